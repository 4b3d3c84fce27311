"""The AMP of this process: the handle that is active, the functions that users registered, and the patches that
a region without a handle needs. The faces (``clamp.amp``, ``clamp.compat``) start and find a handle here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from clamp import bridge
from clamp.casting.module_rules import ModuleRules, rules_for
from clamp.casting.policy_table import (
    CastPolicy,
    Entry,
    PolicyTable,
    check_dtype,
    default_table,
    names_in,
    read_list,
)
from clamp.casting.regions import Caching, InitCall, Region, check_caching, given_to, thread_region
from clamp.casting.results import RESULTS
from clamp.debug.memory_meter import stop_counting
from clamp.handle import AmpHandle, NoOpHandle
from clamp.opencl.device import list_devices
from clamp.ops.arguments import yes_or_no
from clamp.params import updates
from clamp.params.gradient_marks import lost_bits, noted_elsewhere
from clamp.params.masters import gathered
from clamp.patching.patch import Patches
from clamp.patching.user_functions import Registration, registration_of
from clamp.patching.wrap import Installed
from clamp.scaling.dynamic_scale import ScaleRule, make_loss_scale
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.manual import ManualScaling
from clamp.scaling.passes import PassScaling
from clamp.scaling.step_guard import StepGuards, are_steps_withheld, is_vouched
from clamp.scaling.step_report import StepReport, warn_of_lost_bits, warn_of_lost_updates, warn_user

lock = threading.RLock()
registrations: list[Registration] = []
_handle: AmpHandle | None = None
_plain_guards = StepGuards()  # of steps without a handle
_disabled = False  # the last init was one with enabled=False
_autocast_patches: Patches | None = None
_warn_once = cache(warn_of_lost_bits)  # as long as these patches are there


def init(
    enabled: bool = True,
    enable_caching: Caching = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: bridge.DTypeLike = "float16",
    level: str = "O1",
    loss_scale: str | float | ScaleRule = "auto",
    on_overflow: str = "repeat",
    custom_white_list: Iterable[str] = (),
    custom_black_list: Iterable[str] = (),
    lists: str | Path | None = None,
    modules: Mapping[str, bridge.DTypeLike] | None = None,
    check_finite: bool = True,
    debug: str | Iterable[str] | None = None,
) -> AmpHandle | NoOpHandle:
    """Turns on mixed precision for netcl, in every thread, until ``handle.shutdown()``.

    Args:
        enabled: False patches nothing and returns a handle whose methods pass through.
        enable_caching: keep 16-bit copies of parameters until they change; large ones until the last op that has read
            it has run backward, if no other backward can follow, so that copies and gradients are not there at once.
            ``"last_use"``: none for longer, whatever may follow.
        verbose: print a line for every cast: ``Float->Half (matmul_op)``.
        allow_banned: run banned functions in fp32 instead of raising.
        dtype: ``"float16"``, ``"bfloat16"``, or ``"float32"``: clamp's kernels without casting. numpy's types and
            the names ``"half"``, ``"fp16"``, ``"bf16"``, ``"fp32"`` and ``"float"`` are taken too, here and wherever
            clamp takes a dtype.
        level: ``"O0"`` everything in fp32, 16-bit inputs too (losses are still scaled); ``"OD"`` only
            the half list in half; ``"O1"`` the lists;
            ``"O2"`` everything in half but what the lists keep in fp32.
        loss_scale: ``"auto"`` (dynamic for float16, otherwise off), ``"dynamic"``, an ``amp.ScaleRule`` by which it
            moves, or a number.
        on_overflow: ``"repeat"``: where gradients overflow, ``scale_loss`` runs backward again at its end, from the
            same graph, at the largest scale that lets it pass, and no batch is lost; ``"skip"``: the step is skipped,
            and the scale goes down once. A number does not move, and skips.
        custom_white_list: names of functions to run in half.
        custom_black_list: names of functions to run in fp32.
        lists: a list file whose entries go over the shipped lists; its table ``modules`` stands behind the argument.
        modules: AMP dtypes of parts of a model, by patterns of ``fnmatch`` for the paths of its modules:
            ``{"head.*": "float32", "layers.[0-3].*": "bfloat16"}``. Each is for the modules that it matches and all
            that is in them, and the first one counts; one that ends in ``.*`` is for the module before it, too. In
            ``"float32"`` everything is computed in float32, as at level O0. A pattern for no module is warned of.
        check_finite: skip ``optimizer.step()`` where a gradient is inf or nan, in every dtype; False leaves it to loss
            scaling, which looks at the gradients of scaled losses.
        debug: ``"attribution"``: what each op of a step reads and gives is held until the step is done, so that
            ``handle.explain()`` knows why one was skipped; ``"summary"``: ops, casts and bytes are counted, losses and
            norms of gradients noted, for ``handle.summary()``; or both, ``("attribution", "summary")``.

    Raises:
        RuntimeError: a handle is active already, with ``enabled=False`` too: call ``amp.shutdown()`` first.
        ValueError: an unknown dtype, level, loss scale, ``on_overflow``, ``enable_caching`` or function name, or a
            malformed list file; or 16-bit ``modules`` at level O0.
        TypeError: a custom list is no list of names, ``lists`` no path, ``modules`` no dict, ``debug`` no text, or a
            text such as ``"False"``, which Python takes for True, stands where True or False is asked for.
        NoDeviceError: there is no OpenCL device.
    """
    if not yes_or_no("amp.init", "enabled", enabled):
        return disable("amp.init(enabled=False)")
    verbose = yes_or_no("amp.init", "verbose", verbose)
    allow_banned = yes_or_no("amp.init", "allow_banned", allow_banned)
    check_finite = yes_or_no("amp.init", "check_finite", check_finite)
    dtype = check_dtype(dtype)
    custom_white_list = names_in("custom_white_list", custom_white_list)
    custom_black_list = names_in("custom_black_list", custom_black_list)
    init_call = InitCall(given=given_to(init, locals()))
    kinds = _checked_debug(debug)
    if on_overflow not in ("repeat", "skip"):
        raise ValueError(f'on_overflow must be "repeat" or "skip", got {on_overflow!r}')
    with lock:
        require_none("amp.init()")
        make_loss_scale(loss_scale, dtype)  # raises before anything is patched
        rules = rules_for(modules, lists, level)
        region = Region(
            enabled=True,
            dtype="float32" if level == "O0" else dtype,
            policies=policies_for(level, custom_white_list, custom_black_list, lists),
            cache_enabled=check_caching("enable_caching", enable_caching),
            allow_banned=allow_banned,
            verbose=verbose,
            level=level,
            init_call=init_call,
            modules=ModuleRules(rules) if rules else None,
        )
        smallest = "float16" if "float16" in region.dtypes else dtype  # that decides whether losses are scaled
        return start(
            region, lambda: make_loss_scale(loss_scale, smallest), check_finite=check_finite, debug=kinds,
            on_overflow=on_overflow,
        )  # fmt: skip


def start(
    region: Region, make_scaler: Callable[[], LossScale], num_losses: int = 1, check_finite: bool = True,
    debug: Iterable[str] = (), on_overflow: str = "skip",
) -> AmpHandle:  # fmt: skip
    """Patches netcl and makes this region the process's. The arguments are those of ``AmpHandle``.

    Raises:
        RuntimeError: a handle is active already.
        NoDeviceError: there is no OpenCL device.
    """
    global _handle, _disabled
    with lock:
        require_none("amp.init()")
        list_devices()
        forget_patches()
        _disabled = False
        handle = AmpHandle(
            region,
            registrations,
            make_scaler,
            on_shutdown=_forget_handle,
            num_losses=num_losses,
            check_finite=check_finite,
            debug=debug,
            on_overflow=on_overflow,
        )
        try:
            _handle = handle
            handle._turn_on()
            return handle
        except BaseException:
            handle.shutdown()
            raise


def _checked_debug(debug: str | Iterable[str] | None) -> frozenset[str]:
    expected = f'debug must be None, "attribution", "summary" or a tuple of both, got {debug!r}'
    if not isinstance(debug, str | Iterable | None):
        raise TypeError(expected)
    kinds = [debug] if isinstance(debug, str) else list(debug or ())
    if not all(kind in ("attribution", "summary") for kind in kinds):
        raise ValueError(expected)
    return frozenset(kinds)


def shutdown() -> None:
    """Gives netcl back as it was: shuts the active handle down, as its own ``shutdown`` does; without one takes off
    what regions, scalers and ``decorate`` have put over netcl. What asks for AMP later puts it there again."""
    if _handle is not None:
        _handle.shutdown()
    elif not RESULTS.observers:  # who looks at ops goes on looking
        forget_patches()
        stop_counting()


def end(region: Region) -> None:
    """Shuts the handle of a region down, if there is one: no other thread's."""
    if _handle is not None and _handle._region is region:
        _handle.shutdown()


