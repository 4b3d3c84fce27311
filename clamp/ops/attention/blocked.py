"""The attention of CPU devices, in register tiles (kernels/attention_blocked.cl)."""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
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
    """Division of the heads of one call among work-items."""

    problem: Problem
    lanes: int
    rows: int  # lanes, rows: the register tile
    chunks: int  # pieces that the queries of a head are cut into; a piece of a head is a unit of work
    each: int  # units a work-item does one after the other

    @classmethod
    def of(cls, problem: Problem, lanes: int, rows: int) -> Plan:
        """The division of a problem's heads, for a tile."""
        enough = _ITEMS_PER_CORE * problem.device.compute_units
        chunks = max(1, min(-(-enough // problem.heads), -(-problem.length // lanes)))
        return cls(problem, lanes, rows, chunks, max(1, problem.heads * chunks // (2 * enough)))

    @property
    def items(self) -> int:
        """Work-items."""
        return -(-self.problem.heads * self.chunks // self.each)

    @property
    def pitch(self) -> int:
        """Elements of a row of a head's fp32 copies."""
        return -(-self.problem.width // 32) * 32

    @property
    def padded(self) -> int:
        """Rows of these copies."""
        return -(-self.problem.length // self.rows) * self.rows

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

    def launch_forward(self, kernel: Kernel, floats: int, tensors: tuple[Tensor, ...], **macros: object) -> None:
        """Launches a kernel whose work-items have so many floats of workspace each; ``tensors`` are q, k, v, out,
        lse."""
        workspace = bridge.empty(tensors[0].queue, (self.items * floats,), "float32")
        self._launch(kernel, (*tensors, workspace), floats, macros)

    def launch_backward(
        self, kernel: Kernel, floats: int, tensors: tuple[Tensor, ...], grads: Gradients, **macros: object
    ) -> None:
        """As `launch_forward`, with q, k, v, the result's gradient and lse; then the sums of heads' chunks are added
        up."""
        queue, problem = tensors[0].queue, self.problem
        workspace = partial = bridge.empty(queue, (self.items * floats,), "float32")
        if self.chunks > 1:
            partial = bridge.empty(queue, (problem.heads * self.chunks * 2 * self.padded * self.pitch,), "float32")
        self._launch(kernel, (*tensors, *grads, partial, workspace), floats, macros)
        if self.chunks > 1:
            _, dk, dv = grads
            rows = problem.heads * problem.length
            each = max(1, rows // (8 * problem.device.compute_units))
            COMBINE(
                queue, (-(-rows // each),), (1,), partial, dk, dv, rows, problem.length, problem.width, self.chunks,
                each, **self.macros,
            )  # fmt: skip

    def _launch(self, kernel: Kernel, tensors: tuple[Tensor, ...], floats: int, macros: dict[str, object]) -> None:
        problem = self.problem
        kernel(
            tensors[0].queue, (self.items,), (1,), *tensors, problem.heads, problem.length, problem.width,
            problem.scale, problem.causal, self.chunks, self.each, floats, **macros,
        )  # fmt: skip


def _plan_of(problem: Problem) -> Plan:
    return Plan.of(problem, *((32, 8) if problem.device.float_vector_width >= 16 else (16, 4)))


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes the result over ``out`` and the log-sum-exps over ``lse``."""
    plan = _plan_of(problem)
    plan.launch_forward(FORWARD, plan.forward_floats, (q, k, v, out, lse), **plan.macros)


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients) -> None:
    """Writes the gradients of q, k and v over ``grads``."""
    plan = _plan_of(problem)
    plan.launch_backward(BACKWARD, plan.backward_floats, (q, k, v, grad, lse), grads, **plan.macros)
