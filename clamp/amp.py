"""The public names of clamp. ``from clamp import amp``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pyopencl as cl
import wrapt

from clamp import bridge, debugging
from clamp.autocast import Region, current_region, depth, in_region
from clamp.bridge import TensorLike
from clamp.cache import weights
from clamp.device import capabilities, list_devices
from clamp.functions.casting import cast_node
from clamp.handle import AmpHandle, NoOpHandle, OptimWrapper
from clamp.optimizers import StepReport
from clamp.patching.patch import Patches, Registration
from clamp.patching.wrap import user_wrapper
from clamp.policy import CastPolicy, Entry, PolicyError, PolicyTable, default_table, read_list
from clamp.scaler import make_loss_scale

__all__ = [
    "AmpHandle",
    "CastPolicy",
    "NoOpHandle",
    "OptimWrapper",
    "PolicyError",
    "StepReport",
    "autocast",
    "cast",
    "debugging",
    "float_function",
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "half_function",
    "init",
    "is_autocast_enabled",
    "is_bfloat16_supported",
    "is_float16_supported",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "state_dict",
    "supports_fp16",
]

AMP_DTYPES = ("float16", "bfloat16", "float32")

F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.RLock()
_registrations: list[Registration] = []
_handle: AmpHandle | None = None


# ---------------------------------------------------------------------------------------------- init


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: str = "float16",
    level: str = "O1",
    loss_scale: str | float = "auto",
    custom_white_list: Iterable[str] = (),
    custom_black_list: Iterable[str] = (),
    lists: str | Path | None = None,
) -> AmpHandle | NoOpHandle:
    """Turns on mixed precision for netcl, in every thread, until ``handle.shutdown()``.

    Args:
        enabled: False patches nothing and returns a handle whose methods pass through.
        enable_caching: keep 16-bit copies of parameters until they change.
        verbose: print a line for every cast: ``Float->Half (matmul_op)``.
        allow_banned: run banned functions in fp32 instead of raising.
        dtype: ``"float16"``, ``"bfloat16"``, or ``"float32"``: clamp's kernels without casting.
        level: ``"O0"`` everything in fp32, 16-bit inputs too (losses are still scaled); ``"OD"`` only
            the half list in half; ``"O1"`` the lists;
            ``"O2"`` everything in half but what the lists keep in fp32.
        loss_scale: ``"auto"`` (dynamic for float16, otherwise off), ``"dynamic"``, or a number.
        custom_white_list: names of functions to run in half.
        custom_black_list: names of functions to run in fp32.
        lists: a list file whose entries go over the shipped lists.

    Raises:
        RuntimeError: a handle is active already: call its ``shutdown()`` first.
        ValueError: an unknown dtype, level, loss scale or function name, a malformed list file.
        NoDeviceError: there is no OpenCL device.
    """
    global _handle
    if not enabled:
        return NoOpHandle()
    if dtype not in AMP_DTYPES:
        raise ValueError(f"unknown AMP dtype {dtype!r}: pass one of {', '.join(AMP_DTYPES)}")
    with _lock:
        if _handle is not None:
            raise RuntimeError("amp.init() was called while a handle is active: call handle.shutdown() first")
        _release_autocast_patches()
        make_loss_scale(loss_scale, dtype)  # raises before anything is patched
        region = Region(
            enabled=True,
            dtype="float32" if level == "O0" else dtype,
            policies=_policies(level, custom_white_list, custom_black_list, lists),
            cache_enabled=enable_caching,
            allow_banned=allow_banned,
            verbose=verbose,
        )
        list_devices()
        _handle = AmpHandle(
            region, _registrations, lambda: make_loss_scale(loss_scale, dtype), on_shutdown=_forget_handle
        )
        return _handle


def _policies(level: str, white: Iterable[str], black: Iterable[str], lists: str | Path | None) -> PolicyTable:
    table = default_table()
    if lists is not None:
        table = table.merged(read_list(lists))
    overrides = [
        Entry(registration.full_name, registration.policy, "registered by the user")
        for registration in _registrations
        if registration.full_name in table
    ]
    return table.at_level(level).customized(white, black).merged(overrides)


def _forget_handle() -> None:
    global _handle
    _handle = None


# ---------------------------------------------------------------------------------------------- functions of users


def half_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the AMP dtype, nested ones too."""
    return _decorated(function, CastPolicy.HALF)


def float_function(function: F) -> F:
    """Decorator: under AMP the function gets its 16-bit tensors in float32."""
    return _decorated(function, CastPolicy.FLOAT)


