"""Conversion between storage types."""

from __future__ import annotations

from collections.abc import Callable

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch, pieces_for, span_for

CAST = Kernel("cast.cl", "cast")

#: told of each conversion that has been launched, its source and its result: those who count them
LISTENERS: list[Callable[[Tensor, Tensor], None]] = []


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
        x.queue, *launch(x.queue, -(-x.size // span)), x, y, x.size, span,
        X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[y.dtype], PIECES=pieces_for(x.queue),
    )  # fmt: skip
    for listener in LISTENERS:
        listener(x, y)