def _finish_interrupted() -> None:
    """Ends a shutdown, or an init, that was interrupted, and so was its end."""
    if _handle is not None and not _handle.is_active():
        _handle.shutdown()


def disable(call: str) -> NoOpHandle:
    """Patches nothing; what asks for AMP from now on passes through.

    Raises:
        RuntimeError: a handle is active.
    """
    global _disabled
    with lock:
        require_none(call)
        _disabled = True
    return NoOpHandle()


def is_disabled() -> bool:
    """Returns whether AMP was asked for with ``enabled=False``, and not again since."""
    return _disabled


def policies_for(
    level: str, white: Iterable[str] = (), black: Iterable[str] = (), lists: str | Path | None = None
) -> PolicyTable:
    """The shipped lists with a user's changes, at a level.

    Raises:
        ValueError: an unknown level or function name, a name on both lists, a malformed list file.
    """
    table = default_table()
    if lists is not None:
        table = table.merged(read_list(lists))
    overrides = [
        Entry(registration.full_name, registration.policy, "registered by the user")
        for registration in registrations
        if registration.full_name in table
    ]
    return table.at_level(level).customized(white, black).merged(overrides)


# ---------------------------------------------------------------------------------------------- the handle


def active_handle() -> AmpHandle | None:
    """The handle of ``amp.init``, until its shutdown."""
    return _handle if _handle is not None and _handle.is_active() else None


