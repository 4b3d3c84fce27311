"""Norms under autograd, and netcl's tensor-level versions of them: of planes, batch norm and group norm; of rows, layer
norm, RMS norm and L2 normalization.

Backward keeps the input in the dtype it has, and a mean and a variance in fp32 for each channel, group or row; an
activation's mask is computed again. gamma and beta are read as they are and get their gradient in their own dtype.
"""

from __future__ import annotations

from math import prod
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Operand, bound, float_operands, floats_as_is, owned_value
from clamp.casting.registry import Function, implements
from clamp.functions.recompute import is_recomputing, kept
from clamp.ops import norm_planes as planes_ops
from clamp.ops import norm_rows as rows_ops
from clamp.ops import norm_sets
from clamp.ops.arguments import axis_of, number, require_nchw, whole_number, yes_or_no
from clamp.ops.cast import cast, cast_into
from clamp.ops.elementwise import elementwise
from clamp.ops.norm_sets import IDENTITY, RELU, Activation
from clamp.ops.reduce import reduce_sum
from clamp.ops.shape import permute

_FORWARD = (planes_ops.PLANES_FORWARD, norm_sets, cast)
_BATCH = (*_FORWARD, planes_ops.PLANES_BACKWARD)  # without the sums over samples of group norm


def _parameters_of(name: str, x: Operand, size: int, *parameters: Any) -> tuple[Operand, ...]:
    """gamma and beta, read in their own dtype, of ``size`` elements each."""
    operands = floats_as_is(*parameters)
    for label, operand in zip(("gamma", "beta"), operands, strict=False):
        if operand.value.size != size:
            raise ValueError(f"{name}: {label} of shape {operand.shape} for {size} features (x has shape {x.shape})")
    bridge.require_same_queue(name, x.value, *(operand.value for operand in operands))
    return operands


def _operands(casting: Casting, name: str, x: Any, axis: int, *parameters: Any) -> tuple[Operand, ...]:
    """x, and its gamma and beta, which have as many elements as its axis: 1, of images (N, C, H, W), or the last."""
    (xo,) = float_operands(casting, x)
    if axis == 1:
        require_nchw(name, xo.shape)
    size = xo.shape[1] if axis == 1 else _last_axis(name, xo)
    return xo, *_parameters_of(name, xo, size, *parameters)


def _like(grad: Tensor | None, operand: Operand) -> Tensor | None:
    """A parameter's gradient in the parameter's shape."""
    return None if grad is None else bridge.view(grad, operand.shape)


def _statistics_of(name: str, x: Operand, size: int, *statistics: Any) -> list[Tensor]:
    """The statistics of x, read and written as they are: ``size`` elements each, of one dtype."""
    values = [operand.value for operand in floats_as_is(*statistics)]
    if any(value.size != size or value.dtype != values[0].dtype for value in values):
        kinds = " and ".join(f"{value.dtype} {tuple(value.shape)}" for value in values)
        raise ValueError(f"{name}: statistics of one dtype and {size} elements are needed, got {kinds}")
    bridge.require_same_queue(name, x.value, *values)
    return values


def _saved_statistics(name: str, x: Operand, size: int, *statistics: Any) -> list[Tensor]:
    """The statistics of a forward, in fp32: running ones may be kept in 16 bits."""
    return [cast(statistic, "float32") for statistic in _statistics_of(name, x, size, *statistics)]


def _copy(statistic: Tensor) -> Tensor:
    """An fp32 copy: backward wants the statistics of its forward, and the running ones move on."""
    out = bridge.empty(statistic.queue, statistic.shape, "float32")
    cast_into(statistic, out)
    return out


