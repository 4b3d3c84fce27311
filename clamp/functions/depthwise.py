"""Depthwise convolution under autograd, and netcl's tensor-level version of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Gradients, as_is, as_node, bound, require_floating
from clamp.casting.registry import implements
from clamp.functions.conv import bias_gradient
from clamp.ops import depthwise as ops


@implements("netcl.autograd.depthwise_conv2d", "netcl.ops.depthwise_conv2d.depthwise_conv2d")
def depthwise_conv2d(
    casting: Casting, x: Any, w: Any, bias: Any = None, stride: int = 1, pad: int = 0, tape: Tape | None = None
) -> Any:
    """Each channel of x (N, C, H, W) convolved with its own filter of w (C, 1, KH, KW), plus bias (C,).

    The bias is read in its own dtype. The gradients of weight and bias are stored in their own dtypes, straight from
    the fp32 sums.

    Raises:
        ValueError: shapes that do not fit.
    """
    xo, wo = casting.operands(as_node(x), as_node(w))
    bo = None if bias is None else as_is(bias)
    require_floating(xo, wo, bo)
    dtype = casting.result_dtype(xo, wo)
    offset = None if bo is None else bo.value
    bridge.require_same_queue("depthwise_conv2d", xo.value, wo.value, *([] if offset is None else [offset]))
    out = ops.depthwise_conv2d(xo.value, wo.value, offset, stride, pad, out_dtype=dtype)

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = xo.wanted_dtype, wo.wanted_dtype
        return ops.gradients(xo.value, wo.value, grad, stride, pad, dx_dtype=dtypes[0], dw_dtype=dtypes[1])

    gradients: Gradients = {(xo, wo): backward}
    if bo is not None:
        gradients[bo] = partial(bias_gradient, bo)
    return bound(out, gradients, "depthwise_conv2d", tape)


@implements("netcl.ops.depthwise_conv2d.depthwise_conv2d_backward")
def depthwise_conv2d_backward(
    casting: Casting, x: Tensor, w: Tensor, grad_out: Tensor, bias: Tensor | None = None, stride: int = 1, pad: int = 0,
    pool: Any = None, algo: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients by x, w and bias (None without one) of bare tensors, each in its own dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    xo, wo = casting.operands(as_node(x), as_node(w))
    grad, bo = as_is(grad_out), None if bias is None else as_is(bias)
    require_floating(xo, wo, grad, bo)
    bridge.require_same_queue("depthwise_conv2d_backward", xo.value, wo.value, grad.value)
    gx, gw = ops.gradients(xo.value, wo.value, grad.value, stride, pad, dx_dtype=xo.grad_dtype, dw_dtype=wo.grad_dtype)
    return gx, gw, None if bo is None else bias_gradient(bo, grad.value)
