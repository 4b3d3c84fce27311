"""Weight gradients of 3x3 convolutions with fewer multiplications, on CPU devices (kernels/winograd_grad_kernels.clh).

Winograd's F(3x3, 4x4), and its like for stride 2, add multiples of elements of the input, and of the gradient, before
they multiply them, in fp32: sums over many positions are off by up to twice the error of adding term by term. Where
elements times gradients come to 2^110 and more, or one of them to 2^120, which only bfloat16 stores, they may overflow
on the way.
"""

from __future__ import annotations

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops import conv_winograd
from clamp.ops.conv_geometry import Pair, Window, pair
from clamp.ops.conv_packed import divide, tile_of_gradient
from clamp.ops.conv_winograd import PLAIN, STRIDED, Form, Tiles, fits, stage

_BLOCK = 64  # tiles that are transformed at a time
_MOST_CHANNELS = 128  # input channels whose tiles a second-level cache holds, transformed
# Below, transforming and adding up take longer than multiplying less saves.
_MIN_CHANNELS, _MIN_POSITIONS = 16, 1024
_MIN_CHANNELS_STRIDED, _MIN_POSITIONS_STRIDED = 48, 8192
_ITEMS_PER_CORE = 1  # each has partial sums to add up, and a workspace of a few MB


def pays(x: Tensor, grad: Tensor, extent: Pair, window: Window) -> bool:
    """Whether this kernel is faster, for elements whose own rounding is coarse beside that of adding some of them."""
    least_channels, least_positions = _MIN_CHANNELS, _MIN_POSITIONS
    if window.stride != (1, 1):
        least_channels, least_positions = _MIN_CHANNELS_STRIDED, _MIN_POSITIONS_STRIDED
    channels = min(x.shape[1], grad.shape[1]) // window.groups
    large = channels >= least_channels and grad.size >= least_positions * grad.shape[1]
    return "float32" not in (x.dtype, grad.dtype) and large and fits(extent, window)


def weight_gradient(x: Tensor, grad: Tensor, window: Window, out: Tensor) -> None:
    """Writes the gradient of the weights over ``out`` (F, C / groups, 3, 3).

    Raises:
        ValueError: x is not stored in 16 bits.
    """
    if x.dtype == "float32":
        raise ValueError("conv2d: WINOGRAD reads 16 bits; x is float32")
    tiles = Tiles.of(PLAIN if window.stride == (1, 1) else STRIDED, pair(grad.shape[2:]))
    total: _Sum | None = None
    for first, images in conv_winograd.slices(x, tiles):
        staged = stage(x, tiles, first, images, window.pad)
        total = total or _Sum(out, tiles.form, images * tiles.count, window.groups)
        total.add(staged, tiles, images, grad, first * (grad.size // grad.shape[0]))
    if total is not None:
        total.finish()


class _Sum:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, out: Tensor, form: Form, columns: int, groups: int) -> None:
        self._out, self._form, self._groups = out, form, groups
        self._rows, self._channels = out.shape[0] // groups, out.shape[1]
        queue = out.queue
        self._tile = tile = tile_of_gradient(queue, self._rows)
        self._panels_k, self._panels_m = -(-self._channels // tile.rows), -(-self._rows // tile.columns)
        floats = groups * form.weight_planes * self._panels_k * self._panels_m * tile.rows * tile.columns
        items = _ITEMS_PER_CORE * capabilities(queue).compute_units
        # Each part of the channels transforms the gradients for itself.
        parts = -(-self._channels // _MOST_CHANNELS)
        self._division = divide(items, groups, columns, _BLOCK, self._panels_k, floats, parts)
        self._partial = bridge.empty(queue, (self._division.chunks * floats,), "float32")
        self._accumulate = False

    def add(self, staged: Tensor, tiles: Tiles, images: int, grad: Tensor, begin: int) -> None:
        """Adds some staged images, whose output gradients are in ``grad`` from element ``begin`` on."""
        queue, form, tile, division = grad.queue, self._form, self._tile, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, self._groups)
        # One of three sizes, so that few channels take a small workspace and few programs are compiled.
        channels = next(size for size in (24, 72, 144) if division.each_k * tile.rows <= size)
        read_floats, grad_floats = channels * _BLOCK + 16, _BLOCK * tile.columns + 16
        slice_floats = form.read_planes * read_floats + form.grad_places * grad_floats
        slice_floats += form.edge * (form.edge * _BLOCK + 16) * 16
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * slice_floats,), "float32")
        kernel = get_kernel(
            queue, form.file, "weight_grad", "ppppqqqqqqqqqqqui",
            WEIGHT_GRAD=1, X_T=bridge.STORAGE[staged.dtype], G_T=bridge.STORAGE[grad.dtype],
            MR=tile.rows, NR=tile.columns, BLOCK=_BLOCK, CHANNELS=channels, PIECES=tiles.pieces, **dict(form.macros),
        )  # fmt: skip
        kernel(
            queue, grid, (1, 1, 1), staged.buffer, grad.buffer, self._partial.buffer, work.buffer, begin,
            images * tiles.count, self._rows, self._channels, tiles.count, tiles.columns, *tiles.staged,
            *grad.shape[2:], grad.size, division.each_k, self._accumulate,
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        queue: cl.CommandQueue = self._out.queue
        kernel = get_kernel(
            queue, self._form.file, "weight_grad_finish", "ppqqu",
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype], MR=self._tile.rows, NR=self._tile.columns,
            **dict(self._form.macros),
        )  # fmt: skip
        kernel(
            queue, (self._panels_k, self._panels_m, self._groups), (1, 1, 1),
            self._partial.buffer, self._out.buffer, self._rows, self._channels, self._division.chunks,
        )  # fmt: skip
