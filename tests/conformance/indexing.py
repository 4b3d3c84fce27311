"""Selecting, adding and comparing by index."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Distinct, Normal, Op, Values

_REPEATED = Values(np.array([2, 0, 2, -1, 2, 1, 0]))


def index_select(x: Array, axis: int, idx: Array) -> Array:
    """numpy's take."""
    return x.take(idx.ravel(), axis)


def embedding(weight: Array, idx: Array) -> Array:
    """Rows of a table."""
    return weight[idx.ravel()]


def index_add(dst: Array, axis: int, idx: Array, src: Array) -> Array:
    """A copy of dst with src added where the indices say."""
    out = np.moveaxis(dst.copy(), axis, 0)
    np.add.at(out, idx.ravel(), np.moveaxis(src, axis, 0))
    return np.moveaxis(out, 0, axis)


def argmax(x: Array, axis: int = -1, keepdims: bool = False) -> Array:
    """numpy's argmax."""
    return np.atleast_1d(np.argmax(x, axis, keepdims=keepdims))


def topk(x: Array, k: int, axis: int = -1) -> tuple[Array, Array]:
    """The first k of a stable sort in descending order, NaN last, and their places."""
    places = np.argsort(-x, axis, kind="stable").take(np.arange(k), axis)
    return np.take_along_axis(x, places, axis), places


_SELECTIONS = [Case(Normal(3, 4, 5), 1, _REPEATED), Case(Normal(4, 7), 0, _REPEATED), Case(Normal(2, 4), -1, _REPEATED)]

OPS = [
    Op("netcl.autograd.index_select", index_select, _SELECTIONS, exact=True),
    Op("netcl.autograd.gather", index_select, _SELECTIONS, exact=True),
    Op("netcl.autograd.embedding", embedding, [
        Case(Normal(5, 19), _REPEATED),
        Case(Normal(3, 4), Values(np.array([[0, 1], [1, 2]]))),
    ], exact=True),
    Op("netcl.autograd.index_add", index_add, [
        Case(Normal(3, 4, 5), 1, _REPEATED, Normal(3, 7, 5)),
        Case(Normal(4), 0, _REPEATED, Normal(7)),
    ], terms=lambda dst, axis, idx, src: (idx.size, index_add(np.abs(dst), axis, idx, np.abs(src)))),
    Op("netcl.autograd.argmax", argmax, [
        Case(Distinct(3, 17)),
        Case(Distinct(3, 7, 2), axis=1, keepdims=True),
    ], differentiable=False),
    Op("netcl.autograd.topk", topk, [
        Case(Distinct(3, 17), 4),
        Case(Distinct(5, 3), 2, axis=0),
    ], differentiable=False, exact=True),
]  # fmt: skip
