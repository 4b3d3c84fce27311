"""Sums, means, softmax."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op

_CASES = [
    Case(Normal(3, 5, 4)),
    Case(Normal(3, 5, 4), axis=1),
    Case(Normal(3, 5, 4), axis=-1, keepdims=True),
    Case(Normal(7), axis=0),
    Case(Normal(3, 5, 4), axis=-2),
    Case(Normal(3, 4), keepdims=True),
]


def sum_(x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """netcl's sum: of shape (1,) over everything."""
    return np.atleast_1d(x.sum(axis, keepdims=keepdims and axis is not None))


def mean(x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """netcl's mean: of shape (1,) over everything."""
    return sum_(x, axis, keepdims) / (x.size if axis is None else x.shape[axis])


def softmax(x: Array, axis: int = -1, dim: int | None = None) -> Array:
    """exp(x) / sum(exp(x))."""
    axis = axis if dim is None else dim
    exps = np.exp(x - x.max(axis, keepdims=True))
    return exps / exps.sum(axis, keepdims=True)


OPS = [
    Op("netcl.autograd.sum", sum_, _CASES, terms=lambda x, **kwargs: (x.size, sum_(np.abs(x), **kwargs))),
    Op("netcl.autograd.mean", mean, _CASES, terms=lambda x, **kwargs: (x.size, mean(np.abs(x), **kwargs))),
    Op("netcl.autograd.softmax", softmax, [
        Case(Normal(5, 7, scale=3)),
        Case(Normal(3, 5, 4), axis=1),
        Case(Normal(3, 5, 4), dim=0),
        Case(Normal(3, 1), axis=1),
        Case(Normal(2, 3, 4, 2), axis=-3),
        Case(Normal(5)),
    ], terms=lambda x, **kwargs: (8, softmax(x, **kwargs))),
]  # fmt: skip
