"""The public names of clamp. ``from clamp import amp``."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import pyopencl as cl
import wrapt

from clamp import bridge, checkpoint, debugging, session
from clamp.autocast import Region, current_region, depth, in_region
from clamp.bridge import DTypeLike, TensorLike
from clamp.cache import weights
from clamp.checkpoint_file import CheckpointError
from clamp.compat import netcl as _netcl  # noqa: F401  (registers its wrappers)
from clamp.compat.apex import initialize, load_state_dict, restore, scale_loss, state_dict
from clamp.compat.oneflow import Graph, StaticGradScaler
from clamp.compat.paddle import auto_cast, decorate
from clamp.compat.pytorch import GradScaler, custom_bwd, custom_fwd
from clamp.compat.settings import require_function, require_plain_function, require_switch
from clamp.device import capabilities
from clamp.functions.casting import cast_node
from clamp.handle import AmpHandle, NoOpHandle, OptimWrapper
from clamp.masters import pairs
from clamp.optimizers import StepReport
from clamp.patching.patch import Registration
from clamp.patching.wrap import user_wrapper
from clamp.policy import CastPolicy, PolicyError, default_table
from clamp.scaler import NoLossScale
from clamp.session import AMP_DTYPES, check_dtype, init, shutdown

__all__ = [
    "AmpHandle",
    "CastPolicy",
    "CheckpointError",
    "GradScaler",
    "Graph",
    "NoOpHandle",
    "OptimWrapper",
    "PolicyError",
    "StaticGradScaler",
    "StepReport",
    "auto_cast",
    "autocast",
    "cast",
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
    "promote_function",
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

F = TypeVar("F", bound=Callable[..., Any])

_registrations = session.registrations


def __getattr__(name: str) -> Any:
    if name == "_handle":  # the active handle, None without one
        return session.active_handle()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_OTHER_DTYPES = ("float64", "int8", "int32", "int64", "uint8", "bool")


# ---------------------------------------------------------------------------------------------- functions of users


def half_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the AMP dtype, nested ones too."""
    return _decorated(function, "@half_function", CastPolicy.HALF)


def float_function(function: F) -> F:
    """Decorator: under AMP the function gets its 16-bit tensors in float32."""
    return _decorated(function, "@float_function", CastPolicy.FLOAT)


