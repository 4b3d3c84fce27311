"""Sums to a smaller shape: the gradient of a broadcast, and the passes that any sum over axes is made of."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.cast import cast
from clamp.ops.launch import launch
from clamp.ops.reduce import bind_summing

SUM_ROW = Kernel("reduce_to_shape.cl", "sum_row")
SUM_ROWS = Kernel("reduce_to_shape.cl", "sum_rows")

_PANEL = 64  # columns a task of the kernel sum_rows
_FEW = 4096  # elements of a narrow matrix that is summed as it is
_FEW_ON_CPU = 2**17  # below which cutting an axis into chunks costs more than it brings: a launch takes as long
_MOST_PARTS = 256  # that one task adds up
_MOST_AT_ONCE = 2**21  # elements: of more, a second launch costs nothing, and rows in the order of memory are faster

Axes: TypeAlias = tuple[tuple[int, bool], ...]  # extent, and whether it is summed

_plans = Prepared(4096)


def sum_to_shape(x: Tensor, shape: tuple[int, ...], out_dtype: str) -> Tensor:
    """The sum of x over every axis along which ``shape`` would be broadcast to x's shape.

    Accumulated in float32 in a fixed order. With nothing to sum and nothing to convert, x itself (or a view of it).
    """
    if x.shape == shape:
        return cast(x, out_dtype)
    axes = _axes(tuple(x.shape), tuple(shape))
    if 0 < x.size <= _MOST_AT_ONCE and _at_once(x.queue, axes):
        (parts, _), (outer, _), (rows, _) = axes
        x = _sum_pass(x, outer, rows, 1, out_dtype, parts)
    else:
        steps = _steps(axes)
        for index, (outer, rows, inner) in enumerate(steps):
            x = sum_axis(x, outer, rows, inner, out_dtype if index == len(steps) - 1 else "float32")
    return bridge.view(cast(x, out_dtype), shape)


def sum_channels(x: Tensor, out_dtype: str) -> Tensor:
    """The sums (C,) of the channels of x (N, C, H, W), such as the gradient by a bias; see `sum_to_shape`."""
    channels = x.shape[1]
    return bridge.view(sum_to_shape(x, (1, channels, 1, 1), out_dtype), (channels,))


def sum_axis(x: Tensor, outer: int, rows: int, inner: int, out_dtype: str) -> Tensor:
    """The sum over the middle axis of x, seen as ``[outer][rows][inner]``; shape ``(outer * inner,)``."""
    if outer * inner == 0 or rows == 0:
        return bridge.zeros(x.queue, (outer * inner,), out_dtype)
    fold = _fold(rows, inner)
    if fold > 1:
        x = _sum_pass(x, outer, rows // fold, inner * fold, "float32")
        rows = x.size // (outer * inner)
    return _sum_pass(x, outer, rows, inner, out_dtype)


def _sum_pass(x: Tensor, outer: int, rows: int, inner: int, out_dtype: str, parts: int = 1) -> Tensor:
    key = (x.context.int_ptr, x.dtype, out_dtype, outer, rows, inner, parts)
    plan = _plans.known.get(key) or _make_plan(x.queue, key)
    bound, y_shape, y_dtype, chunks = plan
    y = bridge.empty(x.queue, y_shape, y_dtype)
    bound(x.queue, x.buffer, y.buffer)
    return y if chunks == 1 else _sum_pass(y, outer, chunks, inner, out_dtype)


def _make_plan(queue: cl.CommandQueue, key: tuple[Any, ...]) -> tuple[Any, ...]:
    _, x_dtype, out_dtype, outer, rows, inner, parts = key
    if parts == 1 and not capabilities(queue).is_cpu:
        bound, chunks, y_dtype = bind_summing(queue, outer, rows, inner, x_dtype, out_dtype)
        return _plans.keep(key, (bound, (outer * chunks * inner,), y_dtype, chunks))
    items_wanted = _items_wanted(queue)
    panels = -(-inner // _PANEL)
    most = rows * min(inner, _PANEL) // _FEW_ON_CPU
    chunks = min(-(-items_wanted // (outer * panels)), most) if parts == 1 else 1
    per_chunk = -(-rows // max(chunks, 1))
    chunks = -(-rows // per_chunk)
    tasks = outer * panels * chunks
    tasks_per_item = max(1, min(tasks // (4 * items_wanted), 4096))
    y_dtype = out_dtype if chunks == 1 else "float32"
    share = (per_chunk, chunks, tasks, tasks_per_item)
    kernel = SUM_ROW if inner == 1 else SUM_ROWS
    arguments = (rows, *share, parts, outer * rows) if inner == 1 else (rows, inner, *share)
    items = -(-tasks // tasks_per_item)
    types = {"X_T": bridge.STORAGE[x_dtype], "Y_T": bridge.STORAGE[y_dtype]}
    section = {kernel.name.upper(): 1}
    bound = kernel.bind(queue, *launch(queue, items), ..., ..., *arguments, **section, **types)
    return _plans.keep(key, (bound, (outer * chunks * inner,), y_dtype, chunks))


def _fold(rows: int, inner: int) -> int:
    """Rows to lay side by side as one: a narrow matrix is summed as a wider one with fewer rows first."""
    fold = 1
    while rows * inner > _FEW and 1 < inner * fold < _PANEL and rows % (2 * fold) == 0 and rows > 32 * fold:
        fold *= 2
    return fold


def _items_wanted(queue: cl.CommandQueue) -> int:
    return 4 * capabilities(queue).compute_units


def _at_once(queue: cl.CommandQueue, axes: Axes) -> bool:
    """Returns whether one launch sums the axes outside and inside of one that stays, as of the channels of images: the
    axis keeps every core busy."""
    if [summed for _, summed in axes] != [True, False, True] or not capabilities(queue).is_cpu:
        return False
    return axes[0][0] <= _MOST_PARTS and axes[1][0] >= _items_wanted(queue)


@lru_cache(maxsize=4096)
def _axes(source: tuple[int, ...], target: tuple[int, ...]) -> Axes:
    """The axes of ``source``, neighbours of one kind merged."""
    padded = (1,) * (len(source) - len(target)) + target
    if len(padded) != len(source) or any(t not in (s, 1) for s, t in zip(source, padded, strict=True)):
        raise ValueError(f"cannot sum a tensor of shape {source} to {target}: {target} does not broadcast to it")
    axes: list[tuple[int, bool]] = []
    for s, t in zip(source, padded, strict=True):
        if s == 1:
            continue
        if axes and axes[-1][1] == (s != t):
            axes[-1] = (axes[-1][0] * s, s != t)
        else:
            axes.append((s, s != t))
    return tuple(axes)


@lru_cache(maxsize=4096)
def _steps(all_axes: Axes) -> list[tuple[int, int, int]]:
    """The passes ``(outer, rows, inner)`` that sum all axes to be summed, the longest one first."""
    axes, steps = list(all_axes), []
    while any(summed for _, summed in axes):
        k = max((k for k, (_, summed) in enumerate(axes) if summed), key=lambda k: axes[k][0])
        extents = [extent for extent, _ in axes]
        steps.append((prod(extents[:k]), extents[k], prod(extents[k + 1 :])))
        axes[k] = (1, True)
        axes = [axis for axis in axes if axis != (1, True)]
    return steps
