"""Counts, extremes, histograms and means of tensors against numpy's in float64, of what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.core.device import CPUQueue
from netcl.runtime.capture import KernelCapture

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.opencl import device
from clamp.ops.statistics import (
    BINS,
    Numerics,
    PendingNumerics,
    PendingStatistics,
    Statistics,
    edges,
    numerics_of,
    statistics_of,
)
from tests.ops.test_multi_tensor import LARGE_SIZES, SIZES, launches
from tests.reference import SPECIAL, STORAGE_DTYPES, quantize, to_device

__all__ = ["launches"]  # a fixture
pytestmark = pytest.mark.kernel


def expected(stored: Any, histogram: bool = True) -> Statistics:
    """What numpy finds in float64."""
    magnitude = np.abs(np.asarray(stored).astype(np.float64).ravel())
    there = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
    return Statistics(
        count=magnitude.size,
        infs=int(np.isinf(magnitude).sum()),
        nans=int(np.isnan(magnitude).sum()),
        zeros=int((magnitude == 0).sum()),
        smallest=float(there.min(initial=np.inf)),
        largest=float(there.max(initial=0.0)),
        histogram=np.histogram(there, edges())[0] if histogram else None,
        dtype=str(stored.dtype),
    )


def assert_statistics(found: Statistics, stored: Any, histogram: bool = True) -> None:
    want = expected(stored, histogram)
    np.testing.assert_array_equal(found.histogram, want.histogram)
    for name in ("count", "infs", "nans", "zeros", "smallest", "largest", "dtype"):
        assert getattr(found, name) == getattr(want, name), f"{name} of {stored.size} elements"


def assert_numbers(found: Numerics, stored: Any) -> None:
    values = np.asarray(stored).astype(np.float64).ravel()
    magnitude = np.abs(values)
    assert found.count == values.size
    assert found.nans == np.isnan(values).sum()
    assert found.infs == np.isinf(values).sum()
    assert found.zeros == (values == 0).sum()
    assert found.beyond == ((magnitude > 65504) & np.isfinite(magnitude)).sum()
    assert found.below == ((magnitude < 2.0**-24) & (magnitude > 0)).sum()
    assert found.is_finite == bool(np.isfinite(values).all())
    numbers = values[~np.isnan(values)]
    extremes = [numbers.max(), numbers.min()] if numbers.size else [np.nan, np.nan]
    np.testing.assert_array_equal([found.greatest, found.least], extremes)
    with np.errstate(invalid="ignore"):
        mean = values.mean() if values.size else np.nan
    allowed = 64 * 2.0**-24 * magnitude.mean() if np.isfinite(mean) else 0.0
    np.testing.assert_allclose(found.mean, mean, rtol=0, atol=allowed)


def assert_found(found: Sequence[Any], arrays: Sequence[Any], *histogram: bool) -> None:
    for one, array in zip(found, arrays, strict=True):
        if isinstance(one, Numerics):
            assert_numbers(one, array)
        else:
            assert_statistics(one, array, *histogram)


both = pytest.mark.parametrize("pending", [PendingStatistics, PendingNumerics])


def of_all_magnitudes(size: int, dtype: str, seed: int) -> Any:
    """Numbers of all exponents of a dtype, subnormal ones too, with zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        words = rng.integers(0, 1 << 32, size, dtype=np.uint32)
    else:
        words = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    values = words.view(quantize(0.0, dtype).dtype)
    finite = np.where(np.isfinite(values.astype(np.float32)), values, np.ones_like(values))
    finite[rng.random(size) < 0.1] = 0.0
    finite[rng.random(size) < 0.1] = -0.0
    return finite


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_size(queue: cl.CommandQueue, simulated: bool, dtype: str, histogram: bool) -> None:
    sizes = SIZES if simulated else SIZES + LARGE_SIZES
    arrays = [of_all_magnitudes(size, dtype, seed) for seed, size in enumerate(sizes)]
    tensors = [to_device(queue, array, dtype) for array in arrays]
    assert_found(statistics_of(tensors, histogram=histogram), arrays, histogram)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_numbers_of_every_size(
    queue: cl.CommandQueue, simulated: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU work-groups are of several work-items."""
    rng = np.random.default_rng(0)
    for as_gpu in (False, True):
        if as_gpu:
            gpu = replace(device.capabilities(queue), is_cpu=False)
            monkeypatch.setitem(device._capabilities, queue.device.int_ptr, gpu)
        sizes = ([1, 17, 1025] if as_gpu else SIZES[:-3]) if simulated else SIZES + LARGE_SIZES
        arrays = [quantize(rng.standard_normal(size) + 0.5, dtype) for size in sizes]
        arrays += [quantize(np.resize(values, 1030), dtype) for values in (SPECIAL, [np.nan], [3e38], [-np.inf, 3e38])]
        assert_found(PendingNumerics([to_device(queue, array, dtype) for array in arrays]).read(), arrays)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_numbers_of_every_magnitude(queue: cl.CommandQueue, dtype: str) -> None:
    for size in (1, 17, 1030):
        array = of_all_magnitudes(size, dtype, size)
        assert_numbers(numerics_of(to_device(queue, array, dtype)), array)


@pytest.mark.parametrize(
    "values", [SPECIAL, [np.inf], [np.nan, -np.nan], [0.0, -0.0], [-np.inf, np.nan, 0.0], [-np.inf, np.inf], [-3, -2]]
)
@pytest.mark.parametrize("size", [1, 16, 37, 1030])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@both
def test_special_values(queue: cl.CommandQueue, pending: Any, dtype: str, size: int, values: Any) -> None:
    array = quantize(np.resize(values, size), dtype)
    assert_found(pending([to_device(queue, array, dtype)]).read(), [array])


@pytest.mark.parametrize("values", [[3e38], [3e38, 3e38, -np.inf], [3e38, np.inf, -3e38]])
def test_a_sum_beyond_floats(queue: cl.CommandQueue, values: Any) -> None:
    array = np.resize(np.float32(values), 1030)
    assert_numbers(numerics_of(to_device(queue, array)), array)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_edge_of_a_bin(queue: cl.CommandQueue, simulated: bool, dtype: str) -> None:
    begins = edges()[: BINS : 7 if simulated else 1].astype(np.float32)
    just_below = (begins[1:].view(np.uint32) - 1).view(np.float32)
    array = quantize(np.concatenate([begins, -just_below, [np.finfo(np.float32).max]]), dtype)
    assert_found(statistics_of([to_device(queue, array, dtype)]), [array])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_inf_and_nan_are_counted_tensor_by_tensor(queue: cl.CommandQueue, dtype: str) -> None:
    arrays = [of_all_magnitudes(size, dtype, size) for size in (3, 0, 40, 5, 1025, 4099)]
    arrays[0][2], arrays[3][0], arrays[4][::100] = np.nan, -np.inf, np.inf
    arrays[4][:17] = np.nan
    arrays[5][::2], arrays[5][1::2] = np.inf, np.nan  # in every tile
    found = statistics_of([to_device(queue, array, dtype) for array in arrays], histogram=False)
    assert [(one.infs, one.nans) for one in found] == [(0, 1), (0, 0), (0, 0), (1, 0), (10, 17), (2050, 2049)]


def test_one_bad_element_is_found_anywhere(queue: cl.CommandQueue) -> None:
    for size in (1, 17, 1030, 2049):
        for place in {0, size // 2, size - 1}:
            array = np.full(size, 3.0, np.float32)
            array[place] = np.inf
            assert_found(statistics_of([to_device(queue, array)], histogram=False), [array], False)


@both
def test_dtypes_in_any_order_and_empty_ones_among_them(queue: cl.CommandQueue, pending: Any) -> None:
    dtypes = [*STORAGE_DTYPES * 3, "float32"]
    arrays = [of_all_magnitudes(50 + seed if seed < 9 else 0, dtype, seed) for seed, dtype in enumerate(dtypes)]
    tensors = [to_device(queue, array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    assert_found(pending(tensors).read(), arrays)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 250])
@pytest.mark.parametrize(
    ("pending", "before", "each"), [(PendingStatistics, ["fill"], "statistics"), (PendingNumerics, [], "numerics")]
)
def test_a_hundred_tensors_a_launch(
    queue: cl.CommandQueue, launches: list[str], count: int, pending: Any, before: list[str], each: str
) -> None:
    arrays = [of_all_magnitudes(1 + index % 5, "float16", index) for index in range(count)]
    found = pending([to_device(queue, array, "float16") for array in arrays]).read()
    assert launches == before + [each] * -(-count // 100)
    assert_found(found, arrays)


def test_nothing_launches_nothing(queue: cl.CommandQueue, launches: list[str]) -> None:
    assert statistics_of([]) == []
    empty = to_device(queue, np.empty((3, 0)))
    assert_found(statistics_of([empty, empty]), [np.empty(0, np.float32)] * 2)
    assert launches == []


def test_one_read_for_all(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [of_all_magnitudes(40, dtype, 0) for dtype in STORAGE_DTYPES]
    pending = PendingStatistics([to_device(queue, array, str(array.dtype)) for array in arrays * 7])
    reads = []
    to_host = Tensor.to_host
    monkeypatch.setattr(Tensor, "to_host", lambda self: (reads.append(self), to_host(self))[1])
    assert_found(pending.read(), arrays * 7)
    assert len(reads) == 1


def test_shared_storage_and_views(queue: cl.CommandQueue) -> None:
    array = of_all_magnitudes(1024, "float32", 0)
    tensor = to_device(queue, array)
    offset = 256  # elements: devices want a multiple of 1024 bytes at most
    part = bridge.alias(tensor)
    part.buffer = tensor.buffer.get_sub_region(4 * offset, 4 * 300)
    part.shape = (300,)
    front = bridge.alias(tensor)  # the same buffer, less of it
    front.shape = (7,)
    tensors = [tensor, bridge.view(tensor, (32, 32)), part, tensor, front]
    assert_found(statistics_of(tensors), [array, array, array[offset : offset + 300], array, array[:7]])


def test_several_queues(queue: cl.CommandQueue) -> None:
    other = cl.CommandQueue(queue.context, queue.device)
    arrays = [of_all_magnitudes(30 + seed, "float32", seed) for seed in range(4)]
    tensors = [to_device((queue, other)[seed % 2], array) for seed, array in enumerate(arrays)]
    assert_found(statistics_of(tensors), arrays)


def test_what_was_launched_is_read_later_and_again(queue: cl.CommandQueue) -> None:
    array = of_all_magnitudes(100, "float32", 0)
    tensor = to_device(queue, array)
    pending = PendingStatistics([tensor])
    tensor.write(np.zeros(100, np.float32))
    assert_found(pending.read(), [array])
    assert_found(pending.read(), [array])


@pytest.mark.parametrize("amp_is_on", [True, False])
@both
def test_a_replay_finds_what_is_there_then(queue: cl.CommandQueue, pending: Any, amp_is_on: bool) -> None:
    arrays = [np.arange(1, 101, dtype=np.float32), np.full(100, np.nan, np.float32), np.zeros(100, np.float32)]
    tensor = to_device(queue, arrays[0])
    with amp.init() if amp_is_on else nullcontext():
        capture = KernelCapture()
        capture.begin()
        found = pending([tensor])
        capture.end()
        assert_found(found.read(), arrays[:1])
        for array in (*arrays, np.float32([np.inf, 2] * 50), arrays[0]):
            tensor.write(array)
            capture.replay()
            capture.replay()
            assert_found(found.read(), [array])


@pytest.mark.parametrize(("pending", "what"), [(PendingStatistics, "Statistics"), (PendingNumerics, "Numbers")])
def test_reading_is_refused_while_recording(queue: cl.CommandQueue, pending: Any, what: str) -> None:
    with amp.init():
        found = pending([to_device(queue, np.ones(3))])
        capture = KernelCapture()
        capture.begin()
        try:
            with pytest.raises(RuntimeError, match=f"{what} were read"):
                found.read()
        finally:
            capture.end()


def test_what_cannot_be_counted_is_refused(queue: cl.CommandQueue, launches: list[str]) -> None:
    fine = to_device(queue, np.ones(3))
    whole = Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32")
    host = Tensor.from_host(CPUQueue(), np.ones(3, np.float32))
    assert bridge.is_floating(fine)
    assert not any(map(bridge.is_floating, (whole, host, np.ones(3))))
    with pytest.raises(TypeError, match=r"tensors\[1\] is int32"):
        statistics_of([fine, whole])
    with pytest.raises(TypeError, match="int32"):
        numerics_of(whole)
    for look in (statistics_of, PendingNumerics):
        with pytest.raises(TypeError, match="numpy backend"):
            look([host])
    huge = bridge.alias(fine)
    huge.shape = (1 << 16, 1 << 16)
    with pytest.raises(ValueError, match=r"tensors\[0\] has shape \(65536, 65536\)"):
        statistics_of([huge])
    assert launches == []


def test_octaves_sum_the_bins() -> None:
    histogram = np.zeros(BINS, np.int64)
    for value, count in ((2.0**-25, 1), (2.0**-24, 2), (1.99 * 2.0**-24, 3), (1.0, 4), (65504.0, 5), (65536.0, 6)):
        histogram[np.searchsorted(edges(), value, "right") - 1] += count
    octaves = Statistics(21, 0, 0, 0, 2.0**-25, 65536.0, histogram).octaves
    assert octaves.shape == (42,)
    assert {index: int(count) for index, count in enumerate(octaves) if count} == {0: 1, 1: 5, 25: 4, 40: 5, 41: 6}
    with pytest.raises(ValueError, match="histogram=True"):
        _ = Statistics(1, 0, 0, 0, 1.0, 1.0).octaves
