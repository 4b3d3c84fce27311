"""What AMP did: why a step was skipped, what an op errs by, what has to run in float32, how much memory a run takes;
Paddle's debugging tools."""

from clamp.debugging.accuracy import Accuracy, ValueAccuracy
from clamp.debugging.bisection import Bisection, bisect
from clamp.debugging.compare import compare_accuracy
from clamp.debugging.paddle import (
    TensorCheckerConfig,
    check_layer_numerics,
    check_numerics,
    collect_operator_stats,
    disable_operator_stats_collection,
    disable_tensor_checker,
    enable_operator_stats_collection,
    enable_tensor_checker,
)
from clamp.debugging.traces import Difference, TracedValue, first_difference, save_trace
from clamp.observe.attribution import explain_step as explain
from clamp.observe.checker import DebugMode
from clamp.observe.memory import MemoryMeter
from clamp.observe.sampling import Sampling

__all__ = [
    "Accuracy",
    "Bisection",
    "DebugMode",
    "Difference",
    "MemoryMeter",
    "Sampling",
    "TensorCheckerConfig",
    "TracedValue",
    "ValueAccuracy",
    "bisect",
    "check_layer_numerics",
    "check_numerics",
    "collect_operator_stats",
    "compare_accuracy",
    "disable_operator_stats_collection",
    "disable_tensor_checker",
    "enable_operator_stats_collection",
    "enable_tensor_checker",
    "explain",
    "first_difference",
    "save_trace",
]