def _normalized_batch(
    casting: Casting, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, momentum: float, eps: float,
    training: bool, tape: Tape | None, name: str, activation: Activation,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` for each channel of x (N, C, H, W) (Ioffe and Szegedy, 2015), and
    an activation of that in its store. All but x have C elements. Besides the result the mean and variance of each
    channel that it was normalized with.

    In training the statistics are those of the batch, and the running ones become ``(1 - momentum) * running +
    momentum * batch`` in place, with the biased variance; a batch whose statistics are not finite leaves them alone.
    In evaluation the statistics are the running ones, as constants.
    """
    xo, go, bo = _operands(casting, name, x, 1, gamma, beta)
    training = yes_or_no(name, "training", training)
    has_running = running_mean is not None and running_var is not None
    moved: list[Any] = [None, None]
    if has_running or not training:
        moved = _statistics_of(name, xo, xo.shape[1], running_mean, running_var)
    if training and is_recomputing():
        moved = [None, None]
    dtype, eps, made = casting.result_dtype(xo), number(name, "eps", eps), list[Tensor]()

    def of_the_batch() -> tuple[Tensor, Tensor]:
        result, mean, var = planes_ops.batch_norm(
            xo.value, go.value, bo.value, *moved,
            momentum=number(name, "momentum", momentum), eps=eps, out_dtype=dtype, activation=activation,
        )  # fmt: skip
        made.append(result)
        return mean, var

    if training:
        mean, var = kept(of_the_batch, ("batch norm", xo.shape, go.shape, bo.shape), (xo, go, bo))
    else:
        mean, var = moved
        if any(operand.needs_grad for operand in (xo, go, bo)):
            mean, var = _copy(mean), _copy(var)
    out = made.pop() if made else planes_ops.batch_norm_inference(
        xo.value, go.value, bo.value, mean, var, eps=eps, out_dtype=dtype, activation=activation
    )  # fmt: skip

    statistics = center, spread = Operand(mean, mean), Operand(var, var)

    def backward(grad: Tensor, dx_dtype: str | None, *dtypes: str | None) -> tuple[Tensor | None, ...]:
        return planes_ops.batch_norm_backward(
            xo.value, go.value, bo.value, grad, center.value, spread.value, eps=eps, dx_dtype=dx_dtype,
            training=training, parameters=any(dtypes), activation=activation,
        )  # fmt: skip

    return bound(out, {(xo, go, bo): backward}, name, tape, besides=statistics), mean, var


def _batch_norm(name: str, activation: Activation) -> Function:
    @implements(f"netcl.autograd.{name}", whole=f"netcl.nn.batchnorm.{name}", uses=_BATCH)
    def function(
        casting: Casting, x: TensorLike, gamma: TensorLike, beta: TensorLike, running_mean: Tensor, running_var: Tensor,
        momentum: float = 0.1, eps: float = 1e-5, training: bool = True, tape: Tape | None = None,
    ) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
        return _normalized_batch(
            casting, x, gamma, beta, running_mean, running_var, momentum, eps, training, tape, name, activation
        )

    return function


batch_norm2d = _batch_norm("batch_norm2d", IDENTITY)
batch_norm2d_relu = _batch_norm("batch_norm2d_relu", RELU)


@implements("netcl.autograd.batch_norm2d_leaky_relu", whole="netcl.nn.batchnorm.batch_norm2d_leaky_relu", uses=_BATCH)
def batch_norm2d_leaky_relu(
    casting: Casting, x: TensorLike, gamma: TensorLike, beta: TensorLike, running_mean: Tensor, running_var: Tensor,
    momentum: float = 0.1, eps: float = 1e-5, training: bool = True, negative_slope: float = 0.01,
    tape: Tape | None = None,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """leaky_relu of ``batch_norm2d``, in its store. Arguments and results as there."""
    return _normalized_batch(
        casting, x, gamma, beta, running_mean, running_var, momentum, eps, training, tape, "batch_norm2d_leaky_relu",
        Activation(2, number("batch_norm2d_leaky_relu", "negative_slope", negative_slope)),
    )  # fmt: skip


@implements("netcl.nn.batchnorm.batch_norm2d_backward", uses=(planes_ops.PLANES_BACKWARD, elementwise, cast))
def tensor_batch_norm2d_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, eps: float = 1e-5,
    out: Tensor | None = None, leaky_slope: float | None = None, training: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, gamma and beta. ``out`` is not written: with ``leaky_slope`` it tells where to scale."""
    xo, go = _operands(casting, "batch_norm2d_backward", x, 1, gamma)
    grad = owned_value(grad_out)
    center, spread = _saved_statistics("batch_norm2d_backward", xo, xo.shape[1], mean, var)
    if out is not None and leaky_slope is not None:
        grad = elementwise("leaky_relu_grad", grad.dtype, grad, owned_value(out), parameters=(float(leaky_slope),))
    return planes_ops.batch_norm_backward(
        xo.value, go.value, go.value, grad, center, spread, eps=float(eps), dx_dtype=xo.grad_dtype, training=training
    )


@implements("netcl.ops.elementwise_optimized.fused_bn_relu", uses=_FORWARD)
def fused_bn_relu(casting: Casting, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``relu(x * scale + shift)`` of an (N, C, H, W) tensor, scale and shift of shape (C,)."""
    xo, so, bo = _operands(casting, "fused_bn_relu", x, 1, scale, shift)
    zero = bridge.zeros(xo.value.queue, (xo.shape[1],), "float32")  # mean 0, variance 0 + 1
    return planes_ops.batch_norm_inference(
        xo.value, so.value, bo.value, zero, zero, eps=1.0, out_dtype=casting.result_dtype(xo), activation=RELU
    )


@implements("netcl.autograd.group_norm", whole="netcl.nn.groupnorm.group_norm", uses=(planes_ops,))
def group_norm(
    casting: Casting, x: TensorLike, gamma: TensorLike, beta: TensorLike, groups: int, eps: float = 1e-5,
    tape: Tape | None = None,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` with the statistics of each sample's group of channels
    (Wu and He, 2018).

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16; ``groups`` divides C.
        gamma, beta: C elements each.

    Returns:
        The result, and the means and variances in float32, of shape (N, groups).
    """
    xo, go, bo = _operands(casting, "group_norm", x, 1, gamma, beta)
    groups, eps = whole_number("group_norm", "groups", groups, 1), number("group_norm", "eps", eps)
    if xo.shape[1] % groups:
        raise ValueError(f"group_norm: {xo.shape[1]} channels are not divisible by groups={groups}")
    dtype = casting.result_dtype(xo)
    out, mean, var = planes_ops.group_norm(xo.value, go.value, bo.value, groups, eps=eps, out_dtype=dtype)
    statistics = center, spread = Operand(mean, mean), Operand(var, var)

    def backward(grad: Tensor, _: str | None, *dtypes: str | None) -> tuple[Tensor | None, ...]:
        dx, dgamma, dbeta = planes_ops.group_norm_backward(
            xo.value, go.value, grad, center.value, spread.value, groups, eps=eps, dx_dtype=xo.grad_dtype,
            dgamma_dtype=dtypes[0], dbeta_dtype=dtypes[1],
        )  # fmt: skip
        return dx, _like(dgamma, go), _like(dbeta, bo)

    return bound(out, {(xo, go, bo): backward}, "group_norm", tape, besides=statistics), mean, var


@implements("netcl.nn.groupnorm.group_norm_backward", uses=(planes_ops.PLANES_BACKWARD, norm_sets, reduce_sum, cast))
def tensor_group_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, groups: int,
    eps: float = 1e-5,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, gamma and beta."""
    xo, go = _operands(casting, "group_norm_backward", x, 1, gamma)
    groups = int(groups)
    center, spread = _saved_statistics("group_norm_backward", xo, xo.shape[0] * groups, mean, var)
    return planes_ops.group_norm_backward(
        xo.value, go.value, owned_value(grad_out), center, spread, groups, eps=float(eps), dx_dtype=xo.grad_dtype,
        dgamma_dtype=go.grad_dtype, dbeta_dtype=go.grad_dtype,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- rows


@implements("netcl.autograd.layer_norm", whole="netcl.nn.layernorm.layer_norm", uses=(rows_ops,))
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
    eps, shape = number("layer_norm", "eps", eps), xo.shape
    rows = _rows_that_share_statistics(xo, owned_value(gamma))
    go, bo = _parameters_of("layer_norm", xo, rows[-1], gamma, beta)
    out, mean, var = rows_ops.layer_norm(
        bridge.view(xo.value, rows), go.value, bo.value, eps=eps, out_dtype=casting.result_dtype(xo)
    )
    statistics = center, spread = Operand(mean, mean), Operand(var, var)

    def backward(grad: Tensor, _: str | None, *dtypes: str | None) -> tuple[Tensor | None, ...]:
        dx, dgamma, dbeta = rows_ops.layer_norm_backward(
            bridge.view(xo.value, rows), go.value, bridge.view(grad, rows), center.value, spread.value, eps=eps,
            dx_dtype=xo.grad_dtype, dgamma_dtype=dtypes[0], dbeta_dtype=dtypes[1],
        )  # fmt: skip
        return bridge.view(dx, shape), _like(dgamma, go), _like(dbeta, bo)

    result = bridge.view(out, shape)
    return bound(result, {(xo, go, bo): backward}, "layer_norm", tape, besides=statistics), mean, var


def _rows_that_share_statistics(x: Operand, gamma: Tensor) -> tuple[int, ...]:
    """x's shape with the axes that are normalized together as one: the last, or as many as gamma has.

    ``LayerNorm([2, 3])`` means both axes, as in PyTorch; netcl normalizes the last alone and reads the first 3 of
    gamma's 6 elements for every row.
    """
    n = _last_axis("layer_norm", x)
    axes = tuple(gamma.shape)
    if len(axes) > 1 and x.shape[-len(axes) :] == axes:
        return (*x.shape[: -len(axes)], prod(axes))
    return (*x.shape[:-1], n)


def _last_axis(name: str, x: Operand) -> int:
    if not x.shape:
        raise ValueError(f"{name} takes x of shape (..., n), got a tensor without dimensions")
    return x.shape[-1]


@implements("netcl.nn.layernorm.layer_norm_backward", uses=(rows_ops, cast))
def tensor_layer_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, mean: Tensor, var: Tensor, eps: float = 1e-5
) -> tuple[Tensor | None, ...]:
    """Gradients of x, gamma and beta."""
    xo, go = _operands(casting, "layer_norm_backward", x, -1, gamma)
    center, spread = _saved_statistics("layer_norm_backward", xo, xo.value.size // max(xo.shape[-1], 1), mean, var)
    return rows_ops.layer_norm_backward(
        xo.value, go.value, owned_value(grad_out), center, spread, eps=float(eps), dx_dtype=xo.grad_dtype,
        dgamma_dtype=go.grad_dtype, dbeta_dtype=go.grad_dtype,
    )  # fmt: skip


@implements("netcl.autograd.rms_norm", whole="netcl.ops.norm_rope.rms_norm", uses=(rows_ops,))
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
    xo, go = _operands(casting, "rms_norm", x, -1, gamma)
    eps, dtype = number("rms_norm", "eps", eps), casting.result_dtype(xo)
    out, inverse = rows_ops.rms_norm(xo.value, go.value, eps=eps, out_dtype=dtype)
    statistic = Operand(inverse, inverse)

    def backward(grad: Tensor, _: str | None, dtype: str | None) -> tuple[Tensor | None, ...]:
        dx, dgamma = rows_ops.rms_norm_backward(
            xo.value, go.value, grad, statistic.value, dx_dtype=xo.grad_dtype, dgamma_dtype=dtype
        )
        return dx, _like(dgamma, go)

    return bound(out, {(xo, go): backward}, "rms_norm", tape, besides=(statistic,)), inverse


@implements("netcl.ops.norm_rope.rms_norm_backward", uses=(rows_ops, cast))
def tensor_rms_norm_backward(
    casting: Casting, x: Tensor, gamma: Tensor, grad_out: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and gamma."""
    xo, go = _operands(casting, "rms_norm_backward", x, -1, gamma)
    (inverse,) = _saved_statistics("rms_norm_backward", xo, xo.value.size // max(xo.shape[-1], 1), rstd)
    return rows_ops.rms_norm_backward(
        xo.value, go.value, owned_value(grad_out), inverse, dx_dtype=xo.grad_dtype, dgamma_dtype=go.grad_dtype
    )


@implements("netcl.autograd.l2_normalize", uses=(rows_ops, permute))
def l2_normalize(casting: Casting, X: TensorLike, dim: int = -1, eps: float = 1e-8, tape: Tape | None = None) -> Any:
    """``X / (|X| + eps)`` along an axis."""
    (xo,) = float_operands(casting, X)
    eps, axis = number("l2_normalize", "eps", eps), axis_of("l2_normalize", dim, len(xo.shape))
    # The kernels go along the last axis; another one changes places with it, and back.
    order = list(range(len(xo.shape)))
    order[axis], order[-1] = order[-1], order[axis]

    def swapped(tensor: Tensor) -> Tensor:
        return tensor if axis == len(order) - 1 else permute(tensor, order)

    out, norm = rows_ops.l2_normalize(swapped(xo.value), eps=eps, out_dtype=casting.result_dtype(xo))

    def gradient(grad: Tensor, dtype: str) -> Tensor:
        x, grad = swapped(xo.value), swapped(grad)
        return swapped(rows_ops.l2_normalize_backward(x, grad, norm, eps=eps, dx_dtype=dtype))

    return bound(swapped(out), {xo: gradient}, "l2_normalize", tape)


@implements("netcl.nn.loss.l2_normalize", uses=(rows_ops, permute))
def tensor_l2_normalize(casting: Casting, x: Tensor, dim: int = -1, eps: float = 1e-8) -> Any:
    """``l2_normalize`` of a bare tensor."""
    return l2_normalize(casting, x, dim, eps)
