"""The attention of bfloat16 on the matrix unit of x86 processors (kernels/attention_amx.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.attention.blocked import KEYS, combine, plan_of
from clamp.ops.attention.problem import Gradients, Problem

NAME = "amx"
TAKES = "bfloat16 throughout, on a processor whose matrix unit (AMX) works"
IN_WORDS = "the processor's matrix unit"

_FORWARD = Kernel("attention_amx.cl", "attention_forward", "- - - Y")
_BACKWARD = Kernel("attention_amx.cl", "attention_backward", "- - - - - DQ DK DV")
_SIDE = 32  # of a tile


def fits(problem: Problem) -> bool:
    """Returns whether everything is bfloat16, and the device has the unit."""
    return set(problem.storage) == {"bf16"} and bool(problem.device.amx)


def pays(problem: Problem) -> bool:
    """Returns whether heads are so wide, and sequences so long, that products take time beside the exponentials."""
    return min(problem.length, problem.width) > _SIDE


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, emulate: bool = False
) -> None:
    """Writes the result over ``out`` and the log-sum-exps over ``lse``; if ``emulate``, by plain C, bit for bit."""
    plan = plan_of(problem, _SIDE, _SIDE)
    matrix = plan.padded * plan.pitch // 2  # words of a head's queries, say
    floats = 3 * matrix + 2 * KEYS * _SIDE + 3 * _SIDE * plan.pitch // 2
    workspace = bridge.empty(q.queue, (plan.items * floats,), "float32")
    _FORWARD(
        q.queue, (plan.items,), (1,), q, k, v, out, lse, workspace, plan.heads, plan.length, plan.width,
        problem.scale, problem.causal, plan.chunks, plan.each, floats,
        FORWARD=1, KEYS=KEYS, EMULATE=int(emulate),
    )  # fmt: skip


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients,
    *, emulate: bool = False,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v over ``grads``; ``emulate`` as in `forward`."""
    plan = plan_of(problem, _SIDE, _SIDE)
    dq, dk, dv = grads
    floats = (4 * plan.pitch + 3 * _SIDE) * plan.padded + 2 * _SIDE * (plan.pitch + _SIDE)
    workspace = partial = bridge.empty(q.queue, (plan.items * floats,), "float32")
    if plan.chunks > 1:
        partial = bridge.empty(q.queue, (plan.heads * plan.chunks * 2 * plan.padded * plan.pitch,), "float32")
    _BACKWARD(
        q.queue, (plan.items,), (1,), q, k, v, grad, lse, dq, dk, dv, partial, workspace, plan.heads, plan.length,
        plan.width, problem.scale, problem.causal, plan.chunks, plan.each, floats, BACKWARD=1, EMULATE=int(emulate),
    )  # fmt: skip
    if plan.chunks > 1:
        combine(plan, partial, dk, dv)
