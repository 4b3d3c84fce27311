"""Pooling, padding, resizing and sampling under autograd, and netcl's tensor-level versions of them.

Nothing is kept for backward but the input that the graph holds anyway: max pooling finds its maxima again in it. A
grid, and the map that makes one, hold coordinates: they are read in their own dtype under every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting, Gradients, Operand, bound, float_operands, floats_as_is
from clamp.casting.policies import Float
from clamp.casting.registry import implements
from clamp.functions.recompute import is_needless
from clamp.ops import grid as grid_ops
from clamp.ops import pad as pad_ops
from clamp.ops import pool as pool_ops
from clamp.ops import upsample as upsample_ops
from clamp.ops.arguments import number, shown, whole_number
from clamp.ops.cast import cast
from clamp.ops.reduce import reduce_sum

# -------------------------------------------------------------------------------------------- pooling


@implements("netcl.autograd.max_pool2d", "netcl.nn.pooling.max_pool2d", uses=pool_ops.ENGINES)
def max_pool2d(casting: Casting, x: Any, kernel_size: int = 2, stride: int = 2, tape: Tape | None = None) -> Any:
    """The largest element of every kernel_size x kernel_size window of an NCHW tensor, without padding.

    NaN wins. The gradient of a window goes to its first largest element. (netcl refuses windows that overlap or
    leave gaps in backward; they work here.)

    Raises:
        ValueError: x is not NCHW, or no window fits.
    """
    (operand,) = float_operands(casting, x)
    dtype = casting.result_dtype(operand)

    def pooled() -> Tensor:
        return pool_ops.max_pool2d(operand.value, kernel_size, stride, out_dtype=dtype)

    if is_needless():
        sides = ((extent - kernel_size) // stride + 1 for extent in operand.shape[-2:])
        out: Tensor = bridge.Late(pooled, operand.value, (*operand.shape[:-2], *sides), dtype)
    else:
        out = pooled()
    gradients: Gradients = {
        operand: lambda grad, dtype: pool_ops.max_pool2d_backward(
            operand.value, grad, kernel_size, stride, out_dtype=dtype
        )
    }
    return bound(out, gradients, "max_pool2d", tape)


@implements("netcl.autograd.avg_pool2d", "netcl.nn.pooling.avg_pool2d", uses=(pool_ops,))
def avg_pool2d(casting: Casting, x: Any, kernel_size: int = 2, stride: int = 2, tape: Tape | None = None) -> Any:
    """The mean of every kernel_size x kernel_size window of an NCHW tensor, without padding; summed in fp32.

    Raises:
        ValueError: x is not NCHW, or no window fits.
    """
    (operand,) = float_operands(casting, x)
    shape = operand.shape
    out = pool_ops.avg_pool2d(operand.value, kernel_size, stride, out_dtype=casting.result_dtype(operand))
    gradients: Gradients = {
        operand: lambda grad, dtype: pool_ops.avg_pool2d_backward(shape, grad, kernel_size, stride, out_dtype=dtype)
    }
    return bound(out, gradients, "avg_pool2d", tape, unread=(operand,))


@implements("netcl.autograd.global_avg_pool2d", "netcl.nn.pooling.global_avg_pool2d", uses=(reduce_sum,))
def global_avg_pool2d(casting: Casting, x: Any, tape: Tape | None = None) -> Any:
    """The mean of every plane, (N, C, H, W) -> (N, C, 1, 1); summed in fp32.

    Raises:
        ValueError: x is not NCHW, or its planes are empty.
    """
    (operand,) = float_operands(casting, x)
    shape = operand.shape
    out = pool_ops.global_avg_pool2d(operand.value, out_dtype=casting.result_dtype(operand))
    gradients: Gradients = {
        operand: lambda grad, dtype: pool_ops.global_avg_pool2d_backward(shape, grad, out_dtype=dtype)
    }
    return bound(out, gradients, "global_avg_pool2d", tape, unread=(operand,))


@implements("netcl.nn.pooling.max_pool2d_backward", uses=pool_ops.ENGINES)
def max_pool2d_backward(
    casting: Casting, x: Tensor, grad_out: Tensor, kernel_size: int = 2, stride: int = 2, indices: Any = None
) -> Tensor:
    """Gradient of ``max_pool2d`` of a bare tensor, in x's dtype (``indices``: netcl's numpy backend's)."""
    source, grad = floats_as_is(x, grad_out)
    bridge.require_same_queue("max_pool2d_backward", source.value, grad.value)
    return pool_ops.max_pool2d_backward(source.value, grad.value, kernel_size, stride, out_dtype=source.grad_dtype)


