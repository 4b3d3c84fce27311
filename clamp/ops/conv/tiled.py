"""The convolution of every device but CPUs: tiles in local memory (kernels/conv_tiled.cl)."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.cast import cast_into
from clamp.ops.conv.geometry import PARTIAL_FLOATS
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target, convolve_staged, slices, staged
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.engine import always
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.launch import index_type
from clamp.ops.reduce_to_shape import sum_axis

NAME = "tiled"
TAKES = "every convolution"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here

_CONV = Kernel("conv_tiled.cl", "conv", "- X")
_WEIGHT_GRAD = Kernel("conv_tiled.cl", "weight_grad", "X - G")
_PER_ITEM = 4  # a work-item computes 4 x 4 elements
_TILE_K = 16
_GROUPS_PER_UNIT = 4  # work-groups that a compute unit should get
_MIN_CHUNK = 1024  # positions that are worth a work-group of their own


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    convolve_staged(_correlate, problem, x, weights, out, epilogue, by_rows=False)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``."""
    queue, shape, groups, rows = x.queue, problem.forward, problem.window.groups, problem.features
    side, tile = _side(capabilities(queue)), _layout(queue).width
    tiles_k, tiles_m = -(-problem.channels * shape.taps // tile), -(-rows // tile)
    wanted = _GROUPS_PER_UNIT * capabilities(queue).compute_units
    image = groups * rows * shape.positions  # elements of an image of gradients
    columns = slices(x, shape, x.dtype)[0][1] * shape.positions
    most = min(wanted // (tiles_k * tiles_m * groups), columns // _MIN_CHUNK, PARTIAL_FLOATS // out.size)
    chunk = -(-columns // max(1, most))
    chunks = -(-columns // chunk)
    partial = bridge.empty(queue, (chunks * out.size,), "float32")
    grid = (tiles_k * side, tiles_m * side, chunks * groups)
    for first, (source,) in staged(x, [shape], x.dtype, groups, problem.channels, by_rows=False):
        _WEIGHT_GRAD(
            queue, grid, (side, side, 1), source.tensor, source.offsets, grad, partial, first * image,
            *source.sizes(rows), image, chunk, groups, first > 0,
            INDEX=index_type(source.columns), **_macros(queue),
        )  # fmt: skip
    cast_into(sum_axis(partial, 1, chunks, out.size, out.dtype), out)
    return None


def _side(device: Capabilities) -> int:
    """The largest work-group, SIDE x SIDE, that the device takes and whose tiles its local memory holds."""
    for side in (16, 8, 4, 2):
        tile = side * _PER_ITEM
        local_bytes = 2 * _TILE_K * (tile + 1) * 4 + 8 * max(tile, 2 * _TILE_K)
        if side * side <= device.max_work_group and local_bytes <= device.local_memory_bytes:
            return side
    return 1


def _macros(queue: cl.CommandQueue) -> dict[str, Any]:
    return {"SIDE": _side(capabilities(queue)), "PER_ITEM": _PER_ITEM, "TILE_K": _TILE_K}


def _layout(queue: cl.CommandQueue) -> PanelLayout:
    """Of the weights; panels are as wide as a tile."""
    return PanelLayout(_side(capabilities(queue)) * _PER_ITEM, 0, _TILE_K)


def _correlate(source: Source, weights: Weights, target: Target) -> None:
    out, epilogue = target.out, target.epilogue
    side, layout = _side(capabilities(out.queue)), _layout(out.queue)
    tile = layout.width
    grid = (-(-source.columns // tile) * side, -(-weights.rows // tile) * side, source.groups)
    _CONV(
        out.queue, grid, (side, side, 1), weights.panels(source.shape, layout), source.tensor,
        source.offsets, out, epilogue.bias_or(out), target.begin, *source.sizes(weights.rows),
        target.image, *epilogue.flags,
        INDEX=index_type(source.columns), **_macros(out.queue), **epilogue.macros,
    )  # fmt: skip
