"""3x3 convolutions with fewer multiplications, on CPU devices (kernels/conv_winograd.cl, conv_winograd_strided.cl).

Winograd's F(4x4, 3x3), and for stride 2 F(4x4, 2x2) of even and odd rows and columns, add multiples of elements before
they multiply them, in fp32. Their sums err by a few fp32 roundings of the largest element in the tile, a direct sum
by roundings of its own terms. Storing the result in 16 bits rounds 2^13 times as coarsely; so they serve 16-bit storage
only, and float32 is summed directly.
"""

from __future__ import annotations

from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.conv import dot_bf16, winograd_grad
from clamp.ops.conv.geometry import deal, pair
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.conv.winograd_tiles import PLAIN, STRIDED, STRIDED_GRADIENT, Form, Tiles, slices, stage
from clamp.ops.gemm.plan import Tile, tile_of
from clamp.ops.gemm.problem import Epilogue

NAME = "winograd"
TAKES = "3x3 kernels of stride 1 padded by up to 2, or of stride 2 padded by 1; it reads and stores 16 bits"
IN_WORDS = "Winograd's sums, with fewer multiplications"
weight_gradient = winograd_grad.weight_gradient

_TAPS = 9  # planes of the weights as they are, behind the transformed ones
_ROW_PANELS = 4  # of weights, whose sums rest at a time
_PANEL_FLOATS = 8192  # of a place: what a first-level cache holds beside the weights
_SHORT = 4  # rows of the last panels of weights
_ITEMS_PER_CORE = 4  # each has a workspace of its own, of a few hundred KB to a few MB
# Below, transforming takes longer than it saves: the input, or (positions of a batch) the weights.
_MIN_CHANNELS, _MIN_POSITIONS, _MIN_POSITIONS_STRIDED = 16, 512, 4096


def fits(problem: Problem) -> bool:
    """Returns whether a convolution is of the kind, and stored in so few bits that the sums' rounding does not show."""
    window = problem.window
    if problem.dtypes[0] == "float32" or (problem.out_dtype == "float32" and problem.gradient != "weights"):
        return False
    if problem.extent != (3, 3) or window.dilation != (1, 1):
        return False
    return max(window.pad) <= 2 if window.stride == (1, 1) else (window.stride, window.pad) == ((2, 2), (1, 1))


def pays(problem: Problem) -> bool:
    """Returns whether a CPU is faster so than term by term; with stride 2 the processor's dot product is faster yet."""
    is_strided = problem.window.stride != (1, 1)
    if not problem.device.is_cpu or (is_strided and dot_bf16.fits(problem) and dot_bf16.pays(problem)):
        return False
    if problem.gradient == "weights":
        return winograd_grad.pays(problem)
    positions = problem.images * min(prod(problem.image), prod(problem.size))
    least = _MIN_POSITIONS_STRIDED if is_strided else _MIN_POSITIONS
    return min(problem.channels, problem.features) >= _MIN_CHANNELS and positions >= least


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    if out.size == 0:
        return
    window = problem.window
    form, pad = PLAIN, window.pad
    if window.stride == (2, 2):
        form, pad = (STRIDED_GRADIENT, (0, 0)) if weights.transposed else (STRIDED, pad)
    elif weights.transposed:
        pad = 2 - pad[0], 2 - pad[1]
    tiles = Tiles.of(form, pair(out.shape[2:]))
    for first, images in slices(x, tiles):
        staged = stage(x, tiles, first, images, pad) if x.size else out
        _convolve(staged, tiles, images, weights, out, first * (out.size // out.shape[0]), epilogue)


def _convolve(
    staged: Tensor, tiles: Tiles, images: int, weights: Weights, out: Tensor, begin: int, epilogue: Epilogue
) -> None:
    """Writes the convolution of some staged images into ``out`` from element ``begin`` on."""
    form, queue, tile, layout = tiles.form, out.queue, _tile_of(out.queue), _layout_of(weights)
    channels = weights.channels if staged is not out else 0  # an image without pixels is all padding: sums of nothing
    tall, short = layout.heights(weights.rows)
    columns = images * tiles.count
    grid, each_m = deal(queue, -(-columns // tile.columns), tall + short, weights.groups, _ITEMS_PER_CORE)
    # The sums of all panels rest while there are channels to come.
    resting = -(-each_m // _ROW_PANELS) if channels > layout.block else 1
    read_floats, sums_floats = layout.block * tile.columns + 16, _ROW_PANELS * tile.rows * tile.columns + 16
    slice_floats = form.read_planes * read_floats + resting * form.places * sums_floats
    work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * slice_floats,), "float32")
    form.kernel("winograd")(
        queue, grid, (1, 1, 1), transformed(weights, form), staged, out, epilogue.bias_or(out), work,
        begin, columns, weights.rows, channels, tiles.count, tiles.columns, *tiles.staged,
        *out.shape[2:], tall + short, tall, each_m, *epilogue.flags,
        WINOGRAD=1, X_T=bridge.STORAGE[staged.dtype], MR=tile.rows, SHORT=layout.short, NR=tile.columns,
        KC=layout.block, ROW_PANELS=_ROW_PANELS, PIECES=tiles.pieces, **form.macros, **epilogue.macros,
    )  # fmt: skip


def _tile_of(queue: cl.CommandQueue) -> Tile:
    tile = tile_of(queue)
    return Tile(6, 32) if tile == Tile(12, 32) else tile  # so that 16 tiles fewer are transformed at a time


def _layout_of(weights: Weights) -> PanelLayout:
    """Blocks of one of two sizes, so that few channels take a small workspace and few programs are compiled."""
    tile = _tile_of(weights.tensor.queue)
    block = max(1, _PANEL_FLOATS // tile.columns)
    small = max(1, block // 4)
    return PanelLayout(tile.rows, _SHORT, small if weights.channels <= small else block)


def transformed(weights: Weights, form: Form) -> Tensor:
    """The weights, transformed, in panels: [group][plane][block of channels][panel][channel][row]."""
    layout = _layout_of(weights)
    return weights.kept((form.file, layout), lambda: _transform(weights, form, layout))


def _transform(weights: Weights, form: Form, layout: PanelLayout) -> Tensor:
    w, rows, channels = weights.tensor, weights.rows, weights.channels
    tall, short = layout.heights(rows)
    floats = weights.groups * (form.weight_planes + _TAPS) * channels * layout.padded(rows)
    panels = bridge.empty(w.queue, (max(1, floats),), "float32")
    if rows * channels == 0:
        return panels
    per_output = w.shape[1] * 9
    # The input gradient is a convolution with the weights turned round.
    strides, taps = ((9, per_output), (8, -3, -1)) if weights.transposed else ((per_output, 9), (0, 3, 1))
    form.kernel("transform_weights")(
        w.queue, (tall + short, -(-channels // layout.block), weights.groups), (1, 1, 1), w, panels,
        rows, channels, w.shape[0] // weights.groups * per_output, *strides, *taps, tall,
        TRANSFORM_WEIGHTS=1, SRC_T=bridge.STORAGE[w.dtype], MR=layout.width, SHORT=layout.short, KC=layout.block,
        **form.macros,
    )  # fmt: skip
    return panels
