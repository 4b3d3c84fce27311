"""The convolution of CPU devices, register-blocked over panels of floats (kernels/conv_packed.cl)."""

from __future__ import annotations

from functools import partial

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv import direct
from clamp.ops.conv.geometry import deal, divide
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.engine import always, on_cpus
from clamp.ops.gemm.plan import Tile, tile_of
from clamp.ops.gemm.problem import Epilogue

NAME = "packed"
TAKES = "every convolution"
IN_WORDS = "packed panels for a register-blocked loop"
fits, pays = always, on_cpus

_CONV = Kernel("conv_packed.cl", "conv")
_WEIGHT_GRAD = Kernel("conv_packed.cl", "weight_grad")
_FINISH = Kernel("conv_packed.cl", "weight_grad_finish")
_PANEL_FLOATS = 8192  # of steps or positions: what a first-level cache holds beside the other operand
_SHORT = 4  # rows of the last panels of weights: with 6 and 4 rows, at most one is computed in vain
_ITEMS_PER_CORE = 32  # work-items that a core should get, so that the last ones even out
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    direct.convolve(_correlate, problem, x, weights, out, epilogue)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``; returns the bias's, if its dtype is given."""
    bias = None if bias_dtype is None else bridge.empty(x.queue, (grad.shape[1],), bias_dtype)
    # Source elements are taken one by one, which floats are fastest for.
    direct.weight_gradient(partial(_PackedSum, out=out, bias=bias), problem, x, grad, "float32")
    return bias


def _layout(queue: cl.CommandQueue) -> PanelLayout:
    """Of the weights."""
    tile = tile_of_conv(queue)
    return PanelLayout(tile.rows, _SHORT, _PANEL_FLOATS // tile.columns)


def tile_of_conv(queue: cl.CommandQueue) -> Tile:
    """The register tile of a convolution."""
    tile = tile_of(queue)
    return Tile(6, 64) if tile == Tile(12, 32) else tile


def tile_of_gradient(queue: cl.CommandQueue, rows: int) -> Tile:
    """The tile of a weight gradient: the one that pads ``rows`` output channels by fewer rows."""
    return tile_of(queue) if 0 < rows % 64 <= 32 else tile_of_conv(queue)


def _correlate(source: Source, weights: Weights, target: Target) -> None:
    tile, layout = tile_of_conv(target.out.queue), _layout(target.out.queue)
    multiply_panels(
        _CONV, tile.columns, layout, source, weights, target, CONV=1, X_T=bridge.STORAGE[source.tensor.dtype],
        MR=tile.rows, NR=tile.columns, SHORT=layout.short,
    )  # fmt: skip


def multiply_panels(
    kernel: Kernel, columns: int, layout: PanelLayout, source: Source, weights: Weights, target: Target,
    **macros: object,
) -> None:  # fmt: skip
    """Writes a correlation by a kernel that multiplies panels of weights, in some layout, by ``columns`` positions at a
    time."""
    out, epilogue = target.out, target.epilogue
    tall, short = layout.heights(weights.rows)
    grid, each_m = deal(out.queue, -(-source.columns // columns), tall + short, source.groups, _ITEMS_PER_CORE)
    slice_words = (layout.block + each_m * layout.width) * columns
    work = bridge.empty(out.queue, (grid[0] * grid[1] * grid[2] * slice_words,), "float32")
    kernel(
        out.queue, grid, (1, 1, 1), weights.panels(source.shape, layout), source.tensor, source.offsets,
        out, epilogue.bias_or(out), work, target.begin, *source.sizes(weights.rows), source.tensor.size,
        source.offsets.reach, target.image, tall + short, tall, each_m, *epilogue.flags,
        KC=layout.block, **macros, **epilogue.macros,
    )  # fmt: skip


class _PackedSum:
    """A weight gradient as it adds up, slice by slice of the batch; and the bias's, from the same panels."""

    def __init__(self, first: Source, out: Tensor, bias: Tensor | None) -> None:
        queue, rows = out.queue, out.shape[0] // first.groups
        self._out, self._bias, self._rows = out, bias, rows
        self._steps, self._groups = first.offsets.steps, first.groups
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
        queue, tile, division = grad.queue, self._tile, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, source.groups)
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * (self._most + 16) * tile.columns,), "float32")
        _WEIGHT_GRAD(
            queue, grid, (1, 1, 1), source.tensor, source.offsets, grad, self._partial, self._partial_bias, work, begin,
            *source.sizes(self._rows), source.groups * self._rows * source.shape.positions, grad.size,
            division.each_k, division.each, division.block, self._accumulate, self._bias is not None,
            WEIGHT_GRAD=1, G_T=bridge.STORAGE[grad.dtype], MR=tile.rows, NR=tile.columns, JC=self._most,
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        out, tile = self._out, self._tile
        bias = out if self._bias is None else self._bias
        _FINISH(
            out.queue, (self._panels_k, self._panels_m, self._groups), (1, 1, 1),
            self._partial, self._partial_bias, out, bias,
            self._rows, self._steps, self._division.chunks, self._bias is not None,
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[out.dtype], BIAS_T=bridge.STORAGE[bias.dtype],
            MR=tile.rows, NR=tile.columns,
        )  # fmt: skip
