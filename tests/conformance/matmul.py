"""Matrix products."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op


def _terms(a: Array, b: Array) -> tuple[float, Array]:
    return a.shape[-1], np.abs(a) @ np.abs(b)


def linear_relu(x: Array, w: Array, bias: Array | None = None) -> Array:
    """relu(x @ w + bias)."""
    return np.maximum(x @ w + (0 if bias is None else bias), 0)


def _linear_terms(x: Array, w: Array, bias: Array | None = None) -> tuple[float, Array]:
    n, products = _terms(x, w)
    return n + 1, products + (0 if bias is None else np.abs(bias))


OPS = [
    Op("netcl.autograd.matmul_op", np.matmul, [
        Case(Normal(5, 7), Normal(7, 3)),
        Case(Normal(1, 1), Normal(1, 1)),
        Case(Normal(13, 33), Normal(33, 17)),
        Case(Normal(2, 3, 7), Normal(7, 5)),
        Case(Normal(3, 7), Normal(4, 7, 5)),
        Case(Normal(2, 3, 7), Normal(2, 7, 5)),
        Case(Normal(37, 1), Normal(1, 41)),
    ], terms=_terms),
    Op("netcl.autograd.bmm", np.matmul, [
        Case(Normal(2, 5, 7), Normal(2, 7, 3)),
        Case(Normal(2, 2, 3, 5), Normal(2, 2, 5, 4)),
    ], terms=_terms),
    Op("netcl.autograd.linear_relu", linear_relu, [
        Case(Normal(5, 7), Normal(7, 3), Normal(3).aside()),
        Case(Normal(5, 7), Normal(7, 3)),
    ], terms=_linear_terms),
]  # fmt: skip
