"""What casts lose, from statistics, against what real casts lose; the scale that follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest

from clamp.debug.layer_ranges import LayerRange, LayerRanges
from clamp.debug.ranges import HEADROOM, SCALES, Lost, _tilt, lost, pooled, suggested_scale
from clamp.ops.statistics import Statistics, edges, statistics_of
from tests.ops.test_statistics import expected
from tests.reference import HALF_DTYPES, NUMPY, STORAGE_DTYPES, quantize, to_device

SIZES = (1, 37, 1009, 4099, 100_003)


def scattered(rng: np.random.Generator, lowest: int = -30, highest: int = 18) -> float:
    return float(2.0 ** rng.uniform(lowest, highest))


#: kinds of tensors: numbers of a size, drawn by a generator
KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, n: rng.standard_normal(n) * scattered(rng),
    "lognormal": lambda rng, n: rng.lognormal(rng.uniform(-20, 10), rng.uniform(0.3, 5), n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n) * scattered(rng),
    "laplace": lambda rng, n: rng.laplace(size=n) * scattered(rng),
    "heavy tails": lambda rng, n: rng.standard_t(2, n) * scattered(rng),
    "sparse": lambda rng, n: rng.standard_normal(n) * scattered(rng) * (rng.random(n) < 0.1),
    "powers of two": lambda rng, n: rng.choice([-1.0, 1.0], n) * 2.0 ** rng.integers(-40, 18, n),
    "constant": lambda rng, n: np.full(n, scattered(rng)),
    "subnormal": lambda rng, n: rng.integers(0, 1 << 23, n, dtype=np.uint32).view(np.float32),
    "zero": lambda rng, n: np.zeros(n),
    "infinite": lambda rng, n: np.full(n, np.inf),
    "a few bad": lambda rng, n: np.where(
        rng.random(n) < 0.1, rng.choice([np.inf, -np.inf, np.nan], n), rng.standard_normal(n) * scattered(rng)
    ),
}
#: 240 tensors
TENSORS = [
    (kind, size, dtype, seed)
    for seed, (kind, size, dtype) in enumerate(
        (kind, SIZES[(number + repeat) % len(SIZES)], STORAGE_DTYPES[number % 3])
        for repeat in range(20)
        for number, kind in enumerate(KINDS)
    )
]


def made(kind: str, size: int, dtype: str, seed: int) -> Any:
    return quantize(KINDS[kind](np.random.default_rng(seed), size), dtype)


def really_lost(array: Any, dtype: str, factor: float) -> Lost:
    """What a cast loses: the product in float32, then numpy's or ml_dtypes' rounding."""
    x = np.abs(array.astype(np.float32))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = (x * np.float32(factor)).astype(NUMPY[dtype]).astype(np.float64)
    finite, normal = np.isfinite(x), float(ml_dtypes.finfo(NUMPY[dtype]).smallest_normal)
    return Lost(
        float((finite & (x > 0) & (y == 0)).mean()),
        float((finite & np.isinf(y)).mean()),
        float((finite & (y > 0) & (y < normal)).mean()),
    )


def turning_factors(array: Any, rng: np.random.Generator) -> list[float]:
    """Factors that are no powers of two, at which magnitudes from the middle of the tensor are near a turn."""
    magnitude = np.abs(array.astype(np.float64))
    there = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
    if not there.size:
        return [scattered(rng)]
    near = [turn / np.median(there) * rng.uniform(0.2, 3) for turn in (2.0**-25, 2.0**-14, 65520.0, 2.0**-130)]
    return [factor for factor in near if 2.0**-126 < factor < 2.0**127]


@pytest.mark.parametrize("part", range(6))
@pytest.mark.long
def test_as_much_as_real_casts_lose(queue: cl.CommandQueue, part: int) -> None:
    tensors = TENSORS[part::6]
    arrays = [made(*tensor) for tensor in tensors]
    found = statistics_of([to_device(queue, array, str(array.dtype)) for array in arrays])
    for which, array, statistics in zip(tensors, arrays, found, strict=True):
        rng = np.random.default_rng(which[-1])
        for dtype in HALF_DTYPES:
            for factor in (*rng.choice(SCALES, 5), 1.0):
                ours, real = lost(statistics, dtype, factor), really_lost(array, dtype, factor)
                # What float32 rounds, too, is rounded twice.
                allowed = 1e-4 if which[0] == "subnormal" and array.size > 1000 else 1e-15
                np.testing.assert_allclose(ours, real, rtol=0, atol=allowed, err_msg=f"{which} {dtype} {factor}")
            # Of few elements, how many of a bin are on one side is left to chance.
            chance = 2 * np.sqrt(statistics.histogram.max()) / array.size
            for factor in turning_factors(array, rng):
                ours, real = lost(statistics, dtype, factor), really_lost(array, dtype, factor)
                allowed = 1e-3 if array.size >= 100_000 else 1e-3 + chance
                np.testing.assert_allclose(ours, real, rtol=0, atol=allowed, err_msg=f"{which} {dtype} {factor}")


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_where_roundings_turn(dtype: str) -> None:
    """The numbers beside those at which a cast's result changes in kind, at powers of two and at others."""
    info = ml_dtypes.finfo(NUMPY[dtype])
    least, normal, largest = (float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.max))
    turns = np.array([least / 2, normal - least / 2, largest * (1 + float(info.eps) / 4)])
    for factor in (1.0, 2.0**-10, 2.0**10, 3.0, 0.7):
        at = (turns / factor)[turns / factor < 3.4e38].astype(np.float32)
        near = np.unique(np.concatenate([at, np.nextafter(at, 0), np.nextafter(at, np.inf), at / 2]))
        for x in near:
            alone = np.array([x])
            assert lost(expected(alone), dtype, factor) == really_lost(alone, dtype, factor), f"{x!r} times {factor}"
        if factor in (1.0, 2.0**10) or (factor == 2.0**-10 and dtype == "float16"):  # no product is rounded
            together = really_lost(near, dtype, factor)
            assert lost(expected(near), dtype, factor) == pytest.approx(together, abs=1e-15)


