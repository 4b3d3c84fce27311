"""Batch norm and group norm of NCHW tensors, forward and backward (kernels/norm_planes_forward.cl,
norm_planes_backward.cl; norm_planes.clh has the formulas).

GPUs have kernels of their own (norm_sets.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops import norm_sets
from clamp.ops.arguments import require_gradient
from clamp.ops.cast import cast
from clamp.ops.launch import launch, parts_of, plan_rows
from clamp.ops.norm_sets import IDENTITY, Activation, Inputs, Sets, Tensors
from clamp.ops.reduce import reduce_sum

PLANES_STATISTICS = Kernel("norm_planes_forward.cl", "planes_statistics", "X")
PLANES_FORWARD = Kernel("norm_planes_forward.cl", "planes_forward", "X SCALE SHIFT Y")
BATCH_MERGE = Kernel("norm_planes_forward.cl", "batch_merge", "- - - - RUNNING")
PLANES_APPLY = Kernel("norm_planes_forward.cl", "planes_apply", "X SCALE SHIFT Y")
PLANES_BACKWARD = Kernel("norm_planes_backward.cl", "planes_backward", "X G SCALE SHIFT - - DX")
PLANES_BACKWARD_SUMS = Kernel("norm_planes_backward.cl", "planes_backward_sums", "X G SCALE SHIFT")
BATCH_BACKWARD_MERGE = Kernel("norm_planes_backward.cl", "batch_backward_merge", "- - - - SCALE SHIFT")
PLANES_BACKWARD_APPLY = Kernel("norm_planes_backward.cl", "planes_backward_apply", "X G SCALE SHIFT - - - DX")


# -------------------------------------------------------------------------------------------- batch norm


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    *, momentum: float, eps: float, out_dtype: str, activation: Activation = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with each channel's statistics of this batch.

    The running statistics, if there are any, become ``(1 - momentum) * running + momentum * batch`` (with the biased
    variance, as netcl has it) in place, without a word to the host; a batch with a mean or variance that is not finite
    in any channel leaves all of them as they are.

    Returns:
        The result, and the batch's fp32 mean and biased variance, of shape (C,).
    """
    sets = Sets.channels_of(x)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size == 0:
        return y, bridge.zeros(x.queue, (sets.sets,), "float32"), bridge.zeros(x.queue, (sets.sets,), "float32")
    mean, var = (bridge.empty(x.queue, (sets.sets,), "float32") for _ in range(2))
    tensors, statistics = (x, gamma, beta, y, mean, var), (mean, var)
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    if norm_sets.in_phases(x.queue):
        norm_sets.forward(tensors, sets, eps, activation, running, momentum)
        return y, mean, var
    parts, span = parts_of(x.queue, sets.sets, sets.elements)
    if parts == 1:
        _forward(tensors, sets, eps, activation)
        if running is not None:
            _merge(statistics, statistics, running, sets, span, parts, momentum)
        return y, mean, var
    partial = [bridge.empty(x.queue, (sets.sets * parts,), "float32") for _ in range(2)]
    plan = plan_rows(x.queue, sets.sets * parts, span)
    PLANES_STATISTICS(x.queue, *plan.sizes, x, *partial, *sets.geometry, span, parts, plan.each)
    _merge(partial, statistics, running, sets, span, parts, momentum)
    _apply(tensors, sets, eps, activation)
    return y, mean, var


def batch_norm_inference(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor,
    *, eps: float, out_dtype: str, activation: Activation = IDENTITY,
) -> Tensor:  # fmt: skip
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with given statistics."""
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size:
        tensors = (x, gamma, beta, y, cast(mean, "float32"), cast(var, "float32"))
        apply = norm_sets.apply if norm_sets.in_phases(x.queue) else _apply
        apply(tensors, Sets.channels_of(x), eps, activation)
    return y


def _forward(tensors: Tensors, sets: Sets, eps: float, activation: Activation) -> None:
    """Statistics and result, a set at a time."""
    queue = tensors[0].queue
    plan, width = sets.plan(queue)
    PLANES_FORWARD(
        queue, *plan.sizes, *tensors, *sets.geometry, sets.channels, plan.each, eps, activation.slope,
        WIDTH=width, ACT=activation.kind,
    )  # fmt: skip


def _merge(
    partial: Sequence[Tensor], statistics: Sequence[Tensor], running: Sequence[Tensor] | None, sets: Sets, span: int,
    parts: int, momentum: float,
) -> None:  # fmt: skip
    """The parts' means and variances into those of the sets, and into the running statistics if there are any."""
    queue = statistics[0].queue
    moved = statistics if running is None else running
    BATCH_MERGE(
        queue, (1,), (1,), *partial, *statistics, *moved, sets.sets, sets.elements, span, parts, momentum,
        RUNNING=int(running is not None),
    )  # fmt: skip


