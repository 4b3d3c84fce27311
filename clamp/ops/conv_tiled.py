"""The convolution of every device but CPUs: tiles in local memory (kernels/conv_tiled.cl)."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.cast import cast_into
from clamp.ops.conv_stage import Source
from clamp.ops.conv_weights import PanelLayout, Weights
from clamp.ops.gemm_operands import Epilogue
from clamp.ops.reduce_to_shape import sum_axis

_PER_ITEM = 4  # a work-item computes 4 x 4 elements
_TILE_K = 16
_GROUPS_PER_UNIT = 4  # work-groups that a compute unit should get
_MIN_CHUNK = 1024  # positions that are worth a work-group of their own
_PARTIAL_FLOATS = 8 * 2**20  # of partial weight gradients

#: what `weight_grad` reads: any storage type
GRAD_SOURCE_DTYPE: str | None = None


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


def correlate(source: Source, weights: Weights, out: Tensor, begin: int, out_image: int, epilogue: Epilogue) -> None:
    """Writes a correlation, through the epilogue, into ``out`` from element ``begin`` on."""
    queue, shape = out.queue, source.shape
    side, layout = _side(capabilities(queue)), _layout(queue)
    tile = layout.width
    kernel = get_kernel(
        queue, "conv_tiled.cl", "conv", "pppppqqqqqqqqqqii",
        CONV=1, X_T=source.storage, **_macros(queue), **epilogue.macros,
    )  # fmt: skip
    bias = out if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    grid = (-(-source.columns // tile) * side, -(-weights.rows // tile) * side, source.groups)
    kernel(
        queue, grid, (side, side, 1), weights.panels(shape, layout).buffer, source.tensor.buffer,
        source.offsets.buffer, out.buffer, bias.buffer, begin, source.columns, weights.rows, source.offsets.steps,
        shape.positions, *shape.row,
        source.groups * source.group_size, source.group_size, out_image, epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


class WeightGradient:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, first: Source, rows: int, out: Tensor) -> None:
        self._out, self._rows = out, rows
        queue = out.queue
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
        queue, shape = grad.queue, source.shape
        side, tile = _side(capabilities(queue)), _layout(queue).width
        kernel = get_kernel(
            queue, "conv_tiled.cl", "weight_grad", "ppppqqqqqqqqqqqui",
            WEIGHT_GRAD=1, X_T=source.storage, G_T=bridge.STORAGE[grad.dtype], **_macros(queue),
        )  # fmt: skip
        grid = (-(-source.offsets.steps // tile) * side, -(-self._rows // tile) * side, self._chunks * source.groups)
        kernel(
            queue, grid, (side, side, 1), source.tensor.buffer, source.offsets.buffer, grad.buffer,
            self._partial.buffer, begin, source.columns, self._rows, source.offsets.steps, shape.positions, *shape.row,
            source.groups * source.group_size, source.group_size, source.groups * self._rows * shape.positions,
            self._chunk, source.groups, self._accumulate,
        )  # fmt: skip
        self._accumulate = True

    def finish(self, source: Source) -> None:
        """Writes the sum."""
        cast_into(sum_axis(self._partial, 1, self._chunks, self._out.size, self._out.dtype), self._out)
