"""Functions of one tensor, element by element. (dropout is random: tests/functions/test_elementwise.py has it.)"""

from __future__ import annotations

from math import erf, pi, sqrt
from typing import Any

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op, Reference, Uniform


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), for any x."""
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), for any x."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def swish(x: Array) -> Array:
    """x * sigmoid(x); NaN at -inf, as the product has it."""
    return x * sigmoid(x)


def gelu(x: Array, approximate: bool = True) -> Array:
    """x times the normal distribution, exactly or by its usual form in tanh; NaN at -inf."""
    if approximate:
        phi = 0.5 * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    else:
        phi = 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / sqrt(2)))
    return x * phi


def relu(x: Array) -> Array:
    """x where positive; NaN stays."""
    return np.maximum(x, 0)


def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """x where positive, a multiple of it elsewhere."""
    return np.where(x > 0, x, x * np.float32(negative_slope))


def elu(x: Array, alpha: float = 1.0) -> Array:
    """x where positive, alpha * (exp(x) - 1) elsewhere."""
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def hard_sigmoid(x: Array) -> Array:
    """clip(x / 5 + 1 / 2, 0, 1), as netcl (and Keras) have it."""
    return np.clip((x + 2.5) * float(np.float32(0.2)), 0, 1)


def hard_swish(x: Array) -> Array:
    """x * hard_sigmoid(x)."""
    return x * hard_sigmoid(x)


def hard_tanh(x: Array, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    """x between two bounds."""
    return np.clip(x, min_val, max_val)


def plain(name: str, reference: Reference, *cases: Case, **tolerances: Any) -> Op:
    """An entry of netcl.autograd; by default a call on a matrix of normal values and one on a longer tensor."""
    return Op(f"netcl.autograd.{name}", reference, cases or _DEFAULT, **tolerances)


_DEFAULT = (Case(Normal(5, 7, scale=2)), Case(Normal(1)), Case(Normal(3, 11, 13, scale=4)))
_POSITIVE = (Case(Uniform(0.1, 5, 5, 7)), Case(Uniform(0.01, 200, 3, 47)))
#: ulps of functions that OpenCL rounds loosely, and of products with them
_LOOSE = {"ulps": 2.0, "ulps32": 16.0, "grad_ulps": 2.0, "grad_ulps32": 64.0}

OPS = [
    plain("relu", relu),
    plain("leaky_relu", leaky_relu, *_DEFAULT, Case(Normal(5, 7), 0.2)),
    plain("sigmoid", sigmoid, **_LOOSE),
    plain("tanh", np.tanh, **_LOOSE),
    # Where gelu crosses zero its terms cancel: the bound is on the terms, x and x * tanh(...).
    plain("gelu", gelu, *_DEFAULT, Case(Normal(5, 7), approximate=False), **_LOOSE,
          terms=lambda x, approximate=True: (16, np.abs(x)), slack=8.0, cancels=8.0),
    plain("swish", swish, **_LOOSE, cancels=8.0),
    plain("elu", elu, *_DEFAULT, Case(Normal(5, 7), 0.5), **_LOOSE),
    plain("softplus", softplus, **_LOOSE),
    plain("hard_sigmoid", hard_sigmoid),
    plain("hard_swish", hard_swish),
    plain("hard_tanh", hard_tanh, *_DEFAULT, Case(Normal(5, 7), -0.5, 2.0)),
    plain("clamp", np.clip, Case(Normal(5, 7), -0.75, 1.25)),
    plain("clip", np.clip, Case(Normal(5, 7), -0.75, 1.25)),
    plain("abs", np.abs, exact=True),
    plain("exp", np.exp, **_LOOSE),
    plain("log", np.log, *_POSITIVE, **_LOOSE, terms=lambda x: (4, 1.0)),
    plain("log1p", np.log1p, *_POSITIVE, **_LOOSE),
    plain("sqrt", np.sqrt, *_POSITIVE, **_LOOSE),
    plain("rsqrt", lambda x: 1 / np.sqrt(x), *_POSITIVE, **_LOOSE),
    plain("square", np.square),
    plain("pow", np.power, Case(Uniform(0.5, 3, 5, 7), 2.5), Case(Normal(5, 7), 3.0), **_LOOSE),
]  # fmt: skip
