"""The power of two by which one gradient fits best into 16 bits."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops.loss_scale import fitted, taken_off
from clamp.scaling.loss_scale import LossScale
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

SIZES = [(1,), (3, 5), (16,), (257,), (40, 41)]


def expected(top: float, scale: float) -> float:
    """The power with which ``top`` ends below 2^8, or lower by as much as the loss scale is below 2^16."""
    if top == 0 or not np.isfinite(top):
        return 1.0
    highest = 8 + min(np.floor(np.log2(scale)) - 16, 0)
    return float(2.0 ** np.clip(highest - 1 - np.floor(np.log2(top)), -126, 126))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("source", STORAGE_DTYPES)
@pytest.mark.parametrize("target", HALF_DTYPES)
@pytest.mark.parametrize("scale", [2.0**16, 2.0**24, 3.0 * 2.0**10, 2.0**-14])
@pytest.mark.parametrize("top", [1.0, 255.99, 2.0**-30, 1e30, 2.0**-126, 2.0**-140, 0.0, np.inf])
def test_the_largest_magnitude_decides(
    queue: cl.CommandQueue, shape: tuple[int, ...], source: str, target: str, scale: float, top: float
) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, shape)
    at = values.size // 2
    values.flat[at] = -1.0
    values = quantize(values, "float16").astype(float) * (top if np.isfinite(top) else 1.0)
    values.flat[at] = -top
    grad = to_device(queue, values, source)
    held = to_numpy(grad)
    found, down = fitted(grad, target, LossScale(scale).applied())
    power = 1 / to_numpy(down)[0]
    top_held = float(np.abs(held).max())
    assert power == expected(top_held, scale)
    assert (found.dtype, tuple(found.shape)) == (target, shape)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            to_numpy(found), quantize((held * power).astype(np.float32), target).astype(float)
        )
    back = taken_off(found, down)
    assert back.dtype == "float32"
    np.testing.assert_array_equal(to_numpy(back), (to_numpy(found) / power).astype(np.float32))


def test_what_is_no_number_stays_none(queue: cl.CommandQueue) -> None:
    values = np.array([np.nan, 2.0**-30, -(2.0**-31)])
    found, down = fitted(to_device(queue, values), "float16", LossScale(2.0**16).applied())
    np.testing.assert_array_equal(to_numpy(taken_off(found, down)), values)


def test_nothing_fits(queue: cl.CommandQueue) -> None:
    found, down = fitted(to_device(queue, np.zeros((0, 4))), "float16", LossScale(2.0**16).applied())
    assert (found.dtype, tuple(found.shape), to_numpy(down)[0]) == ("float16", (0, 4), 1.0)
    assert tuple(taken_off(found, down).shape) == (0, 4)
