"""The public names of clamp. ``from clamp import amp``."""

from clamp import debugging
from clamp.casting.arguments import cast
from clamp.casting.policy_table import CastPolicy, PolicyError
from clamp.checkpoint.file import CheckpointError
from clamp.checkpoint.run import load_checkpoint, save_checkpoint
from clamp.compat import netcl as _netcl  # noqa: F401  (registers its wrappers)
from clamp.compat.apex import initialize, scale_loss
from clamp.compat.oneflow import Graph
from clamp.compat.paddle import auto_cast, decorate
from clamp.compat.pytorch import GradScaler, checkpoint, custom_bwd, custom_fwd
from clamp.compat.regions import autocast, get_autocast_dtype, is_autocast_enabled
from clamp.compat.scalers import StaticGradScaler
from clamp.debug.memory_meter import max_memory
from clamp.handle import AmpHandle, NoOpHandle
from clamp.opencl.device import get_amp_supported_dtype, is_bfloat16_supported, is_float16_supported, supports_fp16
from clamp.opencl.shortage import OutOfMemoryError
from clamp.params import optim
from clamp.params.masters import master_params
from clamp.patching.user_functions import float_function, half_function, promote_function
from clamp.recordings.function import record
from clamp.scaling.dynamic_scale import ScaleRule
from clamp.scaling.scaled_loss import OptimWrapper
from clamp.scaling.step_report import StepReport
from clamp.session import (
    init,
    load_state_dict,
    register,
    register_float_function,
    register_half_function,
    register_promote_function,
    shutdown,
    state_dict,
)

__all__ = [
    "AmpHandle",
    "CastPolicy",
    "CheckpointError",
    "GradScaler",
    "Graph",
    "NoOpHandle",
    "OptimWrapper",
    "OutOfMemoryError",
    "PolicyError",
    "ScaleRule",
    "StaticGradScaler",
    "StepReport",
    "auto_cast",
    "autocast",
    "cast",
    "checkpoint",
    "custom_bwd",
    "custom_fwd",
    "debugging",
    "decorate",
    "float_function",
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "half_function",
    "init",
    "initialize",
    "is_autocast_enabled",
    "is_bfloat16_supported",
    "is_float16_supported",
    "load_checkpoint",
    "load_state_dict",
    "master_params",
    "max_memory",
    "optim",
    "promote_function",
    "record",
    "register",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "save_checkpoint",
    "scale_loss",
    "shutdown",
    "state_dict",
    "supports_fp16",
]
