"""sum_to_shape is numpy's sum over the broadcast axes, accumulated in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamp.opencl import device
from clamp.opencl.device import capabilities
from clamp.ops.reduce_to_shape import _sum_pass, sum_to_shape
from tests.reference import STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

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


def test_sums_repeat_bit_for_bit(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal((37, 129)))
    first, second = (to_numpy(sum_to_shape(x, (129,), "float32")) for _ in range(2))
    np.testing.assert_array_equal(first, second)
