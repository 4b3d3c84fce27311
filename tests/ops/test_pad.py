"""Padding and its gradient against numpy."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import launch, pad
from tests.ops.plans import plans_of
from tests.reference import SPECIAL, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

#: (shape, pad)
CASES = [
    ((2, 3, 4, 5), 1),
    ((1, 2, 3, 35), 2),
    ((1, 1, 1, 1), 1),
    ((2, 1, 17, 16), 16),
    ((1, 2, 5, 7), 3),
    ((1, 2, 3, 20), 0),
    ((3, 1, 4, 4), 4),
]
NUMPY_MODES = {"zero": "constant", "reflect": "symmetric"}


plan = plans_of(pad, launch)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("mode", pad.MODES)
def test_borders(queue: cl.CommandQueue, plan: None, mode: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape, width in CASES:
        if mode == "reflect" and width > min(shape[2:]):
            continue
        x = to_device(queue, quantize(rng.choice(SPECIAL, shape), dtype), dtype)
        result = pad.pad2d(x, width, mode, out_dtype=dtype)
        border = ((0, 0), (0, 0), (width, width), (width, width))
        expected = np.pad(to_numpy(x), border, mode=NUMPY_MODES[mode])
        assert_close(result, expected, ulps=0)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(to_numpy(result))[number], np.signbit(expected)[number])


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float16", "float32"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("mode", pad.MODES)
def test_gradients(queue: cl.CommandQueue, plan: None, mode: str, source: str, target: str) -> None:
    rng = np.random.default_rng(1)
    for shape, width in CASES:
        if mode == "reflect" and width > min(shape[2:]):
            continue
        n, c, h, w = shape
        grad = to_device(queue, rng.standard_normal((n, c, h + 2 * width, w + 2 * width)), source)
        border = ((0, 0), (0, 0), (width, width), (width, width))
        # which element of x each element of the result is; -1: none
        origin = np.pad(np.arange(n * c * h * w).reshape(shape) + 1, border, mode=NUMPY_MODES[mode]) - 1
        expected = np.bincount(origin.ravel() + 1, to_numpy(grad).ravel(), n * c * h * w + 1)[1:].reshape(shape)
        result = pad.pad2d_backward(grad, shape, width, mode, out_dtype=target)
        assert_close(result, expected, slack=0 if mode == "zero" else 2.0**-20)


def test_empty(queue: cl.CommandQueue) -> None:
    empty = to_device(queue, np.empty((0, 2, 3, 3)))
    assert pad.pad2d(empty, 1, out_dtype="float32").shape == (0, 2, 5, 5)
    no_columns = to_device(queue, np.empty((1, 2, 3, 0)))
    assert_close(pad.pad2d(no_columns, 1, out_dtype="float32"), np.zeros((1, 2, 5, 2)))