def promote_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the widest dtype among them."""
    return _decorated(function, "@promote_function", CastPolicy.PROMOTE)


def _decorated(function: F, decorator: str, policy: CastPolicy) -> F:
    require_function(function, decorator)
    name = getattr(function, "__name__", repr(function))
    return wrapt.FunctionWrapper(function, user_wrapper(name, policy))  # type: ignore[return-value]


def register(module: Any, name: str, policy: CastPolicy | str) -> None:
    """Lets ``init`` wrap the function ``name`` of a module or class. Wins over an entry of the lists.

    Args:
        policy: a ``CastPolicy``, its value, or PyTorch's name for it (``"lower_precision_fp"``, ``"fp32"``,
            ``"fp32_set_opt_dtype"``, ``"fp32_append_dtype"``, ``"promote"``).

    Raises:
        RuntimeError: AMP is active: register before ``amp.init()``.
        ValueError: the module has no such function, or there is no such policy.
    """
    policy = CastPolicy.named(policy)
    if isinstance(module, str):
        raise ValueError(f"pass the module itself, not its name {module!r}")
    if not callable(vars(module).get(name)) and not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(f"No function named {name} in module {where}")
    with session.lock:
        if session.active_handle() is not None:
            raise RuntimeError(f"register {name} before amp.init(), or after handle.shutdown()")
        registration = Registration(module, name, policy)
        _registrations[:] = [r for r in _registrations if (r.owner, r.name) != (module, name)]
        _registrations.append(registration)
        if depth() == 0:
            session.forget_patches()


def register_half_function(module: Any, name: str) -> None:
    """``register`` with policy half."""
    register(module, name, CastPolicy.HALF)


def register_float_function(module: Any, name: str) -> None:
    """``register`` with policy float."""
    register(module, name, CastPolicy.FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """``register`` with policy promote."""
    register(module, name, CastPolicy.PROMOTE)


# ---------------------------------------------------------------------------------------------- autocast


class autocast:
    """A region of this thread in which ops cast, or with ``enabled=False`` do not; context manager and decorator.

    Nests. Without ``amp.init()`` it patches netcl on first entry and leaves AMP off outside the region. The
    weight cache is emptied at the end of the outermost region.

    Args:
        enabled: whether ops cast inside.
        dtype: the AMP dtype; that of the region around, or float16, if not given.
        cache_enabled: whether 16-bit copies of weights are kept; as around, if not given.

    Raises:
        ValueError: there is no such dtype. For one that netcl has and AMP has not a warning is given, as in PyTorch,
            and nothing is cast inside.
        TypeError: ``enabled`` is PyTorch's device type, or a function (``@amp.autocast`` without parentheses); or what
            the region decorates is no function, or a generator or coroutine, whose body would run after it.
    """

    def __init__(
        self, enabled: bool = True, *, dtype: DTypeLike | None = None, cache_enabled: bool | None = None
    ) -> None:
        if isinstance(enabled, str):
            raise TypeError(f"autocast takes no device type: casts follow each tensor's queue. Leave {enabled!r} out.")
        require_switch(enabled, "amp.autocast", "enabled")
        name = None
        if dtype is not None:
            other = bridge.dtype_name(dtype)
            if other in _OTHER_DTYPES:
                warnings.warn(
                    f"autocast to {other} is not supported: casts are off inside. Pass one of {', '.join(AMP_DTYPES)}.",
                    UserWarning,
                    stacklevel=2,
                )
                enabled = False
            else:
                name = check_dtype(dtype)
        self._enabled = bool(enabled)
        self._dtype = name
        self._cache_enabled = cache_enabled
        self._entered = threading.local()

    def __enter__(self) -> autocast:
        session.ensure_patched()
        outer = current_region() or Region(enabled=False, dtype="float16", policies=default_table())
        region = replace(
            outer,
            enabled=self._enabled,
            dtype=self._dtype or outer.dtype,
            cache_enabled=outer.cache_enabled if self._cache_enabled is None else self._cache_enabled,
            castings={},
        )
        manager = in_region(region)
        manager.__enter__()
        self._entered.managers = [*getattr(self._entered, "managers", ()), manager]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.managers.pop().__exit__(*exception)
        if depth() == 0:
            weights.clear()

    def __call__(self, function: F) -> F:
        require_plain_function(function, "amp.autocast()")

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(self._enabled, dtype=self._dtype, cache_enabled=self._cache_enabled):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def master_params(optimizer: Any) -> list[bridge.Tensor]:
    """The fp32 tensors that ``optimizer.step()`` updates: the parameters, or the masters of 16-bit ones.

    Raises:
        TypeError: the optimizer has no ``params``.
    """
    return [master for master, _ in pairs(optimizer)]


def is_autocast_enabled() -> bool:
    """Whether ops called here cast."""
    region = current_region()
    return region is not None and region.enabled


def get_autocast_dtype() -> str:
    """The AMP dtype of the region around, ``"float16"`` outside any."""
    region = current_region()
    return region.dtype if region is not None else "float16"


def cast(x: TensorLike, dtype: DTypeLike) -> TensorLike:
    """x in another dtype, differentiable; the very same node if it is that already.

    Args:
        x: node or tensor, float32, float16 or bfloat16.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises:
        TypeError: x is no floating node or tensor on an OpenCL device.
        ValueError: unknown dtype.
    """
    dtype = check_dtype(dtype, "dtype")
    value = getattr(x, "value", None)
    if not isinstance(value, bridge.Tensor) or value.dtype not in bridge.STORAGE or not bridge.on_device(value):
        raise TypeError(
            f"cast takes a float32, float16 or bfloat16 Node or Tensor on an OpenCL device, got {type(x).__name__}"
            f"{f' of dtype {value.dtype}' if isinstance(value, bridge.Tensor) else ''}"
        )
    return cast_node(x, dtype)


# ---------------------------------------------------------------------------------------------- devices


def is_float16_supported(queue: cl.CommandQueue) -> bool:
    """Whether clamp can store float16 on the queue's device. It needs no ``cl_khr_fp16``."""
    return hasattr(queue, "device") and capabilities(queue).half_storage


