"""Parts of a tensor along one axis: joined, taken out, written in place. Any dtype of 2 or 4 bytes.

Between tensors of one dtype bits are moved, never read as numbers; floating dtypes are converted into one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, axis_of
from clamp.ops.launch import index_type, launch, span_for

MOVE_PARTS = Kernel("concat.cl", "move_parts")

_MOST_PARTS = 8  # of one launch
#: Bytes of a word -> its type in the kernels
WORDS = {2: "ushort", 4: "uint", 8: "uint2", 16: "uint4"}


@dataclass(frozen=True)
class Part:
    """A stretch of an axis: where it begins, how long it is, and the tensor that lies there; None: zeros."""

    start: int
    length: int
    tensor: Tensor | None


def cat(tensors: Sequence[Tensor], axis: int, *, out_dtype: str, out: Tensor | None = None) -> Tensor:
    """The tensors one after the other along an axis, in one launch for every eight of one dtype."""
    if not tensors:
        raise ValueError("cat needs at least one tensor")
    shape = tuple(tensors[0].shape)
    axis = axis_of("cat", axis, len(shape))
    parts, total = [], 0
    for tensor in tensors:
        require_same_but(axis, shape, tensor.shape, "cat")
        parts.append(Part(total, tensor.shape[axis], tensor))
        total += tensor.shape[axis]
    out = result_tensor(tensors[0].queue, (*shape[:axis], total, *shape[axis + 1 :]), out_dtype, out)
    _move(out, axis, parts, join=True)
    return out


def split(
    x: Tensor, axis: int, stretches: Sequence[tuple[int, int]], *, out_dtypes: Sequence[str],
    outs: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Copies of stretches (start, length) of x along an axis, in one launch for every eight of one dtype; in ``outs``,
    where given."""
    axis = axis_of("split", axis, len(x.shape))
    parts = []
    for (start, length), dtype, out in zip(stretches, out_dtypes, outs or [None] * len(stretches), strict=True):
        require_inside(x.shape, axis, start, length, "split")
        shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
        parts.append(Part(start, length, result_tensor(x.queue, shape, dtype, out)))
    _move(x, axis, parts, join=False)
    return [part.tensor for part in parts if part.tensor is not None]


def write_into(target: Tensor, x: Tensor, axis: int, start: int) -> None:
    """Writes x over ``target`` along an axis, from ``start`` on, converted to the target's dtype."""
    axis = axis_of("write_into", axis, len(target.shape))
    require_same_but(axis, target.shape, x.shape, "write_into")
    require_inside(target.shape, axis, start, x.shape[axis], "write_into")
    _move(target, axis, [Part(start, x.shape[axis], x)], join=True)


def overwrite(target: Tensor, x: Tensor | None) -> None:
    """Writes x, of the target's shape, over ``target``; zeros if there is none."""
    _move(target, 0, [Part(0, target.shape[0], x)], join=True)


def assemble(queue: cl.CommandQueue, shape: Sequence[int], axis: int, parts: Iterable[Part], out_dtype: str) -> Tensor:
    """A tensor of this shape that holds the parts, which do not overlap, and zeros everywhere else."""
    out = bridge.empty(queue, shape, out_dtype)
    filled, reached = [], 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > reached:
            filled.append(Part(reached, part.start - reached, None))
        filled.append(part)
        reached = part.start + part.length
    if reached < shape[axis]:
        filled.append(Part(reached, shape[axis] - reached, None))
    _move(out, axis, filled, join=True)
    return out


def result_tensor(queue: cl.CommandQueue, shape: Sequence[int], dtype: str, out: Tensor | None) -> Tensor:
    """``out``, or a new tensor if there is none; ValueError if its shape, dtype or queue is another."""
    if out is None:
        return bridge.empty(queue, shape, dtype)
    if tuple(out.shape) != tuple(shape) or bridge.canonical_dtype(out.dtype) != bridge.canonical_dtype(dtype):
        raise ValueError(
            f"output tensor shape/dtype mismatch: out is {tuple(out.shape)} {out.dtype}, "
            f"the result {tuple(shape)} {dtype}"
        )
    if out.queue != queue:
        raise ValueError("out is on another queue than the inputs, whose launches it would not wait for")
    return out


