"""Convolutions: forward and backward of netcl's conv2d, conv2d_relu, conv_transpose2d and depthwise_conv2d.

The gradients are convolutions again (ops/conv/). A weight's gradient is stored in the weight's own dtype straight
from the fp32 sums; the bias is read, and gets its gradient, in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, Operand, as_is, bound, owned_value, require_floating
from clamp.casting.registry import implements
from clamp.functions.arithmetic import through_relu
from clamp.functions.recompute import asked_before
from clamp.ops import conv as ops
from clamp.ops import depthwise
from clamp.ops.arguments import shown, whole_number
from clamp.ops.conv import Pair, Weights, Window
from clamp.ops.elementwise import elementwise
from clamp.ops.reduce_to_shape import sum_channels

Number = int | Sequence[int]  # netcl takes one number for both axes

_CONVOLUTION, _DEPTHWISE = (ops, elementwise, sum_channels), (depthwise, sum_channels)


@implements("netcl.autograd.conv2d", "netcl.ops.conv2d.conv2d", uses=_CONVOLUTION)
def conv2d(
    casting: Casting, x: TensorLike, w: TensorLike, bias: TensorLike | None = None, stride: Number = 1, pad: Number = 0,
    algo: str | None = None, dilation: Number = 1, groups: int = 1, tape: Tape | None = None,
    fuse_relu: bool | None = None,
) -> Any:  # fmt: skip
    """Convolution of x (N, C, H, W) with w (F, C / groups, KH, KW), plus bias (F,).

    Args:
        stride, pad, dilation: one number, or one for each axis.
        algo: has no effect; there is one algorithm for a device.

    Raises:
        ValueError: shapes that do not fit, or a stride, padding, dilation or number of groups that makes no sense.
    """
    window = _window("conv2d", stride, pad, dilation, groups)
    return _convolve(casting, x, w, bias, window, bool(fuse_relu), "conv2d", tape)


@implements("netcl.autograd.conv2d_relu", uses=_CONVOLUTION)
def conv2d_relu(
    casting: Casting, x: TensorLike, w: TensorLike, bias: TensorLike | None = None, stride: Number = 1, pad: Number = 0,
    algo: str | None = None, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """relu of ``conv2d``, in its store. Backward keeps the result, not what relu was applied to.

    netcl's fused layer does not pass its groups on: they follow from the shapes.
    """
    image, kernel = owned_value(x).shape, owned_value(w).shape
    is_whole = len(image) == len(kernel) == 4 and kernel[1] > 0 and image[1] > 0 and image[1] % kernel[1] == 0
    window = _window("conv2d_relu", stride, pad, 1, image[1] // kernel[1] if is_whole else 1)
    return _convolve(casting, x, w, bias, window, True, "conv2d_relu", tape)


@implements("netcl.autograd.conv_transpose2d", "netcl.ops.conv_transpose2d.conv_transpose2d", uses=_CONVOLUTION)
def conv_transpose2d(
    casting: Casting, x: TensorLike, w: TensorLike, bias: TensorLike | None = None, stride: Number = 1, pad: Number = 0,
    tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Transposed convolution of x (N, F, OH, OW) with w (F, C, KH, KW), plus bias (C,): the input gradient of the
    convolution with w, and so its own gradients are that convolution and its weight gradient.

    Args:
        stride, pad: one number, or one for each axis.

    Raises:
        ValueError: shapes that do not fit, or x or the result has no pixel.
    """
    window = _window("conv_transpose2d", stride, pad, 1, 1)
    xo, wo = casting.operands(x, w)
    bo = None if bias is None else as_is(bias)
    _check("conv_transpose2d", xo, wo, bo, wo.shape[:1], wo.shape[1:2])
    extent = _pair("conv_transpose2d", "kernel", wo.shape[2:], 1)
    image = window.transposed_output(_pair("conv_transpose2d", "x", xo.shape[2:], 0), extent)
    if min(*image, *xo.shape[2:]) < 1:
        raise ValueError(
            f"conv_transpose2d: x {xo.shape} with w {wo.shape} and pad {pad} gives an output of {image} pixels; pass a "
            "smaller pad, and an x that is not empty"
        )
    out = ops.conv2d_input_grad(
        xo.value, _weights(wo, window, transposed=True), image, window,
        out_dtype=casting.result_dtype(xo, wo), bias=None if bo is None else bo.value,
    )  # fmt: skip

    gradients: Gradients = {
        xo: lambda grad, dtype: ops.conv2d(grad, _weights(wo, window, transposed=False), window, out_dtype=dtype),
        wo: lambda grad, dtype: ops.conv2d_weight_grad(grad, xo.value, extent, window, out_dtype=dtype),
    }
    if bo is not None:
        gradients[bo] = partial(bias_gradient, bo)
    return bound(out, gradients, "conv_transpose2d", tape)


