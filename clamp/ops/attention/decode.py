"""Attention of one query at a time to a cache of keys and values (kernels/attention_decode.cl), on every device."""

from __future__ import annotations

from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.attention.problem import default_scale

DECODE = Kernel("attention_decode.cl", "attention_decode")

_KEYS = 256  # keys that one look at the maximum covers
_GROUP_GPU = 64  # work-items of a head


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
    group = 1 if capabilities(q.queue).is_cpu else _GROUP_GPU
    operands = (("Q_T", q), ("K_T", k_cache), ("V_T", v_cache), ("Y_T", out))
    DECODE(
        q.queue, (heads * group,), (group,), q, k_cache, v_cache, out, sums, length, capacity, width,
        default_scale(width, scale),
        WG=group, KEYS=_KEYS, **{name: bridge.STORAGE[x.dtype] for name, x in operands},
    )  # fmt: skip
    return out
