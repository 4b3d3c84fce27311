"""Conversion between storage types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.launches import Launch
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.launch import launch, pieces_for, span_for

CAST = Kernel("cast.cl", "cast")

#: told of each conversion that has been launched, alone or within a product, its source and its result: those who count
#: them
LISTENERS: list[Callable[[Tensor, Tensor], None]] = []

_launches = Prepared(1024)


def cast(x: Tensor, out_dtype: str) -> Tensor:
    """x as ``out_dtype``, rounded to nearest even (numpy's ``astype``, bit for bit); x itself if it is that already."""
    if bridge.STORAGE[x.dtype] == bridge.STORAGE[out_dtype]:
        return x
    y = bridge.empty(x.queue, x.shape, out_dtype)
    cast_into(x, y)
    return y


def cast_into(x: Tensor, y: Tensor) -> None:
    """Writes x, converted to y's storage type, over y. Same number of elements."""
    if 0 in x.shape:
        return
    key = (x.context.int_ptr, x.dtype, y.dtype, tuple(x.shape))
    (_launches.known.get(key) or _bind(key, x, y))(x.queue, x.buffer, y.buffer)
    tell(x, y)


def tell(x: Tensor, y: Tensor) -> None:
    """Says that x has been converted to y."""
    for listener in LISTENERS:
        listener(x, y)


def _bind(key: tuple[Any, ...], x: Tensor, y: Tensor) -> Launch:
    span = span_for(x.queue, x.size)
    bound = CAST.bind(
        x.queue, *launch(x.queue, -(-x.size // span)), ..., ..., x.size, span,
        X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[y.dtype], PIECES=pieces_for(x.queue),
    )  # fmt: skip
    return _launches.keep(key, bound)