def require_same_but(axis: int, shape: Sequence[int], other: Sequence[int], name: str) -> None:
    """Raises ValueError if two shapes differ elsewhere than at an axis."""
    if len(shape) != len(other) or any(
        a != b for at, (a, b) in enumerate(zip(shape, other, strict=True)) if at != axis
    ):
        raise ValueError(
            f"{name}: shapes {tuple(shape)} and {tuple(other)} must agree everywhere but along axis {axis}"
        )


def require_inside(shape: Sequence[int], axis: int, start: int, length: int, name: str) -> None:
    """Raises ValueError if a stretch of an axis is not inside it."""
    if start < 0 or length < 0 or start + length > shape[axis]:
        raise ValueError(
            f"{name}: slice [{start}, {start + length}) out of range for axis {axis} of size {shape[axis]}"
        )


# ---------------------------------------------------------------------------------------------- launches


def _move(whole: Tensor, axis: int, parts: Iterable[Part], *, join: bool) -> None:
    rows, _, inner = around_axis(whole.shape, axis)
    parts = [part for part in parts if rows * inner * part.length > 0]

    def storage(part: Part) -> str:
        return _storage(whole if part.tensor is None else part.tensor)

    for kind, alike in groupby(sorted(parts, key=storage), key=storage):
        group = list(alike)
        for at in range(0, len(group), _MOST_PARTS):
            _launch(whole, (rows, whole.shape[axis], inner), group[at : at + _MOST_PARTS], kind, join)


def _storage(x: Tensor) -> str:
    dtype = bridge.canonical_dtype(x.dtype)
    return bridge.STORAGE.get(dtype, dtype)


def _launch(whole: Tensor, extents: tuple[int, int, int], parts: list[Part], kind: str, join: bool) -> None:
    rows, extent, inner = extents
    count = len(parts) if len(parts) < 4 else 4 if len(parts) == 4 else _MOST_PARTS
    is_cpu = capabilities(whole.queue).is_cpu
    scale_up, scale_down, types = inner, 1, {}
    if kind == _storage(whole):
        itemsize = bridge.nbytes(whole) // whole.size
        word = widest_word(itemsize, inner, extent, (x for part in parts for x in (part.start, part.length)), is_cpu)
        scale_down = word // itemsize
        types = {"WORD": WORDS[word]}
    else:
        types = dict(zip(("FROM_T", "TO_T"), (kind, _storage(whole)) if join else (_storage(whole), kind), strict=True))
    row = extent * scale_up // scale_down
    lengths = [part.length * scale_up // scale_down for part in parts]
    span = span_for(whole.queue, rows * sum(lengths)) if is_cpu else 1
    arguments, end, zeros = [], 0, 0
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        across = -(-length // span)
        deep = 1 if across > 1 else max(1, span // length)
        end += across * -(-rows // deep)
        zeros |= (part.tensor is None) << number
        # A part of zeros has no tensor: any other stands in its place.
        tensor = whole if part.tensor is None else part.tensor
        arguments += [tensor, length, part.start * scale_up // scale_down, end]
    arguments += [arguments[0], 1, 0, end] * (count - len(parts))
    MOVE_PARTS(
        whole.queue, *launch(whole.queue, end), whole, row, rows, span, zeros, *arguments,
        PARTS=count, JOIN=int(join), VECTORS=int(is_cpu), INDEX=index_type(end), **types,
    )  # fmt: skip


def widest_word(itemsize: int, inner: int, extent: int, along: Iterable[int], is_cpu: bool) -> int:
    """Bytes of the widest word in which rows of ``inner * extent`` elements and stretches of them can be moved.

    On a CPU 4 at most: there 16 words are moved at a time.
    """
    common = gcd(inner * extent, *(inner * x for x in along)) * itemsize
    return gcd(common, 4 if is_cpu else 16)
