"""What AMP did: why a step was skipped, what an op errs by, what has to run in float32, how much memory a run takes;
Paddle's debugging tools."""

from clamp import debug, session
from clamp.debug.accuracy import Accuracy
from clamp.debug.bisection import Bisection, bisect
from clamp.debug.checker import DebugMode, Sampling
from clamp.debug.dumps import compare_accuracy
from clamp.debug.explain import explain_step as explain
from clamp.debug.memory_meter import MemoryMeter
from clamp.debug.paddle import (
    TensorCheckerConfig,
    check_layer_numerics,
    check_numerics,
    collect_operator_stats,
    disable_operator_stats_collection,
    disable_tensor_checker,
    enable_operator_stats_collection,
    enable_tensor_checker,
)
from clamp.debug.traces import Difference, TracedValue, first_difference, save_trace
from clamp.debug.watcher import ValueAccuracy

debug.session = session

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
