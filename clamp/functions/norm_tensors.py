"""netcl's backwards of norms on bare tensors, and what has no counterpart among nodes."""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.operands import Casting, Operand, float_operands, owned_value
from clamp.casting.registry import implements, leave_to_netcl_if
from clamp.functions.norm import l2_normalize, last_axis, parameters_of, require_nchw, statistics_of
from clamp.ops import norm_planes as planes_ops
from clamp.ops import norm_planes_backward as planes_backward
from clamp.ops import norm_rows as rows_ops
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from clamp.ops.norm_sets import RELU
from clamp.ops.shape import permute


def _saved(name: str, x: Operand, size: int, *statistics: Any) -> list[Tensor]:
    """The statistics of a forward, in fp32: running ones may be kept in 16 bits."""
    return [cast(statistic, "float32") for statistic in statistics_of(name, x, size, *statistics)]


@implements("netcl.nn.batchnorm.batch_norm2d_backward", uses=(planes_backward.PLANES_BACKWARD, elementwise, cast))
def tensor_batch_norm2d_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, eps: float = 1e-5,
    out: Tensor | None = None, leaky_slope: float | None = None, training: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, gamma and beta. ``out`` is not written: with ``leaky_slope`` it tells where to scale."""
    (xo,) = float_operands(casting, x)
    require_nchw("batch_norm2d_backward", xo)
    (go,) = parameters_of("batch_norm2d_backward", xo, xo.shape[1], gamma)
    grad, (center, spread) = owned_value(grad_out), _saved("batch_norm2d_backward", xo, xo.shape[1], mean, var)
    if out is not None and leaky_slope is not None:
        grad = elementwise("leaky_relu_grad", grad.dtype, grad, owned_value(out), parameters=(float(leaky_slope),))
    return planes_backward.batch_norm_backward(
        xo.value, go.value, go.value, grad, center, spread, eps=float(eps), dx_dtype=xo.grad_dtype, training=training
    )


@implements("netcl.ops.elementwise_optimized.fused_bn_relu", uses=(planes_ops,))
def fused_bn_relu(
    casting: Casting, x: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """``relu(x * scale + shift)`` of an (N, C, H, W) tensor, scale and shift of shape (C,)."""
    leave_to_netcl_if(out)
    (xo,) = float_operands(casting, x)
    require_nchw("fused_bn_relu", xo)
    so, bo = parameters_of("fused_bn_relu", xo, xo.shape[1], scale, shift)
    zero = bridge.zeros(xo.value.queue, (xo.shape[1],), "float32")  # mean 0, variance 0 + 1
    return planes_ops.batch_norm_inference(
        xo.value, so.value, bo.value, zero, zero, eps=1.0, out_dtype=casting.result_dtype(xo), activation=RELU
    )


@implements("netcl.nn.groupnorm.group_norm_backward", uses=(planes_backward, cast))
def tensor_group_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, groups: int,
    eps: float = 1e-5,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, gamma and beta."""
    (xo,) = float_operands(casting, x)
    require_nchw("group_norm_backward", xo)
    (go,) = parameters_of("group_norm_backward", xo, xo.shape[1], gamma)
    groups = int(groups)
    center, spread = _saved("group_norm_backward", xo, xo.shape[0] * groups, mean, var)
    return planes_backward.group_norm_backward(
        xo.value, go.value, owned_value(grad_out), center, spread, groups, eps=float(eps), dx_dtype=xo.grad_dtype,
        dgamma_dtype=go.grad_dtype, dbeta_dtype=go.grad_dtype,
    )  # fmt: skip


@implements("netcl.nn.layernorm.layer_norm_backward", uses=(rows_ops, cast))
def tensor_layer_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, eps: float = 1e-5
) -> tuple[Tensor | None, ...]:
    """Gradients of x, gamma and beta."""
    (xo,) = float_operands(casting, x)
    n = last_axis("layer_norm_backward", xo)
    (go,) = parameters_of("layer_norm_backward", xo, n, gamma)
    center, spread = _saved("layer_norm_backward", xo, xo.value.size // max(n, 1), mean, var)
    return rows_ops.layer_norm_backward(
        xo.value, go.value, owned_value(grad_out), center, spread, eps=float(eps), dx_dtype=xo.grad_dtype,
        dgamma_dtype=go.grad_dtype, dbeta_dtype=go.grad_dtype,
    )  # fmt: skip


@implements("netcl.ops.norm_rope.rms_norm_backward", uses=(rows_ops, cast))
def tensor_rms_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, rstd: Tensor, pool: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and gamma."""
    (xo,) = float_operands(casting, x)
    n = last_axis("rms_norm_backward", xo)
    (go,) = parameters_of("rms_norm_backward", xo, n, gamma)
    (inverse,) = _saved("rms_norm_backward", xo, xo.value.size // max(n, 1), rstd)
    return rows_ops.rms_norm_backward(
        xo.value, go.value, owned_value(grad_out), inverse, dx_dtype=xo.grad_dtype, dgamma_dtype=go.grad_dtype
    )


@implements("netcl.nn.loss.l2_normalize", uses=(rows_ops, permute))
def tensor_l2_normalize(casting: Casting, x: Tensor, dim: int = -1, eps: float = 1e-8) -> Any:
    """``l2_normalize`` of a bare tensor."""
    return l2_normalize(casting, x, dim, eps)
