"""Sums and spread gradients against numpy's float64, over odd shapes, storage types and both kinds of plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamp.bridge import Tensor
from clamp.opencl import device
from clamp.opencl.device import GROUP_SUMS, capabilities
from clamp.ops import launch, norm_rows, softmax
from clamp.ops.reduce import expand, reduce_sum
from clamp.ops.reduce_to_shape import _sum_pass, sum_axis, sum_to_shape
from tests.launches import forget_prepared_launches
from tests.ops.plans import PLANS_AND_DTYPES, plans_of
from tests.reference import SPECIAL, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

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


# ----------------------------------------- sum_to_shape is numpy's sum over the broadcast axes, accumulated in float32.


CASES = [
    ((5,), (5,)),
    ((5,), (1,)),
    ((1, 1), (1,)),
    ((7, 3), (3,)),
    ((7, 3), (7, 1)),
    ((64, 3), (3,)),
    ((8201,), (1,)),  # cut into chunks, but for processors
    ((2, 3, 5), (3, 1)),
    ((3, 17, 33), (17, 33)),
    ((33, 130), (130,)),
    ((2, 5, 4, 3), (1, 5, 1, 1)),
    ((2, 3, 2, 3, 2, 3), (3, 1, 3, 1, 3)),
    ((5, 40, 9), (40, 1)),  # the axes around one that stays
    ((3, 33, 2, 37), (33, 1, 1)),
    ((2, 16, 131), (1, 16, 1)),
    ((0, 40, 3), (40, 1)),
    ((0, 4), (4,)),
    ((4, 0), (4, 1)),
]
LARGE = [
    ((256, 1024), (1024,)),
    ((100_003,), (1,)),
    ((10_007, 5), (5,)),
    ((300_007,), (1,)),  # cut into chunks everywhere, as the next
    ((5003, 65), (65,)),
    ((8192, 10), (10,)),  # rows laid side by side
    ((300, 16, 20), (16, 1)),
    ((8, 64, 28, 28), (64, 1, 1)),
    ((9, 5000), (9, 1)),
]


def reference(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(k for k, (s, t) in enumerate(zip(array.shape, padded, strict=True)) if t == 1 and s != 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape)


@pytest.fixture(autouse=True)
def on_cpus(queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of reduce_to_shape.cl are for CPUs: the simulator, which is none, looks at them, too."""
    if simulated:
        monkeypatch.setitem(
            device._capabilities, queue.device.int_ptr, dataclasses.replace(capabilities(queue), is_cpu=True)
        )


def check(queue: cl.CommandQueue, source: tuple[int, ...], target: tuple[int, ...], dtype: str, out_dtype: str) -> None:
    values = quantize(np.random.default_rng(len(source)).standard_normal(source) + 0.5, dtype).astype(np.float64)
    result = sum_to_shape(to_device(queue, values, dtype), target, out_dtype)
    assert result.dtype == out_dtype
    terms = values.size // max(1, int(np.prod(target)))
    assert_close(result, reference(values, target), slack=terms * 2.0**-24 * reference(np.abs(values), target))


@pytest.mark.parametrize(("source", "target"), CASES)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float16")]
)
def test_sum_to_shape(
    queue: cl.CommandQueue, source: tuple[int, ...], target: tuple[int, ...], dtype: str, out_dtype: str
) -> None:
    check(queue, source, target, dtype, out_dtype)


@pytest.mark.unsimulated
@pytest.mark.parametrize(("source", "target"), LARGE)
def test_large_sums(queue: cl.CommandQueue, source: tuple[int, ...], target: tuple[int, ...]) -> None:
    check(queue, source, target, "float16", "float32")


@pytest.mark.simulated_elsewhere
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_broadcast_shape(queue: cl.CommandQueue, data: st.DataObject) -> None:
    source = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 18]), min_size=1, max_size=6), label="source"))
    if np.prod(source) > 4096:
        source = source[:3]
    kept = data.draw(st.lists(st.booleans(), min_size=len(source), max_size=len(source)), label="kept")
    target = tuple(s if keep else 1 for s, keep in zip(source, kept, strict=True))
    drop = data.draw(st.integers(0, len(source) - 1), label="drop")
    if all(t == 1 for t in target[:drop]):
        target = target[drop:]
    check(queue, source, target, "float32", "float32")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_the_same_tensor_comes_back_when_nothing_is_to_do(queue: cl.CommandQueue, dtype: str) -> None:
    x = to_device(queue, np.ones((3, 4)), dtype)
    assert sum_to_shape(x, (3, 4), dtype) is x


