"""The attention of CPU devices, in register tiles (kernels/attention_blocked.cl)."""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.attention.problem import Gradients, Problem
from clamp.ops.engine import always, on_cpus

FORWARD = Kernel("attention_blocked.cl", "attention_forward", "Q K V Y")
BACKWARD = Kernel("attention_blocked.cl", "attention_backward", "Q K V G - DQ DK DV")
COMBINE = Kernel("attention_blocked.cl", "attention_combine", "- DK DV")

NAME = "blocked"
TAKES = "every attention"
IN_WORDS = "register tiles"
fits, pays = always, on_cpus

KEYS = 128  # keys between two looks at the maximum: their scores, 128 x 32 floats, stay in the first-level cache
_ITEMS_PER_CORE = 4  # work-items, and so workspaces, that a core should get: few, because each has its own memory


@dataclass(frozen=True)
class Plan:
    """Division of the heads of one call among work-items.

    Attributes:
        lanes, rows: the register tile.
        heads, length, width: B*H, T, D.
        pitch, padded: elements of a row and number of rows of a head's fp32 copies.
        chunks: pieces that the queries of a head are cut into; a piece of a head is a unit of work.
        each: units a work-item does one after the other.
        items: work-items.
    """

    lanes: int
    rows: int
    heads: int
    length: int
    width: int
    chunks: int
    each: int
    items: int

    @property
    def pitch(self) -> int:
        return -(-self.width // 32) * 32

    @property
    def padded(self) -> int:
        return -(-self.length // self.rows) * self.rows

    @property
    def forward_floats(self) -> int:
        """Floats of a work-item's part of the workspace."""
        return (2 * self.padded + 3 * self.lanes) * self.pitch + KEYS * self.lanes

    @property
    def backward_floats(self) -> int:
        """As ``forward_floats``, with the sums of dK and dV where no other work-item adds to them."""
        sums = 2 * self.padded * self.pitch if self.chunks == 1 else 0
        return (2 * self.padded + 4 * self.lanes) * self.pitch + 2 * self.padded * self.lanes + sums

    @property
    def macros(self) -> dict[str, object]:
        """The plan, for the kernel."""
        return {"LANES": self.lanes, "ROWS": self.rows, "KEYS": KEYS}


def _tile_of(problem: Problem) -> tuple[int, int]:
    return (32, 8) if problem.device.float_vector_width >= 16 else (16, 4)


def plan_of(problem: Problem, lanes: int, rows: int) -> Plan:
    """Returns the division of a problem's heads, for a tile."""
    device, heads, length = problem.device, problem.heads, problem.length
    enough = _ITEMS_PER_CORE * device.compute_units
    chunks = max(1, min(-(-enough // heads), -(-length // lanes)))
    each = max(1, heads * chunks // (2 * enough))
    return Plan(lanes, rows, heads, length, problem.width, chunks, each, -(-heads * chunks // each))


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes the result over ``out`` and the log-sum-exps over ``lse``."""
    plan = plan_of(problem, *_tile_of(problem))
    launch_forward(FORWARD, problem, plan, plan.forward_floats, (q, k, v, out, lse), **plan.macros)


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients) -> None:
    """Writes the gradients of q, k and v over ``grads``."""
    plan = plan_of(problem, *_tile_of(problem))
    launch_backward(BACKWARD, problem, plan, plan.backward_floats, (q, k, v, grad, lse), grads, **plan.macros)


def launch_forward(
    kernel: Kernel, problem: Problem, plan: Plan, floats: int, tensors: tuple[Tensor, ...], **macros: object
) -> None:
    """Launches a kernel whose work-items have so many floats of workspace each; ``tensors`` are q, k, v, out, lse."""
    queue = tensors[0].queue
    workspace = bridge.empty(queue, (plan.items * floats,), "float32")
    kernel(
        queue, (plan.items,), (1,), *tensors, workspace, plan.heads, plan.length, plan.width, problem.scale,
        problem.causal, plan.chunks, plan.each, floats, **macros,
    )  # fmt: skip


def launch_backward(
    kernel: Kernel, problem: Problem, plan: Plan, floats: int, tensors: tuple[Tensor, ...], grads: Gradients,
    **macros: object,
) -> None:  # fmt: skip
    """As `launch_forward`, with q, k, v, the result's gradient and lse; then the sums of heads' chunks are added up."""
    queue = tensors[0].queue
    workspace = partial = bridge.empty(queue, (plan.items * floats,), "float32")
    if plan.chunks > 1:
        partial = bridge.empty(queue, (plan.heads * plan.chunks * 2 * plan.padded * plan.pitch,), "float32")
    kernel(
        queue, (plan.items,), (1,), *tensors, *grads, partial, workspace, plan.heads, plan.length, plan.width,
        problem.scale, problem.causal, plan.chunks, plan.each, floats, **macros,
    )  # fmt: skip
    if plan.chunks > 1:
        _, dk, dv = grads
        rows = plan.heads * plan.length
        each = max(1, rows // (8 * capabilities(queue).compute_units))
        COMBINE(
            queue, (-(-rows // each),), (1,), partial, dk, dv, rows, plan.length, plan.width, plan.chunks, each,
            **plan.macros,
        )  # fmt: skip
