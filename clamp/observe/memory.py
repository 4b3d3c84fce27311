"""How much device memory a stretch of a training run takes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import wrapt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.params.weight_cache import weights


class MemoryMeter:
    """Counts the bytes of the tensors made since the ``with`` began: live now, and at the peak.

    Bytes are those of the elements, not what a pool rounds them up to; views count with the tensor they show.
    Parameters and inputs made before the ``with`` do not count, so ``activations`` at the end of a forward is
    its activation memory::

        with MemoryMeter() as meter:
            loss = model(x)
            activations = meter.activations
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # id of a buffer -> bytes
        self._live = 0
        self.peak = 0
        self._original: Any = None

    @property
    def live(self) -> int:
        """Bytes of the tensors made since the ``with`` began that still live; collects garbage first."""
        gc.collect()
        return self._live

    @property
    def activations(self) -> int:
        """``live`` less the 16-bit copies of weights that the cache holds."""
        return self.live - weights.nbytes

    def __enter__(self) -> MemoryMeter:
        gc.collect()
        self._original = vars(Tensor)["__init__"]
        Tensor.__init__ = wrapt.FunctionWrapper(self._original, self._made)
        return self

    def __exit__(self, *exception: object) -> None:
        Tensor.__init__ = self._original

    def _made(self, wrapped: Any, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        key = id(tensor.buffer)
        if tensor.buffer is None or key in self._owners:
            return  # the numpy backend's, or a view of a tensor that is counted
        self._owners[key] = bridge.nbytes(tensor)
        self._live += self._owners[key]
        self.peak = max(self.peak, self._live)
        weakref.finalize(tensor, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self._live -= self._owners.pop(key, 0)