def _convolve(
    casting: Casting, x: TensorLike, w: TensorLike, bias: TensorLike | None, window: Window, relu: bool, name: str,
    tape: Tape | None,
) -> Any:  # fmt: skip
    xo, wo = casting.operands(x, w)
    bo = None if bias is None else as_is(bias)
    _check(name, xo, wo, bo, (wo.shape[1] * window.groups,) if len(wo.shape) == 4 else (), wo.shape[:1])
    if wo.shape[0] % window.groups:
        raise ValueError(f"{name}: {wo.shape[0]} output channels do not fall into {window.groups} groups")
    image, extent = _pair(name, "x", xo.shape[2:], 0), _pair(name, "kernel", wo.shape[2:], 1)
    if min(window.output(image, extent)) < 1:
        raise ValueError(
            f"{name}: the kernel of w {wo.shape}, {extent[0]} x {extent[1]} with dilation {window.dilation}, is larger "
            f"than the image of x {xo.shape} with pad {window.pad}; pass a larger image, or a larger pad"
        )
    out = ops.conv2d(
        xo.value, _weights(wo, window, transposed=False), window,
        out_dtype=casting.result_dtype(xo, wo), bias=None if bo is None else bo.value, relu=relu,
    )  # fmt: skip

    def input_gradient(grad: Tensor, dtype: str) -> Tensor:
        packed = _weights(wo, window, transposed=True)
        return ops.conv2d_input_grad(grad, packed, image, window, out_dtype=dtype)

    def parameter_gradients(grad: Tensor, *_: str | None) -> tuple[Tensor | None, ...]:
        if bo is not None and not wo.needs_grad:
            return None, bias_gradient(bo, grad, bo.grad_dtype)
        gw, gb = _parameter_grads(xo.value, grad, wo, bo if bo is not None and bo.needs_grad else None, window)
        return (gw,) if bo is None else (gw, gb)

    parameters = (wo,) if bo is None else (wo, bo)
    gradients: Gradients = {xo: input_gradient, parameters: parameter_gradients}
    if not relu:
        return bound(out, gradients, name, tape)
    result = Operand(out, out)
    return bound(out, gradients, name, tape, first=partial(through_relu, result), besides=(result,))


def _weights(w: Operand, window: Window, *, transposed: bool) -> Weights:
    """The weights for the kernels. What is convolved with again and again, as in inference, is packed once."""
    value = w.value
    kind = ("convolution", transposed, window.groups, value.dtype)
    if w.weight is None or not asked_before(w.weight, kind):
        return ops.pack_weights(value, window.groups, transposed=transposed)
    return w.derived(kind, lambda _: ops.pack_weights(value, window.groups, transposed=transposed))


