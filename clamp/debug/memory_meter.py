"""How much device memory a stretch of a training run takes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import wrapt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.params.weight_cache import weights

_pool_peak = bridge.PoolPeak()


def max_memory(reset: bool = False) -> int:
    """The most bytes of device memory that tensors have held at a time, as ``torch.cuda.max_memory_allocated``.

    Of all devices and queues together, from netcl's memory pools. What netcl allocates outside of them does not count:
    parameters, and inputs that come from the host. Call it with ``reset=True`` before what is to be measured: what is
    held is counted from the first call on, at a little for each tensor, until AMP is shut down; the first call itself
    returns all that the pools have taken so far.

    Args:
        reset: begin anew, from what is held now: ``torch.cuda.reset_peak_memory_stats``.

    Returns:
        The most since the last reset.

    Example::

        amp.max_memory(reset=True)
        train_step()
        print(f"{amp.max_memory() / 2**20:.1f} MiB")
    """
    return _pool_peak(reset)


def stop_counting() -> None:
    """Leaves netcl's pools as they were before the first ``max_memory``."""
    _pool_peak.stop()


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
