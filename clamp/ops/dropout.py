"""Dropout, whose mask is made again where it is needed (kernels/elementwise_dropout.cl)."""

from __future__ import annotations

from functools import partial

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.host_steps import Drawn, launch_with
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch, span_for

DROPOUT = Kernel("elementwise_dropout.cl", "dropout")


def dropout(x: Tensor, p: float, seed: int | Drawn, out_dtype: str) -> Tensor:
    """x with each element zeroed with probability p, the others multiplied by ``1 / (1 - p)``.

    Which elements are kept depends on ``seed`` and the element's index alone, so backward calls this again on
    the gradient with the same seed and no mask is stored. Philox4x32-10: Salmon, Moraes, Dror and Shaw,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        p: in ``[0, 1)``, up to a multiple of 2^-32.
        seed: of any size; its lowest 64 bits count. One that is ``Drawn`` is drawn anew in replays.
    """
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size == 0:
        return y
    kernel = DROPOUT.on(x.queue, X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[out_dtype])
    span = max(span_for(x.queue, x.size), 64)
    dropped = min(round(p * 2**32), 2**32 - 1)
    run = seed.launch if isinstance(seed, Drawn) else partial(launch_with, seed)
    sizes = launch(x.queue, -(-x.size // span))
    run(kernel, x.queue, *sizes, x.buffer, y.buffer, dropped, 1.0 / (1.0 - p), _low, _high, span, x.size)
    return y


def _low(seed: int) -> int:
    return seed & 0xFFFFFFFF


def _high(seed: int) -> int:
    return (seed >> 32) & 0xFFFFFFFF
