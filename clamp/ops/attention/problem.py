"""The problem that an engine of attention is chosen by, and its protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.ops.arguments import number
from clamp.ops.engine import Engine

_MAX_LENGTH = 2**31 - 256  # positions are 32-bit integers in the kernels

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Attention of heads that each have ``length`` queries and as many keys and values."""

    heads: int
    length: int
    width: int  # heads, length, width: B*H, T, D
    causal: bool  # whether query i sees the keys 0 .. i only
    scale: float  # what q k' is multiplied by
    storage: tuple[str, ...]  # storage types of q, k and v, and in backward of the result's gradient
    device: Capabilities = field(repr=False)  # what the device can do
    # names of the engines that must be verified on the device, and are
    verified: frozenset[str] = field(default=frozenset(), repr=False)


class AttentionEngine(Engine[Problem], Protocol):
    """An engine of attention. No tensor that it is given is empty."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Writes the result over ``out`` and the log-sum-exps over ``lse``."""

    def backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: Gradients
    ) -> None:
        """Writes the gradients of q, k and v over ``grads``."""


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, verified: frozenset[str] = frozenset(),
    *, grad: Tensor | None = None,
) -> Problem:  # fmt: skip
    """The problem of q, k and v, and in backward of the result's gradient."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len(shapes[0]) != 4 or shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        given = ", ".join(map(str, shapes))
        raise ValueError(f"flash_attention takes q, k and v of one shape (B, H, T, D), got {given}")
    length, width = shapes[0][2:]
    if length > _MAX_LENGTH:
        raise ValueError(f"flash_attention takes sequences of up to {_MAX_LENGTH} positions, got {length}")
    storage = tuple(bridge.STORAGE[x.dtype] for x in (q, k, v, grad) if x is not None)
    heads, device = prod(shapes[0][:2]), capabilities(q.queue)
    return Problem(heads, length, width, bool(causal), default_scale(width, scale), storage, device, verified)


def default_scale(head_dim: int, scale: float | None) -> float:
    """The scale, by default ``1 / sqrt(head_dim)``."""
    return number("flash_attention", "scale", scale) if scale is not None else max(head_dim, 1) ** -0.5
