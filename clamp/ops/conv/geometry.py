"""Places that a convolution reads and writes: the arithmetic of stride, padding and dilation, one axis at a time.

Every convolution of clamp is a correlation over *positions* (what is computed), *taps* (which kernel elements take
part) and a staged source in which each tap is a constant distance away from each position (kernels/conv_stage.cl).
A strided convolution reads every stride-th element; its input gradient falls apart into one stride-1 correlation for
each remainder of the input position by the stride, with the taps that reach that remainder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp.opencl.device import capabilities

Pair = tuple[int, int]


def pair(shape: Any) -> Pair:
    """The two extents of an image's or a kernel's shape."""
    return int(shape[0]), int(shape[1])


@dataclass(frozen=True)
class Window:
    """Movement of a kernel over an image: (vertical, horizontal) stride, padding and dilation; and channel groups."""

    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def output(self, image: Pair, kernel: Pair) -> Pair:
        """Positions of a convolution; not positive where the kernel is larger than the padded image."""
        sizes = [
            (image[i] + 2 * self.pad[i] - (kernel[i] - 1) * self.dilation[i] - 1) // self.stride[i] + 1 for i in (0, 1)
        ]
        return sizes[0], sizes[1]

    def transposed_output(self, image: Pair, kernel: Pair) -> Pair:
        """Positions of a transposed convolution: the smallest image whose convolution has the size ``image``."""
        sizes = [
            (image[i] - 1) * self.stride[i] - 2 * self.pad[i] + (kernel[i] - 1) * self.dilation[i] + 1 for i in (0, 1)
        ]
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class Taps:
    """The taps of one axis: tap t is kernel element ``first + t * step`` and reads the padded source at
    ``source + t * source_step``, counted from the position times the stride."""

    count: int
    first: int = 0
    step: int = 1
    source: int = 0
    source_step: int = 1


@dataclass(frozen=True)
class StagedAxis:
    """One axis of the staged source: ``length`` elements in each of ``phases``, from ``pad`` before the source on."""

    stride: int
    pad: int
    length: int
    phases: int


@dataclass(frozen=True)
class TapAxis:
    """One axis of a correlation: its positions, its taps and the source they read."""

    positions: int
    taps: Taps
    staged: StagedAxis

    def lines(self, phase: int, line: int) -> npt.NDArray[np.int64]:
        """Returns each tap's offset from a position, in a staged source whose phases and lines have these distances."""
        taps, stride = self.taps, self.staged.stride
        reads = taps.source + np.arange(taps.count, dtype=np.int64) * taps.source_step
        return reads % stride * phase + reads // stride * line


