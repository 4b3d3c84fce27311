"""Counts, extremes and means of tensors against numpy's in float64, of what is stored."""

from __future__ import annotations

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
from clamp.ops.statistics import Numerics, PendingNumerics, numerics_of
from tests.ops.test_multi_tensor import launches
from tests.ops.test_statistics import LARGE_SIZES, SIZES, of_all_magnitudes
from tests.reference import SPECIAL, STORAGE_DTYPES, quantize, to_device

__all__ = ["launches"]  # a fixture
pytestmark = pytest.mark.kernel


def assert_found(found: Numerics, stored: Any) -> None:
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


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_size(queue: cl.CommandQueue, simulated: bool, dtype: str) -> None:
    sizes = SIZES[:-3] if simulated else SIZES + LARGE_SIZES
    rng = np.random.default_rng(0)
    arrays = [quantize(rng.standard_normal(size) + 0.5, dtype) for size in sizes]
    found = PendingNumerics([to_device(queue, array, dtype) for array in arrays]).read()
    for one, array in zip(found, arrays, strict=True):
        assert_found(one, array)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_as_on_a_gpu(queue: cl.CommandQueue, simulated: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work-groups of several work-items."""
    gpu = replace(device.capabilities(queue), is_cpu=False)
    monkeypatch.setitem(device._capabilities, queue.device.int_ptr, gpu)
    rng = np.random.default_rng(0)
    sizes = [1, 17, 1025] if simulated else SIZES + LARGE_SIZES
    arrays = [quantize(rng.standard_normal(size) + 0.5, dtype) for size in sizes]
    arrays += [quantize(np.resize(values, 1030), dtype) for values in (SPECIAL, [np.nan], [3e38], [-np.inf, 3e38])]
    found = PendingNumerics([to_device(queue, array, dtype) for array in arrays]).read()
    for one, array in zip(found, arrays, strict=True):
        assert_found(one, array)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_magnitude(queue: cl.CommandQueue, dtype: str) -> None:
    for size in (1, 17, 1030):
        array = of_all_magnitudes(size, dtype, size)
        assert_found(numerics_of(to_device(queue, array, dtype)), array)


@pytest.mark.parametrize(
    "values", [SPECIAL, [np.inf], [np.nan, -np.nan], [0.0, -0.0], [-np.inf, np.nan, 0.0], [-np.inf, np.inf], [-3, -2]]
)
@pytest.mark.parametrize("size", [1, 16, 37, 1030])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_special_values(queue: cl.CommandQueue, dtype: str, size: int, values: Any) -> None:
    array = quantize(np.resize(values, size), dtype)
    assert_found(numerics_of(to_device(queue, array, dtype)), array)


@pytest.mark.parametrize("values", [[3e38], [3e38, 3e38, -np.inf], [3e38, np.inf, -3e38]])
def test_a_sum_beyond_floats(queue: cl.CommandQueue, values: Any) -> None:
    array = np.resize(np.float32(values), 1030)
    assert_found(numerics_of(to_device(queue, array)), array)


def test_dtypes_in_any_order_and_empty_ones_among_them(queue: cl.CommandQueue) -> None:
    dtypes = [*STORAGE_DTYPES * 3, "float32"]
    arrays = [of_all_magnitudes(50 + seed if seed < 9 else 0, dtype, seed) for seed, dtype in enumerate(dtypes)]
    tensors = [to_device(queue, array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    for found, array in zip(PendingNumerics(tensors).read(), arrays, strict=True):
        assert_found(found, array)


def test_a_hundred_tensors_a_launch(queue: cl.CommandQueue, launches: list[str]) -> None:
    arrays = [np.float32([index, -1.0]) for index in range(101)]
    found = PendingNumerics([to_device(queue, array) for array in arrays]).read()
    assert launches == ["numerics"] * 2
    for one, array in zip(found, arrays, strict=True):
        assert_found(one, array)


def test_what_a_replay_finds(queue: cl.CommandQueue) -> None:
    tensor = to_device(queue, np.float32([1, 2]))
    with amp.init():
        capture = KernelCapture()
        capture.begin()
        pending = PendingNumerics([tensor])
        with pytest.raises(RuntimeError, match="Numbers were read"):
            pending.read()
        capture.end()
        assert pending.read()[0].mean == 1.5
        for array in (np.float32([np.inf, 2]), np.float32([0, -1])):
            tensor.write(array)
            capture.replay()
            assert_found(pending.read()[0], array)


def test_what_it_does_not_take(queue: cl.CommandQueue) -> None:
    whole = Tensor.from_host(queue, np.arange(3, dtype=np.int32), dtype="int32")
    host = Tensor.from_host(CPUQueue(), np.ones(3, np.float32))
    assert bridge.is_floating(to_device(queue, np.ones(3)))
    assert not any(map(bridge.is_floating, (whole, host, np.ones(3))))
    with pytest.raises(TypeError, match="int32"):
        numerics_of(whole)
    with pytest.raises(TypeError, match="numpy backend"):
        numerics_of(host)