supports_fp16 = is_float16_supported


def is_bfloat16_supported(queue: cl.CommandQueue) -> bool:
    """Whether clamp can store bfloat16 on the queue's device: on any OpenCL device."""
    return hasattr(queue, "device")


def get_amp_supported_dtype(queue: cl.CommandQueue) -> list[str]:
    """The 16-bit AMP dtypes of the queue's device."""
    supported = {"float16": is_float16_supported, "bfloat16": is_bfloat16_supported}
    return [dtype for dtype, is_supported in supported.items() if is_supported(queue)]


# ---------------------------------------------------------------------------------------------- state


def save_checkpoint(path: str | os.PathLike[str], models: Any, optimizers: Any = (), **extra: Any) -> None:
    """Writes a training run to one file, from which it goes on bit by bit: call it after ``optimizer.step()``.

    Args:
        path: of the file; one that is there is replaced, at once and as a whole.
        models: a netcl module, an object with ``parameters()``, a list or dict of tensors, or a list of these; a
            dict of modules is one model, whose names begin with its keys. Parameters, fp32 masters and buffers are
            saved.
        optimizers: one or a list. Of netcl's all state and hyperparameters are saved, by their attributes and the names
            of the parameters in the models; another one needs ``state_dict()`` and ``load_state_dict()``.
        extra: numbers, texts, numpy arrays, and dicts, lists and tuples of these: history, epoch,
            ``np.random.get_state()`` (dropout draws from it), ``vars(scheduler)``.

    The loss scales of the active handle are saved too. Half-accumulated gradients are not.

    Raises:
        TypeError: something cannot be saved; the message names it.
        OSError: the file cannot be written; what was there stays.
    """
    handle = session.active_handle()
    scalers = handle.scalers if handle is not None else []
    off = [f"loss_scaler{index}" for index, scaler in enumerate(scalers) if isinstance(scaler, NoLossScale)]
    state = {"scales": state_dict(), "off": off} if scalers else None
    checkpoint.save(path, models, optimizers, state, extra)


def load_checkpoint(path: str | os.PathLike[str], models: Any, optimizers: Any = ()) -> dict[str, Any]:
    """Goes on where ``save_checkpoint`` left off. Pass the same models and optimizers, in the same order.

    An optimizer's parameters may come in another order: their state is found by their names in the models. Whatever
    fails, an optimizer's own ``load_state_dict`` or an interrupt included, is undone.

    A run may go on at another level or dtype: 16-bit parameters take the values of float32 ones and the other way
    round, through their masters where there are any. Loss scales are restored if AMP is active; where the saved run
    had no loss scaling (bfloat16, float32), a dynamic scale starts from its beginning.

    Returns:
        The ``extra`` of ``save_checkpoint``.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged or truncated, or does not fit. Nothing was changed.
        FileNotFoundError: there is no such file.
        ValueError: the number of loss scales differs. Nothing was changed.
        TypeError: what was passed is no model, or no optimizer.
    """
    return checkpoint.load(path, models, optimizers, _load_scales if session.active_handle() else None)


def _load_scales(state: Mapping[str, Any]) -> None:
    now, saved = state_dict(), state["scales"]
    if now.keys() != saved.keys():
        raise ValueError(
            f"the checkpoint has {', '.join(sorted(saved))}, this handle has {', '.join(now)}: "
            f"wrap the same optimizers with the same num_loss before loading"
        )
    restore({name: now[name] if name in state["off"] else s for name, s in saved.items()})
