"""Norms over the last axis, forward and backward: layer norm, RMS norm, L2 normalization (kernels/norm_rows.cl)."""

from __future__ import annotations

from dataclasses import replace

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, require_gradient
from clamp.ops.launch import RowPlan, plan_rows
from clamp.ops.reduce import reduce_sum

ROWS_FORWARD = Kernel("norm_rows.cl", "rows_forward", "X SCALE SHIFT Y")
ROWS_BACKWARD = Kernel("norm_rows.cl", "rows_backward", "X G SCALE - - DX")

_ROWS_SUMMED = 512  # rows that a work-group adds up one by one, at most: their sums are added in blocks


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, *, eps: float, out_dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` over the last axis; the variance is that of the centred row.

    Returns:
        The result, and the fp32 mean and biased variance, of shape (..., 1).
    """
    kept_shape = (*x.shape[:-1], 1)
    mean, var = (bridge.empty(x.queue, kept_shape, "float32") for _ in range(2))
    return _forward("LAYER", x, gamma, beta, mean, var, eps, out_dtype), mean, var


def layer_norm_backward(
    x: Tensor, gamma: Tensor, grad: Tensor, mean: Tensor, var: Tensor,
    *, eps: float, dx_dtype: str, dgamma_dtype: str | None, dbeta_dtype: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``layer_norm``: of x, and of gamma and beta (shape (n,)) unless their dtype is None."""
    return _backward("LAYER", x, gamma, grad, mean, var, eps, dx_dtype, dgamma_dtype, dbeta_dtype)


def rms_norm(x: Tensor, gamma: Tensor, *, eps: float, out_dtype: str) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean x^2 + eps) * gamma`` over the last axis.

    Returns:
        The result, and each row's fp32 ``1 / sqrt(mean x^2 + eps)``, of shape (rows,).
    """
    inverse = bridge.empty(x.queue, (_rows(x),), "float32")
    return _forward("RMS", x, gamma, gamma, inverse, inverse, eps, out_dtype), inverse


def rms_norm_backward(
    x: Tensor, gamma: Tensor, grad: Tensor, inverse: Tensor, *, dx_dtype: str, dgamma_dtype: str | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``rms_norm``: of x, and of gamma (shape (n,)) unless its dtype is None."""
    dx, dgamma, _ = _backward("RMS", x, gamma, grad, inverse, inverse, 0.0, dx_dtype, dgamma_dtype, None)
    return dx, dgamma


def l2_normalize(x: Tensor, *, eps: float, out_dtype: str) -> tuple[Tensor, Tensor]:
    """``x / (|x| + eps)`` over the last axis, and each row's fp32 norm ``|x|``, of shape (rows,)."""
    norm = bridge.empty(x.queue, (_rows(x),), "float32")
    return _forward("UNIT", x, x, x, norm, norm, eps, out_dtype), norm


def l2_normalize_backward(x: Tensor, grad: Tensor, norm: Tensor, *, eps: float, dx_dtype: str) -> Tensor:
    """Gradient of ``l2_normalize``; a row of zeros gets ``grad / eps``."""
    return _backward("UNIT", x, x, grad, norm, norm, eps, dx_dtype, None, None)[0]


def _rows(x: Tensor) -> int:
    return around_axis(x.shape, -1)[0]


def _forward(
    kind: str, x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, kept: Tensor, eps: float, out_dtype: str
) -> Tensor:
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size == 0:
        return y
    rows, n, _ = around_axis(x.shape, -1)
    plan = plan_rows(x.queue, rows, n)
    ROWS_FORWARD(x.queue, *plan.sizes, x, gamma, beta, y, mean, kept, rows, n, plan.each, eps, KIND=kind, **plan.macros)
    return y


def _backward(
    kind: str, x: Tensor, gamma: Tensor, grad: Tensor, mean: Tensor, kept: Tensor, eps: float, dx_dtype: str,
    dgamma_dtype: str | None, dbeta_dtype: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    require_gradient("norm", grad, x.shape)
    dx = bridge.empty(x.queue, x.shape, dx_dtype)
    rows, n, _ = around_axis(x.shape, -1)
    if x.size == 0:
        return dx, *(None if dt is None else bridge.zeros(x.queue, (n,), dt) for dt in (dgamma_dtype, dbeta_dtype))
    parameters = dgamma_dtype is not None or dbeta_dtype is not None
    plan = _plan_sums(x.queue, rows, n) if parameters else plan_rows(x.queue, rows, n)
    partial_gamma = partial_beta = kept  # not touched
    if parameters:
        partial_gamma = bridge.empty(x.queue, (plan.groups, n), "float32")
        partial_beta = bridge.empty(x.queue, (plan.groups, n), "float32") if kind == "LAYER" else kept
    ROWS_BACKWARD(
        x.queue, *plan.sizes, x, grad, gamma, mean, kept, dx, partial_gamma, partial_beta, rows, n, plan.each, eps,
        KIND=kind, **plan.macros, PARAMETERS=int(parameters),
    )  # fmt: skip
    dgamma, dbeta = (
        None if dtype is None else reduce_sum(partial, 0, out_dtype=dtype)
        for partial, dtype in ((partial_gamma, dgamma_dtype), (partial_beta, dbeta_dtype))
    )
    return dx, dgamma, dbeta


def _plan_sums(queue: cl.CommandQueue, rows: int, n: int) -> RowPlan:
    """As ``plan_rows``, with few groups: each leaves a row of partial sums behind."""
    plan = plan_rows(queue, rows, n)
    each = min(max(plan.each, -(-rows // (4 * capabilities(queue).compute_units))), _ROWS_SUMMED)
    return replace(plan, each=each, groups=-(-rows // each))
