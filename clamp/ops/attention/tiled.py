"""The attention of GPUs and of every other device, in tiles of local memory (kernels/attention_tiled.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.attention.problem import Gradients, Problem
from clamp.ops.engine import always

FORWARD = Kernel("attention_tiled.cl", "attention_forward", "Q K V Y")
BACKWARD_Q = Kernel("attention_tiled.cl", "attention_backward_q", "Q K V G - DQ")
BACKWARD_KV = Kernel("attention_tiled.cl", "attention_backward_kv", "Q K V G - - DK DV")

NAME = "tiled"
TAKES = "every attention"
IN_WORDS = "tiles in local memory"
fits = pays = always

_PER_ITEM = 4
_STEP = 16


def _side(problem: Problem) -> int:
    """Work-items on a side of a work-group: 16, or 8 where a device's work-groups or local memory are small."""
    device = problem.device
    return 16 if device.max_work_group >= 256 and device.local_memory_bytes >= 32768 else 8


def launch_of(problem: Problem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(global size, local size): a work-group a tile of a head's columns and rows, all in the first direction."""
    side = _side(problem)
    tile = side * _PER_ITEM
    groups = -(-problem.width // tile) * -(-problem.length // tile) * problem.heads
    return (groups * side, side, 1), (side, side, 1)


def _macros(problem: Problem) -> dict[str, object]:
    return {"SIDE": _side(problem), "PER_ITEM": _PER_ITEM, "STEP": _STEP}


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes the result over ``out`` and the log-sum-exps over ``lse``."""
    FORWARD(
        q.queue, *launch_of(problem), q, k, v, out, lse, problem.length, problem.width, problem.scale, problem.causal,
        **_macros(problem),
    )  # fmt: skip


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients) -> None:
    """Writes the gradients of q, k and v over ``grads``."""
    queue, sizes = q.queue, launch_of(problem)
    dq, dk, dv = grads
    arguments = (problem.length, problem.width, problem.scale, problem.causal)
    delta = bridge.empty(queue, q.shape[:3], "float32")
    macros = _macros(problem)
    BACKWARD_Q(queue, *sizes, q, k, v, grad, lse, dq, delta, *arguments, **macros)
    BACKWARD_KV(queue, *sizes, q, k, v, grad, lse, delta, dk, dv, *arguments, **macros)
