"""Rows picked are numpy's take, bit for bit; rows added are summed in fp32, in a fixed order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import empty
from clamp.opencl.device import capabilities
from clamp.ops import concat, indexing, launch
from clamp.ops.indexing import index_add, index_select, one_hot, sort_positions, to_index
from tests.ops.test_concat import bits_of, words
from tests.reference import HALF_DTYPES, SPECIAL, STORAGE_DTYPES, assert_close, integers, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24


@pytest.fixture(params=["own plan", "other plan"])
def plan(request: pytest.FixtureRequest, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kind of plan, and the other, with a sort that small inputs spread over several work-groups."""
    monkeypatch.setattr(indexing, "_TILE", 8)
    if request.param == "other plan":
        other = dataclasses.replace(capabilities(queue), is_cpu=not capabilities(queue).is_cpu)
        for module in (indexing, concat, launch):
            monkeypatch.setattr(module, "capabilities", lambda queue: other)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
@pytest.mark.parametrize("inner", [1, 3, 16, 37])
def test_picked_rows_keep_their_bits(queue: cl.CommandQueue, inner: int, dtype: str) -> None:
    x, bits = words(queue, (2, 9, inner), dtype)
    index = np.array([[0, -1, 8, 3], [3, -9, 4, 3]])
    out = index_select(x, 1, integers(queue, index), out_dtype=dtype)
    np.testing.assert_array_equal(bits_of(out), bits[:, index.ravel()])


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_an_index_that_names_nothing_is_read_as_nan(queue: cl.CommandQueue, dtype: str) -> None:
    x = to_device(queue, np.ones((2, 3, 5)), dtype)
    index = integers(queue, [0, 3, -4, 2, 2**31 - 1, -(2**31)])
    for out_dtype in {dtype, "float32"}:
        out = to_numpy(index_select(x, 1, index, out_dtype=out_dtype))
        np.testing.assert_array_equal(np.isnan(out[0, :, 0]), [False, True, True, False, True, True])
        assert np.isnan(out[:, [1, 2, 4, 5]]).all()
        zeros = to_numpy(index_select(x, 1, index, out_dtype=out_dtype, missing=0.0))
        np.testing.assert_array_equal(zeros[0, :, 0], [1, 0, 0, 1, 0, 0])


