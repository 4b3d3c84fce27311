"""Joining and slicing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op


def cat(tensors: Sequence[Array], axis: int = 0) -> Array:
    """numpy's concatenate."""
    return np.concatenate(tensors, axis)


def stack(tensors: Sequence[Array], axis: int = 0) -> Array:
    """numpy's stack."""
    return np.stack(tensors, axis)


def narrow(x: Array, axis: int, start: int, length: int) -> Array:
    """``length`` places along an axis."""
    return x.take(np.arange(start, start + length), axis)


def split(x: Array, sizes: int | Sequence[int], axis: int = 0) -> list[Array]:
    """Pieces of one size, or of these sizes."""
    if isinstance(sizes, int):
        return np.split(x, range(sizes, x.shape[axis], sizes), axis)
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def chunk(x: Array, chunks: int, axis: int = 0) -> list[Array]:
    """At most so many pieces of one size."""
    return split(x, -(-x.shape[axis] // chunks), axis)


def getitem(x: Array, key: Any) -> Array:
    """numpy's indexing; one element has shape (1,)."""
    return np.atleast_1d(x[key])


OPS = [
    Op("netcl.autograd.cat", cat, [
        Case([Normal(3, 5, 2), Normal(3, 2, 2), Normal(3, 1, 2)], 1),
        Case([Normal(7), Normal(4)]),
        Case([Normal(2, 3) for _ in range(11)], axis=-1),
        Case([Normal(4, 3)], 0),
    ], exact=True),
    Op("netcl.autograd.stack", stack, [
        Case([Normal(3, 4), Normal(3, 4)], 1),
        Case([Normal(5), Normal(5), Normal(5)], axis=-1),
    ], exact=True),
    Op("netcl.autograd.narrow", narrow, [
        Case(Normal(3, 7, 2), 1, 2, 4),
        Case(Normal(5, 3), 0, -2, 2),
        Case(Normal(2, 3, 4), -1, 0, 4),
    ], exact=True),
    Op("netcl.autograd.split", split, [
        Case(Normal(3, 7, 2), 3, 1),
        Case(Normal(6, 2), [1, 3, 2]),
        Case(Normal(2, 5), (3, 2), -1),
        Case(Normal(3, 2), 5),
    ], exact=True),
    Op("netcl.autograd.chunk", chunk, [
        Case(Normal(2, 3, 12), 3, axis=-1),
        Case(Normal(7, 2), 3),
        Case(Normal(2, 3), 4),
    ], exact=True),
    Op("netcl.autograd.getitem", getitem, [
        Case(Normal(3, 4, 5), (slice(None), 2)),
        Case(Normal(3, 4, 5), -1),
        Case(Normal(3, 4, 5), (slice(1, 3), slice(None, 2), slice(-3, None))),
        Case(Normal(3, 4, 5), (..., slice(1, 4))),
        Case(Normal(3, 4, 5), (2, 1, 0)),
    ], exact=True),
]  # fmt: skip