def _apply(tensors: Tensors, sets: Sets, eps: float, activation: Activation) -> None:
    """The result from given statistics."""
    queue = tensors[0].queue
    plan = sets.plan_planes(queue)
    PLANES_APPLY(
        queue, *plan.sizes, *tensors, sets.sets * sets.planes, sets.hw, sets.channels, plan.each, eps, activation.slope,
        ACT=activation.kind,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- group norm


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, *, eps: float, out_dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` with the statistics of each sample's group of channels.

    Returns:
        The result, and the fp32 mean and biased variance, of shape (N, groups).
    """
    sets = Sets.groups_of(x, groups)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    mean, var = (bridge.empty(x.queue, (x.shape[0], groups), "float32") for _ in range(2))
    if x.size:
        forward = norm_sets.forward if norm_sets.in_phases(x.queue) else _forward
        forward((x, gamma, beta, y, mean, var), sets, eps, IDENTITY)
    return y, mean, var


# -------------------------------------------------------------------------------------------- gradients


def batch_norm_backward(
    x: Tensor, gamma: Tensor, beta: Tensor, grad: Tensor, mean: Tensor, var: Tensor,
    *, eps: float, dx_dtype: str | None, training: bool = True, parameters: bool = True,
    activation: Activation = IDENTITY,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``batch_norm``, or of ``batch_norm_inference`` if not ``training``: of x, gamma and beta, the latter
    two in their parameters' dtypes.

    Args:
        beta: read only to find where the activation was negative.
        mean, var: the statistics that forward used, fp32.
        parameters: whether the gradients of gamma and beta are wanted.
    """
    require_gradient("norm", grad, x.shape)
    sets = Sets.channels_of(x)
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    if x.size == 0:
        dgamma, dbeta = (bridge.zeros(p.queue, p.shape, p.dtype) if parameters else None for p in (gamma, beta))
        return dx, dgamma, dbeta
    summed = None
    if parameters or training:  # x's gradient is made of the others' sums, then
        summed = bridge.empty(gamma.queue, gamma.shape, gamma.dtype), bridge.empty(beta.queue, beta.shape, beta.dtype)
    if dx is not None or summed is not None:
        backward = norm_sets.backward if norm_sets.in_phases(x.queue) else _backward_in_parts
        backward((x, grad, gamma, beta, mean, var), dx, summed, sets, eps, training, activation)
    return dx, *(summed if parameters and summed is not None else (None, None))


def group_norm_backward(
    x: Tensor, gamma: Tensor, grad: Tensor, mean: Tensor, var: Tensor, groups: int,
    *, eps: float, dx_dtype: str, dgamma_dtype: str | None, dbeta_dtype: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``group_norm``: of x, and of gamma and beta (shape (C,)) unless their dtype is None."""
    require_gradient("norm", grad, x.shape)
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


# -------------------------------------------------------------------------------------------- kernels


def _backward(
    inputs: Inputs, dx: Tensor, parameters: tuple[Tensor, Tensor], sets: Sets, eps: float, training: bool,
    activation: Activation, groups: bool = False,
) -> None:  # fmt: skip
    """All gradients, of x, gamma and beta, a set at a time."""
    queue = dx.queue
    plan, width = sets.plan(queue)
    PLANES_BACKWARD(
        queue, *plan.sizes, *inputs, dx, *parameters, *sets.geometry, sets.channels, plan.each, eps, activation.slope,
        WIDTH=width, ACT=activation.kind, TRAINING=int(training), GROUPS=int(groups),
    )  # fmt: skip


def _backward_in_parts(
    inputs: Inputs, dx: Tensor | None, parameters: tuple[Tensor, Tensor] | None, sets: Sets, eps: float, training: bool,
    activation: Activation,
) -> None:  # fmt: skip
    """As `norm_sets.backward`, of channels: a set at a time, or in parts, where few sets would leave cores idle."""
    queue, mean, var = inputs[0].queue, inputs[4], inputs[5]
    parts, span = parts_of(queue, sets.sets, sets.elements)
    sums = mean  # not read
    if parameters is not None:
        if dx is not None and parts == 1:
            _backward(inputs, dx, parameters, sets, eps, training, activation)
            return
        partial_gd, partial_g = (bridge.empty(queue, (sets.sets * parts,), "float32") for _ in range(2))
        plan = plan_rows(queue, sets.sets * parts, span)
        PLANES_BACKWARD_SUMS(
            queue, *plan.sizes, *inputs, partial_gd, partial_g, *sets.geometry, span, parts, plan.each, eps,
            activation.slope, ACT=activation.kind,
        )  # fmt: skip
        sums = bridge.empty(queue, (sets.sets, 2), "float32")  # of gamma and beta, side by side for each channel
        BATCH_BACKWARD_MERGE(
            queue, *launch(queue, sets.sets), partial_gd, partial_g, var, sums, *parameters, sets.sets, parts, eps
        )
    if dx is not None:
        plan = sets.plan_planes(queue)
        PLANES_BACKWARD_APPLY(
            queue, *plan.sizes, *inputs, sums, dx, sets.sets * sets.planes, sets.hw, sets.channels, plan.each,
            sets.elements, eps, activation.slope, ACT=activation.kind, TRAINING=int(training),
        )  # fmt: skip