@implements("netcl.nn.pooling.avg_pool2d_backward", uses=pool_ops.ENGINES)
def avg_pool2d_backward(casting: Casting, x: Tensor, grad_out: Tensor, kernel_size: int = 2, stride: int = 2) -> Tensor:
    """Gradient of ``avg_pool2d`` of a bare tensor, in x's dtype; of x only the shape is read."""
    source, grad = floats_as_is(x, grad_out)
    return pool_ops.avg_pool2d_backward(source.shape, grad.value, kernel_size, stride, out_dtype=source.grad_dtype)


@implements("netcl.nn.pooling.global_avg_pool2d_backward", uses=(reduce_sum,))
def global_avg_pool2d_backward(casting: Casting, x: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient of ``global_avg_pool2d`` of a bare tensor, in x's dtype; of x only the shape is read."""
    source, grad = floats_as_is(x, grad_out)
    return pool_ops.global_avg_pool2d_backward(source.shape, grad.value, out_dtype=source.grad_dtype)


# -------------------------------------------------------------------------------------------- padding


@implements("netcl.autograd.pad2d", "netcl.nn.padding.pad2d", uses=(pad_ops, cast))
def pad2d(casting: Casting, x: Any, pad: int = 1, mode: str = "zero", tape: Tape | None = None) -> Any:
    """An NCHW tensor with ``pad`` elements more on each side of its planes; with none, x itself.

    Args:
        mode: ``"zero"``, or ``"reflect"``, netcl's name for mirroring the plane with its edge.

    Raises:
        ValueError: x is not NCHW, another mode (netcl pads with zeros then, and raises in backward), or a mirrored
            border wider than the plane.
    """
    (operand,) = float_operands(casting, x)
    shape = operand.shape
    pad = whole_number("pad2d", "pad", pad, 0, "the same on all four sides; a slice takes edges off")
    dtype = casting.result_dtype(operand)
    if pad == 0:
        out = cast(operand.value, dtype)
        out = bridge.view(out, shape) if out is operand.value else out
    else:
        out = pad_ops.pad2d(operand.value, pad, mode, out_dtype=dtype)

    def gradient(grad: Tensor, dtype: str) -> Tensor:
        return cast(grad, dtype) if pad == 0 else pad_ops.pad2d_backward(grad, shape, pad, mode, out_dtype=dtype)

    return bound(out, {operand: gradient}, "pad2d", tape, unread=(operand,))


@implements("netcl.nn.padding.pad2d_backward", uses=(pad_ops,))
def pad2d_backward(
    casting: Casting, grad_out: Tensor, pad: int = 1, mode: str = "zero", in_shape: tuple[int, ...] | None = None
) -> Tensor:
    """Gradient of ``pad2d`` of a bare tensor of shape ``in_shape``, in the gradient's dtype.

    Raises:
        ValueError: ``in_shape`` is missing, or does not belong to the gradient's shape.
    """
    (grad,) = floats_as_is(grad_out)
    pad = whole_number("pad2d_backward", "pad", pad, 0)
    if pad == 0:
        return grad.value
    if in_shape is None:
        raise ValueError("pad2d_backward needs in_shape, the shape of what was padded")
    return pad_ops.pad2d_backward(grad.value, tuple(in_shape), pad, mode, out_dtype=grad.grad_dtype)


# -------------------------------------------------------------------------------------------- resizing

Size = Sequence[int] | int | None
ScaleFactor = Sequence[float] | float | None


def _operands(casting: Casting, x: Any, *coordinates: Any) -> list[Operand]:
    """x under the policy, coordinates as they are; all floating and on one queue."""
    (operand,) = float_operands(casting, x)
    others = floats_as_is(*coordinates)
    bridge.require_same_queue(casting.function, operand.parent.value, *(other.value for other in others))
    return [operand, *others]


def _output_size(shape: Sequence[int], size: Size, scale_factor: ScaleFactor) -> tuple[int, int]:
    """Height and width of the result; ValueError unless exactly one of size and scale_factor is given."""
    if len(shape) != 4:
        raise ValueError(f"upsample expects a 4D NCHW tensor, got shape {tuple(shape)}")
    if (size is None) == (scale_factor is None):
        raise ValueError(
            f"upsample: exactly one of size or scale_factor must be given, got size={size}, scale_factor={scale_factor}"
        )
    if size is not None:
        height, width = _both("size", size)
        return whole_number("upsample", "size", height), whole_number("upsample", "size", width)
    down, across = (number("upsample", "scale_factor", factor) for factor in _both("scale_factor", scale_factor))
    if not (isfinite(down) and isfinite(across)):
        raise ValueError(f"upsample: scale_factor is {scale_factor}; pass a finite number, or two")
    return int(shape[2] * down), int(shape[3] * across)


def _both(argument: str, given: Any) -> tuple[Any, Any]:
    """One for down and one for across."""
    if np.ndim(given) == 0:
        return given, given
    if np.shape(given) != (2,):
        raise ValueError(f"upsample: {argument} is {shown(given)}; pass one number, or two: down and across")
    return given[0], given[1]


@implements("netcl.autograd.upsample", "netcl.ops.upsample.upsample", uses=(upsample_ops,))
def upsample(
    casting: Casting, x: Any, size: Size = None, scale_factor: ScaleFactor = None, mode: str = "nearest",
    align_corners: bool = False, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Images resized to ``size`` or by ``scale_factor``, to the nearest neighbour or bilinearly, in fp32.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        size: (height, width), or one number for both.
        scale_factor: (down, across), or one number for both; sizes are rounded down.
        mode: "nearest" or "bilinear".
        align_corners: whether the corner pixels keep their places ("bilinear" only).

    Raises:
        ValueError: not exactly one of size and scale_factor, an unknown mode, a size or an input without pixels.
    """
    (operand,) = _operands(casting, x)
    resolved = _output_size(operand.shape, size, scale_factor)
    shape = operand.shape
    dtype = casting.result_dtype(operand)
    out = upsample_ops.upsample(operand.value, resolved, mode, align_corners, out_dtype=dtype)
    gradients: Gradients = {
        operand: lambda grad, dtype: upsample_ops.upsample_backward(grad, shape, mode, align_corners, out_dtype=dtype)
    }
    return bound(out, gradients, "upsample", tape, unread=(operand,))


# -------------------------------------------------------------------------------------------- grids


def _require_bilinear(mode: str) -> None:
    if mode != "bilinear":
        raise ValueError(f"grid_sample supports mode='bilinear', got {mode!r}")


@implements("netcl.autograd.grid_sample", "netcl.ops.grid_sample.grid_sample", uses=(grid_ops.GRID_SAMPLE, cast))
def grid_sample(
    casting: Casting, x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool = False, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """The images x at the places that grid names, interpolated in fp32.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        grid: (N, OH, OW, 2), across and down from -1 to 1; read in its own dtype.
        mode: "bilinear", the only one netcl has.
        padding_mode: "zeros" or "border".
        align_corners: whether -1 and 1 are the centres of the outer pixels instead of their edges.

    Raises:
        ValueError: shapes that do not belong together, images without pixels, another mode or padding mode.
    """
    _require_bilinear(mode)
    image, places = _operands(casting, x, grid)
    dtype = casting.result_dtype(image)
    out = grid_ops.grid_sample(image.value, places.value, padding_mode, align_corners, out_dtype=dtype)
    modes = (padding_mode, align_corners)
    gradients: Gradients = {
        image: lambda grad, dtype: grid_ops.grid_sample_backward_input(
            grad, places.value, image.shape, *modes, out_dtype=dtype
        ),
        places: lambda grad, dtype: grid_ops.grid_sample_backward_grid(
            grad, image.value, places.value, *modes, out_dtype=dtype
        ),
    }
    return bound(out, gradients, "grid_sample", tape)


@implements("netcl.autograd.affine_grid", "netcl.ops.grid_sample.affine_grid", uses=(grid_ops,))
def affine_grid(
    casting: Casting, theta: Any, size: Sequence[int], align_corners: bool = False, tape: Tape | None = None
) -> Any:
    """The grid (N, OH, OW, 2) that samples an image under affine maps, computed in fp32.

    Args:
        theta: (N, 2, 3), float32, float16 or bfloat16.
        size: (N, C, OH, OW) of what will be sampled.
        align_corners: as for ``grid_sample``.

    Raises:
        ValueError: theta or size have another shape, or their N differ.
    """
    (operand,) = _operands(casting, theta)
    size = tuple(whole_number("affine_grid", "an extent of size", extent) for extent in size)
    dtype = casting.result_dtype(operand)
    out = grid_ops.affine_grid(operand.value, size, align_corners, out_dtype=dtype)
    gradients: Gradients = {
        operand: lambda grad, dtype: grid_ops.affine_grid_backward(grad, align_corners, out_dtype=dtype)
    }
    return bound(out, gradients, "affine_grid", tape)


@implements("netcl.autograd.rotate_2d_grid", uses=(grid_ops,))
def rotate_2d_grid(
    casting: Casting, x: Any, angles_rad: Any, padding_mode: str = "border", align_corners: bool = False,
    tape: Tape | None = None,
    *, mode: str = "bilinear",
) -> Any:  # fmt: skip
    """Images rotated about their centres.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        angles_rad: a number, a sequence or array of N (or one), or a node or tensor of those. A node that needs a
            gradient gets one (netcl reads it to the host and gives it none).
        padding_mode, align_corners, mode: as for ``grid_sample``. (netcl.nn.functional passes a mode, which netcl's own
            function does not take.)

    Raises:
        ValueError: another number of angles, or as for ``grid_sample``.
    """
    (operand,) = _operands(casting, x)
    if len(operand.shape) != 4:
        raise ValueError(f"rotate_2d_grid expects 4D input (N, C, H, W), got {operand.shape}")
    if not isinstance(angles_rad, Node | Tensor):
        host, queue = np.asarray(angles_rad, np.float32).reshape(-1), operand.value.queue
        angles_rad = Tensor.from_host(queue, host) if host.size else bridge.empty(queue, (0,), "float32")
    (angles,) = floats_as_is(angles_rad)
    gradients: Gradients = {angles: lambda grad, dtype: grid_ops.rotation_backward(grad, angles.value, out_dtype=dtype)}
    theta = bound(grid_ops.rotation(angles.value, operand.shape[0]), gradients, "rotation", tape)
    grid = affine_grid(Float(), theta, operand.shape, align_corners, tape)
    return grid_sample(casting, x, grid, mode, padding_mode, align_corners, tape)


# -------------------------------------------------------------------------------------------- tensor level


@implements("netcl.ops.upsample.upsample_backward", uses=(upsample_ops,))
def tensor_upsample_backward(
    casting: Casting, grad_out: Any, in_shape: Sequence[int], mode: str = "nearest", align_corners: bool = False
) -> Tensor:
    """The gradient of ``upsample`` from that of its result.

    Raises:
        ValueError: the shapes do not belong together, or an unknown mode.
    """
    (grad,) = _operands(casting, grad_out)
    shape = tuple(int(extent) for extent in in_shape)
    dtype = casting.result_dtype(grad)
    return upsample_ops.upsample_backward(grad.value, shape, mode, align_corners, out_dtype=dtype)


@implements("netcl.ops.grid_sample.grid_sample_backward", uses=(grid_ops.GRID_SAMPLE, cast))
def tensor_grid_sample_backward(
    casting: Casting, grad_out: Any, x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of image and grid from that of ``grid_sample``'s result.

    Raises:
        ValueError: as for ``grid_sample``.
    """
    _require_bilinear(mode)
    grad, image, places = _operands(casting, grad_out, x, grid)
    dtype = casting.result_dtype(image)
    modes = (padding_mode, align_corners)
    dx = grid_ops.grid_sample_backward_input(grad.value, places.value, image.shape, *modes, out_dtype=dtype)
    dgrid = grid_ops.grid_sample_backward_grid(grad.value, image.value, places.value, *modes, out_dtype="float32")
    return dx, dgrid


@implements("netcl.ops.grid_sample.affine_grid_backward", uses=(grid_ops,))
def tensor_affine_grid_backward(
    casting: Casting, grad_grid: Any, size: Sequence[int], align_corners: bool = False
) -> Tensor:
    """The gradient of ``affine_grid``'s theta from that of the grid.

    Raises:
        ValueError: the gradient is not of a grid of this size.
    """
    (grad,) = _operands(casting, grad_grid)
    expected = (int(size[0]), int(size[2]), int(size[3]), 2)
    if grad.shape != expected:
        raise ValueError(f"affine_grid: gradient of shape {grad.shape}, expected {expected}")
    return grid_ops.affine_grid_backward(grad.value, align_corners, out_dtype=casting.result_dtype(grad))
