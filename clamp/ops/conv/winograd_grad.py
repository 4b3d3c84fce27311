"""Weight gradients of 3x3 convolutions with fewer multiplications, on CPU devices (kernels/winograd_grad_kernels.clh).

Winograd's F(3x3, 4x4), and its like for stride 2, add multiples of elements of the input, and of the gradient, before
they multiply them, in fp32: sums over many positions are off by up to twice the error of adding term by term. Where
elements times gradients come to 2^110 and more, or one of them to 2^120, which only bfloat16 stores, they may overflow
on the way.
"""

from __future__ import annotations

from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.conv.geometry import divide, pair
from clamp.ops.conv.packed import tile_of_gradient
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.winograd_tiles import PLAIN, STRIDED, Form, Tiles, slices, stage

_BLOCK = 64  # tiles that are transformed at a time
_MOST_CHANNELS = 128  # input channels whose tiles a second-level cache holds, transformed
# Below, transforming and adding up take longer than multiplying less saves.
_MIN_CHANNELS, _MIN_POSITIONS = 16, 1024
_MIN_CHANNELS_STRIDED, _MIN_POSITIONS_STRIDED = 48, 8192
_ITEMS_PER_CORE = 1  # each has partial sums to add up, and a workspace of a few MB


def pays(problem: Problem) -> bool:
    """Whether these sums are faster, for elements whose own rounding is coarse beside that of adding some of them."""
    least_channels, least_positions = _MIN_CHANNELS, _MIN_POSITIONS
    if problem.window.stride != (1, 1):
        least_channels, least_positions = _MIN_CHANNELS_STRIDED, _MIN_POSITIONS_STRIDED
    large = problem.images * prod(problem.size) >= least_positions
    return "float32" not in problem.dtypes and large and min(problem.channels, problem.features) >= least_channels


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out`` (F, C / groups, 3, 3)."""
    tiles = Tiles.of(PLAIN if problem.window.stride == (1, 1) else STRIDED, pair(grad.shape[2:]))
    total: _WinogradSum | None = None
    for first, images in slices(x, tiles):
        staged = stage(x, tiles, first, images, problem.window.pad)
        total = total or _WinogradSum(out, tiles.form, images * tiles.count, problem.window.groups)
        total.add(staged, tiles, images, grad, first * (grad.size // grad.shape[0]))
    if total is not None:
        total.finish()
    return None


class _WinogradSum:
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
        form.kernel("weight_grad")(
            queue, grid, (1, 1, 1), staged, grad, self._partial, work, begin,
            images * tiles.count, self._rows, self._channels, tiles.count, tiles.columns, *tiles.staged,
            *grad.shape[2:], grad.size, division.each_k, self._accumulate,
            WEIGHT_GRAD=1, X_T=bridge.STORAGE[staged.dtype], G_T=bridge.STORAGE[grad.dtype],
            MR=tile.rows, NR=tile.columns, BLOCK=_BLOCK, CHANNELS=channels, PIECES=tiles.pieces, **form.macros,
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        self._form.kernel("weight_grad_finish")(
            self._out.queue, (self._panels_k, self._panels_m, self._groups), (1, 1, 1),
            self._partial, self._out, self._rows, self._channels, self._division.chunks,
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype], MR=self._tile.rows, NR=self._tile.columns,
            **self._form.macros,
        )  # fmt: skip
