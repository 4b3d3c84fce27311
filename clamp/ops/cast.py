"""Conversion between storage types."""

from __future__ import annotations

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel

CAST = Kernel("cast.cl", "cast")

_SPAN_CPU = 16384  # elements a work-item; smaller tensors use less, so that every core has work
_SPAN_GPU = 16
_GROUP_GPU = 64  # work-items of a work-group whose items share nothing


def cast(x: Tensor, out_dtype: str) -> Tensor:
    """x as ``out_dtype``, rounded to nearest even (numpy's ``astype``, bit for bit); x itself if it is that already.

    Args:
        x: tensor of any shape, float32, float16 or bfloat16.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    if bridge.STORAGE[x.dtype] == bridge.STORAGE[out_dtype]:
        return x
    y = bridge.empty(x.queue, x.shape, out_dtype)
    cast_into(x, y)
    return y


def cast_into(x: Tensor, y: Tensor) -> None:
    """Writes x, converted to y's storage type, over y. Same number of elements."""
    if x.size == 0:
        return
    span = span_for(x.queue, x.size)
    CAST(
        x.queue, *launch(x.queue, -(-x.size // span)), x, y, x.size,
        X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[y.dtype], SPAN=span,
    )  # fmt: skip


def launch(queue: cl.CommandQueue, items: int) -> tuple[tuple[int], tuple[int]]:
    """(global size, local size) of a launch of at least ``items`` work-items, which share nothing.

    On a CPU each is a work-group of its own. The size is always given, because PoCL compiles a kernel anew for
    every work-group size it picks itself. On a GPU the number is rounded up: kernels must ignore what is too many.
    """
    if capabilities(queue).is_cpu:
        return (items,), (1,)
    return (-(-items // _GROUP_GPU) * _GROUP_GPU,), (_GROUP_GPU,)


def span_for(queue: cl.CommandQueue, size: int) -> int:
    """Elements a work-item should handle in a pass over ``size`` contiguous elements."""
    device = capabilities(queue)
    if not device.is_cpu:
        return _SPAN_GPU
    span = _SPAN_CPU
    while span > 256 and size < span * 4 * device.compute_units:
        span //= 4
    return span
