"""Softmax and its backward against numpy's float64."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.program import source
from clamp.ops import launch
from clamp.ops.softmax import softmax, softmax_backward
from tests.conformance.reduce import softmax as reference
from tests.ops.plans import plans_of
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy, ulp

pytestmark = pytest.mark.kernel

SHAPES = [(1,), (17,), (5, 1), (1, 7), (3, 10), (6, 64), (2, 3, 5), (4, 7, 67), (2, 2, 3, 16)]


plan = plans_of(launch)


EXP16 = """
__kernel void apply_exp16(__global const float *x, __global float *y) {
    const size_t i = get_global_id(0) * 16;
    STORE16(f32, exp16(LOAD16(f32, x, i)), y, i);
}
"""


def exp16(queue: cl.CommandQueue, x: np.ndarray) -> np.ndarray:
    """The function of common.clh, of a number of elements that 16 divides, as float64."""
    argument, result = to_device(queue, x), to_device(queue, np.zeros(x.shape))
    program = cl.Program(queue.context, source("common.clh") + EXP16).build()
    program.apply_exp16(queue, (x.size // 16,), (1,), argument.buffer, result.buffer)
    return to_numpy(result)


def test_exp16_is_right_to_an_ulp_and_a_quarter(queue: cl.CommandQueue, simulated: bool) -> None:
    count = 1 << (10 if simulated else 22)
    x = np.concatenate([np.linspace(-104, 0, count), -np.geomspace(1e-38, 1, 1024)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(exp16(queue, x) - expected)
    is_normal = expected >= 2.0**-126
    assert np.all((error <= 1.25 * ulp(expected, "float32"))[is_normal])
    assert np.all(error[~is_normal] <= 2.0**-126)


def test_exp16_of_special_numbers(queue: cl.CommandQueue) -> None:
    x = np.zeros(16, np.float32)
    x[:6] = [-np.inf, -1e30, np.nan, -np.nan, -0.0, -104]
    np.testing.assert_array_equal(exp16(queue, x), [0, 0, np.nan, np.nan, 1, 0] + 10 * [1])


@pytest.mark.parametrize(
    ("plan", "source", "target"),
    [
        ("own plan", "float32", "float32"),
        ("own plan", "float16", "float16"),
        ("own plan", "bfloat16", "float32"),
        ("other plan", "float16", "bfloat16"),
    ],
    indirect=["plan"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_over_every_axis(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], source: str, target: str
) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal(shape) * 5, source)
    for axis in range(-len(shape), len(shape)):
        slack = (8 + shape[axis]) * 2.0**-24
        assert_close(softmax(x, axis, out_dtype=target), reference(to_numpy(x), axis), slack=slack)


@pytest.mark.parametrize(
    ("plan", "result", "gradient", "target"),
    [
        ("own plan", "float32", "float32", "float32"),
        ("own plan", "float16", "float16", "float16"),
        ("other plan", "bfloat16", "float32", "bfloat16"),
    ],
    indirect=["plan"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_backward_over_every_axis(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], result: str, gradient: str, target: str
) -> None:
    rng = np.random.default_rng(1)
    g = to_device(queue, rng.standard_normal(shape), gradient)
    grad = to_numpy(g)
    for axis in range(len(shape)):
        y = to_device(queue, reference(rng.standard_normal(shape), axis), result)
        out = to_numpy(y)
        terms = np.sum(np.abs(out * grad), axis, keepdims=True)
        expected = out * (grad - np.sum(out * grad, axis, keepdims=True))
        slack = (4 + shape[axis]) * 2.0**-24 * out * (np.abs(grad) + terms)
        assert_close(softmax_backward(y, g, axis, out_dtype=target), expected, slack=slack)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_long_rows(queue: cl.CommandQueue, simulated: bool, dtype: str) -> None:
    for n in (500,) if simulated else (4096, 4097, 50_001):
        x = to_device(queue, np.random.default_rng(2).normal([[0], [-200]], 1, (2, n)), dtype)
        y = softmax(x, out_dtype="float32")
        assert_close(y, reference(to_numpy(x), -1), slack=16 * 2.0**-24)
        np.testing.assert_allclose(to_numpy(y).sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_extreme_and_special_rows(queue: cl.CommandQueue, plan: None) -> None:
    inf, nan = np.inf, np.nan
    rows = np.array([[65504, -65504, 0], [-inf, 0, 0], [-inf, -inf, -inf], [inf, 0, 1], [nan, 0, 1], [-inf, -inf, 3]])
    with np.errstate(invalid="ignore"):
        expected = np.stack([reference(row, 0) for row in rows])
    for dtype in ("float32", "float16"):
        assert_close(softmax(to_device(queue, rows, dtype), 1, out_dtype=dtype), expected, slack=2.0**-23)
        assert_close(softmax(to_device(queue, rows.T, dtype), 0, out_dtype=dtype), expected.T, slack=2.0**-23)


def test_empty(queue: cl.CommandQueue) -> None:
    assert softmax(to_device(queue, np.empty((0, 3))), out_dtype="float32").shape == (0, 3)