def test_extremes_alone_may_decide() -> None:
    statistics = expected(np.array([0.0, 1.0, -2.0], np.float32), histogram=False)
    assert lost(statistics, "float16") == (0, 0, 0)
    assert lost(statistics, np.float16, 2.0**-30) == (2 / 3, 0, 0)
    assert lost(statistics, "fp16", 2.0**17) == (0, 2 / 3, 0)
    with pytest.raises(ValueError, match="histogram=True"):
        lost(statistics, "float16", 2.0**15)


def test_nothing_of_nothing() -> None:
    assert lost(expected(np.empty(0, np.float32)), "bfloat16", 3.0) == (0, 0, 0)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan, 1e60])
def test_bad_arguments(factor: float) -> None:
    one = expected(np.ones(1, np.float32))
    with pytest.raises(ValueError, match="factor"):
        lost(one, "float16", factor)
    with pytest.raises(ValueError, match="scale"):
        suggested_scale(one, factor)
    with pytest.raises(ValueError, match="float64"):
        suggested_scale(one, 1.0, "float64")
    with pytest.raises(ValueError, match="float32"):
        lost(one, "float32")


def gradients(seed: int) -> tuple[list[Any], float]:
    """Gradients of a few layers, and a scale at which they are finite in float32."""
    rng = np.random.default_rng(seed)
    size = scattered(rng, -40, 5)
    arrays = [rng.standard_normal(101) * size * scattered(rng, -10, 0) for _ in range(4)]
    return [array.astype(np.float32) for array in arrays], float(2.0 ** rng.integers(-5, 17))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_suggested_scale_is_near_the_largest_without_overflow(dtype: str) -> None:
    for seed in range(60):
        arrays, scale = gradients(seed)
        suggested = suggested_scale(pooled(expected(scale * array) for array in arrays), scale, dtype)
        fitting = [s for s in SCALES if not any(really_lost(array, dtype, s).overflow for array in arrays)]
        if fitting:
            assert max(fitting) / 4 <= suggested <= max(fitting)
            assert suggested == max(SCALES) or HEADROOM * suggested in fitting or suggested == min(SCALES)
        else:
            assert suggested == min(SCALES)


def test_suggestions_where_little_is_known() -> None:
    zeros = expected(np.zeros(3, np.float32))
    assert suggested_scale(zeros, 1.0) == suggested_scale(pooled([]), 1.0) == 2.0**24
    for bad in (np.inf, np.nan):
        overflowed = expected(np.array([bad, 1e-3], np.float32))
        assert suggested_scale(pooled([zeros, overflowed]), 2.0**10) == 2.0**9
        assert suggested_scale(overflowed, 2.0**-14) == 2.0**-14
    assert suggested_scale(expected(np.array([3e38], np.float32)), 1.0) == 2.0**-14


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_table_of_all_scales(dtype: str) -> None:
    arrays, scale = gradients(3)
    arrays[0][:7], arrays[1][:5] = 0.0, 2.0**-60
    rows = [LayerRange("mul", "", "gradient", dtype, scale, expected(scale * array)) for array in arrays]
    found = LayerRanges(rows, scale, dtype).table(dtype)
    assert list(found) == [2.0**k for k in range(-14, 25)]
    for one, row in found.items():
        assert row == pytest.approx(really_lost(np.concatenate(arrays), dtype, one), abs=1e-15)


def test_pooled_statistics() -> None:
    arrays = [made("a few bad", size, "float32", size) for size in (3, 50, 400)]
    together = pooled(map(expected, arrays))
    whole = expected(np.concatenate(arrays))
    np.testing.assert_array_equal(together.histogram, whole.histogram)
    names = ("count", "infs", "nans", "zeros", "smallest", "largest", "dtype")
    assert [getattr(together, name) for name in names] == [getattr(whole, name) for name in names]
    assert pooled([Statistics(0, 0, 0, 0, np.inf, 0.0, together.histogram, "float16"), whole]).dtype == "float32"


@pytest.mark.parametrize("place", range(2, 8))
def test_the_tilt_of_a_bin_is_that_of_the_density_around_it(queue: cl.CommandQueue, place: int) -> None:
    """Here of one that rises as the magnitudes do."""
    bounds = edges()
    within = int(np.searchsorted(bounds, 1.0)) + place
    near = (bounds[:-1] >= 0.25) & (bounds[1:] <= 8.0)
    counts = np.where(near, (bounds[1:] ** 2 - bounds[:-1] ** 2) * 2.0**40, 0).astype(np.int64)
    found = replace(statistics_of([to_device(queue, [0.25, 8.0])])[0], histogram=counts)
    begin, end = bounds[within : within + 2]
    np.testing.assert_allclose(_tilt(found, within, begin, end), (end - begin) / (end + begin), rtol=1e-6)
