"""Resizing, sampling on grids and rotations under autograd, and netcl's tensor-level versions of them.

A grid, and the map that makes one, hold coordinates: they are read in their own dtype under every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Operand, bound, float_operands, floats_as_is
from clamp.casting.policies import Float
from clamp.casting.registry import implements, leave_to_netcl_if
from clamp.ops import grid as grid_ops
from clamp.ops import upsample as upsample_ops
from clamp.ops.cast import cast

Size = Sequence[int] | int | None
ScaleFactor = Sequence[float] | float | None


def _operands(casting: Casting, x: Any, *coordinates: Any) -> list[Operand]:
    """x under the policy, coordinates as they are; all floating and on one queue."""
    (operand,) = float_operands(casting, x)
    others = floats_as_is(*coordinates)
    bridge.require_same_queue("grid_sample", operand.parent.value, *(other.value for other in others))
    return [operand, *others]


# -------------------------------------------------------------------------------------------- resizing


def _output_size(shape: Sequence[int], size: Size, scale_factor: ScaleFactor) -> tuple[int, int]:
    """Height and width of the result.

    Raises:
        ValueError: not exactly one of size and scale_factor is given, or x is not NCHW.
    """
    if len(shape) != 4:
        raise ValueError(f"upsample expects a 4D NCHW tensor, got shape {tuple(shape)}")
    if size is not None and scale_factor is None:
        height, width = (size, size) if isinstance(size, int) else size
        return int(height), int(width)
    if scale_factor is None or size is not None:
        raise ValueError(
            f"upsample: exactly one of size or scale_factor must be given, got size={size}, scale_factor={scale_factor}"
        )
    down, across = scale_factor if isinstance(scale_factor, Sequence) else (scale_factor, scale_factor)
    return int(shape[2] * float(down)), int(shape[3] * float(across))


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

    def gradient(grad: Tensor) -> Tensor:
        return upsample_ops.upsample_backward(grad, shape, mode, align_corners, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "upsample", tape, unread=(operand,))


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

    def image_gradient(grad: Tensor) -> Tensor:
        return grid_ops.grid_sample_backward_input(
            grad, places.value, image.shape, padding_mode, align_corners, out_dtype=image.grad_dtype
        )

    def grid_gradient(grad: Tensor) -> Tensor:
        return grid_ops.grid_sample_backward_grid(
            grad, image.value, places.value, padding_mode, align_corners, out_dtype=places.grad_dtype
        )

    return bound(out, {image: image_gradient, places: grid_gradient}, "grid_sample", tape)


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
    size = tuple(int(extent) for extent in size)
    dtype = casting.result_dtype(operand)
    out = grid_ops.affine_grid(operand.value, size, align_corners, out_dtype=dtype)

    def gradient(grad: Tensor) -> Tensor:
        return grid_ops.affine_grid_backward(grad, align_corners, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "affine_grid", tape)


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
    theta = _rotation(_angles(angles_rad, operand.value), operand.shape[0], tape)
    grid = affine_grid(Float(), theta, operand.shape, align_corners, tape)
    return grid_sample(casting, x, grid, mode, padding_mode, align_corners, tape)


def _angles(angles: Any, like: Tensor) -> TensorLike:
    """The angles on the device."""
    if isinstance(angles, Node | Tensor):
        return angles
    host = np.asarray(angles, np.float32).reshape(-1)
    return Tensor.from_host(like.queue, host) if host.size else bridge.empty(like.queue, (0,), "float32")


def _rotation(angles: TensorLike, n: int, tape: Tape | None) -> Any:
    """The maps that rotate n images, with a gradient for the angles."""
    (operand,) = floats_as_is(angles)
    theta = grid_ops.rotation(operand.value, n)

    def gradient(grad: Tensor) -> Tensor:
        return grid_ops.rotation_backward(grad, operand.value, out_dtype=operand.grad_dtype)

    return bound(theta, {operand: gradient}, "rotation", tape)


# -------------------------------------------------------------------------------------------- tensor level


@implements("netcl.ops.upsample.upsample_backward", uses=(upsample_ops,))
def tensor_upsample_backward(
    casting: Casting, grad_out: Any, in_shape: Sequence[int], mode: str = "nearest", align_corners: bool = False,
    out: Tensor | None = None, pool: Any = None,
) -> Tensor:  # fmt: skip
    """The gradient of ``upsample`` from that of its result.

    Raises:
        ValueError: the shapes do not belong together, or an unknown mode.
        NotOwned: ``out`` is given.
    """
    leave_to_netcl_if(out)
    (grad,) = _operands(casting, grad_out)
    shape = tuple(int(extent) for extent in in_shape)
    dtype = casting.result_dtype(grad)
    return upsample_ops.upsample_backward(grad.value, shape, mode, align_corners, out_dtype=dtype)


@implements("netcl.ops.grid_sample.grid_sample_backward", uses=(grid_ops.GRID_SAMPLE, cast))
def tensor_grid_sample_backward(
    casting: Casting, grad_out: Any, x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool = False, pool: Any = None,
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
    casting: Casting, grad_grid: Any, size: Sequence[int], align_corners: bool = False, pool: Any = None
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
