"""What AMP did: why a step was skipped, and how much device memory a stretch of a run takes."""

from clamp.debugging.memory import MemoryMeter
from clamp.observe.attribution import explain_step as explain

__all__ = ["MemoryMeter", "explain"]
