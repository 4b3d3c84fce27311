"""An op's gradient at other loss scales than that of the step: a backward is linear in what it is given."""

from __future__ import annotations

from math import log2

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.regions import casting_in
from clamp.observe.frames import Frame
from clamp.opencl.recording import unrecorded
from clamp.ops.cast import cast
from clamp.ops.statistics import statistics_of


def finite_from(frame: Frame, scale: float, floor: float) -> float | None:
    """The largest power-of-two fraction of the loss scale at which a backward gives finite gradients.

    Args:
        frame: a backward, whose tensors are held.
        scale: the loss scale at which it gave inf or nan.
        floor: the lowest one that is tried.

    Returns:
        None if it is not finite at any, or cannot be computed again.
    """
    grad = frame.inputs[0].tensor
    if frame.again is None or grad is None:
        return None
    wide = cast(grad, "float32").to_host()
    low, high = 0, max(0, int(log2(scale / floor)))
    if not _is_finite(frame, grad, wide * np.float32(2.0**-high)):
        return None
    while high - low > 1:  # not finite at scale / 2^low, finite at scale / 2^high
        middle = (low + high) // 2
        if _is_finite(frame, grad, wide * np.float32(2.0**-middle)):
            high = middle
        else:
            low = middle
    return scale / 2.0**high


def _is_finite(frame: Frame, like: Tensor, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bool:
    assert frame.again is not None
    wide = bridge.empty(like.queue, like.shape, "float32")
    bridge.write_bytes(wide, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    with casting_in(None), unrecorded():
        grads = frame.again(cast(wide, bridge.canonical_dtype(like.dtype)))
        found = statistics_of([x for x in grads if x is not None and x.dtype in bridge.STORAGE], histogram=False)
    return all(x.is_finite for x in found)
