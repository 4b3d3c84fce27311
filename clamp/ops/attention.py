"""Scaled dot-product attention that never holds a matrix of scores, forward, backward and one query at a time.

The scores of a block of queries are computed, turned into weights and used up before the next block's: memory
grows with the length T of a sequence, not with its square. Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao, Fu, Ermon, Rudra and Re, "FlashAttention" (NeurIPS 2022); Dao,
"FlashAttention-2" (2023), which divides by the sum once, at the end, and gives backward one number a query: the
logarithm of the sum of the exponentials.

Scores, weights and sums are fp32 throughout; operands are widened as they are read and results rounded once.
"""

from __future__ import annotations

from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops import attention_blocked, attention_tiled

_DECODE_KEYS = 256  # keys that one look at the maximum covers
_DECODE_GROUP = 64  # work-items of a head on a GPU
_MAX_LENGTH = 2**31 - 256  # positions are 32-bit integers in the kernels

Gradients = tuple[Tensor, Tensor, Tensor]


def default_scale(head_dim: int, scale: float | None) -> float:
    """The scale, by default ``1 / sqrt(head_dim)``."""
    return float(scale) if scale is not None else max(head_dim, 1) ** -0.5


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, *, out_dtype: str
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale) v, and the logarithm of each query's sum of exponentials.

    A query whose scores are all -inf has the result 0 and the log-sum-exp -inf; a NaN or +inf among the scores that
    it sees makes its result NaN. With ``causal`` a key that comes after a query never counts, whatever it holds; an
    infinity or NaN in its *value* can reach the queries of the same block, as the weight 0 times infinity.

    Args:
        q, k, v: (B, H, T, D) each, float32, float16 or bfloat16 in any mixture; any T and D.
        causal: whether query i sees the keys 0 .. i only.
        scale: what q k' is multiplied by; None: ``1 / sqrt(D)``.
        out_dtype: dtype of the result.

    Returns:
        The result (B, H, T, D) and the log-sum-exps (B, H, T), float32.

    Raises:
        ValueError: the shapes are not four-dimensional and equal.
    """
    _check(q, k, v)
    out = bridge.empty(q.queue, q.shape, out_dtype)
    lse = bridge.empty(q.queue, q.shape[:3], "float32")
    if out.size:
        plan = attention_blocked if capabilities(q.queue).is_cpu else attention_tiled
        plan.forward(q, k, v, out, lse, bool(causal), default_scale(q.shape[3], scale))
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, causal: bool, scale: float | None,
    *, out_dtypes: tuple[str, str, str],
) -> Gradients:  # fmt: skip
    """Gradients of `attention` by q, k and v, from ``lse`` and the result's gradient; the weights are computed anew.

    The result itself is not needed: each query's sum of weight times gradient, which others take from the rounded
    result, is formed in fp32.

    Args:
        lse: what `attention` returned.
        grad: the result's gradient, in the result's shape.
        out_dtypes: dtypes of the three gradients.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(q, k, v)
    if tuple(grad.shape) != tuple(q.shape) or tuple(lse.shape) != tuple(q.shape[:3]):
        raise ValueError(
            f"attention of {tuple(q.shape)} needs a gradient of that shape and lse of {tuple(q.shape[:3])}, "
            f"got {tuple(grad.shape)} and {tuple(lse.shape)}"
        )
    dq, dk, dv = (bridge.empty(q.queue, q.shape, dtype) for dtype in out_dtypes)
    if q.size:
        plan = attention_blocked if capabilities(q.queue).is_cpu else attention_tiled
        plan.backward(q, k, v, lse, grad, (dq, dk, dv), bool(causal), default_scale(q.shape[3], scale))
    return dq, dk, dv


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """How attention runs on the queue's device, in words."""
    kind = "register tiles" if capabilities(queue).is_cpu else "tiles in local memory"
    return f"attention: {kind}, scores and sums in float32"


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len(shapes[0]) != 4 or shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        given = ", ".join(map(str, shapes))
        raise ValueError(f"flash_attention takes q, k and v of one shape (B, H, T, D), got {given}")
    if shapes[0][2] > _MAX_LENGTH:
        raise ValueError(f"flash_attention takes sequences of up to {_MAX_LENGTH} positions, got {shapes[0][2]}")


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, length: int, scale: float | None, *, out_dtype: str
) -> Tensor:
    """One query a head against the first ``length`` positions of a cache; what lies beyond is never read.

    Args:
        q: (B, H, 1, D).
        k_cache, v_cache: (B, H, capacity, D); they and q float32, float16 or bfloat16 in any mixture.
        length: how many positions to attend to. With none the result is 0.
        scale: as in `attention`.
        out_dtype: dtype of the result.

    Returns:
        (B, H, 1, D).

    Raises:
        ValueError: the shapes do not fit, or the cache is shorter than ``length``.
    """
    shapes = [tuple(x.shape) for x in (q, k_cache, v_cache)]
    fits = len(shapes[0]) == len(shapes[1]) == 4 and shapes[0][2] == 1 and shapes[1] == shapes[2]
    if not fits or shapes[0][:2] != shapes[1][:2] or shapes[0][3] != shapes[1][3]:
        raise ValueError(
            "flash_attention_decode takes q (B, H, 1, D) and caches (B, H, capacity, D), got "
            + ", ".join(map(str, shapes))
        )
    capacity, width = shapes[1][2:]
    if not 0 <= length <= capacity:
        raise ValueError(f"flash_attention_decode: cache_len {length} exceeds capacity {capacity}")
    out = bridge.empty(q.queue, q.shape, out_dtype)
    if out.size == 0:
        return out
    heads = prod(shapes[0][:2])
    sums = bridge.empty(q.queue, (heads, width), "float32")
    group = 1 if capabilities(q.queue).is_cpu else _DECODE_GROUP
    operands = (("Q_T", q), ("K_T", k_cache), ("V_T", v_cache), ("Y_T", out))
    types = {name: bridge.STORAGE[x.dtype] for name, x in operands}
    kernel = get_kernel(
        q.queue, "attention_decode.cl", "attention_decode", "pppppqqqf", WG=group, KEYS=_DECODE_KEYS, **types
    )
    kernel(
        q.queue, (heads * group,), (group,), q.buffer, k_cache.buffer, v_cache.buffer, out.buffer, sums.buffer,
        length, capacity, width, default_scale(width, scale),
    )  # fmt: skip
    return out
