"""Reports on a training run: device memory."""

from clamp.debugging.memory import MemoryMeter

__all__ = ["MemoryMeter"]
