"""Statistics of many tensors' elements: inf, nan and zeros; and either magnitudes or numbers.

`Statistics` have the least and greatest magnitude and a histogram of magnitudes (kernels/statistics.cl), `Numerics`
what float16 has no room for, signed extremes and the mean (kernels/numerics.cl): a launch for 100 tensors of a dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.host_steps import refuse
from clamp.opencl.program import Kernel
from clamp.ops import transfer
from clamp.ops.launch import group_macros
from clamp.ops.slots import batches, require_readable

STATISTICS = Kernel("statistics.cl", "statistics")
NUMERICS = Kernel("numerics.cl", "numerics")

#: where the bins of an octave begin: at its eighths and where roundings to 16 bits turn (kernels/statistics.cl)
OCTAVE = np.array([1, 1 + 2**-23, *(1 + np.arange(1, 8) / 8), *(2 - 2.0 ** -np.arange(7, 12))])
#: the exponent of the smallest magnitude of float32, with which the first bin begins
FIRST_EXPONENT = -149
#: of a histogram: every magnitude of float32 has one
BINS = len(OCTAVE) * (128 - FIRST_EXPONENT)
#: exponents of the octaves that ``Statistics.octaves`` has one by one: those of float16
OCTAVES = range(-24, 16)

_HEAD = 5  # words before a row's histogram
_ROW = 10  # words of a tile's numerics
_NAN = float("nan")
_INF = np.float32(np.inf).view(np.uint32)

Key: TypeAlias = tuple[int, int, str]  # buffer, elements and dtype: what has one row, however often it is asked for


@dataclass(frozen=True)
class ElementCounts:
    """Counts of one tensor's elements."""

    count: int  # elements
    infs: int
    nans: int
    zeros: int  # infs, nans, zeros: how many of them are inf, nan and 0, of either sign

    @property
    def is_finite(self) -> bool:
        """Returns whether nothing of it is inf or nan."""
        return not (self.infs or self.nans)


@dataclass(frozen=True)
class Statistics(ElementCounts):
    """Magnitudes of one tensor's elements."""

    smallest: float  # the least magnitude that is neither 0 nor nan, exact; inf if there is none that is finite
    largest: float  # the greatest finite magnitude, exact; 0.0 if there is none
    # int64 of shape ``(BINS,)``: how many magnitudes are from ``edges()[i]`` on and below ``edges()[i + 1]``; zeros,
    # inf and nan are in no bin. None if none was asked for.
    histogram: NDArray[np.int64] | None = None
    dtype: str = "float32"  # what the tensor is stored in

    @property
    def bins(self) -> NDArray[np.int64]:
        """The histogram.

        Raises:
            ValueError: there is none.
        """
        if self.histogram is None:
            raise ValueError("these statistics have no histogram; take them with histogram=True")
        return self.histogram

    @property
    def octaves(self) -> NDArray[np.int64]:
        """The histogram in octaves, shape ``(42,)``: below 2^-24, the 40 from [2^-24, 2^-23) to [2^15, 2^16), above.

        Raises:
            ValueError: there is no histogram.
        """
        each = self.bins.reshape(-1, len(OCTAVE)).sum(1)
        first, last = OCTAVES.start - FIRST_EXPONENT, OCTAVES.stop - FIRST_EXPONENT
        return np.concatenate([[each[:first].sum()], each[first:last], [each[last:].sum()]])


def edges() -> NDArray[np.float64]:
    """Returns where the bins of a histogram begin, and where the last one ends: ``BINS + 1`` magnitudes."""
    begins = np.ldexp(OCTAVE, np.arange(FIRST_EXPONENT, 128)[:, None]).ravel()
    return np.append(begins, 2.0**128)


def statistics_of(tensors: Sequence[Tensor], *, histogram: bool = True) -> list[Statistics]:
    """The statistics of each tensor, in their order. Waits for the device.

    Args:
        tensors, histogram: as for ``PendingStatistics``.

    Raises:
        TypeError, ValueError, RuntimeError: as ``PendingStatistics`` and its ``read``.
    """
    return PendingStatistics(tensors, histogram=histogram).read()


