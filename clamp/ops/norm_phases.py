"""Batch norm, group norm and their gradients on GPUs, in two phases (kernels/norm_planes_phases.cl)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import group_macros
from clamp.ops.norm_sets import Activation, Inputs, Sets, Tensors, input_types, result_types, storage_types

PLANES_MOMENTS = Kernel("norm_planes_phases.cl", "planes_moments")
PLANES_NORMALIZE = Kernel("norm_planes_phases.cl", "planes_normalize")
GRADIENT_SUMS = Kernel("norm_planes_phases.cl", "gradient_sums")
PLANES_GRADIENT = Kernel("norm_planes_phases.cl", "planes_gradient")

_GROUP = 256  # work-items that share a part
_GROUPS_PER_UNIT = 8  # work-groups that a compute unit of a GPU holds: loads of some are under way while others compute
_BLOCKS_PER_ITEM = 2  # that are worth a work-item
_MOST_PARTS = 128  # one work-item of a group adds up what phase 1 left of a set


def in_phases(queue: cl.CommandQueue) -> bool:
    """Whether norms of planes are computed so on the queue's device: on GPUs."""
    return not capabilities(queue).is_cpu


@dataclass(frozen=True)
class Plan:
    """How the blocks of each set are dealt to work-groups.

    Attributes:
        sets: how many there are.
        group: work-items of a work-group.
        parts: work-groups of a set.
        span: blocks of a part.
        macros: what kernels are built with.
    """

    sets: int
    group: int
    parts: int
    span: int
    macros: dict[str, object]

    def sizes(self, more: int = 0) -> tuple[tuple[int], tuple[int]]:
        """Work-items of a launch of all parts, and perhaps of more work-groups, and those of a work-group."""
        return ((self.sets * self.parts + more) * self.group,), (self.group,)


def plan_of(queue: cl.CommandQueue, sets: Sets) -> Plan:
    """Parts enough that all compute units have work where sets are few, and no more than that is worth."""
    device = capabilities(queue)
    group = _GROUP
    while group > device.max_work_group or (group > 32 and group >= 2 * sets.blocks):
        group //= 2
    wanted = _GROUPS_PER_UNIT * device.compute_units // sets.sets
    parts = max(1, min(wanted, sets.blocks // (_BLOCKS_PER_ITEM * group), _MOST_PARTS))
    span = -(-sets.blocks // parts)
    return Plan(sets.sets, group, -(-sets.blocks // span), span, group_macros(queue, group))


def forward(
    tensors: Tensors, sets: Sets, eps: float, activation: Activation,
    running: tuple[Tensor, Tensor] | None = None, momentum: float = 0.0,
) -> None:  # fmt: skip
    """Statistics and result; the running statistics move, if there are any."""
    x = tensors[0]
    plan = plan_of(x.queue, sets)
    moments = bridge.empty(x.queue, (sets.sets * plan.parts, 4), "float32")
    PLANES_MOMENTS(
        x.queue, *plan.sizes(), x, moments, *sets.geometry, plan.parts, plan.span,
        PLANES_MOMENTS=1, **plan.macros, **storage_types(X=x),
    )  # fmt: skip
    _normalize(tensors, sets, plan, eps, activation, moments, running, momentum)


def apply(tensors: Tensors, sets: Sets, eps: float, activation: Activation) -> None:
    """The result from given statistics."""
    _normalize(tensors, sets, plan_of(tensors[0].queue, sets), eps, activation, None, None, 0.0)


def _normalize(
    tensors: Tensors, sets: Sets, plan: Plan, eps: float, activation: Activation, moments: Tensor | None,
    running: tuple[Tensor, Tensor] | None, momentum: float,
) -> None:  # fmt: skip
    x, _, _, _, mean, var = tensors
    moved = running or (mean, var)
    is_running = int(running is not None)
    PLANES_NORMALIZE(
        x.queue, *plan.sizes(more=is_running), *tensors, moments or mean, *moved, *sets.geometry, sets.channels,
        plan.parts, plan.span, momentum, eps, activation.slope,
        PLANES_NORMALIZE=1, PARTS=int(moments is not None), RUNNING=is_running, **plan.macros,
        ACT=activation.kind, **result_types(tensors), **storage_types(RUNNING=moved[0]),
    )  # fmt: skip


def backward(
    inputs: Inputs, dx: Tensor | None, parameters: tuple[Tensor, Tensor] | None, sets: Sets, eps: float,
    training: bool, activation: Activation, groups: bool = False,
) -> None:  # fmt: skip
    """Gradients of x, unless it is None, and of gamma and beta, unless they are None and statistics were constants.

    Args:
        groups: the set is a group; ``parameters`` then get the fp32 sums of each plane.
    """
    x, mean = inputs[0], inputs[4]
    plan = plan_of(x.queue, sets)
    if dx is None:
        plan = replace(plan, parts=1)
    summed = sets.alone if groups else sets
    of_sums = plan_of(x.queue, summed)
    sums = mean  # not read
    if parameters is not None:
        sums = bridge.empty(x.queue, (summed.sets * of_sums.parts, 2), "float32")
        GRADIENT_SUMS(
            x.queue, *of_sums.sizes(), *inputs, sums, *summed.geometry, summed.sets // sets.sets, of_sums.parts,
            of_sums.span, eps, activation.slope,
            GRADIENT_SUMS=1, **of_sums.macros, ACT=activation.kind, **input_types(inputs),
        )  # fmt: skip
    PLANES_GRADIENT(
        x.queue, *plan.sizes(), *inputs, sums, dx or x, *(parameters or (mean, mean)), *sets.geometry, sets.channels,
        of_sums.parts, plan.span, float(sets.elements), eps, activation.slope,
        PLANES_GRADIENT=1, PARTS=int(parameters is not None), DX=int(dx is not None), TRAINING=int(training),
        GROUPS=int(groups), **plan.macros, ACT=activation.kind, **input_types(inputs),
        **storage_types(DX=dx or x),
    )  # fmt: skip
