"""3x3 convolutions of stride 1 with fewer multiplications, on CPU devices (kernels/conv_winograd.cl).

Winograd's F(2x2, 3x3) adds and subtracts elements before it multiplies them, in fp32. Its sums are off by an fp32
rounding of the largest element that an output reads, where the direct sum is off by one of the terms. Storing the
result in 16 bits rounds 2^13 times as coarsely; so it is used for 16-bit storage only, and float32 is summed directly.
Where a bfloat16 dot product is fast, that serves bfloat16 (conv_dot_bf16.py).
An element of 2^126 and more, which only bfloat16 stores, may overflow on the way.
"""

from __future__ import annotations

from functools import lru_cache

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.conv_geometry import Axis, Correlation, Pair, StagedAxis, Taps, Window, forward_axis, pair
from clamp.ops.conv_packed import deal, layout_of_conv, tile_of_conv
from clamp.ops.conv_stage import slices, stage
from clamp.ops.conv_weights import PanelLayout, Weights
from clamp.ops.gemm_operands import Epilogue
from clamp.program import get_kernel

PLACES = 16  # of a transformed tile
_BLOCK_ROWS = 96  # output channels whose sums rest at a time
_ITEMS_PER_CORE = 4  # each has a workspace of its own, of some 100 KB to a few MB
# Below, transforming takes longer than it saves: the input, or (outputs of a channel in a batch) the weights.
MIN_CHANNELS, MIN_OUTPUTS = 16, 2048
OVERREAD = 16  # elements that may be read beyond a staged source: what 16 tiles read, of which one is real


def fits(extent: Pair, window: Window) -> bool:
    """Whether a convolution is of the kind, and so is its input gradient."""
    return extent == (3, 3) and window.stride == window.dilation == (1, 1) and max(window.pad) <= 2


def pays(x: Tensor, weights: Weights, window: Window, out: Tensor) -> bool:
    """Whether this kernel is faster, and the result is stored in so few bits that its rounding does not show."""
    stored_in_16_bits = "float32" not in (x.dtype, out.dtype)
    large = min(weights.rows, weights.channels) >= MIN_CHANNELS and out.size >= MIN_OUTPUTS * out.shape[1]
    return stored_in_16_bits and large and fits(pair(weights.tensor.shape[2:]), window)


def convolve(x: Tensor, weights: Weights, pad: Pair, out: Tensor, epilogue: Epilogue) -> None:
    """Writes the convolution of x, padded, through the epilogue, over ``out`` (N, F, OH, OW)."""
    if out.size == 0:
        return
    shape = tiles_of(pair(x.shape[2:]), pair(out.shape[2:]), pad)
    for first, images in slices(x, shape, x.dtype):
        staged = stage(x, shape, first, images, x.dtype, by_rows=True, slack=OVERREAD) if x.size else out
        _convolve(staged, shape, images, weights, out, first * (out.size // out.shape[0]), epilogue)


@lru_cache(maxsize=256)
def tiles_of(image: Pair, size: Pair, pad: Pair) -> Correlation:
    """The tiles of ``size`` outputs, as positions that read 4x4 elements of the padded ``image``. Only columns are
    staged in phases: rows that a tile reads lie one after the other."""
    rows, columns = (-(-extent // 2) for extent in size)
    y = Axis(rows, Taps(4), StagedAxis(1, pad[0], 2 * rows + 2, 1))
    return Correlation(y, forward_axis(columns, 4, 2, pad[1], 1), image)


def _convolve(
    staged: Tensor, shape: Correlation, images: int, weights: Weights, out: Tensor, begin: int, epilogue: Epilogue
) -> None:
    """Writes the convolution of some staged images into ``out`` from element ``begin`` on."""
    queue, tile, groups = out.queue, tile_of_conv(out.queue), weights.groups
    channels = weights.channels if staged is not out else 0  # an image without pixels is all padding: sums of nothing
    layout = layout_of_conv(queue)
    tall, short = layout.heights(weights.rows)
    columns = images * shape.positions
    panels_m = tall + short
    grid, each_j, each_m = deal(queue, -(-columns // tile.columns), panels_m, groups, _ITEMS_PER_CORE)
    block_panels = max(1, _BLOCK_ROWS // tile.rows)
    slice_floats = PLACES * (tile.columns * (channels + block_panels * tile.rows) + 16)
    work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * slice_floats,), "float32")
    bias = out if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    kernel = get_kernel(
        queue, "conv_winograd.cl", "winograd", "pppppqqqqqqqqqquuuuii",
        WINOGRAD=1, X_T=bridge.STORAGE[staged.dtype], MR=tile.rows, SHORT=layout.short, NR=tile.columns,
        KC=layout.block, BLOCK_PANELS=block_panels, **epilogue.macros,
    )  # fmt: skip
    kernel(
        queue, grid, (1, 1, 1), transformed(weights).buffer, staged.buffer, out.buffer, bias.buffer, work.buffer,
        begin, columns, weights.rows, channels, shape.positions, shape.x.positions, *shape.staged_shape,
        *out.shape[2:], panels_m, tall, each_j, each_m, epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


def transformed(weights: Weights) -> Tensor:
    """The weights, transformed, in panels: [group][place][block of channels][panel][channel][row]."""
    layout = layout_of_conv(weights.tensor.queue)
    return weights.kept(("winograd", layout), lambda: _transform(weights, layout))


def _transform(weights: Weights, layout: PanelLayout) -> Tensor:
    w, rows, channels = weights.tensor, weights.rows, weights.channels
    tall, short = layout.heights(rows)
    floats = weights.groups * PLACES * channels * layout.padded(rows)
    panels = bridge.empty(w.queue, (max(1, floats),), "float32")
    if rows * channels == 0:
        return panels
    per_output = w.shape[1] * 9
    # The input gradient is a convolution with the weights turned round.
    strides, taps = ((9, per_output), (8, -3, -1)) if weights.transposed else ((per_output, 9), (0, 3, 1))
    kernel = get_kernel(
        w.queue, "conv_winograd.cl", "transform_weights", "ppqqqqquiiu",
        TRANSFORM_WEIGHTS=1, SRC_T=bridge.STORAGE[w.dtype], MR=layout.width, SHORT=layout.short, KC=layout.block,
    )  # fmt: skip
    kernel(
        w.queue, (tall + short, -(-channels // layout.block), weights.groups), (1, 1, 1), w.buffer, panels.buffer,
        rows, channels, w.shape[0] // weights.groups * per_output, *strides, *taps, tall,
    )  # fmt: skip
    return panels