class PendingStatistics:
    """Statistics that the device forms meanwhile; each ``read`` gives what the last run, or replay, of them found.

    Enqueues ``ceil(n / 100)`` launches for each dtype and queue, and one besides for each queue, and does not wait. The
    tensors may change after that, and are not kept.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, on any queues. What occurs several times is looked at once.
        histogram: whether magnitudes are also counted by bins, which takes three to five times as long on a CPU.

    Raises:
        TypeError: a dtype is not one of the above, or a tensor is on netcl's numpy backend.
        ValueError: a tensor has 2^32 elements or more.
    """

    def __init__(self, tensors: Sequence[Tensor], *, histogram: bool = True) -> None:
        require_readable("statistics", tensors)
        for index, tensor in enumerate(tensors):
            if tensor.size >= 1 << 32:
                raise ValueError(
                    f"statistics: tensors[{index}] has shape {tuple(tensor.shape)}, {tensor.size} elements; counters "
                    "have 32 bits: split it into tensors of less than 2^32 elements"
                )
        self._histogram = histogram
        self._asked = [(tensor.queue, _key(tensor)) for tensor in tensors]
        queues: dict[cl.CommandQueue, dict[Key, Tensor]] = {}
        for tensor in tensors:
            if tensor.size:
                queues.setdefault(tensor.queue, {})[_key(tensor)] = tensor
        self._rows = {queue: _launched(queue, distinct, histogram) for queue, distinct in queues.items()}

    def read(self) -> list[Statistics]:
        """The statistics of each tensor, in their order. Waits for the device, with one read a queue.

        Raises:
            RuntimeError: launches are being recorded.
        """
        refuse("Statistics were read", "Read them after the recorded part.")
        found = {
            (queue, key): one
            for queue, (words, rows) in self._rows.items()
            for key, one in _statistics_of_rows(words.to_host().view(np.uint32), rows)
        }
        none = np.zeros(BINS, np.int64) if self._histogram else None
        return [
            found.get((queue, key)) or Statistics(0, 0, 0, 0, np.inf, 0.0, none, dtype=key[-1])
            for queue, key in self._asked
        ]


def _key(tensor: Tensor) -> Key:
    return id(tensor.buffer), tensor.size, bridge.canonical_dtype(tensor.dtype)


@dataclass(frozen=True)
class _Row:
    """Place of a tensor's statistics, in words of its queue's results."""

    begin: int
    bins: range  # which of those of float32 its dtype can fill; none without a histogram


def _launched(queue: cl.CommandQueue, tensors: Mapping[Key, Tensor], histogram: bool) -> tuple[Tensor, dict[Key, _Row]]:
    """The results of one queue's tensors on its device, and where each has its own: those of a dtype in turn."""
    rows: dict[Key, _Row] = {}
    count = 0
    for key in sorted(tensors, key=itemgetter(2)):
        rows[key] = _Row(count, _bins(key[2], histogram))
        count += _HEAD + len(rows[key].bins)
    words = bridge.empty(queue, (count,), "int32")
    transfer.fill(queue, words.buffer, bytes(4), 0, 4 * count)
    for batch in batches([tensors[key] for key in rows]):
        row = rows[_key(batch.tensors[0])]
        batch.run(STATISTICS, words, row.begin, BINS=len(row.bins), FIRST_BIN=row.bins.start)
    return words, rows


