"""Gradients of batch norm and group norm (kernels/norm_planes_backward.cl; norm_planes.clh has the formulas).

GPUs have kernels of their own (norm_sets.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops import norm_sets
from clamp.ops.launch import launch, parts_of, plan_rows
from clamp.ops.norm_sets import IDENTITY, Activation, Inputs, Sets, input_types, storage_types
from clamp.ops.reduce import reduce_sum

PLANES_BACKWARD = Kernel("norm_planes_backward.cl", "planes_backward")
PLANES_BACKWARD_SUMS = Kernel("norm_planes_backward.cl", "planes_backward_sums")
BATCH_BACKWARD_MERGE = Kernel("norm_planes_backward.cl", "batch_backward_merge")
PLANES_BACKWARD_APPLY = Kernel("norm_planes_backward.cl", "planes_backward_apply")


def batch_norm_backward(
    x: Tensor, gamma: Tensor, beta: Tensor, grad: Tensor, mean: Tensor, var: Tensor,
    *, eps: float, dx_dtype: str | None, training: bool = True, parameters: bool = True,
    activation: Activation = IDENTITY,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``batch_norm``, or of ``batch_norm_inference`` if not ``training``.

    Args:
        beta: read only to find where the activation was negative.
        grad: gradient of the result, of x's shape, any storage type.
        mean, var: the statistics that forward used, fp32.
        dx_dtype: dtype of x's gradient; None if it is not wanted.
        parameters: whether the gradients of gamma and beta are wanted.

    Returns:
        Gradients of x, gamma and beta; the latter two in their parameters' dtypes.

    Raises:
        ValueError: the gradient has another shape than x.
    """
    _require_gradient_of(x, grad)
    sets = Sets.channels_of(x)
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    if x.size == 0:
        dgamma, dbeta = (bridge.zeros(p.queue, p.shape, p.dtype) if parameters else None for p in (gamma, beta))
        return dx, dgamma, dbeta
    inputs = (x, grad, gamma, beta, mean, var)
    phases = norm_sets.in_phases(x.queue)
    if not parameters and not training:
        if dx is not None and phases:
            norm_sets.backward(inputs, dx, None, sets, eps, False, activation)
        elif dx is not None:
            _backward_apply(inputs, mean, dx, sets, eps, False, activation)  # the sums are not read
        return dx, None, None
    dgamma, dbeta = (bridge.empty(p.queue, p.shape, p.dtype) for p in (gamma, beta))
    if phases:
        norm_sets.backward(inputs, dx, (dgamma, dbeta), sets, eps, training, activation)
        return dx, dgamma if parameters else None, dbeta if parameters else None
    parts, span = parts_of(x.queue, sets.sets, sets.elements)
    if dx is not None and parts == 1:
        _backward(inputs, dx, (dgamma, dbeta), sets, eps, training, activation)
    else:
        sums = _backward_sums(inputs, (dgamma, dbeta), sets, parts, span, eps, activation)
        if dx is not None:
            _backward_apply(inputs, sums, dx, sets, eps, training, activation)
    return dx, dgamma if parameters else None, dbeta if parameters else None


def group_norm_backward(
    x: Tensor, gamma: Tensor, grad: Tensor, mean: Tensor, var: Tensor, groups: int,
    *, eps: float, dx_dtype: str, dgamma_dtype: str | None, dbeta_dtype: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``group_norm``: of x, and of gamma and beta (shape (C,)) unless their dtype is None.

    Raises:
        ValueError: the gradient has another shape than x.
    """
    _require_gradient_of(x, grad)
    sets = Sets.groups_of(x, groups)
    dx = bridge.empty(x.queue, x.shape, dx_dtype)
    make = bridge.empty if x.size else bridge.zeros
    plane_gamma, plane_beta = (make(x.queue, tuple(x.shape[:2]), "float32") for _ in range(2))
    if x.size:
        inputs = (x, grad, gamma, gamma, mean, var)
        backward = norm_sets.backward if norm_sets.in_phases(x.queue) else _backward
        backward(inputs, dx, (plane_gamma, plane_beta), sets, eps, True, IDENTITY, groups=True)
    dgamma, dbeta = (
        None if dtype is None else reduce_sum(total, 0, out_dtype=dtype)
        for total, dtype in ((plane_gamma, dgamma_dtype), (plane_beta, dbeta_dtype))
    )
    return dx, dgamma, dbeta


def _require_gradient_of(x: Tensor, grad: Tensor) -> None:
    if tuple(grad.shape) != tuple(x.shape):
        raise ValueError(f"norm: gradient of shape {tuple(grad.shape)} for a result of shape {tuple(x.shape)}")


# -------------------------------------------------------------------------------------------- kernels


def _backward(
    inputs: Inputs, dx: Tensor, parameters: tuple[Tensor, Tensor], sets: Sets, eps: float, training: bool,
    activation: Activation, groups: bool = False,
) -> None:  # fmt: skip
    """All gradients, of x, gamma and beta, a set at a time."""
    queue = dx.queue
    plan, width = sets.plan(queue)
    PLANES_BACKWARD(
        queue, plan.global_size, plan.local_size, *inputs, dx, *parameters, *sets.geometry, sets.channels, plan.each,
        eps, activation.slope,
        PLANES_BACKWARD=1, WIDTH=width, ACT=activation.kind, TRAINING=int(training), GROUPS=int(groups),
        **input_types(inputs), **storage_types(DX=dx),
    )  # fmt: skip


def _backward_sums(
    inputs: Inputs, gradients: Sequence[Tensor], sets: Sets, parts: int, span: int, eps: float, activation: Activation
) -> Tensor:
    """The gradients of gamma and beta; both in fp32 as well, side by side for each channel."""
    queue, var = inputs[0].queue, inputs[-1]
    partial_gd, partial_g = (bridge.empty(queue, (sets.sets * parts,), "float32") for _ in range(2))
    plan = plan_rows(queue, sets.sets * parts, span)
    PLANES_BACKWARD_SUMS(
        queue, plan.global_size, plan.local_size, *inputs, partial_gd, partial_g, *sets.geometry, span, parts,
        plan.each, eps, activation.slope,
        PLANES_BACKWARD_SUMS=1, ACT=activation.kind, **input_types(inputs),
    )  # fmt: skip
    sums = bridge.empty(queue, (sets.sets, 2), "float32")
    BATCH_BACKWARD_MERGE(
        queue, *launch(queue, sets.sets), partial_gd, partial_g, var, sums, *gradients, sets.sets, parts, eps,
        BATCH_BACKWARD_MERGE=1, **storage_types(SCALE=gradients[0], SHIFT=gradients[1]),
    )  # fmt: skip
    return sums


def _backward_apply(
    inputs: Inputs, sums: Tensor, dx: Tensor, sets: Sets, eps: float, training: bool, activation: Activation
) -> None:
    """x's gradient from the sums."""
    queue = dx.queue
    plan = sets.plan_planes(queue)
    PLANES_BACKWARD_APPLY(
        queue, plan.global_size, plan.local_size, *inputs, sums, dx, sets.sets * sets.planes, sets.hw, sets.channels,
        plan.each, sets.elements, eps, activation.slope,
        PLANES_BACKWARD_APPLY=1, ACT=activation.kind, TRAINING=int(training), **input_types(inputs),
        **storage_types(DX=dx),
    )  # fmt: skip
