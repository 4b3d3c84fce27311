"""What AMP did: why a step was skipped, how much device memory a stretch of a run takes; Paddle's debugging tools."""

from clamp.debugging.compare import compare_accuracy
from clamp.debugging.memory import MemoryMeter
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
from clamp.observe.attribution import explain_step as explain
from clamp.observe.checker import DebugMode
from clamp.observe.sampling import Sampling

__all__ = [
    "DebugMode",
    "MemoryMeter",
    "Sampling",
    "TensorCheckerConfig",
    "check_layer_numerics",
    "check_numerics",
    "collect_operator_stats",
    "compare_accuracy",
    "disable_operator_stats_collection",
    "disable_tensor_checker",
    "enable_operator_stats_collection",
    "enable_tensor_checker",
    "explain",
]
