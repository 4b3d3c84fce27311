"""Casts equal numpy's astype, bit for bit, for every pair of storage types."""

from __future__ import annotations

import itertools

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops.cast import cast
from tests.reference import SPECIAL, STORAGE_DTYPES, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("target", STORAGE_DTYPES)
def test_cast_is_numpys_astype(queue: cl.CommandQueue, target: str) -> None:
    for source, size in itertools.product(STORAGE_DTYPES, (0, 1, 15, 16, 17, 1009)):
        rng = np.random.default_rng(size)
        bits = (rng.standard_normal(size).astype(np.float32) * 100).view(np.uint32)
        for dropped in (16, 13):  # bits that bfloat16, and then float16, has no room for: ties, and what is beside them
            near = (bits >> dropped << dropped) + rng.choice([0, -1, 1], size) + (1 << dropped - 1)
            bits = np.where(rng.random(size) < 0.4, near, bits).astype(np.uint32)
        stored = quantize(bits.view(np.float32), source)
        result = cast(to_device(queue, stored, source), target)
        assert result.dtype == target
        np.testing.assert_array_equal(to_numpy(result), quantize(stored, target).astype(np.float64))


@pytest.mark.parametrize("target", STORAGE_DTYPES)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # numpy's, of NaNs that signal
def test_special_values_survive(queue: cl.CommandQueue, target: str) -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    values = np.concatenate([nans, SPECIAL, nans])  # a vector of 16, and what is beyond it
    result = to_numpy(cast(to_device(queue, values), target))
    expected = quantize(values, target).astype(np.float64)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(np.signbit(result[~np.isnan(expected)]), np.signbit(expected[~np.isnan(expected)]))


def test_every_half_round_trips(queue: cl.CommandQueue, simulated: bool) -> None:
    bits = np.arange(0, 1 << 16, 61 if simulated else 1, dtype=np.uint16)
    halves = bits.view(np.float16)
    result = cast(cast(to_device(queue, halves, "float16"), "float32"), "float16").to_host()
    numbers = ~np.isnan(halves)
    np.testing.assert_array_equal(result.view(np.uint16)[numbers], bits[numbers])
    assert np.isnan(result[~numbers]).all()
