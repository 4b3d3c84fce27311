"""What is tried of attention on matrix units before it is used (clamp/opencl/proofs.py): small ones, compared with
numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.attention.problem import Gradients, Problem
from clamp.ops.device_matrix import DeviceMatrix
from clamp.ops.gemm.plan import Plan

Array = npt.NDArray[Any]

_CLOSE = 2.0**-6  # of the largest: weights of 16 bits are off by 2^-9 of their terms, a wrong index by the terms


class Attender(Protocol):
    """What computes by a given plan."""

    def forward_by(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan
    ) -> None:
        """Writes the result and the log-sum-exps."""

    def backward_by(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients,
        delta: Tensor, plan: Plan,
    ) -> None:  # fmt: skip
        """Writes the gradients; ``delta`` is for numbers of its own."""


def computes_right(engine: Attender, plan: Plan, queue: cl.CommandQueue, dtypes: Sequence[str]) -> bool:
    """Whether attention and its gradients come out right by a plan, in each type, with a causal mask and without, of
    rows of whole pieces of 16 bytes and of others."""
    cases = product(dtypes, ((plan.k, True), (plan.k - 16, False), (plan.k - 3, True)))
    return all(_computes(engine, plan, queue, dtype, width, causal) for dtype, (width, causal) in cases)


def _computes(engine: Attender, plan: Plan, queue: cl.CommandQueue, dtype: str, width: int, causal: bool) -> bool:
    shape = (2, 2 * plan.rows + 3, width)
    # Eighths are exact in every type; scores that differ by some ones let few keys count much.
    numbers = np.random.default_rng(0).integers(-8, 9, (4, *shape)) / 8
    scale = 8 / width**0.5
    expected = _attention(numbers, causal, scale)
    found: list[Any] = [DeviceMatrix.like(queue, np.full(x.shape, 99), "float32") for x in expected]
    delta: Any = DeviceMatrix.like(queue, np.full(shape[:2], 99), "float32")
    q, k, v, grad = (DeviceMatrix.like(queue, x, dtype) for x in numbers)
    storage = (bridge.STORAGE[dtype],) * 4
    problem = Problem(*shape, causal, scale, storage, capabilities(queue))
    out, lse, *grads = found
    engine.forward_by(problem, q, k, v, out, lse, plan)
    engine.backward_by(problem, q, k, v, lse, grad, tuple(grads), delta, plan)
    close = (np.abs(x.to_host() - y).max() <= _CLOSE * np.abs(y).max() for x, y in zip(found, expected, strict=True))
    return all(close)  # a NaN is not


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
