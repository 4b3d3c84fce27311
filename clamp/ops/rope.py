"""Rotary position embedding: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021)."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch

ROPE = Kernel("rope.cl", "rope", "X Y P")

_PAIRS = 16  # pairs of a block of the table of cosines and sines
_SPAN_CPU, _BLOCKS_CPU = 16, 4  # positions and blocks of that table: 16 KB, in the first-level cache


def rope(x: Tensor, positions: Tensor, base: float = 10000.0, *, inverse: bool = False, out_dtype: str) -> Tensor:
    """Rotates the pairs (2t, 2t+1) of each row of x (..., T, D) by the angle ``position * base ** (-2 t / D)``.

    The angle is the float32 product of the position and of the power, which is rounded to float32 once; its cosine
    and sine are good to float32 however many turns it makes. The gradient is the inverse rotation.

    Args:
        positions: T elements, int32 or floating.
        inverse: whether to rotate by the negated angles.
    """
    shape = tuple(x.shape)
    if len(shape) < 2 or shape[-1] % 2:
        raise ValueError(f"rope takes (..., T, D) with an even D, got shape {shape}")
    if positions.size != shape[-2]:
        raise ValueError(f"rope of {shape} takes {shape[-2]} positions, got {positions.size}")
    if not base > 0:
        raise ValueError(f"rope takes a positive base, got {base}")
    out = bridge.empty(x.queue, shape, out_dtype)
    if out.size == 0:
        return out
    queue, (*leading, length, width) = x.queue, shape
    leads, device = prod(leading), capabilities(queue)
    span, blocks = (_SPAN_CPU, _BLOCKS_CPU) if device.is_cpu else (1, 1)
    spans = -(-length // span)
    # As many leads as leave work for every core; on a GPU a few, for which the angles are computed once.
    leads_each = min(leads, max(1, leads * spans // (4 * device.compute_units)) if device.is_cpu else 4)
    ROPE(
        queue, *launch(queue, spans * -(-leads // leads_each)), x, out, positions, _theta(queue.context, width, base),
        leads, length, width, leads_each, -1.0 if inverse else 1.0, SPAN=span, BLOCKS=blocks,
    )  # fmt: skip
    return out


@lru_cache(maxsize=64)
def _theta(context: cl.Context, width: int, base: float) -> cl.Buffer:
    """The angle of each pair for position 1, padded to whole blocks."""
    pairs = width // 2
    theta = np.zeros(-(-pairs // _PAIRS) * _PAIRS, np.float32)
    theta[:pairs] = np.float64(base) ** (-2.0 * np.arange(pairs) / width)
    return cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=theta)
