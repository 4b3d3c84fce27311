"""What AMP did: why a step was skipped, and how much device memory a stretch of a run takes."""

from clamp.observe.attribution import explain_step as explain
from clamp.observe.memory import MemoryMeter

__all__ = ["MemoryMeter", "explain"]
