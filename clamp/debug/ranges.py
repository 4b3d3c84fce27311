"""What a cast to 16 bits, at any loss scale, would do to numbers whose statistics are known. Nothing is cast.

A cast turns magnitudes below some number to zero, from some number on to inf, and between two more into subnormals.
Where these numbers are is found by bisection over all float32, with the cast itself; how many elements are below them
is in the histogram. At a factor that is a power of two they are edges of bins (kernels/statistics.cl), and the answer
is exact. Another factor has them inside of bins: the density there is taken to be linear, with the slope of the bins
beside it, over the numbers that the tensor's dtype has.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import DTypeLike
from clamp.ops.statistics import OCTAVE, Statistics, edges
from clamp.scaling.dynamic_scale import DEFAULT_RULE
from clamp.scaling.loss_scale import positive

#: those that are powers of two, of a loss scale's limits
SCALES = [2.0**k for k in range(int(math.log2(DEFAULT_RULE.min)), int(math.log2(DEFAULT_RULE.max)) + 1)]
#: Between the largest gradient seen, at the suggested scale, and the largest number of the dtype. The next batch's
#: gradients may be larger; at the largest scale that just fits, by nothing.
HEADROOM = 2.0

_INF_BITS = 0x7F800000
_EDGES = edges()
_EIGHTHS = np.array([0, 2, 3, 4, 5, 6, 7, 8, 14])  # which of an octave's bins each eighth of it has


class Format(NamedTuple):
    """A dtype's smallest number above 0, smallest normal and largest one; half the distance from 1 to the next."""

    smallest: float
    least_normal: float
    largest: float
    roundoff: float


FORMATS = {
    "float32": Format(2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127, 2.0**-24),
    "float16": Format(2.0**-24, 2.0**-14, 65504.0, 2.0**-11),
    "bfloat16": Format(2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127, 2.0**-8),
}
FLOAT16 = FORMATS["float16"]


class Lost(NamedTuple):
    """Fractions of all of a tensor's elements that a cast changes in kind.

    Attributes:
        underflow: from other than zero to zero.
        overflow: from finite to inf.
        subnormal: into subnormal numbers, which have fewer bits.
    """

    underflow: float
    overflow: float
    subnormal: float


def lost(statistics: Statistics, dtype: DTypeLike, factor: float = 1.0) -> Lost:
    """Returns what a cast of ``factor * x`` to ``dtype`` loses: the product in float32, rounded to nearest even.

    Exact where ``factor`` is a power of two (but for products below 2^-126, which float32 itself rounds) and where the
    extremes decide alone. At another factor within 0.1 % of the elements, if these are smoothly distributed and 100 000
    or more; of fewer, or where many are equal, as well as may be told from an eighth of an octave, whose elements are
    counted together.

    Args:
        statistics: with a histogram, unless the extremes decide.
        dtype: float16 or bfloat16.
        factor: a loss scale, say; rounded to float32.

    Raises:
        ValueError: another dtype; a factor that is not positive and finite; or there is no histogram and it is needed.
    """
    turns = _turns(_format_name(dtype), positive("factor", factor))
    below = [_below(statistics, turn) for turn in turns]
    count = max(statistics.count, 1)
    return Lost(below[0] / count, (_finite(statistics) - below[2]) / count, (below[1] - below[0]) / count)


def suggested_scale(gradients: Statistics, scale: float, dtype: DTypeLike = "float16") -> float:
    """The largest power of two at which no gradient comes nearer to overflow than by a factor of ``HEADROOM``.

    So it is a quarter to a half of the largest scale of all that does not overflow; between 2^-14 and 2^24, which are a
    loss scale's limits. If a gradient has inf or nan, how large it was is not known: then it is half of ``scale`` at
    most. With no gradient that is not zero it is 2^24.

    Args:
        gradients: those of all of them together; with or without a histogram.
        scale: what the gradients were multiplied by when they were observed.
        dtype: float16 or bfloat16.

    Raises:
        ValueError: another dtype, or a scale that is not positive and finite.
    """
    largest_number = FORMATS[_format_name(dtype)].largest
    scale = positive("scale", scale)
    suggested = DEFAULT_RULE.max
    if gradients.largest:
        suggested = min(suggested, _power_of_two(largest_number / HEADROOM / gradients.largest * scale))
    if not gradients.is_finite:
        suggested = min(suggested, _power_of_two(scale / 2))
    return max(suggested, DEFAULT_RULE.min)


