"""Depthwise convolution of NCHW tensors and its gradients: one filter a channel, any stride and padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.arguments import whole_number
from clamp.ops.cast import launch, span_for
from clamp.ops.reduce import plan_rows
from clamp.ops.reduce_to_shape import sum_axis

_FRAME = 8192  # as FRAME in depthwise.clh
_TAPS = 64  # as TAPS in depthwise.clh
_BLOCK = 16  # as BLOCK in depthwise.clh
_UNITS_SUMMED = 256  # images, or bands of them, that a work-item adds up one by one, at most
_BLOCK_ELEMENTS = 32768  # elements of x that are worth reading in one go
_SPILL = 32  # elements of a phase of the frame for what stores write beyond its end
_SPECIALIZED = (3,)  # filter sizes that have a program of their own
_COLUMN_FILTERS = (3, 5, 7)  # sizes whose sums fit into registers, in columns
_COLUMN_FILTERS_BACKWARD = (3,)  # of gradients, which have a sum for each tap besides
_PLANES_PER_CORE = 1  # that columns need; fewer are cut into tiles
_COLUMN_PLANE = 2**17  # elements of the largest plane that columns go down; of larger ones the caches hold too little
_WIDTHS = (512, 256, 128, 64, 32, 16)  # columns of a tile where a whole row is too long
_GROUP_GPU = 256


@dataclass(frozen=True)
class Geometry:
    """A depthwise convolution's extents.

    Attributes:
        images, channels: of input and result.
        height, width: of the input's planes.
        out_height, out_width: of the result's planes.
        kernel_height, kernel_width: of the filters.
        stride, pad: alike in both directions.
    """

    images: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    stride: int
    pad: int

    @property
    def extents(self) -> tuple[int, ...]:
        """Arguments that every kernel takes."""
        return (
            self.channels, self.height, self.width, self.out_height, self.out_width,
            self.kernel_height, self.kernel_width, self.pad,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        """Elements of a filter."""
        return self.kernel_height * self.kernel_width

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        return self.images, self.channels, self.out_height, self.out_width

    @property
    def macros(self) -> dict[str, int]:
        """Macros of the tiled kernels: the stride, and the filter's size if it is a common one."""
        square = self.kernel_height == self.kernel_width in _SPECIALIZED
        return {"STRIDE": self.stride, **({"KERNEL": self.kernel_height} if square else {})}


def geometry(x: tuple[int, ...], w: tuple[int, ...], stride: int, pad: int) -> Geometry:
    """Extents of the convolution of a tensor of shape ``x`` with filters of shape ``w``.

    Raises:
        ValueError: x is not (N, C, H, W), w not (C, 1, KH, KW), or the filter is larger than the padded planes.
    """
    if len(x) != 4 or len(w) != 4 or w[0] != x[1] or w[1] != 1:
        raise ValueError(f"depthwise_conv2d takes x (N, C, H, W) and w (C, 1, KH, KW), got {x} and {w}")
    instead = "one number for both directions; conv2d with groups takes two"
    stride = whole_number("depthwise_conv2d", "stride", stride, 1, instead)
    pad = whole_number("depthwise_conv2d", "pad", pad, 0, instead)
    height, width = (extent + 2 * pad - size for extent, size in zip(x[2:], w[2:], strict=True))
    if min(height, width) < 0 or min(w[2:]) < 1:
        raise ValueError(f"depthwise_conv2d: filters of {w[2:]} do not fit into planes of {x[2:]} padded by {pad}")
    return Geometry(*x, height // stride + 1, width // stride + 1, *w[2:], stride, pad)


def depthwise_conv2d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, stride: int = 1, pad: int = 0, *, out_dtype: str
) -> Tensor:
    """Each channel of x convolved with its own filter, zeros around; accumulated in fp32.

    Args:
        x: (N, C, H, W).
        w: (C, 1, KH, KW).
        bias: (C,), or None. All in float32, float16 or bfloat16, in any mixture.
        out_dtype: dtype of the result.

    Returns:
        (N, C, (H + 2 pad - KH) // stride + 1, (W + 2 pad - KW) // stride + 1)

    Raises:
        ValueError: shapes that do not fit.
    """
    geo = geometry(tuple(x.shape), tuple(w.shape), stride, pad)
    if bias is not None and bias.size != geo.channels:
        raise ValueError(f"depthwise_conv2d: the bias must have shape ({geo.channels},), got {bias.shape}")
    y = bridge.empty(x.queue, geo.out_shape, out_dtype)
    if y.size == 0:
        return y
    offset = w if bias is None else bias
    buffers = x.buffer, w.buffer, offset.buffer, y.buffer
    types = {
        "X_T": bridge.STORAGE[x.dtype], "W_T": bridge.STORAGE[w.dtype], "B_T": bridge.STORAGE[offset.dtype],
        "Y_T": bridge.STORAGE[out_dtype], "BIAS": int(bias is not None),
    }  # fmt: skip
    if _in_columns(x.queue, geo, _COLUMN_FILTERS):
        _launch_forward_columns(x, buffers, geo, types)
    elif (tiles := _output_tiles(x.queue, geo)) is not None:
        _launch_forward_tiles(x, buffers, geo, tiles, types)
    else:
        _launch_elements("depthwise_forward.cl", "forward", y, buffers, geo, types)
    return y


