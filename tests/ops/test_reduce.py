"""Sums and spread gradients against numpy's float64, over odd shapes, storage types and both kinds of plan."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import launch
from clamp.ops.reduce import expand, reduce_sum
from tests.ops.plans import PLANS_AND_DTYPES, plans_of
from tests.reference import SPECIAL, assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

SHAPES = [(1,), (17,), (1031,), (3, 5), (5, 1), (1, 7), (37, 64), (16, 33), (2, 3, 5), (4, 7, 67), (3, 1, 2, 130)]


plan = plans_of(launch)


def rounding(n: int, terms: np.ndarray) -> np.ndarray:
    """What summing n terms in fp32 may be off by."""
    return np.asarray((8 + n / 64) * 2.0**-24 * np.abs(terms))


@pytest.mark.parametrize(("plan", "source", "target"), PLANS_AND_DTYPES, indirect=["plan"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_over_every_axis(
    queue: cl.CommandQueue, simulated: bool, plan: None, shape: tuple[int, ...], source: str, target: str
) -> None:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    x = to_device(queue, values, source)
    stored = to_numpy(x)
    for axis in [None, *range(0 if simulated else -len(shape), len(shape))]:
        for keepdims in (False,) if simulated else (False, True):
            expected = np.sum(stored, axis, keepdims=keepdims)
            n = stored.size if axis is None else shape[axis]
            slack = rounding(n, np.sum(np.abs(stored), axis, keepdims=keepdims))
            shaped = expected.shape or (1,)
            result = reduce_sum(x, axis, keepdims, out_dtype=target)
            assert_close(result, expected.reshape(shaped), slack=slack.reshape(shaped))
            mean = reduce_sum(x, axis, keepdims, out_dtype=target, divisor=float(n))
            assert_close(mean, expected.reshape(shaped) / n, slack=slack.reshape(shaped) / n)


@pytest.mark.parametrize(
    ("plan", "source"),
    [("own plan", "float32"), ("own plan", "bfloat16"), ("other plan", "float16")],
    indirect=["plan"],
)
@pytest.mark.parametrize("shape", [(100_003,), (3, 40_000), (40_000, 3), (2, 9000, 5)])
def test_long_sums_are_accurate(
    queue: cl.CommandQueue, plan: None, simulated: bool, shape: tuple[int, ...], source: str
) -> None:
    if simulated:
        shape = tuple(-(-extent // 20) if extent > 100 else extent for extent in shape)
    x = to_device(queue, np.random.default_rng(1).standard_normal(shape) + 1, source)
    stored = to_numpy(x)
    for axis in (None, int(np.argmax(shape))):
        expected = np.sum(stored, axis)
        slack = 2.0**-24 * (8 + stored.size / 1024) * np.sum(np.abs(stored), axis)
        result = reduce_sum(x, axis, out_dtype="float32")
        assert_close(result, expected.reshape(result.shape), slack=slack.reshape(result.shape))


def test_a_sum_of_65536_halves_is_exact(queue: cl.CommandQueue, simulated: bool) -> None:
    n = 4096 if simulated else 65536
    ones = to_device(queue, np.ones((n, 1)), "float16")
    assert reduce_sum(ones, out_dtype="float32").to_host()[0] == n
    assert reduce_sum(ones, 0, out_dtype="float32").to_host()[0] == n


def test_a_mean_does_not_overflow_half(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.full((3, 100), 60000.0), "float16")
    assert_close(reduce_sum(x, 1, out_dtype="float16", divisor=100.0), np.full(3, 60000.0), ulps=0)
    assert np.isinf(to_numpy(reduce_sum(x, 1, out_dtype="float16"))).all()


def test_sums_repeat_bit_for_bit(queue: cl.CommandQueue, simulated: bool) -> None:
    x = to_device(queue, np.random.default_rng(2).standard_normal((7, 999 if simulated else 9999)), "float16")
    first = reduce_sum(x, out_dtype="float32").to_host()
    for _ in range(3):
        np.testing.assert_array_equal(reduce_sum(x, out_dtype="float32").to_host(), first)


def test_special_values_reach_the_sum(queue: cl.CommandQueue) -> None:
    rows = np.stack([SPECIAL, np.where(np.isfinite(SPECIAL), SPECIAL, 1.0)])
    sums = to_numpy(reduce_sum(to_device(queue, rows), 1, out_dtype="float32"))
    assert np.isnan(sums[0])
    assert np.isfinite(sums[1])
    infinite = to_device(queue, [[np.inf, 1.0], [-np.inf, 2.0]])
    np.testing.assert_array_equal(to_numpy(reduce_sum(infinite, 1, out_dtype="float32")), [np.inf, -np.inf])


def test_empty_axes_sum_to_zero(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.empty((0, 3)))
    np.testing.assert_array_equal(to_numpy(reduce_sum(x, 0, out_dtype="float32")), np.zeros(3))
    np.testing.assert_array_equal(to_numpy(reduce_sum(x, out_dtype="float32")), [0.0])
    assert reduce_sum(x, 1, out_dtype="float32").shape == (0,)
    assert np.isnan(to_numpy(reduce_sum(x, out_dtype="float32", divisor=0.0))).all()


@pytest.mark.parametrize(("plan", "source", "target"), PLANS_AND_DTYPES, indirect=["plan"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gradient_is_spread_over_its_axis(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], source: str, target: str
) -> None:
    for axis in [None, *range(len(shape))]:
        reduced = (1,) * len(shape) if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
        grad = to_device(queue, np.random.default_rng(3).standard_normal(reduced), source)
        expected = np.broadcast_to(to_numpy(grad), shape)
        assert_close(expand(grad, shape, axis, out_dtype=target), expected, ulps=0.5)
        assert_close(expand(grad, shape, axis, out_dtype=target, divisor=7.0), expected / 7, ulps=0.51)