def active_scaling() -> PassScaling | None:
    """The loss scales and passes of the active handle; None where there is none."""
    handle = active_handle()
    return None if handle is None else handle._scaling


def around_step(scaling: ManualScaling, optimizer: Any) -> AbstractContextManager[None]:
    """Around a step that a ``GradScaler`` decides about: the active handle, if there is one, tells of it as well."""
    passes = active_scaling()
    return nullcontext() if passes is None else passes.stepped_with(scaling, optimizer)


def require_handle() -> AmpHandle:
    """The active handle.

    Raises:
        RuntimeError: there is none.
    """
    handle = active_handle()
    if handle is None:
        raise RuntimeError("AMP is not active: call amp.init() first")
    return handle


def require_none(call: str) -> None:
    """Raises RuntimeError if a handle is active."""
    _finish_interrupted()
    if _handle is not None:
        raise RuntimeError(f"{call} was called while a handle is active: {_handle._way_out}")


def _forget_handle(handle: AmpHandle) -> None:
    global _handle
    if _handle is handle:
        _handle = None
    if _handle is None and RESULTS.observers:
        ensure_patched()  # who looks at ops goes on looking


# ---------------------------------------------------------------------------------------------- functions of users


def register(module: Any, name: str, policy: CastPolicy | str) -> None:
    """Lets ``init`` wrap the function ``name`` of a module or class. Wins over an entry of the lists.

    Args:
        module: the module or class itself.
        name: of its function.
        policy: a ``CastPolicy``, its value, or PyTorch's name for it (``"lower_precision_fp"``, ``"fp32"``,
            ``"fp32_set_opt_dtype"``, ``"fp32_append_dtype"``, ``"promote"``).

    Raises:
        RuntimeError: AMP is active: register before ``amp.init()``.
        TypeError: it is no module or class, the name no text, or the function a generator or coroutine.
        ValueError: the module has no such function, or there is no such policy.
    """
    registration = registration_of(module, name, policy)
    with lock:
        if active_handle() is not None:
            raise RuntimeError(f"register {name} before amp.init(), or after amp.shutdown()")
        registrations[:] = [r for r in registrations if (r.owner, r.name) != (module, name)]
        registrations.append(registration)
        if thread_region() is None:
            forget_patches()


