"""The convolution of CPU devices, register-blocked over panels of floats (kernels/conv_packed.cl)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.conv_stage import Source
from clamp.ops.conv_weights import PanelLayout, Weights
from clamp.ops.gemm_operands import Epilogue
from clamp.ops.gemm_packed import Tile, tile_of

_PANEL_FLOATS = 8192  # of steps or positions: what a first-level cache holds beside the other operand
_SHORT = 4  # rows of the last panels of weights: with 6 and 4 rows, at most one is computed in vain
_ITEMS_PER_CORE = 32  # work-items that a core should get, so that the last ones even out
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up
_PARTIAL_FLOATS = 8 * 2**20  # of partial weight gradients

#: what `weight_grad` reads: it takes the source's elements one by one
GRAD_SOURCE_DTYPE: str | None = "float32"


def layout_of_conv(queue: cl.CommandQueue) -> PanelLayout:
    """Of the weights."""
    tile = tile_of_conv(queue)
    return PanelLayout(tile.rows, _SHORT, _PANEL_FLOATS // tile.columns)


def tile_of_conv(queue: cl.CommandQueue) -> Tile:
    """The register tile of a convolution."""
    tile = tile_of(queue)
    return Tile(6, 64) if tile == Tile(12, 32) else tile


def tile_of_gradient(queue: cl.CommandQueue, rows: int) -> Tile:
    """The tile of a weight gradient: of ``rows`` output channels, as few as can be should be computed in vain."""
    return tile_of(queue) if 0 < rows % 64 <= 32 else tile_of_conv(queue)


def deal(
    queue: cl.CommandQueue, panels_j: int, panels_m: int, groups: int, items_per_core: int = _ITEMS_PER_CORE
) -> tuple[tuple[int, int, int], int]:
    """How the panels of a convolution are dealt out: into how many shares of positions, of weights and of groups, and
    how many panels of weights are the most in a share. Weights are shared out only where there are too few positions,
    whose panels each work-item makes for itself."""
    items = items_per_core * capabilities(queue).compute_units
    shares_j = min(panels_j, max(1, items // groups))
    shares_m = min(panels_m, max(1, items // (panels_j * groups)))
    return (shares_j, shares_m, groups), -(-panels_m // shares_m)


def correlate(source: Source, weights: Weights, out: Tensor, begin: int, out_image: int, epilogue: Epilogue) -> None:
    """Writes a correlation, through the epilogue, into ``out`` from element ``begin`` on."""
    tile, layout = tile_of_conv(out.queue), layout_of_conv(out.queue)
    macros = {"CONV": 1, "X_T": source.storage, "MR": tile.rows, "NR": tile.columns, "SHORT": layout.short}
    launch("conv_packed.cl", macros, tile.columns, layout, source, weights, out, begin, out_image, epilogue)


def launch(
    file: str,
    macros: Mapping[str, object],
    columns: int,
    layout: PanelLayout,
    source: Source,
    weights: Weights,
    out: Tensor,
    begin: int,
    out_image: int,
    epilogue: Epilogue,
) -> None:
    """Runs the kernel of a file that multiplies panels of weights, in some layout, by ``columns`` positions at a time.
    The rest as in `correlate`."""
    queue, shape = out.queue, source.shape
    tall, short = layout.heights(weights.rows)
    grid, each_m = deal(queue, -(-source.columns // columns), tall + short, source.groups)
    slice_words = (layout.block + each_m * layout.width) * columns
    work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * slice_words,), "float32")
    bias = out if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    kernel = get_kernel(
        queue, file, "conv", "ppppppqqqqqqqqqqqquuuii", KC=layout.block, **macros, **epilogue.macros
    )  # fmt: skip
    kernel(
        queue, grid, (1, 1, 1), weights.panels(shape, layout).buffer, source.tensor.buffer, source.offsets.buffer,
        out.buffer, bias.buffer, work.buffer, begin, source.columns, weights.rows, source.offsets.steps,
        shape.positions, *shape.row, source.groups * source.group_size, source.group_size, source.tensor.size,
        source.offsets.reach, out_image, tall + short, tall, each_m, epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


@dataclass(frozen=True)
class Division:
    """How the positions and the panels of a weight gradient are divided among work-items.

    Attributes:
        each: positions of a chunk, whose sums are kept apart until the end.
        chunks: how many there are.
        block: positions that are read at a time; alike, or the last would be few.
        each_k: panels of a work-item.
    """

    each: int
    chunks: int
    block: int
    each_k: int


def divide(items: int, groups: int, columns: int, most: int, panels_k: int, floats: int, parts: int = 1) -> Division:
    """Into about ``items`` work-items.

    Args:
        columns: positions, of which ``most`` are read at a time.
        panels_k: panels, in at least so many ``parts``.
        floats: sums of a chunk.
    """
    chunks = max(1, min(-(-columns // most), -(-items // groups), _PARTIAL_FLOATS // floats))
    each = -(-columns // chunks)
    chunks = -(-columns // each)
    parts = max(parts, min(panels_k, items // (groups * chunks)))
    return Division(each, chunks, -(-each // -(-each // most)), -(-panels_k // parts))


class WeightGradient:
    """A weight gradient as it adds up, slice by slice of the batch; and the bias's, from the same panels."""

    def __init__(self, first: Source, rows: int, out: Tensor, bias: Tensor | None = None) -> None:
        self._out, self._bias, self._rows = out, bias, rows
        queue = out.queue
        self._tile = tile = tile_of_gradient(queue, rows)
        self._most = _PANEL_FLOATS // tile.columns
        self._panels_k, self._panels_m = -(-first.offsets.steps // tile.rows), -(-rows // tile.columns)
        floats = first.groups * self._panels_k * self._panels_m * tile.rows * tile.columns
        items = _CHUNKS_PER_CORE * capabilities(queue).compute_units
        self._division = divide(items, first.groups, first.columns, self._most, self._panels_k, floats)
        chunks = self._division.chunks
        self._partial = bridge.empty(queue, (chunks * floats,), "float32")
        bias_floats = chunks * first.groups * self._panels_m * tile.columns
        # a kernel's pointers must point somewhere
        self._partial_bias = self._partial if bias is None else bridge.empty(queue, (bias_floats,), "float32")
        self._accumulate = False

    def add(self, source: Source, grad: Tensor, begin: int) -> None:
        """Adds the images of ``source``, whose output gradients are in ``grad`` from element ``begin`` on."""
        queue, shape, tile, division = grad.queue, source.shape, self._tile, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, source.groups)
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * (self._most + 16) * tile.columns,), "float32")
        kernel = get_kernel(
            queue, "conv_packed.cl", "weight_grad", "ppppppqqqqqqqqqqquqqii",
            WEIGHT_GRAD=1, G_T=bridge.STORAGE[grad.dtype], MR=tile.rows, NR=tile.columns, JC=self._most,
        )  # fmt: skip
        kernel(
            queue, grid, (1, 1, 1), source.tensor.buffer, source.offsets.buffer, grad.buffer, self._partial.buffer,
            self._partial_bias.buffer, work.buffer, begin, source.columns, self._rows, source.offsets.steps,
            shape.positions, *shape.row, source.groups * source.group_size, source.group_size,
            source.groups * self._rows * shape.positions, grad.size, division.each_k, division.each, division.block,
            self._accumulate, self._bias is not None,
        )  # fmt: skip
        self._accumulate = True

    def finish(self, source: Source) -> None:
        """Writes the sum."""
        queue, tile = self._out.queue, self._tile
        bias = self._out if self._bias is None else self._bias
        kernel = get_kernel(
            queue, "conv_packed.cl", "weight_grad_finish", "ppppqqui",
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype], BIAS_T=bridge.STORAGE[bias.dtype],
            MR=tile.rows, NR=tile.columns,
        )  # fmt: skip
        kernel(
            queue, (self._panels_k, self._panels_m, source.groups), (1, 1, 1),
            self._partial.buffer, self._partial_bias.buffer, self._out.buffer, bias.buffer,
            self._rows, source.offsets.steps, self._division.chunks, self._bias is not None,
        )  # fmt: skip
