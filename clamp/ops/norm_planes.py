"""Batch norm and group norm of NCHW tensors (kernels/norm_planes_forward.cl; norm_planes.clh has the formulas)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.cast import cast
from clamp.ops.launch import parts_of, plan_rows
from clamp.ops.norm_sets import (
    IDENTITY,
    Activation,
    Sets,
    batch_sets,
    group_sets,
    plan_planes,
    plan_sets,
    storage_types,
)

PLANES_STATISTICS = Kernel("norm_planes_forward.cl", "planes_statistics")
PLANES_FORWARD = Kernel("norm_planes_forward.cl", "planes_forward")
BATCH_MERGE = Kernel("norm_planes_forward.cl", "batch_merge")
PLANES_APPLY = Kernel("norm_planes_forward.cl", "planes_apply")

_MERGE_GROUP = 256  # work-items that merge the channels' statistics on a GPU


# -------------------------------------------------------------------------------------------- batch norm


def batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
    out_dtype: str,
    activation: Activation = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with each channel's statistics of this batch.

    The running statistics become ``(1 - momentum) * running + momentum * batch`` (with the biased variance, as
    netcl has it) in place, without a word to the host; a batch with a mean or variance that is not finite in any
    channel leaves all of them as they are.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        gamma, beta: C elements each, any storage type.
        running_mean, running_var: C elements each, of one storage type; None to keep none.
        out_dtype: dtype of the result.

    Returns:
        The result, and the batch's fp32 mean and biased variance, of shape (C,).
    """
    sets = batch_sets(x)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size == 0:
        return y, bridge.zeros(x.queue, (sets.sets,), "float32"), bridge.zeros(x.queue, (sets.sets,), "float32")
    mean, var = (bridge.empty(x.queue, (sets.sets,), "float32") for _ in range(2))
    parts, span = parts_of(x.queue, sets.sets, sets.elements)
    if parts == 1:
        _forward(x, gamma, beta, y, mean, var, sets, eps, activation)
        if running_mean is not None and running_var is not None:
            _merge(mean, var, mean, var, running_mean, running_var, sets, span, parts, momentum)
        return y, mean, var
    partial_mean, partial_var = (bridge.empty(x.queue, (sets.sets * parts,), "float32") for _ in range(2))
    plan = plan_rows(x.queue, sets.sets * parts, span)
    PLANES_STATISTICS(
        x.queue, plan.global_size, plan.local_size, x, partial_mean, partial_var, *sets.geometry, span, parts,
        plan.each,
        PLANES_STATISTICS=1, WG=plan.group, **storage_types(X=x),
    )  # fmt: skip
    _merge(partial_mean, partial_var, mean, var, running_mean, running_var, sets, span, parts, momentum)
    _apply(x, gamma, beta, y, mean, var, sets, eps, activation)
    return y, mean, var


def batch_norm_inference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float,
    out_dtype: str,
    activation: Activation = IDENTITY,
) -> Tensor:
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with given statistics. Arguments as of ``batch_norm``."""
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size:
        mean, var = cast(mean, "float32"), cast(var, "float32")
        _apply(x, gamma, beta, y, mean, var, batch_sets(x), eps, activation)
    return y


def _forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    sets: Sets,
    eps: float,
    activation: Activation,
) -> None:
    """Statistics and result, a set at a time."""
    plan, width = plan_sets(x.queue, sets)
    PLANES_FORWARD(
        x.queue, plan.global_size, plan.local_size, x, gamma, beta, y, mean, var, *sets.geometry, sets.channels,
        plan.each, eps, activation.slope,
        PLANES_FORWARD=1, WG=plan.group, WIDTH=width, ACT=activation.kind,
        **storage_types(X=x, SCALE=gamma, SHIFT=beta, Y=y),
    )  # fmt: skip


def _merge(
    partial_mean: Tensor,
    partial_var: Tensor,
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    sets: Sets,
    span: int,
    parts: int,
    momentum: float,
) -> None:
    """The parts' statistics into mean and var, and into the running statistics if there are any."""
    queue, device = mean.queue, capabilities(mean.queue)
    group = 1 if device.is_cpu else min(_MERGE_GROUP, device.max_work_group)
    running = running_mean is not None and running_var is not None
    moved = (running_mean, running_var) if running_mean is not None and running_var is not None else (mean, var)
    BATCH_MERGE(
        queue, (group,), (group,), partial_mean, partial_var, mean, var, moved[0], moved[1], sets.sets, sets.elements,
        span, parts, momentum,
        BATCH_MERGE=1, WG=group, RUNNING=int(running), **storage_types(RUNNING=moved[0]),
    )  # fmt: skip


def _apply(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    sets: Sets,
    eps: float,
    activation: Activation,
) -> None:
    """The result from given statistics."""
    plan = plan_planes(x.queue, sets)
    PLANES_APPLY(
        x.queue, plan.global_size, plan.local_size, x, gamma, beta, y, mean, var, sets.sets * sets.planes, sets.hw,
        sets.channels, plan.each, eps, activation.slope,
        PLANES_APPLY=1, WG=plan.group, ACT=activation.kind, **storage_types(X=x, SCALE=gamma, SHIFT=beta, Y=y),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- group norm


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, *, eps: float, out_dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` with the statistics of each sample's group of channels.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16; ``groups`` divides C.
        gamma, beta: C elements each, any storage type.

    Returns:
        The result, and the fp32 mean and biased variance, of shape (N, groups).
    """
    sets = group_sets(x, groups)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    mean, var = (bridge.empty(x.queue, (x.shape[0], groups), "float32") for _ in range(2))
    if x.size:
        _forward(x, gamma, beta, y, mean, var, sets, eps, IDENTITY)
    return y, mean, var
