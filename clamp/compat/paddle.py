"""Paddle's face: ``decorate``, ``auto_cast`` and ``GradScaler``. docs/coming-from-paddle.md has every difference."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from clamp import session
from clamp.bridge import DTypeLike
from clamp.casting.policy_table import LEVELS, CastPolicy, PolicyTable, names_in
from clamp.casting.regions import check_dtype
from clamp.compat.paddle_scaler import AmpScaler, GradScaler
from clamp.compat.regions import ThreadRegion
from clamp.compat.settings import require_switch, warn_if_nothing_is_gained
from clamp.models import SAVE_DTYPES, as_list, require_convertible, save_as, to_16_bit
from clamp.patching.patch import Registration
from clamp.scaling.step_report import warn_user

#: half the distance from 1 to the next number
_ULP = {"float16": "1/2048", "bfloat16": "1/256"}

__all__ = ["AmpScaler", "GradScaler", "auto_cast", "decorate"]


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O2",
    dtype: DTypeLike = "float16",
    master_weight: bool | None = None,
    *,
    save_dtype: DTypeLike | None = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
) -> Any:
    """Makes models ready for a level: at O2 their parameters become 16-bit, in place, with fp32 masters.

    The parameters stay the same objects. Batch norms keep theirs in fp32. ``step()`` of every optimizer, built before
    or after, updates the masters, in fp32, and rewrites the parameters. ``state_dict`` of a decorated model, and of
    each of its layers, saves the masters, and ``load_state_dict`` writes masters and parameters.

    A model may be decorated again: its masters stay, and the other arguments hold from now on. With the other 16-bit
    dtype its parameters are made anew from the masters.

    Args:
        models: a model, or a list of them.
        optimizers: an optimizer built before, a list of them, or None. They keep the state that they have.
        level: ``"O0"``, ``"OD"`` and ``"O1"`` change nothing; ``"O2"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        master_weight: None or True: masters; False: no precision is kept from one step to the next, and one warning
            says that small updates are lost.
        save_dtype: dtype of what ``state_dict`` saves, float32 if not given. (numpy has no bfloat16: numbers rounded
            to it are saved as float32.)
        master_grad: gradients of 16-bit parameters come from backward in float32.
        excluded_layers: layers, or classes of layers, or a list of them, whose parameters stay fp32.

    Returns:
        The models, or (models, optimizers), in the form in which they were passed.

    Raises:
        ValueError: an unknown level or dtype; or an earlier ``decorate`` (or ``amp.initialize``) made parameters 16-bit
            that are excluded now, or a model that is to be float32. Nothing was changed.
        TypeError: something is no model, no optimizer, no layer, or no switch.
    """
    result = models if optimizers is None else (models, optimizers)
    _check("level", level, LEVELS)
    dtype = check_dtype(dtype, "dtype")
    if save_dtype is not None:
        save_dtype = check_dtype(save_dtype, "save_dtype", SAVE_DTYPES)
    for name, switch in (("master_weight", master_weight), ("master_grad", master_grad)):
        if not isinstance(switch, bool | None):
            raise TypeError(f"{name} is True or False, got {switch!r}")
    model_list = as_list(models, "a model", "parameters")
    optimizer_list = [] if optimizers is None else as_list(optimizers, "an optimizer", "step")
    excluded = [] if excluded_layers is None else _layers(excluded_layers)
    if level == "O2":
        for model in model_list:
            require_convertible(model, dtype, excluded)
    if level != "O2" or dtype == "float32":
        return result
    if master_weight is False:
        warn_user(
            f"amp.decorate(master_weight=False): after each step parameters are rounded to {dtype}, so that updates of "
            f"less than about {_ULP[dtype]} of a parameter are lost, or are doubled. Leave master_weight out, and fp32 "
            "masters keep them"
        )
    session.ensure_patched()  # so that netcl's optimizers update the masters, without amp.init() too
    for model in model_list:
        for param in model.parameters():
            warn_if_nothing_is_gained(param, dtype)
        to_16_bit(
            model,
            dtype,
            optimizer_list,
            excluded=excluded,
            keep_master=master_weight is not False,
            gradient_dtype="float32" if master_grad else None,
        )
        if save_dtype is not None:
            save_as(model, save_dtype)
    return result


def _check(name: str, value: Any, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}: pass one of {', '.join(known)}")


def _layers(excluded: Any) -> list[Any]:
    items = list(excluded) if isinstance(excluded, list | tuple | set) else [excluded]
    for item in items:
        if not callable(getattr(item, "parameters", None)):
            raise TypeError(f"excluded_layers takes layers or classes of layers, got {item!r}")
    return items


# ---------------------------------------------------------------------------------------------- auto_cast


def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: DTypeLike = "float16",
    use_promote: bool = True,
) -> ThreadRegion:
    """A region of this thread in which ops cast as at one of Paddle's levels; context manager and decorator.

    Args:
        enable: False: ops do not cast inside.
        custom_white_list: names of functions that run in ``dtype``.
        custom_black_list: names of functions that run in fp32.
        level: ``"O0"`` no casts; ``"OD"`` the white list in ``dtype``, all else in fp32; ``"O1"`` the lists; ``"O2"``
            everything in ``dtype`` but the black list.
        dtype: ``"float16"`` or ``"bfloat16"`` (or ``"float32"``: clamp's kernels without casts).
        use_promote: at O2, whether a function of several inputs runs in fp32 if one of them is float32.

    Raises:
        ValueError: an unknown level, dtype or function, or one that is on both lists.
        TypeError: a list is no list of names; ``enable`` is a function (``@amp.auto_cast`` without parentheses) or a
            text; or what the region decorates is no function, or a generator or coroutine, whose body would run after
            it.
    """
    require_switch(enable, "amp.auto_cast", "enable")
    _check("level", level, LEVELS)
    dtype = check_dtype(dtype, "dtype")
    white = frozenset(names_in("custom_white_list", custom_white_list))
    black = frozenset(names_in("custom_black_list", custom_black_list))
    policies = _policies(level, white, black, use_promote, tuple(session.registrations))
    return ThreadRegion("amp.auto_cast()", enabled=bool(enable) and level != "O0", dtype=dtype, policies=policies)


@lru_cache(maxsize=32)
def _policies(
    level: str, white: frozenset[str], black: frozenset[str], promote: bool, registrations: tuple[Registration, ...]
) -> PolicyTable:
    table = session.policies_for(level, white, black)
    if level == "O2" and promote:
        listed = session.policies_for("O1", white, black)
        table = table.merged(entry for entry in listed if entry.policy is CastPolicy.PROMOTE)
    return table
