"""Functions of two tensors or more that broadcast, element by element."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op, Uniform, Values

_BINARY = [
    Case(Normal(5, 7), Normal(5, 7)),
    Case(Normal(5, 7), Normal(7)),
    Case(Normal(3, 1, 5), Normal(4, 1)),
    Case(Normal(2, 3), 1.5),
    Case(-0.5, Normal(2, 3)),
    Case(Normal(1), Normal(1)),
]
_QUOTIENTS = [
    Case(Normal(5, 7), Uniform(0.5, 2, 5, 7)),
    Case(Normal(3, 1, 5), Uniform(0.5, 2, 4, 1)),
    Case(2.0, Uniform(0.5, 2, 2, 3)),
]
_CONDITION = Values(np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (2, 1))).aside().fixed()


def _terms(a: Array, b: Array) -> tuple[float, Array]:
    return 1, np.abs(a) + np.abs(b)


def add_relu(a: Array, b: Array) -> Array:
    """relu(a + b)."""
    return np.maximum(a + b, 0)


def compare(name: str, reference: object) -> Op:
    """A comparison: 1.0 or 0.0 in the widest dtype, without gradient."""
    cases = [Case(Values(np.array([[1.0, 2.0, 2.0]])), Values(np.array([[2.0], [1.5]]))), *_BINARY]
    return Op(f"netcl.autograd.{name}", reference, cases, differentiable=False)


OPS = [
    Op("netcl.autograd.add", np.add, _BINARY, terms=_terms),
    Op("netcl.autograd.sub", np.subtract, _BINARY, terms=_terms),
    Op("netcl.autograd.mul", np.multiply, _BINARY),
    Op("netcl.autograd.div", np.divide, _QUOTIENTS, grad_ulps32=16.0),
    Op("netcl.autograd.maximum", np.maximum, _BINARY),
    Op("netcl.autograd.minimum", np.minimum, _BINARY),
    Op("netcl.autograd.add_relu", add_relu, _BINARY[:1], terms=_terms),
    Op("netcl.autograd.bias_add", np.add, [Case(Normal(5, 7), Normal(7).aside())], terms=_terms),
    Op("netcl.autograd.where", lambda c, a, b: np.where(c != 0, a, b), [
        Case(_CONDITION, Normal(4, 3), Normal(4, 3)),
        Case(_CONDITION, Normal(3), Normal(4, 1)),
        Case(_CONDITION, Normal(4, 3), 0.5),
    ], exact=True),
    compare("lt", np.less),
    compare("le", np.less_equal),
    compare("gt", np.greater),
    compare("ge", np.greater_equal),
]  # fmt: skip
