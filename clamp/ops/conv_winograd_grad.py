"""Weight gradients of 3x3 convolutions of stride 1 with fewer multiplications, on CPU devices
(kernels/conv_winograd_grad.cl).

Winograd's F(3x3, 2x2) adds elements of the input, and elements of the gradient, before it multiplies them, in fp32.
A sum over so many positions is off by about as much as if it were added up term by term. Elements of 2^126 and more,
which only bfloat16 stores, may overflow on the way.
"""

from __future__ import annotations

from functools import lru_cache

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import capabilities
from clamp.ops.conv_geometry import Axis, Correlation, Pair, StagedAxis, Taps, Window, forward_axis, pair
from clamp.ops.conv_packed import divide, tile_of_gradient
from clamp.ops.conv_stage import slices, stage
from clamp.ops.conv_winograd import fits
from clamp.program import get_kernel

_PLACES = 16  # of a transformed tile
_OVERREAD = 16  # elements that may be read beyond a staged source: what 16 tiles read, of which one is real
_BLOCK = 64  # tiles that are transformed at a time
_MOST_CHANNELS = 128  # input channels whose tiles a second-level cache holds, transformed
# Below, transforming takes longer than it saves.
_MIN_CHANNELS, _MIN_OUTPUTS = 16, 2048
_ITEMS_PER_CORE = 2  # each has partial sums to add up, and a workspace of a few MB


def pays(x: Tensor, grad: Tensor, extent: Pair, window: Window) -> bool:
    """Whether this kernel is faster, for elements whose own rounding is coarse beside that of adding two of them."""
    channels = min(x.shape[1], grad.shape[1]) // window.groups
    large = channels >= _MIN_CHANNELS and grad.size >= _MIN_OUTPUTS * grad.shape[1]
    return "float32" not in (x.dtype, grad.dtype) and large and window.stride == (1, 1) and fits(extent, window)


def weight_gradient(x: Tensor, grad: Tensor, window: Window, out: Tensor) -> None:
    """Writes the gradient of the weights over ``out`` (F, C / groups, 3, 3)."""
    shape = _tiles_of(pair(x.shape[2:]), pair(grad.shape[2:]), window.pad)
    total: _Sum | None = None
    for first, images in slices(x, shape, x.dtype):
        staged = stage(x, shape, first, images, x.dtype, by_rows=True, slack=_OVERREAD)
        total = total or _Sum(out, images * shape.positions, window.groups)
        total.add(staged, shape, images, grad, first * (grad.size // grad.shape[0]))
    if total is not None:
        total.finish()


@lru_cache(maxsize=256)
def _tiles_of(image: Pair, size: Pair, pad: Pair) -> Correlation:
    """The tiles of ``size`` outputs, as positions that read 4x4 elements of the padded ``image``. Only columns are
    staged in phases: rows that a tile reads lie one after the other."""
    rows, columns = (-(-extent // 2) for extent in size)
    y = Axis(rows, Taps(4), StagedAxis(1, pad[0], 2 * rows + 2, 1))
    return Correlation(y, forward_axis(columns, 4, 2, pad[1], 1), image)


class _Sum:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, out: Tensor, columns: int, groups: int) -> None:
        self._out, self._groups = out, groups
        self._rows, self._channels = out.shape[0] // groups, out.shape[1]
        queue = out.queue
        self._tile = tile = tile_of_gradient(queue, self._rows)
        self._panels_k, self._panels_m = -(-self._channels // tile.rows), -(-self._rows // tile.columns)
        floats = groups * _PLACES * self._panels_k * self._panels_m * tile.rows * tile.columns
        items = _ITEMS_PER_CORE * capabilities(queue).compute_units
        # Each part of the channels transforms the gradients for itself.
        parts = -(-self._channels // _MOST_CHANNELS)
        self._division = divide(items, groups, columns, _BLOCK, self._panels_k, floats, parts)
        self._partial = bridge.empty(queue, (self._division.chunks * floats,), "float32")
        self._accumulate = False

    def add(self, staged: Tensor, shape: Correlation, images: int, grad: Tensor, begin: int) -> None:
        """Adds some staged images, whose output gradients are in ``grad`` from element ``begin`` on."""
        queue, tile, division = grad.queue, self._tile, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, self._groups)
        slice_floats = _PLACES * (division.each_k * tile.rows * _BLOCK + 16 + (_BLOCK + 16) * tile.columns)
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * slice_floats,), "float32")
        kernel = get_kernel(
            queue, "conv_winograd_grad.cl", "weight_grad", "ppppqqqqqqqqqqquqqi",
            WEIGHT_GRAD=1, X_T=bridge.STORAGE[staged.dtype], G_T=bridge.STORAGE[grad.dtype],
            MR=tile.rows, NR=tile.columns, BLOCK=_BLOCK,
        )  # fmt: skip
        kernel(
            queue, grid, (1, 1, 1), staged.buffer, grad.buffer, self._partial.buffer, work.buffer, begin,
            images * shape.positions, self._rows, self._channels, shape.positions, shape.x.positions,
            *shape.staged_shape, *grad.shape[2:], grad.size, division.each_k, division.each, division.block,
            self._accumulate,
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        queue: cl.CommandQueue = self._out.queue
        kernel = get_kernel(
            queue, "conv_winograd_grad.cl", "weight_grad_finish", "ppqqu",
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype], MR=self._tile.rows, NR=self._tile.columns,
        )  # fmt: skip
        kernel(
            queue, (self._panels_k, self._panels_m, self._groups), (1, 1, 1),
            self._partial.buffer, self._out.buffer, self._rows, self._channels, self._division.chunks,
        )  # fmt: skip
