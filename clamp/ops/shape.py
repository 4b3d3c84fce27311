"""Movement without arithmetic: permutations of axes, and copies. Any dtype of 2 or 4 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch

MOVE_ROWS = Kernel("permute.cl", "move_rows", "-")
TRANSPOSE = Kernel("permute.cl", "transpose", "-")
TRANSPOSE_LOCAL = Kernel("permute.cl", "transpose_local", "-")

_WORD = {2: "ushort", 4: "uint"}
_MAX_BATCH = 5  # batch axes that the kernels take
_SPAN_CPU = 16384  # words a work-item moves, where there are enough of them
_TILE, _LINES = 32, 8  # transpose_local's tile and work-group, whose lines are fewer on a device of small groups


@dataclass(frozen=True)
class Axis:
    """An axis of the merged permutation: its extent, and the words from one place to the next in x and in y."""

    extent: int
    from_step: int
    to_step: int


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A copy of x with its axes in the order ``dims``, as numpy's ``transpose``; at most 7 groups of axes may move
    independently."""
    dims = tuple(int(dim) for dim in dims)
    if sorted(dims) != list(range(len(x.shape))):
        raise ValueError(
            f"permute: dims must be a permutation of 0..{len(x.shape) - 1} for shape {x.shape}, got {dims}"
        )
    out = bridge.empty(x.queue, tuple(x.shape[dim] for dim in dims), x.dtype)
    if out.size == 0:
        return out
    axes = merged_axes(tuple(x.shape), dims)
    if axes[-1].from_step == 1:
        _move_rows(x, out, axes)
    else:
        _transpose(x, out, axes)
    return out


def copy(x: Tensor) -> Tensor:
    """A copy of x in a buffer of its own."""
    return permute(x, range(len(x.shape)))


@lru_cache(maxsize=1024)
def merged_axes(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Axis, ...]:
    """The permutation's axes in the order of the result, without those of extent 1, neighbours merged into one.

    Two axes merge where the second follows the first in x as well as in y.
    """
    merged: list[Axis] = []
    to_step = prod(shape)
    for dim in dims:
        extent = shape[dim]
        to_step //= extent
        from_step = prod(shape[dim + 1 :])
        if extent == 1:
            continue
        if merged and merged[-1].from_step == extent * from_step:
            merged[-1] = Axis(merged[-1].extent * extent, from_step, to_step)
        else:
            merged.append(Axis(extent, from_step, to_step))
    return tuple(merged) or (Axis(1, 1, 1),)


def _batch(axes: Sequence[Axis]) -> tuple[int, int, list[int]]:
    """(rank, batches, kernel arguments) of the batch axes: extents, steps in x, steps in y, padded to five."""
    if len(axes) > _MAX_BATCH:
        raise ValueError(f"permute: {len(axes) + 2} groups of axes move independently; at most {_MAX_BATCH + 2} can")
    padded = [*axes, *[Axis(1, 0, 0)] * (_MAX_BATCH - len(axes))]
    arguments = [axis.extent for axis in padded]
    arguments += [axis.from_step for axis in padded] + [axis.to_step for axis in padded]
    return len(axes), prod(axis.extent for axis in axes), arguments


def _macros(x: Tensor, rank: int) -> dict[str, object]:
    itemsize = bridge.nbytes(x) // x.size
    if itemsize not in _WORD:
        raise ValueError(f"permute moves elements of 2 or 4 bytes, not {x.dtype}")
    return {"WORD": _WORD[itemsize], "RANK": rank}


def _move_rows(x: Tensor, y: Tensor, axes: tuple[Axis, ...]) -> None:
    inner = axes[-1].extent
    runs = axes[-2] if len(axes) > 1 else Axis(1, inner, inner)
    rank, batches, batch = _batch(axes[:-2])
    if capabilities(x.queue).is_cpu:
        column_span = _span(x, inner)
        row_span = max(1, _span(x, x.size) // inner)
    else:
        column_span = row_span = 1
    across, down = -(-inner // column_span), -(-runs.extent // row_span)
    MOVE_ROWS(
        x.queue, *launch(x.queue, across * down * batches), x, y, inner, column_span, runs.extent, row_span,
        runs.from_step, runs.to_step, across, down, batches, *batch, **_macros(x, rank),
    )  # fmt: skip


def _span(x: Tensor, size: int) -> int:
    """Words a work-item of a CPU device should move of a range of ``size``."""
    span = _SPAN_CPU
    while span > 256 and x.size < span * 4 * capabilities(x.queue).compute_units:
        span //= 4
    return max(1, min(span, size))


def _transpose(x: Tensor, y: Tensor, axes: tuple[Axis, ...]) -> None:
    a = next(axis for axis in axes if axis.from_step == 1)
    b = axes[-1]
    rank, batches, batch = _batch([axis for axis in axes[:-1] if axis is not a])
    steps = (b.from_step, a.to_step)
    if capabilities(x.queue).is_cpu:
        b_span = 16 * -(-_span(x, x.size) // 256)
        across, down = -(-a.extent // 16), -(-b.extent // b_span)
        TRANSPOSE(
            x.queue, *launch(x.queue, across * down * batches), x, y, a.extent, b.extent, b_span, *steps, across, down,
            batches, *batch, **_macros(x, rank),
        )  # fmt: skip
        return
    across, down, lines = -(-a.extent // _TILE), -(-b.extent // _TILE), _LINES
    while _TILE * lines > capabilities(x.queue).max_work_group:
        lines //= 2
    TRANSPOSE_LOCAL(
        x.queue, (across * down * batches * _TILE, lines), (_TILE, lines), x, y, a.extent, b.extent, *steps, across,
        down, batches, *batch, LINES=lines, **_macros(x, rank),
    )  # fmt: skip
