"""Sets of elements that batch norm and group norm normalize together (kernels/norm_planes.clh), shared on GPUs in
two phases, forward and backward (kernels/norm_planes_phases.cl)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import RowPlan, group_macros, plan_rows

_WIDTH = 8  # channels that a CPU's work-item reads side by side, at most
_RUN = 1024  # elements that are worth a run of their own


@dataclass(frozen=True)
class Activation:
    """Activation after a batch norm, in the same kernel."""

    kind: int = 0  # the kernels' number for it: 0 nothing, 1 relu, 2 leaky relu
    slope: float = 0.0  # leaky relu's factor for negative values


IDENTITY = Activation()
RELU = Activation(1)


@dataclass(frozen=True)
class Sets:
    """Sets of planes that are normalized together; the names are those of norm_planes.clh."""

    sets: int
    planes: int
    hw: int
    first: int
    step: int
    channels: int

    @property
    def elements(self) -> int:
        """Elements of a set."""
        return self.planes * self.hw

    @property
    def blocks(self) -> int:
        """Blocks of 16 elements of a set, and of what is left of its planes."""
        return self.planes * -(-self.hw // 16)

    @property
    def alone(self) -> Sets:
        """Each plane of these sets, as a set of its own."""
        return Sets(sets=self.sets * self.planes, planes=1, hw=self.hw, first=1, step=1, channels=self.channels)

    @property
    def geometry(self) -> tuple[int, int, int, int, int]:
        """The arguments that every kernel of sets takes."""
        return self.sets, self.planes, self.hw, self.first, self.step

    @staticmethod
    def channels_of(x: Tensor) -> Sets:
        """Each channel is a set, as in batch norm."""
        n, c, h, w = x.shape
        return Sets(sets=c, planes=n, hw=h * w, first=1, step=c, channels=c)

    @staticmethod
    def groups_of(x: Tensor, groups: int) -> Sets:
        """Each sample's group of channels is a set."""
        n, c, h, w = x.shape
        return Sets(sets=n * groups, planes=c // groups, hw=h * w, first=c // groups, step=1, channels=c)

    def plan_planes(self, queue: cl.CommandQueue) -> RowPlan:
        """Work-groups of a CPU for a pass over all planes, in the order of memory."""
        return plan_rows(queue, self.sets * self.planes, self.hw)

    def plan(self, queue: cl.CommandQueue) -> tuple[RowPlan, int]:
        """Work-groups of a CPU for whole sets, and how many neighbouring sets one may read side by side.

        Small planes are taken several at a time, as long as every core has work.
        """
        plan = plan_rows(queue, self.sets, self.elements)
        if self.step == 1:
            return plan, 1
        wanted = min(_WIDTH, -(-_RUN // self.hw), self.sets // (4 * capabilities(queue).compute_units))
        each = max(plan.each, wanted)
        return replace(plan, each=each, groups=-(-self.sets // each)), _WIDTH


#: x, gamma, beta, result, mean, variance
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
#: x, incoming gradient, gamma, beta, mean, variance
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


# ------------------------------------------------------------------------------------------ in two phases, on GPUs

PLANES_MOMENTS = Kernel("norm_planes_phases.cl", "planes_moments", "X")
PLANES_NORMALIZE = Kernel("norm_planes_phases.cl", "planes_normalize", "X SCALE SHIFT Y - - - RUNNING")
GRADIENT_SUMS = Kernel("norm_planes_phases.cl", "gradient_sums", "X G SCALE SHIFT")
PLANES_GRADIENT = Kernel("norm_planes_phases.cl", "planes_gradient", "X G SCALE SHIFT - - - DX")

_GROUP = 256  # work-items that share a part
_GROUPS_PER_UNIT = 8  # work-groups that a compute unit of a GPU holds: loads of some are under way while others compute
_BLOCKS_PER_ITEM = 2  # that are worth a work-item
_MOST_PARTS = 128  # one work-item of a group adds up what phase 1 left of a set


def in_phases(queue: cl.CommandQueue) -> bool:
    """Returns whether norms of planes are computed so on the queue's device: on GPUs."""
    return not capabilities(queue).is_cpu


@dataclass(frozen=True)
class Plan:
    """Division of the blocks of each set among work-groups."""

    sets: int  # how many there are
    group: int  # work-items of a work-group
    parts: int  # work-groups of a set
    span: int  # blocks of a part
    macros: dict[str, object]  # what kernels are built with

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
    PLANES_MOMENTS(x.queue, *plan.sizes(), x, moments, *sets.geometry, plan.parts, plan.span, **plan.macros)
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
        PARTS=int(moments is not None), RUNNING=is_running, **plan.macros, ACT=activation.kind,
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
            of_sums.span, eps, activation.slope, **of_sums.macros, ACT=activation.kind,
        )  # fmt: skip
    PLANES_GRADIENT(
        x.queue, *plan.sizes(), *inputs, sums, dx or x, *(parameters or (mean, mean)), *sets.geometry, sets.channels,
        of_sums.parts, plan.span, float(sets.elements), eps, activation.slope,
        PARTS=int(parameters is not None), DX=int(dx is not None), TRAINING=int(training), GROUPS=int(groups),
        **plan.macros, ACT=activation.kind,
    )  # fmt: skip