def register_half_function(module: Any, name: str) -> None:
    """``register(module, name, "half")``."""
    register(module, name, CastPolicy.HALF)


def register_float_function(module: Any, name: str) -> None:
    """``register(module, name, "float")``."""
    register(module, name, CastPolicy.FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """``register(module, name, "promote")``."""
    register(module, name, CastPolicy.PROMOTE)


# -------------------------------------------------------------------------------------------- regions without a handle


def ensure_patched() -> None:
    """Patches netcl for autocast without init. The patches stay, inactive outside regions, until an init."""
    global _autocast_patches
    with lock:
        _finish_interrupted()
        if _autocast_patches is not None and not Installed.now:  # an interrupted end, or beginning
            forget_patches()
        if _handle is None and _autocast_patches is None:
            _autocast_patches = Patches(default_table(), registrations, _plain_step)
            _autocast_patches.install()


def guard_masters(optimizers: Iterable[Any]) -> None:
    """Guards optimizers that step masters, whether a loss names them or not; under the next ``init``, too."""
    with lock:
        ensure_patched()
        patches = _autocast_patches if _handle is None else _handle._patches
        if patches is not None:
            patches.guard_masters(optimizers)


def _plain_step(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if are_steps_withheld():
        return None
    if lost_bits(getattr(optimizer, "params", ())):
        _warn_once()
    found = gathered(optimizer)
    noted = [] if is_vouched(optimizer) else noted_elsewhere(getattr(optimizer, "params", ()))
    if noted and _plain_guards.found_in(noted):
        warn_user(
            f"{type(optimizer).__name__}.step() was skipped: its gradients, which scaler.unscale_(optimizer) has "
            "divided, are inf or nan. Call scaler.step(optimizer), which skips such steps by itself."
        )
        RESULTS.stepped(StepReport(False, "inf or nan in gradients that a scaler has divided", 1.0))
        return None
    done = updates.make(optimizer, found, lambda: wrapped(*args, **kwargs))
    if not is_vouched(optimizer):  # else an outer guard says it
        warn_of_lost_updates(getattr(optimizer, "params", ()))
        RESULTS.stepped(StepReport(True, "", 1.0))
    return done


def forget_patches() -> None:
    """Takes the patches of regions without a handle off; the next region installs them with all registrations."""
    global _autocast_patches
    with lock:
        if _autocast_patches is not None:
            _warn_once.cache_clear()
            _autocast_patches.remove()
            _autocast_patches = None


# ---------------------------------------------------------------------------------------------- state


def state_dict() -> dict[str, dict[str, Any]]:
    """The loss scalers of the active handle, ``{"loss_scaler0": {...}, ...}``.

    After ``init`` or ``initialize`` with ``enabled=False`` there are none: ``{}``.

    Raises:
        RuntimeError: AMP is not active.
    """
    return {} if _disabled else require_handle()._scaling.state_dict()


def load_state_dict(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores what ``state_dict`` returned; on an error nothing is changed. With ``enabled=False`` nothing is done.

    Of a state with fewer or more scalers than the handle has, what both have is loaded, and a warning names the rest,
    as in apex.

    Raises:
        RuntimeError: AMP is not active, or the state is empty.
        TypeError: the state is no dict.
        ValueError: the state is malformed, has something else than ``loss_scaler0``, ``loss_scaler1``, ..., or none of
            the handle's scalers.
    """
    if not _disabled:
        require_handle()._scaling.load_state_dict(state)
