"""Norms of rows under autograd, and netcl's tensor-level versions: layer norm, RMS norm, L2 normalization.

As for norm_planes.py; statistics are those of each row.
"""

from __future__ import annotations

from math import prod
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Operand, as_node, bound, float_operands, owned_value
from clamp.casting.registry import implements
from clamp.functions.norm_planes import like, parameters_of, saved_statistics
from clamp.ops import norm_rows as rows_ops
from clamp.ops.arguments import axis_of
from clamp.ops.cast import cast
from clamp.ops.shape import permute


@implements("netcl.nn.layernorm.layer_norm")
@implements("netcl.autograd.layer_norm", result_only=True, uses=(rows_ops,))
def layer_norm(
    casting: Casting, x: TensorLike, gamma: TensorLike, beta: TensorLike, eps: float = 1e-5, tape: Tape | None = None
) -> tuple[Any, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` over the last axis (Ba, Kiros and Hinton, 2016), or over the
    last axes where gamma has several.

    Args:
        x: (..., n), float32, float16 or bfloat16.
        gamma, beta: n elements each, or of the shape of x's last axes.

    Returns:
        The result, and the means and variances in float32, of shape (..., 1).
    """
    (xo,) = float_operands(casting, x)
    eps, shape = float(eps), xo.shape
    rows = _rows_that_share_statistics(xo, as_node(gamma))
    go, bo = parameters_of("layer_norm", xo, rows[-1], gamma, beta)
    out, mean, var = rows_ops.layer_norm(
        bridge.view(xo.value, rows), go.value, bo.value, eps=eps, out_dtype=casting.result_dtype(xo)
    )

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dgamma, dbeta = rows_ops.layer_norm_backward(
            bridge.view(xo.value, rows), go.value, bridge.view(grad, rows), mean, var, eps=eps, dx_dtype=xo.grad_dtype,
            dgamma_dtype=go.wanted_dtype, dbeta_dtype=bo.wanted_dtype,
        )  # fmt: skip
        return bridge.view(dx, shape), like(dgamma, go), like(dbeta, bo)

    return bound(bridge.view(out, shape), {(xo, go, bo): backward}, "layer_norm", tape), mean, var


def _rows_that_share_statistics(x: Operand, gamma: TensorLike) -> tuple[int, ...]:
    """x's shape with the axes that are normalized together as one: the last, or as many as gamma has.

    ``LayerNorm([2, 3])`` means both axes, as in PyTorch; netcl normalizes the last alone and reads the first 3 of
    gamma's 6 elements for every row.
    """
    n = last_axis("layer_norm", x)
    axes = tuple(gamma.value.shape)
    if len(axes) > 1 and x.shape[-len(axes) :] == axes:
        return (*x.shape[: -len(axes)], prod(axes))
    return (*x.shape[:-1], n)


def last_axis(name: str, x: Operand) -> int:
    """Extent of x's last axis.

    Raises:
        ValueError: x has no axes.
    """
    if not x.shape:
        raise ValueError(f"{name} takes x of shape (..., n), got a tensor without dimensions")
    return x.shape[-1]


@implements("netcl.nn.layernorm.layer_norm_backward", uses=(rows_ops, cast))
def tensor_layer_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, eps: float = 1e-5
) -> tuple[Tensor | None, ...]:
    """Gradients of x, gamma and beta."""
    (xo,) = float_operands(casting, x)
    n = last_axis("layer_norm_backward", xo)
    (go,) = parameters_of("layer_norm_backward", xo, n, gamma)
    center, spread = saved_statistics("layer_norm_backward", xo, xo.value.size // max(n, 1), mean, var)
    return rows_ops.layer_norm_backward(
        xo.value, go.value, owned_value(grad_out), center, spread, eps=float(eps), dx_dtype=xo.grad_dtype,
        dgamma_dtype=go.grad_dtype, dbeta_dtype=go.grad_dtype,
    )  # fmt: skip


@implements("netcl.ops.norm_rope.rms_norm")
@implements("netcl.autograd.rms_norm", result_only=True, uses=(rows_ops,))
def rms_norm(
    casting: Casting, x: TensorLike, gamma: TensorLike, eps: float = 1e-6, tape: Tape | None = None
) -> tuple[Any, Tensor]:
    """``x / sqrt(mean x^2 + eps) * gamma`` over the last axis (Zhang and Sennrich, 2019).

    Args:
        x: (..., n), float32, float16 or bfloat16.
        gamma: n elements.

    Returns:
        The result, and the reciprocal root mean square of each row in float32.
    """
    (xo,) = float_operands(casting, x)
    (go,) = parameters_of("rms_norm", xo, last_axis("rms_norm", xo), gamma)
    out, inverse = rows_ops.rms_norm(xo.value, go.value, eps=float(eps), out_dtype=casting.result_dtype(xo))

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dgamma = rows_ops.rms_norm_backward(
            xo.value, go.value, grad, inverse, dx_dtype=xo.grad_dtype, dgamma_dtype=go.wanted_dtype
        )
        return dx, like(dgamma, go)

    return bound(out, {(xo, go): backward}, "rms_norm", tape), inverse


@implements("netcl.ops.norm_rope.rms_norm_backward", uses=(rows_ops, cast))
def tensor_rms_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, rstd: Tensor, pool: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and gamma."""
    (xo,) = float_operands(casting, x)
    n = last_axis("rms_norm_backward", xo)
    (go,) = parameters_of("rms_norm_backward", xo, n, gamma)
    (inverse,) = saved_statistics("rms_norm_backward", xo, xo.value.size // max(n, 1), rstd)
    return rows_ops.rms_norm_backward(
        xo.value, go.value, owned_value(grad_out), inverse, dx_dtype=xo.grad_dtype, dgamma_dtype=go.grad_dtype
    )


@implements("netcl.autograd.l2_normalize", uses=(rows_ops, permute))
def l2_normalize(
    casting: Casting, X: TensorLike, dim: int = -1, eps: float = 1e-8, tape: Tape | None = None
) -> Any:  # fmt: skip
    """``X / (|X| + eps)`` along an axis."""
    (xo,) = float_operands(casting, X)
    eps, axis = float(eps), axis_of("l2_normalize", dim, len(xo.shape))
    # The kernels go along the last axis; another one changes places with it, and back.
    order = list(range(len(xo.shape)))
    order[axis], order[-1] = order[-1], order[axis]

    def swapped(tensor: Tensor) -> Tensor:
        return tensor if axis == len(order) - 1 else permute(tensor, order)

    out, norm = rows_ops.l2_normalize(swapped(xo.value), eps=eps, out_dtype=casting.result_dtype(xo))

    def gradient(grad: Tensor) -> Tensor:
        x, grad = swapped(xo.value), swapped(grad)
        return swapped(rows_ops.l2_normalize_backward(x, grad, norm, eps=eps, dx_dtype=xo.grad_dtype))

    return bound(swapped(out), {xo: gradient}, "l2_normalize", tape)


@implements("netcl.nn.loss.l2_normalize", uses=(rows_ops, permute))
def tensor_l2_normalize(casting: Casting, x: Tensor, dim: int = -1, eps: float = 1e-8) -> Any:
    """``l2_normalize`` of a bare tensor."""
    return l2_normalize(casting, x, dim, eps)
