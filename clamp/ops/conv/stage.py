"""Convolutions as matrix products whose right-hand operand is read from a staged copy of the source, never written down
(no im2col): what the engines that multiply term by term have in common (kernels/conv_stage.cl). Each has kernels of its
own for the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import Correlation, Pair
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.launch import index_type, launch

_STAGE_ROWS = Kernel("conv_stage.cl", "stage_rows", "-")
_STAGE_ELEMENTS = Kernel("conv_stage.cl", "stage_elements", "-")
_INTERLEAVE_ROWS = Kernel("conv_stage.cl", "interleave_rows", "-")
_INTERLEAVE_ELEMENTS = Kernel("conv_stage.cl", "interleave_elements", "-")
_WORKSPACE_BYTES = 256 * 2**20  # of a staged source; a larger batch is computed in slices
_ROWS_BYTES = 2**16  # that a CPU's work-item should write


@dataclass(frozen=True)
class Source:
    """Some images of a batch, laid out for a correlation."""

    tensor: Tensor  # the elements, [image][group][channel][plane]
    shape: Correlation  # the correlation that reads it
    offsets: Offsets  # for each step (channel of a group, tap), how far from a position its element lies
    images: int
    groups: int
    channels: int  # images, groups, channels: of the tensor; channels of one group

    @property
    def columns(self) -> int:
        """Output positions of all images."""
        return self.images * self.shape.positions

    @property
    def group_size(self) -> int:
        """Elements of one group of an image."""
        return self.channels * self.shape.plane

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Arguments of every kernel that reads a staged source, in order: positions of all images, output channels of
        a group, steps, positions of an image, a row of them, elements of an image and of a group of the source."""
        image, group = self.groups * self.group_size, self.group_size
        return self.columns, rows, self.offsets.steps, self.shape.positions, *self.shape.row, image, group


@dataclass(frozen=True)
class Target:
    """Destination of the results of a correlation."""

    out: Tensor  # the tensor
    begin: int  # its first element that is written
    image: int  # elements from an image's results to the next's
    epilogue: Epilogue  # what happens in the store


#: writes a correlation
Correlate = Callable[[Source, Weights, Target], None]


def convolve_staged(
    correlate: Correlate, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue,
    *, by_rows: bool = True,
) -> None:  # fmt: skip
    """Writes a convolution or an input gradient over ``out``.

    Args:
        by_rows: as in `stage`.
    """
    if out.size == 0:
        return
    shapes, remainders = problem.correlations
    phases = out if len(shapes) == 1 else bridge.empty(out.queue, out.shape, out.dtype)
    channels = weights.channels if x.size else 0  # an image without pixels is all padding: sums of nothing
    parts = slices(x, shapes[0], x.dtype)
    for first, sources in staged(x, parts, shapes, x.dtype, weights.groups, channels, by_rows=by_rows):
        begin = 0
        for source in sources:
            if x.size == 0:  # a kernel's pointer must point somewhere
                source = replace(source, tensor=out)
            out_image = weights.groups * weights.rows * source.shape.positions
            correlate(source, weights, Target(phases, begin + first * out_image, out_image, epilogue))
            begin += problem.images * out_image
    if phases is not out:
        interleave(phases, out, remainders, by_rows=by_rows)


def staged(
    x: Tensor, parts: Sequence[tuple[int, int]], shapes: Sequence[Correlation], dtype: str, groups: int, channels: int,
    *, by_rows: bool = True,
) -> Iterator[tuple[int, list[Source]]]:  # fmt: skip
    """The parts of a batch: the number of the first image, and the part as each correlation reads it. All read one
    staged source.

    Args:
        parts: `slices` of the batch.
        dtype: storage type of the source.
        channels: of one group.
        by_rows: as in `stage`.
    """
    tables = [offsets(x.queue.context, shape, channels) for shape in shapes]
    for first, images in parts:
        tensor = stage(x, shapes[0], first, images, dtype, by_rows=by_rows)
        yield (
            first,
            [
                Source(tensor, shape, table, images, groups, channels)
                for shape, table in zip(shapes, tables, strict=True)
            ],
        )