@pytest.mark.parametrize(("parts", "outer", "rows"), [(1, 3, 70), (3, 2, 5), (7, 5, 67), (130, 2, 3), (2, 9, 131)])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_parts_around_an_axis_are_added_in_one_launch(
    queue: cl.CommandQueue, dtype: str, parts: int, outer: int, rows: int
) -> None:
    values = quantize(np.random.default_rng(parts).standard_normal((parts, outer, rows)), dtype).astype(np.float64)
    result = _sum_pass(to_device(queue, values, dtype), outer, rows, 1, "float32", parts)
    np.testing.assert_allclose(to_numpy(result), values.sum((0, 2)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("parts", "rows"), [(256, 15), (256, 16), (256, 31), (100, 79)])
def test_terms_that_are_alike_do_not_round_the_same_way(
    queue: cl.CommandQueue, simulated: bool, parts: int, rows: int
) -> None:
    outer = 2 if simulated else 16
    x = to_device(queue, np.full((parts, outer, rows), 0.1))
    np.testing.assert_allclose(
        to_numpy(sum_to_shape(x, (outer, 1), "float32")).ravel(), parts * rows * float(np.float32(0.1)), rtol=3e-6
    )


def test_half_sums_do_not_overflow_or_stall(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.full((4096,), 100.0), "float16")  # beyond 65504, and past 2048 a half cannot count on
    assert to_numpy(sum_to_shape(x, (1,), "float32"))[0] == 409600.0


def test_sums_to_a_shape_repeat_bit_for_bit(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal((37, 129)))
    first, second = (to_numpy(sum_to_shape(x, (129,), "float32")) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# Sums and maxima over a work-group (kernels/group_sum.clh): every way a device has gives every work-item the same.


HAS_SUB_GROUPS = "cl_intel_subgroups"


def as_gpu(patch: pytest.MonkeyPatch, queue: cl.CommandQueue, exchange: str) -> None:
    """Lets the device pass for a GPU whose work-items exchange values in this way."""
    other = dataclasses.replace(capabilities(queue), is_cpu=False, exchange=exchange)
    patch.setitem(device._capabilities, queue.device.int_ptr, other)
    forget_prepared_launches(patch)


def by_both(queue: cl.CommandQueue, compute: Callable[[], Tensor]) -> list[np.ndarray]:
    """What a function computes with a tree, and with sums of sub-groups where there are any."""
    results = []
    for exchange in ["TREE", "SUB_GROUPS"] if HAS_SUB_GROUPS in queue.device.extensions else ["TREE"]:
        with pytest.MonkeyPatch.context() as patch:
            as_gpu(patch, queue, exchange)
            results.append(to_numpy(compute()))
    return results


def test_ways_that_a_device_offers_are_right(queue: cl.CommandQueue) -> None:
    ways = ["TREE", "SUB_GROUPS"] if HAS_SUB_GROUPS in queue.device.extensions else ["TREE"]
    for exchange in ways:
        for group in (64,):
            assert device._probe(queue, GROUP_SUMS, group, WG=group, EXCHANGE=exchange), exchange


def test_a_gpu_with_sub_groups_uses_them(queue: cl.CommandQueue) -> None:
    offered = HAS_SUB_GROUPS in queue.device.extensions
    is_nvidia = capabilities(queue).compute_capability > (0, 0)  # it has shuffles in place of them
    assert device._exchange(queue) == ("SHUFFLES" if is_nvidia else "SUB_GROUPS" if offered else "TREE")
    if not is_nvidia:
        assert capabilities(queue).exchange == "TREE"  # of work-groups of one, or a simulator


@pytest.mark.parametrize("n", [3, 40, 2000])
def test_sums_of_sub_groups(queue: cl.CommandQueue, n: int) -> None:
    if HAS_SUB_GROUPS not in queue.device.extensions:
        pytest.skip("no sub-groups")
    rows = np.random.default_rng(n).standard_normal((5, n))
    rows[3, n // 2] = -np.inf
    x, one = to_device(queue, rows), to_device(queue, np.ones(n))
    for compute in (
        lambda: reduce_sum(x, 1, out_dtype="float32"),
        lambda: softmax.softmax(x, out_dtype="float32"),
        lambda: norm_rows.rms_norm(x, one, eps=1e-5, out_dtype="float32")[0],
    ):
        got, expected = by_both(queue, compute)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    rows[2, 0] = np.nan
    got, expected = by_both(queue, lambda: softmax.softmax(to_device(queue, rows), out_dtype="float32"))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 70, 5), (2, 300, 1), (1, 513, 64), (4, 33, 130), (2, 5000, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_over_an_axis(queue: cl.CommandQueue, shape: tuple[int, int, int], dtype: str) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal(shape), dtype)
    expected = to_numpy(x).astype(np.float64).sum(1).reshape(-1)
    magnitude = np.abs(to_numpy(x)).astype(np.float64).sum(1).reshape(-1)
    for got in (*by_both(queue, lambda: sum_axis(x, *shape, "float32")), to_numpy(sum_axis(x, *shape, "float32"))):
        assert (np.abs(got - expected) <= 2.0**-24 * 12 * magnitude).all()
