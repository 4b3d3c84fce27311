"""Numbers that a device notes: norms against numpy's in float64, of all magnitudes; elements as they are."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops.ring_buffers import Elements, Norms
from tests.ops.test_multi_tensor import launches
from tests.reference import STORAGE_DTYPES, quantize, to_device, to_numpy

__all__ = ["launches"]  # a fixture
pytestmark = pytest.mark.kernel

SIZES = [1, 2, 15, 16, 17, 1009, 1024, 4099]
LARGE_SIZES = [8193, 65537, 200003]


def norm_of(queue: cl.CommandQueue, *arrays: np.ndarray, dtype: str = "float32") -> float:
    norms = Norms(queue, 3)
    norms.note(1, [to_device(queue, array, dtype) for array in arrays])
    before, found, after = norms.read()
    assert before == after == 0
    return float(found)


def wanted(*arrays: np.ndarray, dtype: str = "float32") -> float:
    return float(np.sqrt(sum((quantize(array, dtype).astype(np.float64) ** 2).sum() for array in arrays)))


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_a_norm_is_that_of_all_tensors(queue: cl.CommandQueue, simulated: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size, dtype=np.float32) for size in (SIZES if simulated else SIZES + LARGE_SIZES)]
    assert norm_of(queue, *arrays, dtype=dtype) == pytest.approx(wanted(*arrays, dtype=dtype), rel=1e-5)


@pytest.mark.parametrize("exponent", [-140, -126, -100, -51, -50, -49, -10, 0, 39, 40, 41, 63, 64, 100, 120])
def test_no_magnitude_is_lost(queue: cl.CommandQueue, exponent: int) -> None:
    values = np.ldexp(np.linspace(1, 2, 100), exponent).astype(np.float32)
    if exponent < -126 and not to_numpy(to_device(queue, values[:1]))[0]:
        pytest.skip("a device without subnormal numbers")
    assert norm_of(queue, values, values) == pytest.approx(wanted(values, values), rel=1e-5)


def test_small_and_large_elements_count_together(queue: cl.CommandQueue) -> None:
    for values in ([3e-20, 4e-20], [3e19, 4e19, 1.0], [1e-30, 3.0, 4.0], [0.0, -0.0], [2.0**-50, 2.0**-51]):
        array = np.array(values, np.float32)
        assert norm_of(queue, array) == pytest.approx(wanted(array), rel=1e-6)


def test_inf_and_nan_show(queue: cl.CommandQueue) -> None:
    ones = np.ones(100, np.float32)
    with np.errstate(invalid="ignore"):
        assert norm_of(queue, ones, np.array([np.inf, 1.0], np.float32)) == np.inf
        assert norm_of(queue, ones, np.array([-np.inf], np.float32), dtype="float16") == np.inf
        assert np.isnan(norm_of(queue, np.array([1.0, np.nan], np.float32), ones))


def test_dtypes_are_mixed_in_one_norm(queue: cl.CommandQueue) -> None:
    norms = Norms(queue, 1)
    norms.note(0, [to_device(queue, np.full(3, 2.0), dtype) for dtype in STORAGE_DTYPES])
    assert norms.read()[0] == 6.0


def test_elements_are_noted_each_in_its_row(queue: cl.CommandQueue) -> None:
    notes = Elements(queue, 4)
    for row, (value, dtype) in enumerate(zip([1.5, -2.0, np.inf], STORAGE_DTYPES, strict=True)):
        notes.note(row, to_device(queue, np.array([value]), dtype))
    assert list(notes.read()) == [1.5, -2.0, np.inf, 0.0]
    notes.note(0, to_device(queue, np.array([np.nan])))
    assert np.isnan(notes.read()[0])


def test_a_norm_takes_one_launch_for_100_tensors_and_one_besides(queue: cl.CommandQueue, launches: list[str]) -> None:
    tensors = [to_device(queue, np.ones(3, np.float32)) for _ in range(101)]
    norms = Norms(queue, 1)
    launches.clear()
    norms.note(0, tensors)
    assert launches[-1] == "total"
    assert set(launches[:-1]) == {"squares"}
    assert len(launches) >= 3
    assert norms.read()[0] == pytest.approx(np.sqrt(303))
