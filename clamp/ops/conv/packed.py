"""The convolution of CPU devices, register-blocked over panels of floats (kernels/conv_packed.cl)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import deal, divide
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target, convolve_staged, slices, staged
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.engine import always, on_cpus
from clamp.ops.gemm.plan import Tile, tile_of
from clamp.ops.gemm.problem import Epilogue

NAME = "packed"
TAKES = "every convolution"
IN_WORDS = "packed panels for a register-blocked loop"
fits, pays = always, on_cpus

_CONV = Kernel("conv_packed.cl", "conv", "- X")
_WEIGHT_GRAD = Kernel("conv_packed.cl", "weight_grad", "- - G")
_FINISH = Kernel("conv_packed.cl", "weight_grad_finish", "- - OUT BIAS")
_PANEL_FLOATS = 8192  # of steps or positions: what a first-level cache holds beside the other operand
_SHORT = 4  # rows of the last panels of weights: with 6 and 4 rows, at most one is computed in vain
_ITEMS_PER_CORE = 32  # work-items that a core should get, so that the last ones even out
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    tile, layout = tile_of_conv(x.queue), _layout(x.queue)
    tiled = {"MR": tile.rows, "NR": tile.columns, "SHORT": layout.short}
    convolve_staged(partial(multiply_panels, _CONV, tile.columns, layout, tiled), problem, x, weights, out, epilogue)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``; returns the bias's, if its dtype is given."""
    dtype = "float32"  # source elements are taken one by one, which floats are fastest for
    queue, shape, groups, rows = x.queue, problem.forward, problem.window.groups, problem.features
    steps = problem.channels * shape.taps
    tile = tile_of_gradient(queue, rows)
    most = _PANEL_FLOATS // tile.columns
    panels_k, panels_m = -(-steps // tile.rows), -(-rows // tile.columns)
    floats = groups * panels_k * panels_m * tile.rows * tile.columns
    items = _CHUNKS_PER_CORE * capabilities(queue).compute_units
    image = groups * rows * shape.positions  # elements of an image of gradients
    parts = slices(x, shape, dtype)
    columns = parts[0][1] * shape.positions
    division = divide(items, groups, columns, most, panels_k, floats)
    sums = bridge.empty(queue, (division.chunks * floats,), "float32")
    bias, sums_bias = None, sums  # a kernel's pointers must point somewhere
    if bias_dtype is not None:
        bias = bridge.empty(queue, (grad.shape[1],), bias_dtype)
        sums_bias = bridge.empty(queue, (division.chunks * groups * panels_m * tile.columns,), "float32")
    grid = (-(-panels_k // division.each_k), division.chunks, groups)
    work = bridge.empty(queue, (prod(grid) * (most + 16) * tile.columns,), "float32")
    for first, (source,) in staged(x, parts, [shape], dtype, groups, problem.channels):
        _WEIGHT_GRAD(
            queue, grid, (1, 1, 1), source.tensor, source.offsets, grad, sums, sums_bias, work, first * image,
            *source.sizes(rows), image, grad.size, division.each_k, division.each,
            division.block, first > 0, bias is not None, MR=tile.rows, NR=tile.columns, JC=most,
        )  # fmt: skip
    _FINISH(
        queue, (panels_k, panels_m, groups), (1, 1, 1), sums, sums_bias, out, out if bias is None else bias,
        rows, steps, division.chunks, bias is not None, MR=tile.rows, NR=tile.columns,
    )  # fmt: skip
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


def multiply_panels(
    kernel: Kernel, columns: int, layout: PanelLayout, macros: Mapping[str, int], source: Source, weights: Weights,
    target: Target,
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