def slices(x: Tensor, shape: Correlation, dtype: str) -> list[tuple[int, int]]:
    """(first image, images) of the parts in which a batch is staged, so that the workspace stays small."""
    images = x.shape[0]
    if not must_copy(x, shape, dtype):
        return [(0, images)]
    each = max(1, _WORKSPACE_BYTES // max(1, 4 * x.shape[1] * shape.plane))
    return [(first, min(each, images - first)) for first in range(0, images, each)]


def must_copy(x: Tensor, shape: Correlation, dtype: str) -> bool:
    """Returns whether kernels that read ``dtype`` cannot read x in place."""
    return x.size > 0 and (shape.is_staged or bridge.STORAGE[x.dtype] != bridge.STORAGE[dtype])


def stage(x: Tensor, shape: Correlation, first: int, images: int, dtype: str, *, by_rows: bool) -> Tensor:
    """Images ``first`` and following of x (N, C, H, W), laid out for a correlation; x itself if it already is.

    Args:
        dtype: storage type of the copy.
        by_rows: whether a work-item copies rows, as suits a CPU, or one element.
    """
    if not must_copy(x, shape, dtype):
        return x
    y, x_axis = shape.y.staged, shape.x.staged
    source = shape.source if shape.is_staged else (1, shape.plane)  # what only changes its type is one row a plane
    rows_phase, columns_phase = shape.staged_shape if shape.is_staged else source
    planes = images * x.shape[1]
    out = bridge.empty(x.queue, (planes * shape.plane,), dtype)
    rows = planes * shape.plane // columns_phase
    types = _moved(x.dtype, dtype)
    first_plane = first * x.shape[1]
    sizes = (rows, *source, rows_phase, columns_phase)
    phases = (y.phases, x_axis.phases, y.stride, x_axis.stride, y.pad, x_axis.pad)
    if by_rows:
        each = max(1, min(_ROWS_BYTES // (4 * columns_phase), rows // (4 * capabilities(x.queue).compute_units)))
        grid = ((-(-rows // each),), (1,))
        _STAGE_ROWS(x.queue, *grid, x, out, first_plane, x.size, *sizes, *phases, each, **types)
    else:
        grid = launch(x.queue, rows * columns_phase)
        index = index_type(max(x.size, rows * columns_phase))
        _STAGE_ELEMENTS(x.queue, *grid, x, out, first_plane, *sizes, *phases, INDEX=index, **types)
    return out


def _moved(source: str, target: str) -> dict[str, Any]:
    """Storage types for a kernel that copies: 16-bit elements which keep their type are moved as bits."""
    x_t, y_t = bridge.STORAGE[source], bridge.STORAGE[target]
    return {"X_T": "u16", "Y_T": "u16"} if x_t == y_t != "f32" else {"X_T": x_t, "Y_T": y_t}


@dataclass(frozen=True)
class Offsets:
    """The offsets of every step, on the device."""

    buffer: cl.Buffer  # 64-bit integers, at least one
    steps: int  # how many there are
    reach: int  # the largest


@lru_cache(maxsize=128)  # of up to some 50 KB
def offsets(context: cl.Context, shape: Correlation, channels: int) -> Offsets:
    """The table of a correlation over so many channels."""
    table = shape.offsets(channels)
    host = np.zeros(max(table.size, 1), np.uint64)
    host[: table.size] = table
    buffer = cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=host)
    return Offsets(buffer, table.size, int(host.max()))


def interleave(phases: Tensor, out: Tensor, stride: Pair, *, by_rows: bool) -> None:
    """Writes the phases of an input gradient, [a][b][n][c][rows of a][columns of b], over out (N, C, H, W)."""
    queue, (images, channels, height, width) = out.queue, out.shape
    planes, types = images * channels, _moved(out.dtype, out.dtype)
    if by_rows:
        rows = planes * height
        each = max(1, min(_ROWS_BYTES // (2 * width), rows // (4 * capabilities(queue).compute_units)))
        grid = ((-(-rows // each),), (1,))
        _INTERLEAVE_ROWS(queue, *grid, phases, out, planes, height, width, *stride, each, **types)
    else:
        grid = launch(queue, out.size)
        _INTERLEAVE_ELEMENTS(
            queue, *grid, phases, out, planes, height, width, *stride,
            INDEX=index_type(out.size), **types,
        )  # fmt: skip