def gradients(
    x: Tensor,
    w: Tensor,
    grad: Tensor,
    stride: int = 1,
    pad: int = 0,
    *,
    dx_dtype: str | None = None,
    dw_dtype: str | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by x and w in these dtypes, None for what is not wanted; summed in fp32, rounded once.

    On CPU devices both come from one pass over x and grad.

    Raises:
        ValueError: shapes that do not fit.
    """
    geo = geometry(tuple(x.shape), tuple(w.shape), stride, pad)
    _require_grad_shape(grad, geo)
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    if x.size == 0 or (dx_dtype is None and dw_dtype is None):
        return dx, None if dw_dtype is None else bridge.zeros(x.queue, w.shape, dw_dtype)
    with_weight = dw_dtype is not None
    if _in_columns(x.queue, geo, _COLUMN_FILTERS_BACKWARD):
        sums = _launch_gradient_columns(x, w, grad, dx, geo, with_weight)
    elif (tiles := _input_tiles(x.queue, geo)) is not None:
        sums = _launch_gradient_tiles(x, w, grad, dx, geo, tiles, with_weight)
    else:
        if dx is not None:
            _launch_input_elements(w, grad, dx, geo)
        sums = _launch_weight_elements(x, grad, geo) if with_weight else None
    return dx, None if sums is None or dw_dtype is None else bridge.view(_sum_parts(sums, dw_dtype), w.shape)


def _sum_parts(sums: Tensor, dtype: str) -> Tensor:
    """The sum of the parts' sums, (parts, channels, taps)."""
    parts = sums.shape[0]
    if parts == 1 and sums.dtype == dtype:
        return sums  # what would be left to do is a copy, which took a tenth of the whole
    return sum_axis(sums, 1, parts, sums.size // parts, dtype)


def _require_grad_shape(grad: Tensor, geo: Geometry) -> None:
    if tuple(grad.shape) != geo.out_shape:
        raise ValueError(
            f"depthwise_conv2d: the gradient must have the result's shape {geo.out_shape}, got {tuple(grad.shape)}"
        )


# --------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Tiles:
    """How planes are cut into tiles.

    Attributes:
        band, width: rows and columns of a tile, in outputs or in groups of ``stride`` inputs.
        across: tiles beside each other.
        pitch: floats of a phase of a row of the frame.
        count: tiles altogether.
        work: elements of a tile.
    """

    band: int
    width: int
    across: int
    pitch: int
    count: int
    work: int


def _output_tiles(queue: cl.CommandQueue, geo: Geometry) -> Tiles | None:
    """Tiles of the result; None where the plan for elements is the one to take."""
    if not _tiled(queue, geo):
        return None

    def frame(width: int) -> tuple[int, int]:
        pitch = width + (geo.kernel_width - 1) // geo.stride + 1 + _SPILL
        rows = _FRAME // (pitch * geo.stride)
        return pitch, (rows - geo.kernel_height) // geo.stride + 1

    return _fit(geo, geo.out_height, geo.out_width, frame)


def _input_tiles(queue: cl.CommandQueue, geo: Geometry) -> Tiles | None:
    """Tiles of the input's gradient, in groups of ``stride``; None where the plan for elements is the one to take."""
    if not _tiled(queue, geo):
        return None

    def frame(width: int) -> tuple[int, int]:
        pitch = width + (geo.kernel_width - 1) // geo.stride + 1 + _SPILL
        return pitch, _FRAME // pitch - (geo.kernel_height - 1) // geo.stride - 1

    return _fit(geo, -(-geo.height // geo.stride), -(-geo.width // geo.stride), frame)


def _tiled(queue: cl.CommandQueue, geo: Geometry) -> bool:
    return capabilities(queue).is_cpu and geo.stride <= 2 and geo.taps <= _TAPS


def _in_columns(queue: cl.CommandQueue, geo: Geometry, filters: tuple[int, ...]) -> bool:
    """Whether to go down whole planes, without a frame, which filters of these sizes can."""
    device = capabilities(queue)
    is_square = geo.kernel_height == geo.kernel_width in filters
    fits = geo.stride == 1 and is_square and geo.pad < geo.kernel_width
    are_small = geo.width > 0 and geo.height * geo.width <= _COLUMN_PLANE
    are_many = geo.images * geo.channels >= _PLANES_PER_CORE * device.compute_units
    return device.is_cpu and fits and are_small and are_many


def _fit(geo: Geometry, height: int, width: int, frame: Callable[[int], tuple[int, int]]) -> Tiles | None:
    """The widest tiles of at least a few rows; ``frame`` gives the pitch and rows of tiles of some width."""
    for columns in (width, *(narrow for narrow in _WIDTHS if narrow < width)):
        pitch, band = frame(columns)
        if band >= min(8, height):
            band = min(band, height)
            across = -(-width // columns)
            count = geo.images * geo.channels * -(-height // band) * across
            return Tiles(band, columns, across, pitch, count, band * columns * geo.stride)
    return None


def _parts(queue: cl.CommandQueue, units: int, sums: int) -> tuple[int, int]:
    """(units of a part, parts): into how many spans units that add to ``sums`` sums are cut to keep the device busy."""
    device = capabilities(queue)
    wanted = -(-(4 if device.is_cpu else 16) * device.compute_units // sums)
    each = min(-(-units // min(max(wanted, 1), units)), _UNITS_SUMMED)
    return each, -(-units // each)


def _channel_block(queue: cl.CommandQueue, geo: Geometry) -> int:
    """Channels that a work-item of ``gradient_tiles`` takes: enough for long reads, and work for every core."""
    fair = geo.channels // (4 * capabilities(queue).compute_units)
    return max(1, min(_BLOCK, fair, _BLOCK_ELEMENTS // (geo.height * geo.width)))


# ------------------------------------------------------------------------------------------------- launches


def _launch_forward_tiles(
    x: Tensor, buffers: tuple[Any, ...], geo: Geometry, tiles: Tiles, types: Mapping[str, object]
) -> None:
    each = plan_rows(x.queue, tiles.count, tiles.work).each
    kernel = get_kernel(
        x.queue, "depthwise_forward.cl", "forward_tiles", "ppppqquuiiuuuuuuui", FORWARD_TILES=1, **types, **geo.macros
    )
    kernel(
        x.queue, (-(-tiles.count // each),), (1,),
        *buffers, x.size, tiles.count, each, *geo.extents, tiles.band, tiles.width, tiles.pitch,
    )  # fmt: skip


def _launch_forward_columns(x: Tensor, buffers: tuple[Any, ...], geo: Geometry, types: Mapping[str, object]) -> None:
    planes = geo.images * geo.channels
    each = plan_rows(x.queue, planes, geo.out_height * geo.out_width).each
    kernel = get_kernel(
        x.queue, "depthwise_columns_forward.cl", "forward_columns", "ppppqquuqqqq",
        KERNEL=geo.kernel_width, PAD=geo.pad, **types,
    )  # fmt: skip
    kernel(x.queue, (-(-planes // each),), (1,), *buffers, x.size, planes, each, *geo.extents[:5])


def _launch_elements(
    file: str, name: str, out: Tensor, buffers: tuple[Any, ...], geo: Geometry, macros: Mapping[str, object]
) -> None:
    span = span_for(out.queue, out.size) if capabilities(out.queue).is_cpu else 1
    kernel = get_kernel(
        out.queue, file, f"{name}_elements", "p" * len(buffers) + "quuiiiiuuuu",
        **{f"{name.upper()}_ELEMENTS": 1}, **macros,
    )  # fmt: skip
    sizes = launch(out.queue, -(-out.size // span))
    kernel(out.queue, *sizes, *buffers, out.size, span, *geo.extents, geo.stride)


def _launch_input_elements(w: Tensor, grad: Tensor, dx: Tensor, geo: Geometry) -> None:
    types = {name: bridge.STORAGE[t.dtype] for name, t in (("G_T", grad), ("W_T", w), ("DX_T", dx))}
    _launch_elements("depthwise_backward.cl", "input_gradient", dx, (grad.buffer, w.buffer, dx.buffer), geo, types)


def _gradient_types(x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool) -> dict[str, object]:
    """Macros of the kernels that compute both gradients in one pass."""
    return {
        "INPUT_GRADIENT": int(dx is not None), "WEIGHT_GRADIENT": int(with_weight),
        "X_T": bridge.STORAGE[x.dtype], "G_T": bridge.STORAGE[grad.dtype], "W_T": bridge.STORAGE[w.dtype],
        "DX_T": bridge.STORAGE[grad.dtype if dx is None else dx.dtype],
    }  # fmt: skip


def _launch_gradient_tiles(
    x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, geo: Geometry, tiles: Tiles, with_weight: bool
) -> Tensor | None:
    """Writes dx, if there is one; returns partial sums of the weight's gradient, if wanted."""
    units = tiles.count // (geo.channels * tiles.across)
    each, parts = _parts(x.queue, units, geo.channels)
    block = _channel_block(x.queue, geo)
    sums = bridge.empty(x.queue, (parts, geo.channels, geo.taps), "float32") if with_weight else None
    kernel = get_kernel(
        x.queue, "depthwise_backward.cl", "gradient_tiles", "pppppqquuuuiiiiuuuuui", GRADIENT_TILES=1,
        SHIFT=geo.pad % geo.stride, **_gradient_types(x, w, grad, dx, with_weight), **geo.macros,
    )  # fmt: skip
    kernel(
        x.queue, (-(-geo.channels // block) * parts,), (1,),
        x.buffer, grad.buffer, w.buffer, (x if dx is None else dx).buffer, (x if sums is None else sums).buffer,
        x.size, grad.size, units, each, block, *geo.extents, tiles.band, tiles.width, tiles.pitch,
    )  # fmt: skip
    return sums


def _launch_gradient_columns(
    x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, geo: Geometry, with_weight: bool
) -> Tensor | None:
    """As ``_launch_gradient_tiles``."""
    each, parts = _parts(x.queue, geo.images, geo.channels)
    block = _channel_block(x.queue, geo)
    sums = bridge.empty(x.queue, (parts, geo.channels, geo.taps), "float32") if with_weight else None
    kernel = get_kernel(
        x.queue, "depthwise_columns_backward.cl", "gradient_columns", "pppppqquuuuqqqq",
        KERNEL=geo.kernel_width, PAD=geo.pad, **_gradient_types(x, w, grad, dx, with_weight),
    )  # fmt: skip
    kernel(
        x.queue, (-(-geo.channels // block) * parts,), (1,),
        x.buffer, grad.buffer, w.buffer, (x if dx is None else dx).buffer, (x if sums is None else sums).buffer,
        x.size, grad.size, geo.images, each, block, *geo.extents[:5],
    )  # fmt: skip
    return sums


def _launch_weight_elements(x: Tensor, grad: Tensor, geo: Geometry) -> Tensor:
    """Partial sums of the weight's gradient."""
    device = capabilities(x.queue)
    images, parts = _parts(x.queue, geo.images, geo.channels * geo.taps)
    sums = bridge.empty(x.queue, (parts, geo.channels, geo.taps), "float32")
    group = 1 if device.is_cpu else min(_GROUP_GPU, 1 << (device.max_work_group.bit_length() - 1))
    kernel = get_kernel(
        x.queue, "depthwise_backward.cl", "weight_gradient_elements", "pppuuuiiuuuuuu", WEIGHT_GRADIENT_ELEMENTS=1,
        WG=group, X_T=bridge.STORAGE[x.dtype], G_T=bridge.STORAGE[grad.dtype],
    )  # fmt: skip
    kernel(
        x.queue, (prod(sums.shape) * group,), (group,),
        x.buffer, grad.buffer, sums.buffer, geo.images, images, *geo.extents, geo.stride,
    )  # fmt: skip
    return sums
