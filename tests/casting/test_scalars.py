"""Numbers of the user's: a finite one never becomes infinite by being stored in 16 bits, an infinity stays one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.ops import elementwise as tensor_ops
from netcl.ops import lm_ops

from clamp import amp
from clamp.bridge import Node
from tests.reference import HALF_DTYPES, NUMPY, to_device, to_numpy

LOWEST = float(np.finfo(np.float32).min)
#: finite in float64, beyond float16, beyond bfloat16 (by rounding), beyond float32
FINITE = (-1e9, LOWEST, -1e39, -1e300, np.float64(-1e9), np.float32(LOWEST), -(10**9), -(10**400))
Fill = Callable[[Node, float], Any]


@pytest.fixture(params=["float16", "bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    with amp.init(dtype=request.param):
        yield request.param


def largest(dtype: str) -> float:
    return float(ml_dtypes.finfo(NUMPY[dtype]).max)


def inside(bound: float, dtype: str, up: bool) -> float:
    """The number of a dtype that is next to a bound, on the side that it leaves."""
    stored = np.float64(np.asarray(bound, np.float32).astype(NUMPY[dtype]))
    if dtype == "float32" or (stored >= bound if up else stored <= bound):
        return float(stored)
    step = np.asarray(stored).astype(NUMPY[dtype])
    bits = step.view(np.uint16)
    away = (stored > 0) == up if stored else True  # the magnitude grows
    nearest = (bits + np.uint16(1) if away else bits - np.uint16(1)).view(NUMPY[dtype])
    return float(nearest)


def node(queue: cl.CommandQueue, values: Any, dtype: str) -> Node:
    return ag.tensor(to_device(queue, np.asarray(values, np.float64), dtype), requires_grad=True)


def everywhere(x: Node) -> Tensor:
    return to_device(x.value.queue, np.ones(x.value.shape))


#: ways for a number to become an element; the first argument is a row of ones, and -inf where they clip
WAYS: dict[str, tuple[float, Fill]] = {
    "masked_fill": (1, lambda x, fill: ag.masked_fill(x, everywhere(x), fill)),
    "lm_ops.masked_fill": (1, lambda x, fill: lm_ops.masked_fill(x.value, everywhere(x), fill)),
    "where, first": (1, lambda x, fill: ag.where(everywhere(x), fill, x)),
    "where, second": (1, lambda x, fill: ag.where(ag.sub(everywhere(x), 1.0), x, fill)),
    "maximum": (-np.inf, lambda x, fill: ag.maximum(x, fill)),
    "maximum, first": (-np.inf, lambda x, fill: ag.maximum(fill, x)),
    "minimum": (1, lambda x, fill: ag.minimum(x, fill)),
    "clamp": (-np.inf, lambda x, fill: ag.clamp(x, fill, -fill)),
    "clip": (-np.inf, lambda x, fill: ag.clip(x, fill, -fill)),
    "hard_tanh": (-np.inf, lambda x, fill: ag.hard_tanh(x, fill, -fill)),
    "elementwise.clamp": (-np.inf, lambda x, fill: tensor_ops.clamp(x.value, fill, -fill)),
    "clamp, one bound": (1, lambda x, fill: ag.clamp(x, fill, fill)),
    "from_shape": (1, lambda x, fill: Tensor.from_shape(x.value.queue, x.value.shape, x.value.dtype, fill=fill)),
    "from_shape, in order": (
        1, lambda x, fill: Tensor.from_shape(x.value.queue, x.value.shape, x.value.dtype, None, None, fill),
    ),
}  # fmt: skip


#: those that keep what they return within a number
BOUNDING = ("clamp", "clip", "hard_tanh", "elementwise.clamp", "maximum", "minimum")


@pytest.mark.parametrize("way", WAYS)
def test_a_finite_number_stays_finite(queue: cl.CommandQueue, dtype: str, way: str) -> None:
    start, fill_with = WAYS[way]
    for fill in FINITE:
        number = -1e308 if isinstance(fill, int) and fill < -(10**300) else float(fill)  # float() refuses it
        held = max(number, -largest(dtype))  # in the type, then rounded to it
        if way.startswith(BOUNDING) and way != "clamp, one bound":
            held = inside(held, dtype, up=way != "minimum")
        out = to_numpy(fill_with(node(queue, [[start] * 5], dtype), fill).value)
        np.testing.assert_array_equal(out, np.asarray(held).astype(NUMPY[dtype]), err_msg=repr(fill)[:20])
    for fill in (-np.inf, -2.0):
        out = fill_with(node(queue, [[start] * 5], dtype), fill)
        np.testing.assert_array_equal(to_numpy(out.value), fill)


def test_a_nan_stays_one(queue: cl.CommandQueue, dtype: str) -> None:
    x = node(queue, [1.0, 2.0], dtype)
    for out in (ag.masked_fill(x, everywhere(x), np.nan), ag.where(everywhere(x), np.nan, x)):
        assert np.isnan(to_numpy(out.value)).all()


@pytest.mark.parametrize("fill", [-1e9, LOWEST, -1e30, -65520])
def test_softmax_of_a_row_masked_throughout_is_uniform(queue: cl.CommandQueue, dtype: str, fill: float) -> None:
    scores = node(queue, [[3.0, -1.0, 0.5, 2.0], [1.0, 2.0, 3.0, 4.0]], dtype)
    mask = to_device(queue, np.array([[1, 1, 1, 1], [0, 1, 0, 1.0]]))
    for masked in (ag.masked_fill(scores, mask, fill), ag.where(mask, fill, scores)):
        weights = ag.softmax(masked)
        ag.sum(ag.mul(weights, node(queue, [[1.0, 2.0, 3.0, 4.0]] * 2, "float32"))).backward()
        got = to_numpy(weights.value)
        np.testing.assert_allclose(got[0], 0.25)
        np.testing.assert_allclose(got[1], np.array([1, 0, np.exp(2), 0]) / (1 + np.exp(2)), rtol=2e-3, atol=1e-7)
        assert np.isfinite(to_numpy(scores.value.grad)).all()
        scores.value.grad = None


def test_clipped_gradients_pass_between_the_bounds_that_were_given(queue: cl.CommandQueue, dtype: str) -> None:
    x = node(queue, [-np.inf, -60000.0, 0.0, 60000.0, np.inf], dtype)
    ag.sum(ag.clamp(x, -1e9, 1e9)).backward()
    assert to_numpy(x.grad).tolist() == [0, 1, 1, 1, 0]


#: functions that keep their result within bounds: of a node, between two numbers
WITHIN: dict[str, Callable[[Node, float, float], Any]] = {
    "clamp": lambda x, low, high: ag.clamp(x, low, high),
    "clip": lambda x, low, high: ag.clip(x, low, high),
    "hard_tanh": lambda x, low, high: ag.hard_tanh(x, min_val=low, max_val=high),
    "maximum, minimum": lambda x, low, high: ag.minimum(high, ag.maximum(x, low)),
    "minimum, maximum": lambda x, low, high: ag.maximum(low, ag.minimum(x, high)),
    "elementwise": lambda x, low, high: ag.tensor(
        tensor_ops.hard_tanh(tensor_ops.clamp(x.value, low, np.inf), -np.inf, high)
    ),
}


@pytest.mark.parametrize("half", HALF_DTYPES)
@pytest.mark.parametrize("way", WITHIN)
def test_what_lies_between_bounds_in_16_bits_lies_between_those_that_were_given(
    queue: cl.CommandQueue, way: str, half: str
) -> None:
    values = np.array([-np.inf, -3, -0.3, -1e-3, 0, 1e-7, 0.1, 0.2, 0.9999, 1, 2.5, 6e4, np.inf])
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.standard_normal((12, 2)) * 10.0 ** rng.integers(-6, 4, (12, 1)), axis=1).tolist()
    with amp.init(dtype=half):
        for low, high in [(1e-4, 1 - 1e-4), (-0.1, 0.1), (1e-10, 6.001), (-2.001, -1e-3), (-1e9, 1e9), *pairs]:
            x = node(queue, values, half)
            out = WITHIN[way](x, low, high)
            got, held = to_numpy(out.value).astype(np.float64), to_numpy(x.value).astype(np.float64)
            assert ((got >= low) & (got <= high)).all(), (low, high)
            np.testing.assert_array_equal(got[(held >= low) & (held <= high)], held[(held >= low) & (held <= high)])
            if way != "elementwise":
                ag.sum(out).backward()
                np.testing.assert_array_equal(to_numpy(x.grad) != 0, (held >= low) & (held <= high))


def test_bounds_with_no_number_between_them_are_the_nearest(queue: cl.CommandQueue) -> None:
    with amp.init():
        x = node(queue, [-1.0, 0.1, 1.0], "float16")
        out = ag.clamp(x, 0.1, 0.1)
        ag.sum(out).backward()
    assert to_numpy(out.value).tolist() == [np.float16(0.1)] * 3
    assert to_numpy(x.grad).tolist() == [0, 1, 0]


@pytest.mark.parametrize("half", HALF_DTYPES)
def test_arithmetic_computes_with_the_number_itself(queue: cl.CommandQueue, half: str) -> None:
    """Where its result fits it is right, where it does not it overflows: numbers in arithmetic are float32."""
    with amp.init(dtype=half):
        x = node(queue, [0.0, 2.0**-10, 1024.0], half)
        small = to_numpy(ag.mul(x, 2.0**20).value).astype(np.float64)
        assert small[:2].tolist() == [0.0, 1024.0]
        assert np.isinf(small[2]) == (half == "float16")
        assert to_numpy(ag.div(x, 2.0**20).value).astype(np.float64)[2] == 2.0**-10
        assert to_numpy(ag.mul(x, 1e300).value)[0] == 0  # not 0 * inf
        assert np.isinf(to_numpy(ag.add(x, 1e9).value)[0]) == (half == "float16")
        assert to_numpy(ag.lt(x, 1e9).value).tolist() == [1, 1, 1]
        assert to_numpy(ag.gt(node(queue, [65504.0, np.inf], "float16"), 65504.5).value).tolist() == [0, 1]
        assert to_numpy(ag.pow(x, 10**9).value).tolist()[:2] == [0, 0]


@pytest.mark.parametrize("value", [1.0, -0.3, 1e9, np.inf])
def test_a_new_bfloat16_tensor_is_filled_with_the_number(queue: cl.CommandQueue, value: float) -> None:
    with amp.init(dtype="bfloat16"):
        tensor = Tensor.from_shape(queue, (3,), dtype="bfloat16", fill=value)
        np.testing.assert_array_equal(tensor.to_host(), np.float32(ml_dtypes.bfloat16(value)))
        words = Tensor.from_shape(queue, (3,), dtype="bfloat16", fill=np.uint16(0x3F80))  # netcl's way
        np.testing.assert_array_equal(words.to_host(), 1.0)