def _parameter_grads(
    x: Tensor, grad: Tensor, w: Operand, bias: Operand | None, window: Window
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weights and of the bias, where there is one."""
    extent, dtype = _pair("conv2d", "kernel", w.shape[2:], 1), w.grad_dtype
    if bias is None:
        return ops.conv2d_weight_grad(x, grad, extent, window, out_dtype=dtype), None
    gw, gb = ops.conv2d_parameter_grads(x, grad, extent, window, out_dtype=dtype, bias_dtype=bias.grad_dtype)
    return gw, bridge.view(gb, bias.shape)


def bias_gradient(bias: Operand, grad: Tensor, dtype: str) -> Tensor:
    """The sum over everything but channels, in the bias's shape."""
    return bridge.view(sum_channels(grad, dtype), bias.shape)


def _window(name: str, stride: Number, pad: Number, dilation: Number, groups: int) -> Window:
    return Window(
        _pair(name, "stride", stride, 1),
        _pair(name, "pad", pad, 0),
        _pair(name, "dilation", dilation, 1),
        whole_number(name, "groups", groups, 1),
    )


def _pair(name: str, what: str, number: Number, least: int) -> Pair:
    pair = tuple(number) if isinstance(number, Sequence) else (number, number)
    if len(pair) != 2:
        raise ValueError(
            f"{name}: {what} is {shown(number)}; it must be a whole number from {least} on, or two of them"
        )
    first, second = (whole_number(name, what, n, least, "one for both directions, or two") for n in pair)
    return first, second


def _check(
    name: str, x: Operand, w: Operand, bias: Operand | None, channels: Sequence[int], features: Sequence[int]
) -> None:
    require_floating(x, w, bias)
    if len(x.shape) != 4 or len(w.shape) != 4:
        raise ValueError(f"{name} takes x (N, C, H, W) and w with four dimensions, got {x.shape} and {w.shape}")
    if x.shape[1] != channels[0]:
        raise ValueError(f"{name}: x {x.shape} has {x.shape[1]} channels, but w {w.shape} needs {channels[0]}")
    if bias is not None and tuple(bias.shape) != tuple(features):
        raise ValueError(f"{name}: the bias has shape {bias.shape}; w {w.shape} needs {tuple(features)}")
    tensors = [operand.value for operand in (x, w, *([] if bias is None else [bias]))]
    bridge.require_same_queue(name, *tensors)


@implements("netcl.autograd.depthwise_conv2d", "netcl.ops.depthwise_conv2d.depthwise_conv2d", uses=_DEPTHWISE)
def depthwise_conv2d(
    casting: Casting, x: Any, w: Any, bias: Any = None, stride: int = 1, pad: int = 0, tape: Tape | None = None
) -> Any:
    """Each channel of x (N, C, H, W) convolved with its own filter of w (C, 1, KH, KW), plus bias (C,)."""
    xo, wo = casting.operands(x, w)
    bo = None if bias is None else as_is(bias)
    require_floating(xo, wo, bo)
    dtype = casting.result_dtype(xo, wo)
    offset = None if bo is None else bo.value
    bridge.require_same_queue("depthwise_conv2d", xo.value, wo.value, *([] if offset is None else [offset]))
    out = depthwise.depthwise_conv2d(xo.value, wo.value, offset, stride, pad, out_dtype=dtype)
    gradients: Gradients = {
        (xo, wo): lambda grad, dx_dtype, dw_dtype: depthwise.gradients(
            xo.value, wo.value, grad, stride, pad, dx_dtype=dx_dtype, dw_dtype=dw_dtype
        )
    }
    if bo is not None:
        gradients[bo] = partial(bias_gradient, bo)
    return bound(out, gradients, "depthwise_conv2d", tape)


# ------------------------------------------------------------------------------------------ tensor level


@implements("netcl.ops.conv2d.conv2d_backward", uses=(ops,))
def tensor_conv2d_backward(
    casting: Casting, x: Tensor, w: Tensor, grad_out: Tensor, bias: Tensor | None = None, stride: Number = 1,
    pad: Number = 0, need_grad_x: bool = True, dilation: Number = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """(gradient of x or None, of w, of the bias or None), each in its tensor's dtype."""
    window = _window("conv2d_backward", stride, pad, dilation, groups)
    xo, wo = casting.operands(x, w)
    grad = as_is(grad_out).value
    gx = None
    if need_grad_x:
        packed = _weights(wo, window, transposed=True)
        image = _pair("conv2d_backward", "x", xo.shape[2:], 0)
        gx = ops.conv2d_input_grad(grad, packed, image, window, out_dtype=xo.grad_dtype)
    gw, gb = _parameter_grads(xo.value, grad, wo, None if bias is None else as_is(bias), window)
    return gx, gw, gb


@implements("netcl.ops.fused_ops.fused_conv_bias_relu", uses=_CONVOLUTION)
def fused_conv_bias_relu(
    casting: Casting, input: Tensor, weight: Tensor, bias: Tensor, stride: Number = 1, padding: Number = 0
) -> Any:
    """``conv2d_relu`` of bare tensors."""
    window = _window("fused_conv_bias_relu", stride, padding, 1, 1)
    return _convolve(casting, input, weight, bias, window, True, "fused_conv_bias_relu", None)


@implements("netcl.ops.depthwise_conv2d.depthwise_conv2d_backward", uses=_DEPTHWISE)
def depthwise_conv2d_backward(
    casting: Casting, x: Tensor, w: Tensor, grad_out: Tensor, bias: Tensor | None = None, stride: int = 1, pad: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of x, of w, of the bias or None), each in its tensor's dtype."""
    xo, wo = casting.operands(x, w)
    grad, bo = as_is(grad_out), None if bias is None else as_is(bias)
    require_floating(xo, wo, grad, bo)
    bridge.require_same_queue("depthwise_conv2d_backward", xo.value, wo.value, grad.value)
    gx, gw = depthwise.gradients(
        xo.value, wo.value, grad.value, stride, pad, dx_dtype=xo.grad_dtype, dw_dtype=wo.grad_dtype
    )
    return gx, gw, None if bo is None else bias_gradient(bo, grad.value, bo.grad_dtype)
