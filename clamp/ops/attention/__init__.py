"""Scaled dot-product attention that never holds a matrix of scores, forward, backward and one query at a time.

The scores of a block of queries are computed, turned into weights and used up before the next block's: memory
grows with the length T of a sequence, not with its square. Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao, Fu, Ermon, Rudra and Re, "FlashAttention" (NeurIPS 2022); Dao,
"FlashAttention-2" (2023), which divides by the sum once, at the end, and gives backward one number a query: the
logarithm of the sum of the exponentials.

Scores, weights and sums are fp32 throughout; operands are widened as they are read and results rounded once. (Matrix
units multiply 16-bit weights: matrix_units.py; or two 16-bit parts of them: amx.py.)
"""

from __future__ import annotations

from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.attention import amx, blocked, tiled
from clamp.ops.attention.matrix_units import MMA
from clamp.ops.attention.problem import AttentionEngine, Gradients, Problem, default_scale, problem_of
from clamp.ops.engine import choose
from clamp.ops.verified import names_of_verified

__all__ = ["DECODE", "ENGINES", "Gradients", "attention", "attention_backward", "attention_decode", "on_device"]

#: the first that fits and pays runs
ENGINES: tuple[AttentionEngine, ...] = (MMA, amx, blocked, tiled)

#: those of them that must be verified on a device
MATRIX_UNITS = (MMA,)

DECODE = Kernel("attention_decode.cl", "attention_decode", "Q K V Y")

_KEYS = 256  # of a cache, that one look at the maximum covers
_GROUP_GPU = 64  # work-items of a head of a cache


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, *, out_dtype: str, engine: str | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale) v for q, k and v of one shape (B, H, T, D), by default with a scale of ``1 / sqrt(D)``.

    A query whose scores are all -inf has the result 0 and the log-sum-exp -inf; a NaN or +inf among the scores that
    it sees makes its result NaN. With ``causal`` a key that comes after a query never counts, whatever it holds; an
    infinity or NaN in its *value* can reach the queries of the same block, as the weight 0 times infinity.

    Returns:
        The result (B, H, T, D) and the logarithm of each query's sum of exponentials (B, H, T), float32.
    """
    problem = problem_of(q, k, v, causal, scale, names_of_verified(MATRIX_UNITS, q.queue))
    out = bridge.empty(q.queue, q.shape, out_dtype)
    lse = bridge.empty(q.queue, q.shape[:3], "float32")
    if out.size:
        choose("attention", ENGINES, problem, engine).forward(problem, q, k, v, out, lse)
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, causal: bool, scale: float | None,
    *, out_dtypes: tuple[str, str, str], engine: str | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of `attention` by q, k and v, from ``lse`` and the result's gradient; the weights are computed anew.

    The result itself is not needed: each query's sum of weight times gradient, which others take from the rounded
    result, is formed in fp32.
    """
    problem = problem_of(q, k, v, causal, scale, names_of_verified(MATRIX_UNITS, q.queue), grad=grad)
    if tuple(grad.shape) != tuple(q.shape) or tuple(lse.shape) != tuple(q.shape[:3]):
        raise ValueError(
            f"attention of {tuple(q.shape)} needs a gradient of that shape and lse of {tuple(q.shape[:3])}, "
            f"got {tuple(grad.shape)} and {tuple(lse.shape)}"
        )
    dq, dk, dv = (bridge.empty(q.queue, q.shape, dtype) for dtype in out_dtypes)
    if q.size:
        choose("attention", ENGINES, problem, engine).backward(problem, q, k, v, lse, grad, (dq, dk, dv))
    return dq, dk, dv


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, length: int, scale: float | None, *, out_dtype: str
) -> Tensor:
    """One query a head, (B, H, 1, D), against the first ``length`` positions of caches (B, H, capacity, D); what lies
    beyond is never read, and with none the result is 0."""
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
    group = 1 if capabilities(q.queue).is_cpu else _GROUP_GPU
    DECODE(
        q.queue, (heads * group,), (group,), q, k_cache, v_cache, out, sums, length, capacity, width,
        default_scale(width, scale), WG=group, KEYS=_KEYS,
    )  # fmt: skip
    return out


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """Says in words by which engine attention runs on the queue's device."""
    storage = bridge.STORAGE[dtype]
    device, verified = capabilities(queue), names_of_verified(MATRIX_UNITS, queue)
    problem = Problem(8, 256, 64, True, default_scale(64, None), (storage, storage, storage), device, verified)
    chosen = choose("attention", ENGINES, problem)
    return f"attention: {chosen.IN_WORDS}, scores and sums in float32"