def _statistics_of_rows(words: NDArray[np.uint32], rows: Mapping[Key, _Row]) -> Iterator[tuple[Key, Statistics]]:
    begins = np.array([row.begin for row in rows.values()])
    heads = words[begins[:, None] + np.arange(_HEAD)]
    negated = heads[:, 3]
    heads[:, 3] = np.where(negated > 0, np.minimum(-negated, _INF), _INF)
    counts, magnitudes = heads[:, :3].tolist(), heads[:, 3:].view(np.float32).tolist()
    for (key, row), (not_zero, bad, nans), (smallest, largest) in zip(rows.items(), counts, magnitudes, strict=True):
        histogram = None
        if row.bins:
            histogram = np.zeros(BINS, np.int64)
            histogram[row.bins.start : row.bins.stop] = words[row.begin + _HEAD :][: len(row.bins)]
        _, count, dtype = key
        yield key, Statistics(count, bad - nans, nans, count - not_zero, smallest, largest, histogram, dtype)


def _bins(dtype: str, histogram: bool) -> range:
    """Returns which bins the magnitudes of a dtype fall into."""
    if not histogram:
        return range(0)
    if dtype != "float16":
        return range(BINS)
    return range(*(len(OCTAVE) * (exponent - FIRST_EXPONENT) for exponent in (OCTAVES.start, OCTAVES.stop)))


# ---------------------------------------------------------------------------------------------------- numerics


@dataclass(frozen=True)
class Numerics(ElementCounts):
    """Numbers of one tensor's elements."""

    beyond: int  # how many are finite, and larger than 65504 in magnitude
    below: int  # how many are not 0, and smaller than 2^-24 in magnitude
    greatest: float
    least: float  # greatest, least: of those that are not nan; nan if there is none
    mean: float  # of all, of float32 sums; inf and nan where elements are; nan of none


_EMPTY = Numerics(0, 0, 0, 0, 0, 0, _NAN, _NAN, _NAN)


class PendingNumerics:
    """Numerics that the device forms meanwhile; each ``read`` gives what the last run, or replay, of them found.

    Does not wait. The tensors may change after that, and are not kept.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, on any queues.

    Raises:
        TypeError: a dtype is not one of the above, or a tensor is on netcl's numpy backend.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        require_readable("numerics", tensors)
        self._counts = [tensor.size for tensor in tensors]
        filled_ones = [index for index, tensor in enumerate(tensors) if tensor.size]
        self._launches: list[tuple[list[int], Tensor]] = []
        for batch in batches([tensors[index] for index in filled_ones]):
            queue, (_, (group,)) = batch.tensors[0].queue, batch.tiles.grid
            words = bridge.empty(queue, (_ROW * batch.groups,), "int32")
            batch.run(NUMERICS, words, **group_macros(queue, group))
            self._launches.append(([filled_ones[place] for place in batch.indices], words))

    def read(self) -> list[Numerics]:
        """The numerics of each tensor, in their order. Waits for the device, with one read a launch.

        Raises:
            RuntimeError: launches are being recorded.
        """
        refuse("Numbers were read", "Read them after the recorded part.")
        found = [_EMPTY] * len(self._counts)
        for indices, words in self._launches:
            rows = words.to_host().view(np.uint32).reshape(-1, _ROW)
            for slot, index in enumerate(indices):
                found[index] = _numerics_of_rows(self._counts[index], rows[rows[:, 0] == slot])
        return found


def numerics_of(tensor: Tensor) -> Numerics:
    """The numerics of a tensor. Waits for the device.

    Raises:
        TypeError, RuntimeError: as ``PendingNumerics`` and its ``read``.
    """
    return PendingNumerics([tensor]).read()[0]


def _numerics_of_rows(count: int, rows: NDArray[np.uint32]) -> Numerics:
    """The numerics of a tensor from the rows of its tiles."""
    not_zero, normal, beyond, bad, nans = (int(x) for x in rows[:, 1:6].sum(0, dtype=np.uint64))
    greatest, least, sums, factors = rows[:, 6:].view(np.float32).astype(np.float64).T
    extremes = (_NAN, _NAN) if nans == count else (float(greatest.max()), float(least.min()))
    with np.errstate(invalid="ignore"):  # inf - inf is nan
        mean = float((sums * factors).sum() / count)
    return Numerics(count, bad - nans, nans, count - not_zero, beyond - bad, not_zero - normal, *extremes, mean)
