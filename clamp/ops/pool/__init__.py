"""Max and average pooling of NCHW tensors without padding, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.arguments import whole_number
from clamp.ops.cast import cast, launch, span_for
from clamp.ops.reduce import expand, plan_rows, reduce_sum

_LINE = 2048  # as LINE in pool_rows.cl
_LINES = 8  # as LINES in pool_rows.cl
_TILE = 4096  # as TILE in pool_rows.cl
_SPECIALIZED = ((2, 2), (3, 1), (3, 2))  # (kernel size, stride) that have a program of their own
_TILE_ELEMENTS = 16384  # elements of a CPU's work-item in the tiled backward


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling.

    Attributes:
        planes: images times channels.
        height, width: of a plane of the input.
        out_height, out_width: how many windows there are.
        size, stride: of the square windows.
    """

    planes: int
    height: int
    width: int
    out_height: int
    out_width: int
    size: int
    stride: int

    @property
    def extents(self) -> tuple[int, int, int, int, int, int]:
        """Arguments that the kernels of pool_rows.cl and pool_elements.cl take."""
        return self.height, self.width, self.out_height, self.out_width, self.size, self.stride

    @property
    def margin(self) -> int:
        """Windows before its own that an element may belong to."""
        return (self.size - 1) // self.stride

    @property
    def groups(self) -> int:
        """Groups of ``stride`` columns in a row, the last perhaps incomplete."""
        return -(-self.width // self.stride)

    @property
    def are_pairs(self) -> bool:
        """Whether pool_2x2.cl takes them: 2 x 2 windows that cover every element once, at least 16 in a row."""
        covers_all = (self.height, self.width) == (2 * self.out_height, 2 * self.out_width)
        return self.size == self.stride == 2 and covers_all and self.out_width >= 16

    @property
    def macros(self) -> dict[str, int]:
        """Macros of the kernels that are compiled for common sizes."""
        known = (self.size, self.stride) in _SPECIALIZED
        return {"KERNEL": self.size, "STRIDE": self.stride} if known else {}


_SQUARES = "one for both directions (the stride is 2 if you pass none)"


def windows(name: str, shape: tuple[int, ...], kernel_size: int, stride: int) -> tuple[Windows, tuple[int, ...]]:
    """The windows that fit into a tensor's planes, and the result's shape.

    Raises:
        TypeError: kernel_size or stride is no number, but a pair or None.
        ValueError: the tensor is not NCHW, an extent is not positive, or the window is larger than the planes.
    """
    if len(shape) != 4:
        raise ValueError(f"{name} takes a tensor of shape (N, C, H, W), got {shape}")
    kernel_size = whole_number(name, "kernel_size", kernel_size, 1, _SQUARES)
    stride = whole_number(name, "stride", stride, 1, _SQUARES)
    n, c, height, width = shape
    if kernel_size > min(height, width):
        raise ValueError(f"{name}: a window of {kernel_size} x {kernel_size} does not fit into planes of {shape[2:]}")
    out_height, out_width = (height - kernel_size) // stride + 1, (width - kernel_size) // stride + 1
    return Windows(n * c, height, width, out_height, out_width, kernel_size, stride), (n, c, out_height, out_width)


def _require_grad_shape(name: str, grad: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(grad.shape) != shape:
        raise ValueError(f"{name}: the gradient must have the result's shape {shape}, got {tuple(grad.shape)}")


# -------------------------------------------------------------------------------------------------- maximum


def max_pool2d(x: Tensor, kernel_size: int, stride: int, *, out_dtype: str) -> Tensor:
    """The largest element of every window; NaN if there is one among them.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        kernel_size: side of a window, at most H and W.
        stride: distance of windows.
        out_dtype: dtype of the result.

    Returns:
        (N, C, (H - kernel_size) // stride + 1, (W - kernel_size) // stride + 1)

    Raises:
        ValueError: x is not NCHW, or no window fits.
    """
    win, shape = windows("max_pool2d", tuple(x.shape), kernel_size, stride)
    return cast(_pool(x, win, shape, 1, x.dtype), out_dtype)


def max_pool2d_backward(x: Tensor, grad: Tensor, kernel_size: int, stride: int, *, out_dtype: str) -> Tensor:
    """Gradient of ``max_pool2d``: each window's goes to its first largest element, found again in x.

    Args:
        x: what the forward read.
        grad: gradient of the result, in any storage type.
        out_dtype: dtype of the gradient returned.

    Raises:
        ValueError: the gradient's shape is not that of the result.
    """
    win, shape = windows("max_pool2d", tuple(x.shape), kernel_size, stride)
    _require_grad_shape("max_pool2d", grad, shape)
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    if win.are_pairs and capabilities(x.queue).is_cpu and bridge.nbytes(x) == bridge.nbytes(out):
        _pairs(win, "max_pool_2x2_backward", {"X_T": x.dtype}, x, cast(grad, out_dtype), out)
        return out
    plan = _plan_tiles(x.queue, win)
    types = {"G_T": bridge.STORAGE[grad.dtype], "DX_T": bridge.STORAGE[out_dtype]}
    if plan is None:
        chosen = _argmax(x, win, shape)
        _elements_backward(grad, chosen, out, win, 1, 1.0, types)
        return out
    band, tile, tiles, each = plan
    kernel = get_kernel(
        x.queue, "pool_rows.cl", "max_pool_tiles_backward", "pppqqq" + "u" * 9,
        MAX_POOL_TILES_BACKWARD=1, MAX=1, X_T=bridge.STORAGE[x.dtype], **types, **win.macros,
    )  # fmt: skip
    kernel(
        x.queue, (-(-tiles // each),), (1,),
        x.buffer, grad.buffer, out.buffer, x.size, grad.size, tiles, each, *win.extents, band, tile,
    )  # fmt: skip
    return out


def _plan_tiles(queue: cl.CommandQueue, win: Windows) -> tuple[int, int, int, int] | None:
    """(rows of a tile, groups of columns of a tile, tiles, tiles a work-item); None where elements do better."""
    if not capabilities(queue).is_cpu:
        return None
    halo = win.size - 1
    for tile in (win.groups, 512, 256, 64, 16):
        step = win.margin + -(-tile // 16) * 16
        band = win.height if win.height * step <= _TILE else _TILE // step - 2 * halo
        if tile <= win.groups and band >= min(2 * halo + 1, win.height) and _fits_line(win, tile + win.margin):
            break
    else:
        return None
    bands, across = -(-win.height // band), -(-win.groups // tile)
    tiles = win.planes * bands * across
    each = plan_rows(queue, tiles, min(band * tile * win.stride, _TILE_ELEMENTS)).each
    return band, tile, tiles, each


def _fits_line(win: Windows, count: int) -> bool:
    """Whether the columns of ``count`` windows, split into phases, fit into a line."""
    return win.stride * (count + win.margin + 32) + win.size <= _LINE


def _argmax(x: Tensor, win: Windows, shape: tuple[int, ...]) -> Tensor:
    """Position in its plane of every window's maximum, int32."""
    chosen = bridge.empty(x.queue, shape, "int32")
    span = span_for(x.queue, chosen.size) if capabilities(x.queue).is_cpu else 1
    kernel = get_kernel(
        x.queue,
        "pool_elements.cl",
        "max_pool_argmax",
        "ppquuuuuuu",
        MAX_POOL_ARGMAX=1,
        MAX=1,
        X_T=bridge.STORAGE[x.dtype],
    )
    kernel(x.queue, *launch(x.queue, -(-chosen.size // span)), x.buffer, chosen.buffer, chosen.size, span, *win.extents)
    return chosen


# -------------------------------------------------------------------------------------------------- average


def avg_pool2d(x: Tensor, kernel_size: int, stride: int, *, out_dtype: str) -> Tensor:
    """The mean of every window, summed in fp32 and rounded once.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        kernel_size: side of a window, at most H and W.
        stride: distance of windows.
        out_dtype: dtype of the result.

    Raises:
        ValueError: x is not NCHW, or no window fits.
    """
    win, shape = windows("avg_pool2d", tuple(x.shape), kernel_size, stride)
    if win.size == win.height == win.width:
        return global_avg_pool2d(x, out_dtype=out_dtype)
    return _pool(x, win, shape, 0, out_dtype)


def avg_pool2d_backward(
    shape: tuple[int, ...], grad: Tensor, kernel_size: int, stride: int, *, out_dtype: str
) -> Tensor:
    """Gradient of ``avg_pool2d``: every element gets its share from all windows it is in, summed in fp32.

    Args:
        shape: that of the forward's input.
        grad: gradient of the result, in any storage type.
        out_dtype: dtype of the gradient returned.

    Raises:
        ValueError: the gradient's shape is not that of the result.
    """
    win, out_shape = windows("avg_pool2d", shape, kernel_size, stride)
    _require_grad_shape("avg_pool2d", grad, out_shape)
    out = bridge.empty(grad.queue, shape, out_dtype)
    if out.size == 0:
        return out
    if win.are_pairs and capabilities(grad.queue).is_cpu:
        _pairs(win, "avg_pool_2x2_backward", {"G_T": grad.dtype, "DX_T": out_dtype}, grad, out)
        return out
    scale = 1.0 / win.size**2
    types = {"G_T": bridge.STORAGE[grad.dtype], "DX_T": bridge.STORAGE[out_dtype]}
    tile = min(-(-win.groups // 16) * 16, (_LINE - win.margin - 32) // 16 * 16)
    if not capabilities(grad.queue).is_cpu or tile < 16:
        _elements_backward(grad, grad, out, win, 0, scale, types)
        return out
    rows = win.planes * win.height
    plan = plan_rows(grad.queue, rows, win.width)
    pitch = tile + win.margin + 32
    lines = min(_LINES, max(_LINE // pitch, 1)) if tile >= win.groups else 1
    kernel = get_kernel(
        grad.queue, "pool_rows.cl", "avg_pool_rows_backward", "ppqq" + "u" * 10 + "f",
        AVG_POOL_ROWS_BACKWARD=1, MAX=0, **types, **win.macros,
    )  # fmt: skip
    kernel(
        grad.queue, plan.global_size, plan.local_size,
        grad.buffer, out.buffer, grad.size, rows, plan.each, *win.extents, tile, pitch, lines, scale,
    )  # fmt: skip
    return out


def global_avg_pool2d(x: Tensor, *, out_dtype: str) -> Tensor:
    """The mean of every plane, summed in fp32: (N, C, H, W) -> (N, C, 1, 1).

    Raises:
        ValueError: x is not NCHW, or its planes are empty.
    """
    n, c, area = _planes(tuple(x.shape))
    rows = bridge.view(x, (n * c, area))
    return bridge.view(reduce_sum(rows, 1, out_dtype=out_dtype, divisor=float(area)), (n, c, 1, 1))


def global_avg_pool2d_backward(shape: tuple[int, ...], grad: Tensor, *, out_dtype: str) -> Tensor:
    """Gradient of ``global_avg_pool2d`` of a tensor of this shape.

    Raises:
        ValueError: the gradient's shape is not (N, C, 1, 1).
    """
    n, c, area = _planes(shape)
    _require_grad_shape("global_avg_pool2d", grad, (n, c, 1, 1))
    return bridge.view(expand(grad, (n * c, area), 1, out_dtype=out_dtype, divisor=float(area)), shape)


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 4 or shape[2] * shape[3] == 0:
        raise ValueError(f"global_avg_pool2d takes a tensor of shape (N, C, H, W) with H, W > 0, got {shape}")
    return shape[0], shape[1], shape[2] * shape[3]


# ------------------------------------------------------------------------------------------------- launches


def _pool(x: Tensor, win: Windows, shape: tuple[int, ...], is_max: int, out_dtype: str) -> Tensor:
    y = bridge.empty(x.queue, shape, out_dtype)
    if y.size == 0:
        return y
    if win.are_pairs and capabilities(x.queue).is_cpu:
        if is_max:
            _pairs(win, "max_pool_2x2", {"X_T": x.dtype}, x, y)
        else:
            _pairs(win, "avg_pool_2x2", {"X_T": x.dtype, "Y_T": out_dtype}, x, y)
        return y
    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype], "MAX": is_max}
    scale = 1.0 / win.size**2
    tile = -(-win.out_width // 16) * 16
    while tile > 16 and not _fits_line(win, tile):
        tile = tile // 32 * 16
    if capabilities(x.queue).is_cpu and _fits_line(win, tile):
        rows = win.planes * win.out_height
        plan = plan_rows(x.queue, rows, win.out_width * win.stride)
        kernel = get_kernel(
            x.queue, "pool_rows.cl", "pool_rows", "ppqq" + "u" * 10 + "f", POOL_ROWS=1, **types, **win.macros
        )
        pitch = tile + win.margin + 32
        lines = min(_LINES, max(_LINE // (pitch * win.stride), 1)) if tile >= win.out_width else 1
        kernel(
            x.queue, plan.global_size, plan.local_size,
            x.buffer, y.buffer, x.size, rows, plan.each, *win.extents, tile, pitch, lines, scale,
        )  # fmt: skip
        return y
    span = span_for(x.queue, y.size) if capabilities(x.queue).is_cpu else 1
    kernel = get_kernel(x.queue, "pool_elements.cl", "pool_elements", "ppq" + "u" * 7 + "f", POOL_ELEMENTS=1, **types)
    kernel(x.queue, *launch(x.queue, -(-y.size // span)), x.buffer, y.buffer, y.size, span, *win.extents, scale)
    return y


def _pairs(win: Windows, name: str, dtypes: dict[str, str], *operands: Tensor) -> None:
    """Runs a kernel of pool_2x2.cl; the result is the last operand."""
    queue = operands[0].queue
    pairs = win.planes * win.out_height
    plan = plan_rows(queue, pairs, 4 * win.out_width)
    types = {macro: bridge.STORAGE[dtype] for macro, dtype in dtypes.items()}
    kernel = get_kernel(queue, "pool_2x2.cl", name, "p" * len(operands) + "quu", **{name.upper(): 1}, **types)
    buffers = (operand.buffer for operand in operands)
    kernel(queue, plan.global_size, plan.local_size, *buffers, pairs, plan.each, win.out_width)


def _elements_backward(
    grad: Tensor, chosen: Tensor, out: Tensor, win: Windows, is_max: int, scale: float, types: dict[str, str]
) -> None:
    span = span_for(out.queue, out.size) if capabilities(out.queue).is_cpu else 1
    kernel = get_kernel(
        out.queue, "pool_elements.cl", "pool_elements_backward", "pppq" + "u" * 7 + "f",
        POOL_ELEMENTS_BACKWARD=1, MAX=is_max, **types,
    )  # fmt: skip
    kernel(
        out.queue, *launch(out.queue, -(-out.size // span)),
        grad.buffer, chosen.buffer, out.buffer, out.size, span, *win.extents, scale,
    )  # fmt: skip
