"""The attention of bfloat16 on the matrix unit of x86 processors (kernels/attention_amx.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.attention.blocked import KEYS, Plan
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
    plan = Plan.of(problem, _SIDE, _SIDE)
    matrix = plan.padded * plan.pitch // 2  # words of a head's queries, say
    floats = 3 * matrix + 2 * KEYS * _SIDE + 3 * _SIDE * plan.pitch // 2
    plan.launch_forward(_FORWARD, floats, (q, k, v, out, lse), KEYS=KEYS, EMULATE=int(emulate))


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients,
    *, emulate: bool = False,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v over ``grads``; ``emulate`` as in `forward`."""
    plan = Plan.of(problem, _SIDE, _SIDE)
    floats = (4 * plan.pitch + 3 * _SIDE) * plan.padded + 2 * _SIDE * (plan.pitch + _SIDE)
    plan.launch_backward(_BACKWARD, floats, (q, k, v, grad, lse), grads, EMULATE=int(emulate))
