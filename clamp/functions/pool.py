"""Pooling and padding under autograd, and netcl's tensor-level versions of them.

Nothing is kept for backward but the input that the graph holds anyway: max pooling finds its maxima again in it.
"""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, bound, float_operands, floats_as_is
from clamp.casting.registry import implements
from clamp.functions.recompute import is_needless
from clamp.ops import pad as pad_ops
from clamp.ops import pool as ops
from clamp.ops.arguments import whole_number
from clamp.ops.cast import cast
from clamp.ops.reduce import reduce_sum

# -------------------------------------------------------------------------------------------------- pooling


@implements("netcl.autograd.max_pool2d", "netcl.nn.pooling.max_pool2d", uses=ops.ENGINES)
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
        return ops.max_pool2d(operand.value, kernel_size, stride, out_dtype=dtype)

    shape = operand.shape
    if is_needless():
        sides = ((extent - kernel_size) // stride + 1 for extent in shape[-2:])
        out: Tensor = bridge.Late(pooled, operand.value, (*shape[:-2], *sides), dtype)
    else:
        out = pooled()

    def gradient(grad: Tensor) -> Tensor:
        return ops.max_pool2d_backward(operand.value, grad, kernel_size, stride, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "max_pool2d", tape)


@implements("netcl.autograd.avg_pool2d", "netcl.nn.pooling.avg_pool2d", uses=(ops,))
def avg_pool2d(casting: Casting, x: Any, kernel_size: int = 2, stride: int = 2, tape: Tape | None = None) -> Any:
    """The mean of every kernel_size x kernel_size window of an NCHW tensor, without padding; summed in fp32.

    Raises:
        ValueError: x is not NCHW, or no window fits.
    """
    (operand,) = float_operands(casting, x)
    shape = operand.shape
    out = ops.avg_pool2d(operand.value, kernel_size, stride, out_dtype=casting.result_dtype(operand))

    def gradient(grad: Tensor) -> Tensor:
        return ops.avg_pool2d_backward(shape, grad, kernel_size, stride, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "avg_pool2d", tape, unread=(operand,))


@implements("netcl.autograd.global_avg_pool2d", "netcl.nn.pooling.global_avg_pool2d", uses=(reduce_sum,))
def global_avg_pool2d(casting: Casting, x: Any, tape: Tape | None = None) -> Any:
    """The mean of every plane, (N, C, H, W) -> (N, C, 1, 1); summed in fp32.

    Raises:
        ValueError: x is not NCHW, or its planes are empty.
    """
    (operand,) = float_operands(casting, x)
    shape = operand.shape
    out = ops.global_avg_pool2d(operand.value, out_dtype=casting.result_dtype(operand))

    def gradient(grad: Tensor) -> Tensor:
        return ops.global_avg_pool2d_backward(shape, grad, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "global_avg_pool2d", tape, unread=(operand,))


@implements("netcl.nn.pooling.max_pool2d_backward", uses=ops.ENGINES)
def max_pool2d_backward(
    casting: Casting, x: Tensor, grad_out: Tensor, kernel_size: int = 2, stride: int = 2, indices: Any = None
) -> Tensor:
    """Gradient of ``max_pool2d`` of a bare tensor, in x's dtype (``indices``: netcl's numpy backend's)."""
    source, grad = floats_as_is(x, grad_out)
    bridge.require_same_queue("max_pool2d_backward", source.value, grad.value)
    return ops.max_pool2d_backward(source.value, grad.value, kernel_size, stride, out_dtype=source.grad_dtype)


@implements("netcl.nn.pooling.avg_pool2d_backward", uses=ops.ENGINES)
def avg_pool2d_backward(casting: Casting, x: Tensor, grad_out: Tensor, kernel_size: int = 2, stride: int = 2) -> Tensor:
    """Gradient of ``avg_pool2d`` of a bare tensor, in x's dtype; of x only the shape is read."""
    source, grad = floats_as_is(x, grad_out)
    return ops.avg_pool2d_backward(source.shape, grad.value, kernel_size, stride, out_dtype=source.grad_dtype)


@implements("netcl.nn.pooling.global_avg_pool2d_backward", uses=(reduce_sum,))
def global_avg_pool2d_backward(casting: Casting, x: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient of ``global_avg_pool2d`` of a bare tensor, in x's dtype; of x only the shape is read."""
    source, grad = floats_as_is(x, grad_out)
    return ops.global_avg_pool2d_backward(source.shape, grad.value, out_dtype=source.grad_dtype)


# -------------------------------------------------------------------------------------------------- padding


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

    def gradient(grad: Tensor) -> Tensor:
        if pad == 0:
            return cast(grad, operand.grad_dtype)
        return pad_ops.pad2d_backward(grad, shape, pad, mode, out_dtype=operand.grad_dtype)

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
