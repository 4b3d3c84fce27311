"""What batch norm and group norm normalize together, and how work-groups share it (kernels/norm_planes.clh)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.launch import RowPlan, plan_rows

_WIDTH = 8  # channels that a CPU's work-item reads side by side, at most
_RUN = 1024  # elements that are worth a run of their own


@dataclass(frozen=True)
class Activation:
    """What follows a batch norm in the same kernel.

    Attributes:
        kind: the kernels' number for it: 0 nothing, 1 relu, 2 leaky relu.
        slope: leaky relu's factor for negative values.
    """

    kind: int = 0
    slope: float = 0.0


IDENTITY = Activation()
RELU = Activation(1)


@dataclass(frozen=True)
class Sets:
    """How planes make sets that are normalized together; the names are those of norm_planes.clh."""

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


def storage_types(**tensors: Tensor | str) -> dict[str, str]:
    """Storage types as macros: ``storage_types(X=x)`` is ``{"X_T": "f16"}``."""
    return {
        f"{name}_T": bridge.STORAGE[tensor if isinstance(tensor, str) else tensor.dtype]
        for name, tensor in tensors.items()
    }


#: x, gamma, beta, result, mean, variance
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
#: x, incoming gradient, gamma, beta, mean, variance
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def result_types(tensors: Tensors) -> dict[str, str]:
    """Storage types that forward's kernels are built with."""
    x, gamma, beta, y, _, _ = tensors
    return storage_types(X=x, SCALE=gamma, SHIFT=beta, Y=y)


def input_types(inputs: Inputs) -> dict[str, str]:
    """Storage types of what backward's kernels read."""
    x, grad, gamma, beta, _, _ = inputs
    return storage_types(X=x, G=grad, SCALE=gamma, SHIFT=beta)
