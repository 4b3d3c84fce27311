"""Batch norm and group norm of NCHW tensors (kernels/norm_planes_forward.cl; norm_planes.clh has the formulas).

GPUs have kernels of their own (norm_sets.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops import norm_sets
from clamp.ops.cast import cast
from clamp.ops.launch import parts_of, plan_rows
from clamp.ops.norm_sets import IDENTITY, Activation, Sets, Tensors, result_types, storage_types

PLANES_STATISTICS = Kernel("norm_planes_forward.cl", "planes_statistics")
PLANES_FORWARD = Kernel("norm_planes_forward.cl", "planes_forward")
BATCH_MERGE = Kernel("norm_planes_forward.cl", "batch_merge")
PLANES_APPLY = Kernel("norm_planes_forward.cl", "planes_apply")


# -------------------------------------------------------------------------------------------- batch norm


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    *, momentum: float, eps: float, out_dtype: str, activation: Activation = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
    PLANES_STATISTICS(
        x.queue, plan.global_size, plan.local_size, x, *partial, *sets.geometry, span, parts, plan.each,
        PLANES_STATISTICS=1, **storage_types(X=x),
    )  # fmt: skip
    _merge(partial, statistics, running, sets, span, parts, momentum)
    _apply(tensors, sets, eps, activation)
    return y, mean, var


def batch_norm_inference(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor,
    *, eps: float, out_dtype: str, activation: Activation = IDENTITY,
) -> Tensor:  # fmt: skip
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with given statistics. Arguments as of ``batch_norm``."""
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
        queue, plan.global_size, plan.local_size, *tensors, *sets.geometry, sets.channels, plan.each, eps,
        activation.slope,
        PLANES_FORWARD=1, WIDTH=width, ACT=activation.kind, **result_types(tensors),
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
        BATCH_MERGE=1, RUNNING=int(running is not None), **storage_types(RUNNING=moved[0]),
    )  # fmt: skip


def _apply(tensors: Tensors, sets: Sets, eps: float, activation: Activation) -> None:
    """The result from given statistics."""
    queue = tensors[0].queue
    plan = sets.plan_planes(queue)
    PLANES_APPLY(
        queue, plan.global_size, plan.local_size, *tensors, sets.sets * sets.planes, sets.hw, sets.channels, plan.each,
        eps, activation.slope,
        PLANES_APPLY=1, ACT=activation.kind, **result_types(tensors),
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
    sets = Sets.groups_of(x, groups)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    mean, var = (bridge.empty(x.queue, (x.shape[0], groups), "float32") for _ in range(2))
    if x.size:
        forward = norm_sets.forward if norm_sets.in_phases(x.queue) else _forward
        forward((x, gamma, beta, y, mean, var), sets, eps, IDENTITY)
    return y, mean, var
