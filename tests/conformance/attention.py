"""Attention, rotary positions and masks."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Ints, Normal, Op, Values

_MASK = np.triu(np.ones((5, 5)), 1)


def _weights(q: Array, k: Array, causal: bool, scale: float | None) -> Array:
    scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def flash_attention(q: Array, k: Array, v: Array, causal: bool = True, scale: float | None = None) -> Array:
    """softmax(q k' scale) v over (B, H, T, D)."""
    return _weights(q, k, causal, scale) @ v


def rope(x: Array, positions: Array, base: float = 10000.0) -> Array:
    """Each pair (2t, 2t+1) turned by position * base^(-2t/D), a float32 product."""
    width = x.shape[-1]
    theta = (float(base) ** (-2.0 * np.arange(width // 2) / width)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * theta).astype(np.float64)
    a, b = x[..., 0::2], x[..., 1::2]
    pairs = np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)
    return pairs.reshape(x.shape)


def masked_fill(x: Array, mask: Array, fill: float = -1e9) -> Array:
    """fill where the mask, repeated over the leading elements, is not zero."""
    repeated = np.tile(mask.ravel(), x.size // mask.size).reshape(x.shape)
    return np.where(repeated != 0, np.float64(fill), x)


OPS = [
    Op("netcl.autograd.flash_attention", flash_attention, [
        Case(Normal(1, 2, 7, 5), Normal(1, 2, 7, 5), Normal(1, 2, 7, 5)),
        Case(Normal(2, 3, 6, 4), Normal(2, 3, 6, 4), Normal(2, 3, 6, 4), causal=False, scale=0.3),
        Case(Normal(1, 1, 1, 1), Normal(1, 1, 1, 1), Normal(1, 1, 1, 1), causal=False),
        Case(Normal(1, 2, 3, 65), Normal(1, 2, 3, 65), Normal(1, 2, 3, 65)),
    ], terms=lambda q, k, v, causal=True, scale=None: (
        q.shape[-1] + q.shape[-2] + 16, _weights(q, k, causal, scale) @ np.abs(v)
    ), slack=16.0, cancels=64.0),
    Op("netcl.autograd.rope", rope, [
        Case(Normal(2, 3, 5, 6), Values(np.array([0, 1, 7, 4000, 100_000]))),
        Case(Normal(4, 34), Ints(2048, 4), base=500.0),
        Case(Normal(3, 4), Values(np.array([-1, 0, -7])), base=1.0),
    ], terms=lambda x, positions, base=10000.0: (2, np.abs(x[np.isfinite(x)]).max()), special_below=1e5),
    Op("netcl.autograd.masked_fill", masked_fill, [
        Case(Normal(2, 2, 5, 5), Values(_MASK).fixed().aside(), -1e4),
        Case(Normal(2, 3, 4), Values(np.array([0, 1, 1, 0]))),
        Case(Normal(3, 4), Values(np.zeros((3, 4))).fixed().aside(), fill=-np.inf),
    ], exact=True),
]  # fmt: skip