def pooled(statistics: Iterable[Statistics]) -> Statistics:
    """The statistics of all elements of several tensors.

    Raises:
        ValueError: one of them has no histogram.
    """
    them = list(statistics)
    dtypes = {one.dtype for one in them}
    return Statistics(
        count=sum(one.count for one in them),
        infs=sum(one.infs for one in them),
        nans=sum(one.nans for one in them),
        zeros=sum(one.zeros for one in them),
        smallest=min((one.smallest for one in them), default=math.inf),
        largest=max((one.largest for one in them), default=0.0),
        histogram=sum((one.bins for one in them), np.zeros(len(_EDGES) - 1, np.int64)),
        dtype=dtypes.pop() if len(dtypes) == 1 else "float32",
    )


def _power_of_two(x: float) -> float:
    """The largest that is not above x."""
    return 2.0 ** (math.frexp(x)[1] - 1)


def _format_name(dtype: DTypeLike) -> str:
    name = bridge.dtype_name(dtype)
    if name not in ("float16", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be float16 or bfloat16")
    return str(name)


def _finite(statistics: Statistics) -> int:
    """Returns how many elements are finite and not zero."""
    return statistics.count - statistics.infs - statistics.nans - statistics.zeros


@lru_cache(maxsize=1024)
def _turns(dtype: str, factor: float) -> tuple[float, float, float]:
    """The least magnitudes, as float32, that a cast of ``factor * x`` does not make zero, makes normal, makes inf."""

    def least(reached: float) -> float:
        def is_reached(bits: int) -> bool:
            with np.errstate(over="ignore"):
                product = np.array([bits], np.uint32).view(np.float32) * np.float32(factor)
                return float(bridge.from_words(bridge.to_words(product, dtype), dtype)[0]) >= reached

        return float(np.uint32(bisect_left(range(_INF_BITS), True, key=is_reached)).view(np.float32))

    return least(2.0**-149), least(FORMATS[dtype].least_normal), least(math.inf)


def _below(statistics: Statistics, limit: float) -> float:
    """Returns how many of the elements that are finite and not zero have magnitudes below the limit."""
    if limit <= statistics.smallest:
        return 0.0
    if limit > statistics.largest:
        return float(_finite(statistics))
    histogram = statistics.bins
    within = int(np.searchsorted(_EDGES, limit)) - 1  # the bin from below the limit to it or beyond
    inside = int(histogram[within])
    return float(histogram[:within].sum()) + (inside * _share(statistics, within, limit) if inside else 0.0)


def _share(statistics: Statistics, within: int, limit: float) -> float:
    """Returns which part of a bin's elements have magnitudes below the limit, a number in the bin."""
    begin = max(_EDGES[within], statistics.smallest)
    end = min(_EDGES[within + 1], np.nextafter(statistics.largest, np.inf))
    begin, end, limit = _up(np.array([begin, end, limit]), statistics.dtype)
    x = (limit - begin) / (end - begin)
    return float(x - _tilt(statistics, within, begin, end) * x * (1 - x))


def _up(x: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """The least numbers of a dtype that are not below x."""
    step = np.maximum(np.ldexp(FORMATS[dtype].roundoff, np.frexp(x)[1]), FORMATS[dtype].smallest)
    return np.asarray(np.ceil(x / step) * step)


def _tilt(statistics: Statistics, within: int, begin: float, end: float) -> float:
    """Returns how much the density of magnitudes differs from its mean at a bin's end, in parts of it: -1 to 1."""
    octave, place = divmod(within, len(OCTAVE))
    if not 1 <= place <= 8:  # one of the narrow ones
        return 0.0
    histogram = statistics.bins
    points = [((begin + end) / 2, histogram[within] / (end - begin))]
    for eighth in (8 * octave + place - 2, 8 * octave + place):
        octave_beside, first = divmod(eighth, 8)
        bins = octave_beside * len(OCTAVE) + _EIGHTHS[first : first + 2]
        if bins[0] < 0 or bins[1] >= len(_EDGES):
            continue
        left, right = _EDGES[bins]
        if statistics.smallest <= left and right <= statistics.largest:
            points.append(((left + right) / 2, histogram[bins[0] : bins[1]].sum() / (right - left)))
    (x0, y0), (x1, y1) = min(points), max(points)
    if x0 == x1:
        return 0.0
    tilt = (y1 - y0) / (x1 - x0) * (end - begin) / 2 / points[0][1]
    return float(np.clip(tilt, -1, 1))