def promote_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the widest dtype among them."""
    return _decorated(function, CastPolicy.PROMOTE)


def _decorated(function: F, policy: CastPolicy) -> F:
    name = getattr(function, "__name__", repr(function))
    return wrapt.FunctionWrapper(function, user_wrapper(name, policy))  # type: ignore[return-value]


def register(module: Any, name: str, policy: CastPolicy | str) -> None:
    """Lets ``init`` wrap the function ``name`` of a module or class. Wins over an entry of the lists.

    Raises:
        RuntimeError: AMP is active: register before ``amp.init()``.
        ValueError: the module has no such function, or there is no such policy.
    """
    try:
        policy = CastPolicy(policy)
    except ValueError:
        names = ", ".join(known.value for known in CastPolicy)
        raise ValueError(f"unknown policy {policy!r}: pass one of {names}") from None
    if isinstance(module, str):
        raise ValueError(f"pass the module itself, not its name {module!r}")
    if not callable(vars(module).get(name)) and not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(f"No function named {name} in module {where}")
    with _lock:
        if _handle is not None:
            raise RuntimeError(f"register {name} before amp.init(), or after handle.shutdown()")
        registration = Registration(module, name, policy)
        _registrations[:] = [r for r in _registrations if (r.owner, r.name) != (module, name)]
        _registrations.append(registration)


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


_autocast_patches: Patches | None = None


class autocast:
    """A region of this thread in which ops cast, or with ``enabled=False`` do not; context manager and decorator.

    Nests. Without ``amp.init()`` it patches netcl on first entry and leaves AMP off outside the region. The
    weight cache is emptied at the end of the outermost region.

    Args:
        enabled: whether ops cast inside.
        dtype: the AMP dtype; that of the region around, or float16, if not given.
        cache_enabled: whether 16-bit copies of weights are kept; as around, if not given.
    """

    def __init__(self, enabled: bool = True, *, dtype: str | None = None, cache_enabled: bool | None = None) -> None:
        if dtype is not None and dtype not in AMP_DTYPES:
            raise ValueError(f"unknown AMP dtype {dtype!r}: pass one of {', '.join(AMP_DTYPES)}")
        self._enabled = enabled
        self._dtype = dtype
        self._cache_enabled = cache_enabled
        self._entered: list[Any] = []

    def __enter__(self) -> autocast:
        _ensure_patched()
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
        self._entered.append(manager)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
        if depth() == 0:
            weights.clear()

    def __call__(self, function: F) -> F:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(self._enabled, dtype=self._dtype, cache_enabled=self._cache_enabled):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def _ensure_patched() -> None:
    """Patches netcl for autocast without init. The patches stay, inactive outside regions, until an init."""
    global _autocast_patches
    with _lock:
        if _handle is None and _autocast_patches is None:
            patches = Patches(default_table(), _registrations, _plain_step)
            patches.install()
            _autocast_patches = patches


def _plain_step(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    weights.clear()
    return result


def _release_autocast_patches() -> None:
    global _autocast_patches
    if _autocast_patches is not None:
        _autocast_patches.remove()
        _autocast_patches = None


def master_params(optimizer: Any) -> list[bridge.Tensor]:
    """The fp32 tensors that ``optimizer.step()`` updates: the parameters, or the masters of 16-bit ones.

    Raises:
        TypeError: the optimizer has no ``params``.
    """
    return bridge.optimizer_parameters(optimizer)


def is_autocast_enabled() -> bool:
    """Whether ops called here cast."""
    region = current_region()
    return region is not None and region.enabled


def get_autocast_dtype() -> str:
    """The AMP dtype of the region around, ``"float16"`` outside any."""
    region = current_region()
    return region.dtype if region is not None else "float16"


def cast(x: TensorLike, dtype: str) -> TensorLike:
    """x in another dtype, differentiable; the very same node if it is that already.

    Args:
        x: node or tensor, float32, float16 or bfloat16.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises:
        TypeError: x is no floating node or tensor on an OpenCL device.
        ValueError: unknown dtype.
    """
    if dtype not in AMP_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: pass one of {', '.join(AMP_DTYPES)}")
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


def state_dict() -> dict[str, dict[str, Any]]:
    """The loss scalers of the active handle, ``{"loss_scaler0": {...}, ...}``.

    Raises:
        RuntimeError: AMP is not active.
    """
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(_require_handle().scalers)}


def load_state_dict(state: dict[str, dict[str, Any]]) -> None:
    """Restores what ``state_dict`` returned; on an error nothing is changed.

    Raises:
        RuntimeError: AMP is not active, or the state is empty.
        ValueError: the state has another number of scalers, or is malformed.
    """
    scalers = _require_handle().scalers
    if not state:
        raise RuntimeError("the state is empty: it was saved without AMP, or with amp disabled")
    expected = [f"loss_scaler{index}" for index in range(len(scalers))]
    if sorted(state) != sorted(expected):
        raise ValueError(
            f"the state has {', '.join(sorted(state))}, this handle has {', '.join(expected)}: "
            f"wrap the same optimizers with the same num_loss before loading"
        )
    before = [scaler.state_dict() for scaler in scalers]
    try:
        for scaler, name in zip(scalers, expected, strict=True):
            scaler.load_state_dict(state[name])
    except Exception:
        for scaler, saved in zip(scalers, before, strict=True):
            scaler.load_state_dict(saved)
        raise


def _require_handle() -> AmpHandle:
    if _handle is None:
        raise RuntimeError("AMP is not active: call amp.init() first")
    return _handle
