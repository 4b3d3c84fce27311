"""The place of the maximum is numpy's; the k largest are those of a stable sort, bit for bit."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import indexing, launch
from tests.ops.plans import plans_of
from tests.ops.test_concat import bits_of
from tests.reference import SPECIAL, STORAGE_DTYPES, to_device, to_numpy

pytestmark = pytest.mark.kernel


plan = plans_of(indexing, launch)


def values(*shape: int) -> np.ndarray:
    """Many equal elements, and NaNs and infinities here and there."""
    rng = np.random.default_rng(sum(shape))
    x = rng.integers(-4, 5, shape).astype(np.float64)
    places = rng.random(shape)
    x[places < 0.05] = -np.inf
    x[places > 0.95] = np.inf
    x[(places > 0.4) & (places < 0.43)] = np.nan
    x[(places > 0.5) & (places < 0.6)] = -0.0
    return x


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((4, 53), 1), ((3, 16), -1), ((5, 7), 0), ((2, 9, 19), 1), ((3, 1), 1)])
def test_argmax_is_numpys(queue: cl.CommandQueue, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x = values(*shape)
    for keepdims in (False, True):
        out = indexing.argmax(to_device(queue, x, dtype), axis, keepdims)
        assert out.dtype == "int32"
        np.testing.assert_array_equal(out.to_host(), np.argmax(x, axis, keepdims=keepdims))


@pytest.mark.usefixtures("plan")
def test_argmax_of_long_and_of_single_rows(queue: cl.CommandQueue) -> None:
    rng = np.random.default_rng(0)
    for shape in ((2, 1500), (70, 33), (1, 1)):
        x = to_device(queue, rng.standard_normal(shape), "float16")
        np.testing.assert_array_equal(indexing.argmax(x).to_host(), np.argmax(to_numpy(x), -1))
    np.testing.assert_array_equal(indexing.argmax(to_device(queue, [3.0, 5.0, 1.0])).to_host(), [1])
    np.testing.assert_array_equal(indexing.argmax(to_device(queue, np.full((2, 40), -np.inf))).to_host(), [0, 0])


@pytest.mark.usefixtures("plan")
def test_the_first_of_equal_elements_is_found_wherever_the_others_are(queue: cl.CommandQueue) -> None:
    """In the same lane of 16, in one before or after it, in what is left of the row; in long rows by another one."""
    places = [(first, other) for first in (0, 2, 15) for other in range(16, 36)]
    for n in (36, 36 + 16 * 64):
        x = np.zeros((len(places), n))
        for row, pair in zip(x, places, strict=True):
            row[[pair[0], pair[1] + n - 36]] = 1
        np.testing.assert_array_equal(indexing.argmax(to_device(queue, x)).to_host(), [first for first, _ in places])


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(("shape", "axis", "k"), [((3, 53), 1, 5), ((3, 20), 1, 20), ((7, 5), 0, 3), ((2, 9, 4), 1, 1)])
def test_topk_is_a_stable_sort(queue: cl.CommandQueue, shape: tuple[int, ...], axis: int, k: int, dtype: str) -> None:
    x = to_device(queue, values(*shape), dtype)
    largest, places = indexing.topk(x, k, axis)
    order = np.argsort(-to_numpy(x), axis, kind="stable").take(np.arange(k), axis)  # NaN comes last
    assert (largest.dtype, places.dtype) == (dtype, "int32")
    np.testing.assert_array_equal(places.to_host(), order)
    np.testing.assert_array_equal(bits_of(largest), np.take_along_axis(bits_of(x), order, axis))


@pytest.mark.usefixtures("plan")
def test_topk_of_long_rows_and_special_values(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal((2, 700)), "float16")
    for host in (x, to_device(queue, np.arange(300.0)), to_device(queue, -np.arange(300.0)), to_device(queue, SPECIAL)):
        k = min(11, host.shape[-1])
        np.testing.assert_array_equal(
            indexing.topk(host, k)[1].to_host(), np.argsort(-to_numpy(host), -1, kind="stable")[..., :k]
        )


def test_empty_and_impossible(queue: cl.CommandQueue) -> None:
    empty, x = to_device(queue, np.empty((0, 3))), to_device(queue, np.ones((2, 3)))
    assert indexing.argmax(empty).shape == (0,)
    assert indexing.topk(empty, 2)[0].shape == (0, 2)
    with pytest.raises(ValueError, match=r"axis 0 of shape .* is empty"):
        indexing.argmax(empty, 0)
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k={k} out of range for axis of size 3"):
            indexing.topk(x, k)
    with pytest.raises(ValueError, match="axis 2 out of"):
        indexing.topk(x, 1, 2)
