"""Sums, means and softmax under autograd, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tape
from clamp.casting.operands import Casting
from clamp.casting.policies import Float, Match
from clamp.functions import reduce
from tests.functions.operands import half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
EPS = 2.0**-24
SHAPE = (3, 5, 4)


def run(
    queue: cl.CommandQueue, function: Callable[..., Any], casting: Casting, x: Node, **kwargs: Any
) -> tuple[Node, Any]:
    """The result, and the incoming gradient that was sent through it."""
    tape = Tape()
    out = function(casting, x, tape=tape, **kwargs)
    grad = to_device(queue, RNG.standard_normal(out.value.shape), out.value.dtype)
    tape.backward(out, grad)
    return out, to_numpy(grad)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(queue: cl.CommandQueue, axis: int, dtype: str) -> None:
    for casting in (Float(), Match()):
        x = leaf(queue, RNG.standard_normal(SHAPE) * 3, dtype)
        out, grad = run(queue, reduce.softmax, casting, x, axis=axis)
        values = to_numpy(x.value)
        exps = np.exp(values - values.max(axis, keepdims=True))
        assert_close(out.value, exps / exps.sum(axis, keepdims=True), slack=16 * EPS)
        y = to_numpy(out.value)  # what backward has kept
        assert x.grad.dtype == dtype
        assert_close(x.grad, y * (grad - (grad * y).sum(axis, keepdims=True)), slack=32 * EPS)
        assert out.value.dtype == (dtype if isinstance(casting, Match) else "float32")


def test_a_half_mean_does_not_overflow(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.full(SHAPE, 60000.0))
    out, _ = run(queue, reduce.mean, half(), x)
    assert out.value.dtype == "float16"
    assert_close(out.value, [60000.0])
    assert x.grad.dtype == "float32"
