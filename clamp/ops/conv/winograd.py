"""3x3 convolutions and their gradients with fewer multiplications, on CPU devices (kernels/conv_winograd.cl,
conv_winograd_strided.cl).

Winograd's F(4x4, 3x3), and for stride 2 F(4x4, 2x2) of even and odd rows and columns, add multiples of elements before
they multiply them, in fp32. Their sums err by a few fp32 roundings of the largest element in the tile, a direct sum
by roundings of its own terms. Storing the result in 16 bits rounds 2^13 times as coarsely; so they serve 16-bit storage
only, and float32 is summed directly.

Of a weight gradient, F(3x3, 4x4) and its like for stride 2, sums over many positions are off by up to twice the error
of adding term by term. Where elements times gradients come to 2^110 and more, or one of them to 2^120, which only
bfloat16 stores, they may overflow on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv import dot_bf16
from clamp.ops.conv.geometry import Pair, deal, divide, pair
from clamp.ops.conv.packed import tile_of_gradient
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.gemm.plan import Tile, tile_of
from clamp.ops.gemm.problem import Epilogue

NAME = "winograd"
TAKES = "3x3 kernels of stride 1 padded by up to 2, or of stride 2 padded by 1; it reads and stores 16 bits"
IN_WORDS = "Winograd's sums, with fewer multiplications"

_TAPS = 9  # planes of the weights as they are, behind the transformed ones
_ROW_PANELS = 4  # of weights, whose sums rest at a time
_PANEL_FLOATS = 8192  # of a place: what a first-level cache holds beside the weights
_SHORT = 4  # rows of the last panels of weights
_ITEMS_PER_CORE = 4  # each has a workspace of its own, of a few hundred KB to a few MB
# Channels, and positions of a batch, by whether there are strides: below, transforming the input, or the weights, takes
# longer than it saves; or, of a gradient by the weights, to transform and to add up.
_LEAST, _GRADIENT_LEAST = ((16, 512), (16, 4096)), ((16, 1024), (48, 8192))
_LEAST_WITH_DOT = 6144  # of positions without strides: the processor's dot product takes half of the time term by term
# With strides, positions for each pair of channels, whose weights are transformed into 81 numbers that lie in no cache:
# of the gradient by the input, which shares a tile among more positions, and of others
_EACH_INPUT, _EACH = 0.125, 2.0


# ------------------------------------------------------------------------------------------ tiles

_OVERREAD = 16  # elements that may be read beyond a staged source: what 16 tiles read, of which one is real
_STAGED_BYTES = 256 * 2**20  # a larger batch is computed in slices
_STAGED_ROWS = 256  # of a work-item


_FILES = ("conv_winograd.cl", "conv_winograd_strided.cl")
_TENSORS = {
    "stage_tiles": "", "winograd": "- X", "transform_weights": "SRC", "weight_grad": "X G",
    "weight_grad_finish": "- OUT",
}  # fmt: skip
_KERNELS = {(file, name): Kernel(file, name, tensors) for file in _FILES for name, tensors in _TENSORS.items()}


@dataclass(frozen=True)
class Form:
    """A kind of convolution: what its file in kernels/ defines, by the same names."""

    file: str
    # edge, source_edge: rows and columns of a tile's outputs; and of the source, from a tile to the next
    edge: int
    source_edge: int
    reach: int  # rows and columns of the source that a tile reads beyond those
    # read_planes, places, weight_planes, grad_places: of a transformed tile of the source, of its sums, of the
    # weights, and of a transformed tile of the outputs' gradient
    read_planes: int
    places: int
    weight_planes: int
    grad_places: int
    macros: Mapping[str, int] = field(default_factory=dict)  # of its kernels

    def kernel(self, name: str) -> Kernel:
        """A kernel of its file."""
        return _KERNELS[self.file, name]


PLAIN = Form(_FILES[0], 4, 4, 2, 36, 36, 36, 36)
STRIDED = Form(_FILES[1], 4, 8, 1, 81, 25, 81, 25, {"GRADIENT": 0})
STRIDED_GRADIENT = Form(_FILES[1], 8, 4, 1, 25, 81, 81, 25, {"GRADIENT": 1})


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


def slices(x: Tensor, tiles: Tiles) -> list[tuple[int, int]]:
    """(first image, images) of the parts in which a batch is staged, so that the workspace stays small."""
    each = max(1, _STAGED_BYTES // max(1, 2 * x.shape[1] * tiles.plane))
    return [(first, min(each, x.shape[0] - first)) for first in range(0, x.shape[0], each)]


def stage(x: Tensor, tiles: Tiles, first: int, images: int, pad: Pair) -> Tensor:
    """Images ``first`` and following of x (N, C, H, W), padded, laid out for tiles."""
    rows = images * x.shape[1] * tiles.staged[0]
    out = bridge.empty(x.queue, (images * x.shape[1] * tiles.plane + _OVERREAD,), x.dtype)
    each = max(1, min(_STAGED_ROWS, rows // (4 * capabilities(x.queue).compute_units)))
    tiles.form.kernel("stage_tiles")(
        x.queue, (-(-rows // each),), (1,), x, out, first * (x.size // x.shape[0]), x.size, rows,
        *x.shape[2:], *tiles.staged, *pad, each, STAGE=1, **tiles.form.macros,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------ convolutions


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
    with_dot = dot_bf16.fits(problem) and dot_bf16.pays(problem)
    if not problem.device.is_cpu or (is_strided and with_dot):
        return False
    if problem.gradient == "weights":
        if "float32" in problem.dtypes:  # whose own rounding is not coarse beside that of adding some elements
            return False
        if max(problem.size) <= PLAIN.edge // 2:  # a quarter of a tile is there
            return False
        positions, (channels, least) = prod(problem.size), _GRADIENT_LEAST[is_strided]
    else:
        positions, (channels, least) = min(prod(problem.image), prod(problem.size)), _LEAST[is_strided]
        least = max(least, _LEAST_WITH_DOT) if with_dot else least
    if is_strided:
        each = _EACH_INPUT if problem.gradient == "input" else _EACH
        least = max(least, int(each * problem.channels * problem.features))
    return min(problem.channels, problem.features) >= channels and problem.images * positions >= least


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
        MR=tile.rows, SHORT=layout.short, NR=tile.columns,
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
        MR=layout.width, SHORT=layout.short, KC=layout.block, **form.macros,
    )  # fmt: skip
    return panels


# ------------------------------------------------------------------------------------------ weight gradients

_BLOCK = 64  # tiles that are transformed at a time
_MOST_CHANNELS = 128  # input channels whose tiles a second-level cache holds, transformed
_GRADIENT_ITEMS_PER_CORE = 1  # each has partial sums to add up, and a workspace of a few MB


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out`` (F, C / groups, 3, 3)."""
    queue, groups, rows, channels = out.queue, problem.window.groups, problem.features, problem.channels
    form = PLAIN if problem.window.stride == (1, 1) else STRIDED
    tiles, tile = Tiles.of(form, pair(grad.shape[2:])), tile_of_gradient(queue, rows)
    batch = slices(x, tiles)
    panels_k, panels_m = -(-channels // tile.rows), -(-rows // tile.columns)
    floats = groups * form.weight_planes * panels_k * panels_m * tile.rows * tile.columns
    items = _GRADIENT_ITEMS_PER_CORE * capabilities(queue).compute_units
    # Each part of the channels transforms the gradients for itself.
    parts = -(-channels // _MOST_CHANNELS)
    division = divide(items, groups, batch[0][1] * tiles.count, _BLOCK, panels_k, floats, parts)
    partial = bridge.empty(queue, (division.chunks * floats,), "float32")
    grid = (-(-panels_k // division.each_k), division.chunks, groups)
    # One of three sizes, so that few channels take a small workspace and few programs are compiled.
    most = next(size for size in (24, 72, 144) if division.each_k * tile.rows <= size)
    read_floats, grad_floats = most * _BLOCK + 16, _BLOCK * tile.columns + 16
    slice_floats = form.read_planes * read_floats + form.grad_places * grad_floats
    slice_floats += form.edge * (form.edge * _BLOCK + 16) * 16
    work = bridge.empty(queue, (prod(grid) * slice_floats,), "float32")
    for first, images in batch:
        staged = stage(x, tiles, first, images, problem.window.pad)
        form.kernel("weight_grad")(
            queue, grid, (1, 1, 1), staged, grad, partial, work, first * (grad.size // grad.shape[0]),
            images * tiles.count, rows, channels, tiles.count, tiles.columns, *tiles.staged, *grad.shape[2:], grad.size,
            division.each_k, first > 0,
            MR=tile.rows, NR=tile.columns, BLOCK=_BLOCK, CHANNELS=most, PIECES=tiles.pieces, **form.macros,
        )  # fmt: skip
    form.kernel("weight_grad_finish")(
        queue, (panels_k, panels_m, groups), (1, 1, 1), partial, out, rows, channels, division.chunks,
        MR=tile.rows, NR=tile.columns, **form.macros,
    )  # fmt: skip
    return None