def added(source: np.ndarray, index: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum in float64, and the sum of the terms' magnitudes."""
    total, magnitude = base.copy(), np.abs(base)
    for position, row in enumerate(index):
        if -base.shape[1] <= row < base.shape[1]:
            total[:, row] += source[:, position]
            magnitude[:, row] += np.abs(source[:, position])
    return total, magnitude


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(
    ("outer", "dim", "inner", "n"), [(1, 7, 83, 40), (3, 20, 3, 9), (5, 2, 16, 30), (40, 3, 1, 5), (1, 100, 1, 1)]
)
def test_rows_add_up_in_fp32(
    queue: cl.CommandQueue, simulated: bool, outer: int, dim: int, inner: int, n: int, dtype: str
) -> None:
    rng = np.random.default_rng(n)
    x = to_device(queue, rng.standard_normal((outer, n, inner)), dtype)
    index = rng.integers(-dim - 1, dim + 1, n)  # some name nothing
    base = to_device(queue, rng.standard_normal((outer, dim, inner)), "float16")
    total, magnitude = added(to_numpy(x), index, to_numpy(base))
    slack = 4 * n * EPS * magnitude
    for out_dtype in ("float32",) if simulated else (dtype, "float32"):
        out = empty(queue, base.shape, out_dtype)
        index_add(x, base.shape, 1, integers(queue, index), out, base)
        assert_close(out, total, ulps=0.51, slack=slack)
        index_add(x, base.shape, 1, integers(queue, index), out, None)
        assert_close(out, total - to_numpy(base), ulps=0.51, slack=slack)
    index_add(x, base.shape, 1, integers(queue, index), base, base)
    assert_close(base, total, ulps=0.51, slack=slack)


@pytest.mark.usefixtures("plan")
def test_a_row_named_often_is_rounded_once(queue: cl.CommandQueue) -> None:
    for dtype in HALF_DTYPES:
        x = to_device(queue, np.ones((3000, 2)), dtype)
        out = empty(queue, (2, 2), dtype)
        index_add(x, (2, 2), 0, integers(queue, np.arange(3000) % 3 // 2), out, None)
        assert_close(out, [[2000.0, 2000.0], [1000.0, 1000.0]], ulps=0.51)


@pytest.mark.usefixtures("plan")
def test_sums_have_the_same_bits_every_time(queue: cl.CommandQueue) -> None:
    rng = np.random.default_rng(0)
    x, index = to_device(queue, rng.standard_normal((200, 17))), integers(queue, rng.integers(0, 3, 200))
    results = []
    for _ in range(3):
        out = empty(queue, (3, 17), "float32")
        index_add(x, (3, 17), 0, index, out, None)
        results.append(bits_of(out))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.usefixtures("plan")
def test_rows_that_nothing_is_added_to_keep_their_bits(queue: cl.CommandQueue) -> None:
    target, bits = words(queue, (50, 3), "float16")
    index_add(to_device(queue, np.ones((1, 3))), (50, 3), 0, integers(queue, [7]), target, target)
    kept = np.arange(50) != 7
    np.testing.assert_array_equal(bits_of(target)[kept], bits[kept])


@pytest.mark.usefixtures("plan")
def test_no_indices(queue: cl.CommandQueue) -> None:
    none, nothing = empty(queue, (0,), "int32"), empty(queue, (0, 4), "float32")
    base, out = to_device(queue, np.ones((3, 4)), "float16"), empty(queue, (3, 4), "float32")
    assert index_select(base, 0, none, out_dtype="float16").shape == (0, 4)
    index_add(nothing, (3, 4), 0, none, out, base)
    np.testing.assert_array_equal(to_numpy(out), np.ones((3, 4)))
    index_add(nothing, (3, 4), 0, none, out, None)
    np.testing.assert_array_equal(to_numpy(out), np.zeros((3, 4)))


@pytest.mark.parametrize(("n", "dim"), [(1, 1), (50, 3), (100, 300), (33, 100_000)])
def test_positions_are_sorted_and_equal_ones_keep_their_order(
    queue: cl.CommandQueue, simulated: bool, n: int, dim: int
) -> None:
    dim = min(dim, 1000) if simulated else dim
    index = np.random.default_rng(n).integers(-dim, dim, n)
    positions, starts = sort_positions(integers(queue, index), dim, 16)
    rows = index % dim
    np.testing.assert_array_equal(positions.to_host(), np.argsort(rows, kind="stable"))
    np.testing.assert_array_equal(starts.to_host(), np.searchsorted(np.sort(rows), np.arange(dim + 1)))


@pytest.mark.unsimulated
@pytest.mark.slow
@pytest.mark.usefixtures("plan")
def test_tables_of_language_models(queue: cl.CommandQueue) -> None:
    rng = np.random.default_rng(0)
    for dim, n, inner in ((256, 4096, 64), (20_011, 1009, 96)):
        index = np.minimum(rng.zipf(1.3, n) - 1, dim - 1)
        x = to_device(queue, rng.standard_normal((n, inner)), "float16")
        out = empty(queue, (dim, inner), "float16")
        index_add(x, (dim, inner), 0, integers(queue, index), out, None)
        total, magnitude = added(to_numpy(x)[None], index, np.zeros((1, dim, inner)))
        assert_close(out, total[0], ulps=0.51, slack=4 * n * EPS * magnitude[0])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_one_hot_and_whole_numbers(queue: cl.CommandQueue, dtype: str) -> None:
    rows = one_hot(integers(queue, [0, 3, -1, 4, 2]), 4, out_dtype=dtype)
    assert rows.dtype == dtype
    expected = np.zeros((5, 4))
    expected[[0, 1, 4], [0, 3, 2]] = 1
    np.testing.assert_array_equal(to_numpy(rows), expected)
    assert one_hot(empty(queue, (0,), "int32"), 4, out_dtype=dtype).shape == (0, 4)
    index = to_index(to_device(queue, [[0.0, -3.0], [200.0, 1.5]], dtype))
    assert index.dtype == "int32"
    np.testing.assert_array_equal(index.to_host(), [0, -3, 200, 1])


# -------------------------- The place of the maximum is numpy's; the k largest are those of a stable sort, bit for bit.


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
