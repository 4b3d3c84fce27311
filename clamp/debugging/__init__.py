"""Reports on a training run: device memory."""

from clamp.observe.memory import MemoryMeter

__all__ = ["MemoryMeter"]
