"""The convolution of every device but CPUs: tiles in local memory (kernels/conv_tiled.cl)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.cast import cast_into
from clamp.ops.conv import direct
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.engine import always
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.launch import index_type
from clamp.ops.reduce_to_shape import sum_axis

NAME = "tiled"
TAKES = "every convolution"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here

_CONV = Kernel("conv_tiled.cl", "conv")
_WEIGHT_GRAD = Kernel("conv_tiled.cl", "weight_grad")
_PER_ITEM = 4  # a work-item computes 4 x 4 elements
_TILE_K = 16
_GROUPS_PER_UNIT = 4  # work-groups that a compute unit should get
_MIN_CHUNK = 1024  # positions that are worth a work-group of their own
_PARTIAL_FLOATS = 8 * 2**20  # of partial weight gradients


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    direct.convolve(_correlate, problem, x, weights, out, epilogue, by_rows=False)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``."""
    direct.weight_gradient(partial(_TiledSum, out=out), problem, x, grad, x.dtype, by_rows=False)
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
        CONV=1, INDEX=index_type(source.columns), X_T=bridge.STORAGE[source.tensor.dtype], **_macros(out.queue),
        **epilogue.macros,
    )  # fmt: skip


class _TiledSum:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, first: Source, out: Tensor) -> None:
        queue, rows = out.queue, out.shape[0] // first.groups
        self._out, self._rows = out, rows
        tile = _layout(queue).width
        floats = first.groups * rows * first.offsets.steps
        groups = -(-first.offsets.steps // tile) * -(-rows // tile) * first.groups
        wanted = _GROUPS_PER_UNIT * capabilities(queue).compute_units
        chunks = max(1, min(wanted // groups, first.columns // _MIN_CHUNK, _PARTIAL_FLOATS // floats))
        self._chunk = -(-first.columns // chunks)
        self._chunks = -(-first.columns // self._chunk)
        self._partial = bridge.empty(queue, (self._chunks * floats,), "float32")
        self._accumulate = False

    def add(self, source: Source, grad: Tensor, begin: int) -> None:
        """Adds the images of ``source``, whose output gradients are in ``grad`` from element ``begin`` on."""
        queue = grad.queue
        side, tile = _side(capabilities(queue)), _layout(queue).width
        grid = (-(-source.offsets.steps // tile) * side, -(-self._rows // tile) * side, self._chunks * source.groups)
        _WEIGHT_GRAD(
            queue, grid, (side, side, 1), source.tensor, source.offsets, grad, self._partial,
            begin, *source.sizes(self._rows), source.groups * self._rows * source.shape.positions, self._chunk,
            source.groups, self._accumulate,
            WEIGHT_GRAD=1, INDEX=index_type(source.columns), X_T=bridge.STORAGE[source.tensor.dtype],
            G_T=bridge.STORAGE[grad.dtype], **_macros(queue),
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        cast_into(sum_axis(self._partial, 1, self._chunks, self._out.size, self._out.dtype), self._out)
