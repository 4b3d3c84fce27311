"""What AMP did: why a step was skipped, what an op errs by, what has to run in float32, how much memory a run takes."""

from clamp.debugging.accuracy import Accuracy, ValueAccuracy, compare_accuracy
from clamp.debugging.bisection import Bisection, bisect
from clamp.debugging.memory import MemoryMeter
from clamp.debugging.traces import Difference, TracedValue, first_difference, save_trace
from clamp.observe.attribution import explain_step as explain

__all__ = [
    "Accuracy",
    "Bisection",
    "Difference",
    "MemoryMeter",
    "TracedValue",
    "ValueAccuracy",
    "bisect",
    "compare_accuracy",
    "explain",
    "first_difference",
    "save_trace",
]
