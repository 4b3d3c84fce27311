"""How much device memory a stretch of a training run takes."""

from __future__ import annotations

import gc
from typing import Any

import wrapt

from clamp.bridge import BufferPool


class MemoryMeter:
    """Counts the bytes that netcl's pool has handed out since the ``with`` began: live now, and at the peak.

    Bytes are as requested, not as rounded up to the pool's sizes. Activations, gradients and workspaces come
    from the pool; parameters and tensors made from host arrays do not, so ``live`` at the end of a forward is
    its activation memory::

        with MemoryMeter() as meter:
            loss = model(x)
            activations = meter.live
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._live = 0
        self.peak = 0
        self._originals: list[tuple[str, Any]] = []

    @property
    def live(self) -> int:
        """Bytes handed out since the ``with`` began and not given back; collects garbage first."""
        gc.collect()
        return self._live

    def __enter__(self) -> MemoryMeter:
        gc.collect()
        for name, wrapper in (("allocate", self._allocate), ("release", self._release)):
            original = vars(BufferPool)[name]
            self._originals.append((name, original))
            setattr(BufferPool, name, wrapt.FunctionWrapper(original, wrapper))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._originals:
            setattr(BufferPool, *self._originals.pop())

    def _allocate(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = wrapped(*args, **kwargs)
        size = int(args[0] if args else kwargs["nbytes"])
        self._sizes[id(handle)] = size
        self._live += size
        self.peak = max(self.peak, self._live)
        return handle

    def _release(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._live -= self._sizes.pop(id(args[0]), 0)
        return wrapped(*args, **kwargs)
