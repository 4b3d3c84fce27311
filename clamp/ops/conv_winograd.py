"""3x3 convolutions with fewer multiplications, on CPU devices (kernels/conv_winograd.cl, conv_winograd_strided.cl).

Winograd's F(4x4, 3x3), and for stride 2 F(4x4, 2x2) of even and odd rows and columns, add multiples of elements before
they multiply them, in fp32. Their sums are off by some fp32 roundings of the largest element in the tile, where the
direct sum is off by some of the terms. Storing the result in 16 bits rounds 2^13 times as coarsely; so they serve
16-bit storage only, and float32 is summed directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.conv_geometry import Pair, Window, pair
from clamp.ops.conv_packed import deal
from clamp.ops.conv_weights import PanelLayout, Weights
from clamp.ops.gemm_operands import Epilogue
from clamp.ops.gemm_packed import Tile, tile_of

_TAPS = 9  # planes of the weights as they are, behind the transformed ones
_ROW_PANELS = 4  # of weights, whose sums rest at a time
_PANEL_FLOATS = 8192  # of a place: what a first-level cache holds beside the weights
_SHORT = 4  # rows of the last panels of weights
_ITEMS_PER_CORE = 4  # each has a workspace of its own, of a few hundred KB to a few MB
_OVERREAD = 16  # elements that may be read beyond a staged source: what 16 tiles read, of which one is real
_STAGED_BYTES = 256 * 2**20  # a larger batch is computed in slices
_STAGED_ROWS = 256  # of a work-item
# Below, transforming takes longer than it saves: the input, or (positions of a batch) the weights.
_MIN_CHANNELS, _MIN_POSITIONS, _MIN_POSITIONS_STRIDED = 16, 512, 4096


def fits(extent: Pair, window: Window) -> bool:
    """Whether a convolution is of the kind, and so is its input gradient."""
    if extent != (3, 3) or window.dilation != (1, 1):
        return False
    return max(window.pad) <= 2 if window.stride == (1, 1) else (window.stride, window.pad) == ((2, 2), (1, 1))


def pays(x: Tensor, weights: Weights, window: Window, out: Tensor) -> bool:
    """Whether this kernel is faster than `conv_packed`, and the result is stored in so few bits that its rounding does
    not show."""
    if "float32" in (x.dtype, out.dtype) or not fits(pair(weights.tensor.shape[2:]), window):
        return False
    positions = min(tensor.size // max(1, tensor.shape[1]) for tensor in (x, out))
    least = _MIN_POSITIONS if window.stride == (1, 1) else _MIN_POSITIONS_STRIDED
    return min(weights.rows, weights.channels) >= _MIN_CHANNELS and positions >= least


@dataclass(frozen=True)
class Form:
    """A kind of convolution: what its file in kernels/ defines, by the same names.

    Attributes:
        edge, source_edge: rows and columns of a tile's outputs; and of the source, from a tile to the next.
        reach: rows and columns of the source that a tile reads beyond those.
        read_planes, places, weight_planes, grad_places: of a transformed tile of the source, of its sums, of the
            weights, and of a transformed tile of the outputs' gradient.
    """

    file: str
    edge: int
    source_edge: int
    reach: int
    read_planes: int
    places: int
    weight_planes: int
    grad_places: int
    macros: tuple[tuple[str, int], ...] = ()


PLAIN = Form("conv_winograd.cl", 4, 4, 2, 36, 36, 36, 36)
STRIDED = Form("conv_winograd_strided.cl", 4, 8, 1, 81, 25, 81, 25, (("GRADIENT", 0),))
STRIDED_GRADIENT = Form("conv_winograd_strided.cl", 8, 4, 1, 25, 81, 81, 25, (("GRADIENT", 1),))


@dataclass(frozen=True)
class Tiles:
    """The tiles of an image's outputs."""

    form: Form
    rows: int
    columns: int

    @classmethod
    def of(cls, form: Form, size: Pair) -> Tiles:
        """Tiles of ``size`` outputs."""
        return cls(form, *(-(-extent // form.edge) for extent in size))

    @property
    def count(self) -> int:
        """Tiles of an image."""
        return self.rows * self.columns

    @property
    def staged(self) -> Pair:
        """Rows of a staged plane, and columns of a phase of a row."""
        return self.form.source_edge * self.rows + self.form.reach, self.columns + 1

    @property
    def plane(self) -> int:
        """Elements of a staged plane."""
        rows, columns = self.staged
        return rows * self.form.source_edge * columns

    @property
    def pieces(self) -> int:
        """Of 16 tiles that are transformed together, how many parts lie in rows of their own."""
        return 4 if self.columns <= 4 else 2 if self.columns <= 8 else 1


def convolve(x: Tensor, weights: Weights, window: Window, out: Tensor, epilogue: Epilogue) -> None:
    """Writes the convolution of x (N, C, H, W), or its input gradient if the weights are transposed, through the
    epilogue, over ``out`` (N, F, OH, OW).

    Raises:
        ValueError: x or out is not stored in 16 bits.
    """
    if "float32" in (x.dtype, out.dtype):
        raise ValueError(f"conv2d: WINOGRAD reads and stores 16 bits; x is {x.dtype}, the result {out.dtype}")
    if out.size == 0:
        return
    form, pad = PLAIN, window.pad
    if window.stride == (2, 2):
        form, pad = (STRIDED_GRADIENT, (0, 0)) if weights.transposed else (STRIDED, pad)
    elif weights.transposed:
        pad = 2 - pad[0], 2 - pad[1]
    tiles = Tiles.of(form, pair(out.shape[2:]))
    for first, images in slices(x, tiles):
        staged = stage(x, tiles, first, images, pad) if x.size else out
        _convolve(staged, tiles, images, weights, out, first * (out.size // out.shape[0]), epilogue)


def slices(x: Tensor, tiles: Tiles) -> Iterator[tuple[int, int]]:
    """(first image, images) of the parts in which a batch is staged, so that the workspace stays small."""
    each = max(1, _STAGED_BYTES // max(1, 2 * x.shape[1] * tiles.plane))
    for first in range(0, x.shape[0], each):
        yield first, min(each, x.shape[0] - first)


def stage(x: Tensor, tiles: Tiles, first: int, images: int, pad: Pair) -> Tensor:
    """Images ``first`` and following of x (N, C, H, W), padded, laid out for tiles."""
    rows = images * x.shape[1] * tiles.staged[0]
    out = bridge.empty(x.queue, (images * x.shape[1] * tiles.plane + _OVERREAD,), x.dtype)
    each = max(1, min(_STAGED_ROWS, rows // (4 * capabilities(x.queue).compute_units)))
    kernel = get_kernel(
        x.queue, tiles.form.file, "stage_tiles", "ppqqqqqqquuu", STAGE=1, **dict(tiles.form.macros)
    )  # fmt: skip
    kernel(
        x.queue, (-(-rows // each),), (1,), x.buffer, out.buffer, first * (x.size // x.shape[0]), x.size, rows,
        *x.shape[2:], *tiles.staged, *pad, each,
    )  # fmt: skip
    return out


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
    bias = out if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    kernel = get_kernel(
        queue, form.file, "winograd", "pppppqqqqqqqqqquuuii",
        WINOGRAD=1, X_T=bridge.STORAGE[staged.dtype], MR=tile.rows, SHORT=layout.short, NR=tile.columns,
        KC=layout.block, ROW_PANELS=_ROW_PANELS, PIECES=tiles.pieces, **dict(form.macros), **epilogue.macros,
    )  # fmt: skip
    kernel(
        queue, grid, (1, 1, 1), transformed(weights, form).buffer, staged.buffer, out.buffer, bias.buffer, work.buffer,
        begin, columns, weights.rows, channels, tiles.count, tiles.columns, *tiles.staged,
        *out.shape[2:], tall + short, tall, each_m, epilogue.bias is not None, epilogue.relu,
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
    kernel = get_kernel(
        w.queue, form.file, "transform_weights", "ppqqqqquiiu",
        TRANSFORM_WEIGHTS=1, SRC_T=bridge.STORAGE[w.dtype], MR=layout.width, SHORT=layout.short, KC=layout.block,
        **dict(form.macros),
    )  # fmt: skip
    kernel(
        w.queue, (tall + short, -(-channels // layout.block), weights.groups), (1, 1, 1), w.buffer, panels.buffer,
        rows, channels, w.shape[0] // weights.groups * per_output, *strides, *taps, tall,
    )  # fmt: skip
    return panels