def forward_axis(positions: int, kernel: int, stride: int, pad: int, dilation: int) -> TapAxis:
    """One axis of a convolution."""
    reach = (kernel - 1) * dilation + 1
    length = -(-((positions - 1) * stride + reach) // stride)
    staged = StagedAxis(stride, pad, length, min(stride, reach))
    return TapAxis(positions, Taps(kernel, source_step=dilation), staged)


def gradient_axes(image: int, positions: int, kernel: int, stride: int, pad: int, dilation: int) -> list[TapAxis]:
    """One axis of an input gradient: for each remainder of the input position, a correlation over the gradient's
    ``positions``. All read one staged gradient."""
    step = stride // gcd(stride, dilation)
    phases: list[tuple[int, int, list[int]]] = []  # inputs, their first tap, what its taps read relative to an input
    for phase in range(min(stride, image)):
        first = next((t for t in range(min(step, kernel)) if (phase + pad - t * dilation) % stride == 0), kernel)
        reads = [(phase + pad - t * dilation) // stride for t in range(first, kernel, step)]
        phases.append((-(-(image - phase) // stride), first, reads))
    before = max([0, *(-read for _, _, reads in phases for read in reads)])
    length = before + max([positions, *(inputs + read for inputs, _, reads in phases for read in reads)])
    staged = StagedAxis(1, before, length, 1)
    return [
        TapAxis(inputs, Taps(len(reads), first, step, before + (reads or [0])[0], -(step * dilation // stride)), staged)
        for inputs, first, reads in phases
    ]


@dataclass(frozen=True)
class Correlation:
    """Both axes together: what the kernels are told about where positions and taps lie."""

    y: TapAxis
    x: TapAxis  # y, x: the axes
    source: Pair  # rows and columns of the source

    @cached_property
    def is_staged(self) -> bool:
        """Returns whether the source must be copied; without padding and stride it is read in place."""
        in_place = all(
            axis.staged.stride == 1 and axis.staged.pad == 0 and axis.staged.length <= extent
            for axis, extent in zip((self.y, self.x), self.source, strict=True)
        )
        return not in_place

    @cached_property
    def staged_shape(self) -> Pair:
        """Rows and columns of a phase of a staged plane."""
        return (self.y.staged.length, self.x.staged.length) if self.is_staged else self.source

    @cached_property
    def plane(self) -> int:
        """Elements of a staged plane, all its phases together."""
        rows, columns = self.staged_shape
        return self.y.staged.phases * self.x.staged.phases * rows * columns

    @property
    def positions(self) -> int:
        """Output positions of an image."""
        return self.y.positions * self.x.positions

    @cached_property
    def row(self) -> Pair:
        """(width, pitch) of a row of positions in the staged source; rows that follow each other count as one."""
        pitch = self.staged_shape[1]
        return (self.positions, 0) if pitch == self.x.positions else (self.x.positions, pitch)

    @property
    def taps(self) -> int:
        """Taps of a channel."""
        return self.y.taps.count * self.x.taps.count

    def offsets(self, channels: int) -> npt.NDArray[np.int64]:
        """Returns the offset of each step (channel, tap) from a position."""
        rows, columns = self.staged_shape
        y = self.y.lines(self.x.staged.phases * rows * columns, columns)
        x = self.x.lines(rows * columns, 1)
        plane = np.arange(channels, dtype=np.int64) * self.plane
        return (plane[:, None, None] + y[:, None] + x).reshape(-1)


# A network has a few dozen convolutions, each of which asks for its geometry in every step.
_KEPT = 256


@lru_cache(maxsize=_KEPT)
def forward(image: Pair, extent: Pair, window: Window) -> Correlation:
    """A convolution of an image with a kernel of some extent; also what its weights' gradient reads."""
    size = window.output(image, extent)
    y, x = (forward_axis(size[i], extent[i], window.stride[i], window.pad[i], window.dilation[i]) for i in (0, 1))
    return Correlation(y, x, image)


@lru_cache(maxsize=_KEPT)
def gradient(image: Pair, size: Pair, extent: Pair, window: Window) -> tuple[tuple[Correlation, ...], Pair]:
    """The input gradient of an ``image`` from the gradient of a result of some size: a correlation for each remainder
    of the position, row by row; and the remainders in both directions."""
    rows, columns = (
        gradient_axes(image[i], size[i], extent[i], window.stride[i], window.pad[i], window.dilation[i]) for i in (0, 1)
    )
    return tuple(Correlation(y, x, size) for y in rows for x in columns), (len(rows), len(columns))


PARTIAL_FLOATS = 8 * 2**20  # of partial weight gradients


def deal(
    queue: cl.CommandQueue, panels_j: int, panels_m: int, groups: int, items_per_core: int
) -> tuple[tuple[int, int, int], int]:
    """Returns the division of a convolution's panels: into how many shares of positions, of weights and of groups, and
    how many panels of weights are the most in a share. Weights are shared out only where there are too few positions,
    whose panels each work-item makes for itself."""
    items = items_per_core * capabilities(queue).compute_units
    shares_j = min(panels_j, max(1, items // groups))
    shares_m = min(panels_m, max(1, items // (panels_j * groups)))
    return (shares_j, shares_m, groups), -(-panels_m // shares_m)


@dataclass(frozen=True)
class Division:
    """Division of the positions and panels of a weight gradient among work-items."""

    each: int  # positions of a chunk, whose sums are kept apart until the end
    chunks: int  # how many there are
    block: int  # positions that are read at a time; alike, or the last would be few
    each_k: int  # panels of a work-item


def divide(items: int, groups: int, columns: int, most: int, panels_k: int, floats: int, parts: int = 1) -> Division:
    """Into about ``items`` work-items.

    Args:
        columns: positions, of which ``most`` are read at a time.
        panels_k: panels, in at least so many ``parts``.
        floats: sums of a chunk.
    """
    chunks = max(1, min(-(-columns // most), -(-items // groups), PARTIAL_FLOATS // floats))
    each = -(-columns // chunks)
    chunks = -(-columns // each)
    parts = max(parts, min(panels_k, items // (groups * chunks)))
    return Division(each, chunks, -(-each // -(-each // most)), -(-panels_k // parts))
