"""masked_fill and its gradient: the elements themselves, bit for bit, or the number."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops.elementwise import masked_fill, masked_fill_backward
from tests.reference import SPECIAL, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel


def repeated(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.tile(mask.ravel() != 0, int(np.prod(shape)) // mask.size).reshape(shape)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("float16", "int32")],
)
def test_dtypes(queue: cl.CommandQueue, dtype: str, mask_dtype: str) -> None:
    rng = np.random.default_rng(0)
    shape = (2, 3, 5, 7)
    x = to_device(queue, rng.standard_normal(shape), dtype)
    for mask_shape in ((1, 1, 5, 7), shape, (7,), (1,), (7, 2, 15, 1, 1)):
        host = (rng.random(mask_shape) < 0.5).astype(np.int32) * 3
        mask = Tensor.from_host(queue, host) if mask_dtype == "int32" else to_device(queue, host, mask_dtype)
        hidden = repeated(host, shape)
        assert_close(masked_fill(x, mask, -0.3, out_dtype=dtype), np.where(hidden, np.float32(-0.3), to_numpy(x)))
        np.testing.assert_array_equal(
            to_numpy(masked_fill_backward(x, mask, out_dtype=dtype)), np.where(hidden, 0, to_numpy(x))
        )


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_special_values(queue: cl.CommandQueue, dtype: str) -> None:
    x = quantize(SPECIAL, dtype)
    tensor = to_device(queue, SPECIAL, dtype)
    mask = to_device(queue, np.zeros(len(SPECIAL)), "float16")
    kept = to_numpy(masked_fill(tensor, mask, 1.0, out_dtype=dtype))
    np.testing.assert_array_equal(kept, x.astype(np.float64))
    np.testing.assert_array_equal(np.signbit(kept), np.signbit(x))
    everywhere = to_device(queue, np.full(len(SPECIAL), np.nan), "float16")  # NaN is not zero
    for fill in (-1e9, -np.inf, np.nan, -0.0):
        filled = to_numpy(masked_fill(tensor, everywhere, fill, out_dtype=dtype))
        stored = -65504.0 if (fill, dtype) == (-1e9, "float16") else float(quantize(fill, dtype))  # finite stays finite
        np.testing.assert_array_equal(filled, stored)
    np.testing.assert_array_equal(to_numpy(masked_fill_backward(tensor, everywhere, out_dtype=dtype)), 0)


def test_empty(queue: cl.CommandQueue) -> None:
    nothing = to_device(queue, np.empty((0, 3)))
    for mask in ((4,), (0, 3), (0, 1), (0,)):
        assert masked_fill(nothing, to_device(queue, np.ones(mask)), 0.0, out_dtype="float32").shape == (0, 3)
        assert masked_fill_backward(nothing, to_device(queue, np.ones(mask)), out_dtype="float32").shape == (0, 3)


@pytest.mark.parametrize("mask_shape", [(4, 1), (2, 1, 1, 4), (2, 1, 4, 4), (2, 2, 1, 1)])
def test_a_mask_that_numpy_would_broadcast_otherwise_is_refused(
    queue: cl.CommandQueue, mask_shape: tuple[int, ...]
) -> None:
    x, mask = to_device(queue, np.ones((2, 2, 4, 4))), to_device(queue, np.ones(mask_shape))
    for call in (lambda: masked_fill(x, mask, 0.0, out_dtype="float32"),
                 lambda: masked_fill_backward(x, mask, out_dtype="float32")):  # fmt: skip
        with pytest.raises(ValueError, match=r"ag\.where\(mask, fill, x\), which broadcasts"):
            call()
