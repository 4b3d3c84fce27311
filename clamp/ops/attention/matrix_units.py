"""Attention on the matrix units of NVIDIA's GPUs, by mma.sync (kernels/attention_mma.cl).

As every engine of matrix units it is used only where it is verified on the device (clamp/opencl/trials.py), and runs in
plain C (``emulate``) on any device, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.attention.problem import Gradients, Problem
from clamp.ops.gemm.plan import Plan
from clamp.ops.verified import DeviceMatrix, Verified

FORWARD = Kernel("attention_mma.cl", "attention_forward", "- - - Y")
DELTA = Kernel("attention_mma.cl", "attention_delta")
BACKWARD_Q = Kernel("attention_mma.cl", "attention_backward_q", "- - - - - - DQ")
BACKWARD_KV = Kernel("attention_mma.cl", "attention_backward_kv", "- - - - - - DK DV")

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = ("float16", "bfloat16")
_CLOSE = 2.0**-6  # of the largest: weights of 16 bits are off by 2^-9 of their terms, a wrong index by the terms


@dataclass(frozen=True)
class MatrixAttention(Verified):
    """An engine of attention by a matrix instruction.

    Its plans are rows of a work-group, of the other side a step, and the widest heads; the narrowest of these first.
    """

    def fits(self, problem: Problem) -> bool:
        """Returns whether all that is multiplied is of one 16-bit type, heads are narrow enough, and the engine is
        verified."""
        is_half = set(problem.storage) in [{bridge.STORAGE[dtype]} for dtype in _DTYPES]
        return self.NAME in problem.verified and is_half and problem.width <= self.plans[-1].k

    def plan(self, problem: Problem) -> Plan:
        """The plan of a problem that fits."""
        return next(plan for plan in self.plans if problem.width <= plan.k)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""
        return (FORWARD,)  # one file

    def is_verified(self, queue: cl.CommandQueue) -> bool:
        """Returns whether every plan is: each is for heads of some width."""
        return self.verified_plans(queue) == self.plans

    def cases(self, plan: Plan) -> Iterator[tuple[str, int, bool]]:
        """Small attentions in each type, with a causal mask and without, of rows of whole pieces of 16 bytes and of
        others."""
        for dtype in _DTYPES:
            yield dtype, plan.k, True
            yield dtype, plan.k - 16, False
            yield dtype, plan.k - 3, True

    def computes(self, plan: Plan, queue: cl.CommandQueue, *case: Any) -> bool:
        """Returns whether one of them, with its gradients, comes out right by a plan."""
        dtype, width, causal = case
        shape = (2, 2 * plan.rows + 3, width)
        # Eighths are exact in every type; scores that differ by some ones let few keys count much.
        numbers = np.random.default_rng(0).integers(-8, 9, (4, *shape)) / 8
        scale = 8 / width**0.5
        expected = _attention(numbers, causal, scale)
        found: list[Any] = [DeviceMatrix.like(queue, np.full(x.shape, 99), "float32") for x in expected]
        delta: Any = DeviceMatrix.like(queue, np.full(shape[:2], 99), "float32")
        q, k, v, grad = (DeviceMatrix.like(queue, x, dtype) for x in numbers)
        problem = Problem(*shape, causal, scale, (bridge.STORAGE[dtype],) * 4, capabilities(queue))
        out, lse, *grads = found
        self.forward(problem, q, k, v, out, lse, plan)
        self.backward(problem, q, k, v, lse, grad, tuple(grads), plan, delta)
        pairs = zip(found, expected, strict=True)
        return all(np.abs(x.to_host() - y).max() <= _CLOSE * np.abs(y).max() for x, y in pairs)  # a NaN is not

    def forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan | None = None
    ) -> None:
        """Writes the result over ``out`` and the log-sum-exps over ``lse``, by the problem's plan if none is given."""
        plan = plan or self.plan(problem)
        FORWARD(
            q.queue, *_launch(problem, plan), q, k, v, out, lse, *_extents(problem),
            **self._macros(problem, plan.rows, plan.columns),
        )  # fmt: skip

    def backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients,
        plan: Plan | None = None, delta: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes the gradients of q, k and v over ``grads``; sums of weight times slope over ``delta`` (B, H, T),
        float32, if that is given. ``plan`` as of `forward`."""
        (dq, dk, dv), plan = grads, plan or self.plan(problem)
        delta = bridge.empty(q.queue, q.shape[:3], "float32") if delta is None else delta
        queue, sizes, extents = q.queue, _launch(problem, plan), _extents(problem)
        built = self._macros(problem, plan.rows, plan.columns // 2)  # there are two own tiles
        DELTA(queue, *sizes, q, k, v, grad, lse, delta, *extents, DELTA=1, **built)
        BACKWARD_Q(queue, *sizes, q, k, v, grad, lse, delta, dq, *extents, **built)
        BACKWARD_KV(queue, *sizes, q, k, v, grad, lse, delta, dk, dv, *extents, **built)

    def _macros(self, problem: Problem, rows: int, columns: int) -> dict[str, object]:
        return {
            "IN_T": problem.storage[0], "ROWS": rows, "COLUMNS": columns, "WIDTH": -(-problem.width // 16) * 16,
            "ALIGNED": int(problem.width % 8 == 0), "EMULATE": self.emulate,
        }  # fmt: skip


def _launch(problem: Problem, plan: Plan) -> tuple[tuple[int], tuple[int]]:
    """(global size, local size)"""
    return (-(-problem.length // plan.rows) * problem.heads * plan.threads,), (plan.threads,)


def _extents(problem: Problem) -> tuple[int, int, float, bool]:
    return problem.length, problem.width, problem.scale, problem.causal


def _attention(numbers: Array, causal: bool, scale: float) -> tuple[Array, ...]:
    """The result, its log-sum-exps, and the gradients by q, k and v."""
    q, k, v, grad = numbers
    scores = np.where(np.tri(q.shape[1]) if causal else True, q @ _turned(k) * scale, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    slopes = grad @ _turned(v)
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * scale
    return weights @ v, lse, slopes @ k, _turned(slopes) @ q, _turned(weights) @ grad


def _turned(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


MMA = MatrixAttention(
    NAME="mma",
    TAKES="heads of up to 128 elements, all operands float16 or all bfloat16, on an NVIDIA GPU of compute capability "
    "8.0 or later on which it computed a few small ones right",
    IN_WORDS="tiles in local memory and NVIDIA's matrix instruction mma.sync, weights rounded to 16 bits",
    where=f"{__name__}:MMA",
    plans=(Plan(64, 64, 64, 2, (4, 1)), Plan(64, 32, 128, 2, (4, 1))),  # in 48 KB, which every such device has
    may_work=lambda device: device.compute_capability >= (8, 0),
)
