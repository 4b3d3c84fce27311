"""Paddle's face: ``decorate``, ``auto_cast`` and its loss scalers. docs/coming-from-paddle.md has every difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pyopencl as cl

from clamp import bridge, session
from clamp.bridge import DTypeLike, Node, Tensor
from clamp.casting.module_rules import ModuleRules, module_rules
from clamp.casting.policy_table import LEVELS, CastPolicy, PolicyTable, check_dtype, names_in
from clamp.casting.regions import process_region
from clamp.compat.regions import ThreadRegion, switch, warn_if_nothing_is_gained
from clamp.compat.scalers import FaceRule, FaceScaler, setting
from clamp.interrupts import uninterrupted
from clamp.models import SAVE_DTYPES, as_list, dtypes_of, require_convertible, to_16_bit
from clamp.ops.arguments import shown, whole_number, yes_or_no
from clamp.params.masters import require_kept, require_steppable
from clamp.patching.user_functions import Registration
from clamp.scaling.dynamic_scale import DynamicLossScale
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.manual import ManualScaling

__all__ = ["AmpScaler", "GradScaler", "auto_cast", "decorate"]


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O2",
    dtype: DTypeLike = "float16",
    master_weight: bool | str | None = None,
    *,
    save_dtype: DTypeLike | None = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
    rounding_seed: int = 0,
    modules: Mapping[str, DTypeLike] | None = None,
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
        master_weight: None or True: fp32 masters; False: no precision is kept from one step to the next, and one
            warning, after the first step, says which part of its updates was lost. Without fp32 masters, by netcl's
            SGD, Momentum, Adam and AdamW: ``"remainder"``: 16 bits more, which with the parameter's are the fp32
            master; ``"kahan"``: 16 bits more, what rounding left over; ``"stochastic"``: nothing more, but rounded up
            or down by chance.
        save_dtype: dtype of what ``state_dict`` saves, float32 if not given. (numpy has no bfloat16: numbers rounded
            to it are saved as float32.)
        master_grad: gradients of 16-bit parameters come from backward in float32.
        excluded_layers: layers, or classes of layers, or a list of them, whose parameters stay fp32.
        rounding_seed: of ``"stochastic"``: the same seed, step, parameter and element are rounded the same way.
        modules: dtypes of the parameters of parts of a model, as for ``amp.init``; those of ``amp.init`` that is
            active, if not given. A batch norm follows a pattern that ends in its name, and no wildcard.

    Returns:
        The models, or (models, optimizers), in the form in which they were passed.

    Raises:
        ValueError: an unknown level or dtype; or an earlier ``decorate`` (or ``amp.initialize``) made parameters 16-bit
            that are excluded now, or a model that is to be float32. Nothing was changed.
        TypeError: something is no model, no optimizer, no layer, or no switch; or an optimizer cannot step parameters
            that have no fp32 masters.
    """
    result = models if optimizers is None else (models, optimizers)
    _require_level(level)
    dtype = check_dtype(dtype, "dtype")
    if save_dtype is not None:
        save_dtype = check_dtype(save_dtype, "save_dtype", SAVE_DTYPES)
    if not isinstance(master_grad, bool | None):
        raise TypeError(f"master_grad is True or False, got {master_grad!r}")
    keeps = require_kept(master_weight, "master_weight")
    seed = whole_number("amp.decorate", "rounding_seed", rounding_seed)
    model_list = as_list(models, "a model", "parameters")
    optimizer_list = [] if optimizers is None else as_list(optimizers, "an optimizer", "step")
    excluded = [] if excluded_layers is None else _layers(excluded_layers)
    around = process_region()
    rules = None if around is None else around.modules
    if modules is not None:
        rules = ModuleRules(module_rules(modules))
    if level == "O2":
        for model in model_list:
            require_convertible(model, dtype, excluded, rules)
    if level != "O2" or {dtype, *(rule.dtype for rule in (rules.rules if rules else ()))} == {"float32"}:
        return result
    require_steppable(optimizer_list, keeps)
    session.guard_masters(optimizer_list)  # so that they update the masters, without amp.init() too
    for model in model_list:
        for _, param, becomes in dtypes_of(model, dtype, excluded=excluded, rules=rules):
            warn_if_nothing_is_gained(param, becomes)
        to_16_bit(
            model,
            dtype,
            optimizer_list,
            excluded=excluded,
            keep_master=keeps,
            gradient_dtype="float32" if master_grad else None,
            seed=seed,
            rules=rules,
            saves=save_dtype or "float32",
        )
    return result


def _require_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: pass one of {', '.join(LEVELS)}")


def _layers(excluded: Any) -> list[Any]:
    items = list(excluded) if isinstance(excluded, list | tuple | set) else [excluded]
    for item in items:
        if not callable(getattr(item, "parameters", None)):
            raise TypeError(f"excluded_layers takes layers or classes of layers, got {shown(item)}")
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
    enable = switch(enable, "amp.auto_cast", "enable")
    _require_level(level)
    dtype = check_dtype(dtype, "dtype")
    white = frozenset(names_in("custom_white_list", custom_white_list))
    black = frozenset(names_in("custom_black_list", custom_black_list))
    promote = yes_or_no("amp.auto_cast", "use_promote", use_promote)
    policies = _policies(level, white, black, promote, tuple(session.registrations))
    return ThreadRegion("amp.auto_cast()", enabled=enable and level != "O0", dtype=dtype, policies=policies)


@lru_cache(maxsize=32)
def _policies(
    level: str, white: frozenset[str], black: frozenset[str], promote: bool, registrations: tuple[Registration, ...]
) -> PolicyTable:
    table = session.policies_for(level, white, black)
    if level == "O2" and promote:
        listed = session.policies_for("O1", white, black)
        table = table.merged(entry for entry in listed if entry.policy is CastPolicy.PROMOTE)
    return table


# ---------------------------------------------------------------------------------------------- scalers


class _AtLeastOne(DynamicLossScale):
    """Paddle's scale: an overflow makes it ``max(scale * decr_ratio, 1)``, so one that was set below 1 becomes 1."""

    lifts = True


class _Scaling(ManualScaling):
    _scale_class, _floor = _AtLeastOne, 1.0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with uninterrupted():
            result = super().step(optimizer, *args, **kwargs)
            if not self.moves:
                self.make_ready()
        return result

    def update(self) -> None:
        super().update() if self.moves else self.make_ready()

    def scale_on(self, queue: cl.CommandQueue) -> LossScale:
        scaler = super().scale_on(queue)
        scaler.comes_down = self.moves
        scaler.cure = "" if self.moves else "scaler = GradScaler(use_dynamic_loss_scaling=True)"
        return scaler


_NAMES = {
    "scale": "loss_scale", "incr_ratio": "growth", "decr_ratio": "backoff", "incr_every_n_steps": "interval",
    "decr_every_n_nan_or_inf": "hysteresis", "incr_count": "unskipped", "decr_count": "bad_steps",
    "use_dynamic_loss_scaling": "dynamic",
}  # fmt: skip


class _Rule(FaceRule):
    """A rule of which messages speak in Paddle's names."""

    called: ClassVar[Mapping[str, str]] = {name: key for key, name in _NAMES.items()} | {"loss_scale": "the loss scale"}


class GradScaler(FaceScaler):
    """Paddle's loss scaler::

        scaler = GradScaler(init_loss_scaling=1024)
        with auto_cast():
            loss = loss_of(model(x), y)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(optimizer, scaled)      # or scaler.step(optimizer) and scaler.update()
        optimizer.zero_grad()

    Args:
        enable: False: every method passes through, and the other arguments may be anything.
        init_loss_scaling: the first scale, finite and positive.
        incr_ratio: above 1: the scale grows by it after ``incr_every_n_steps`` steps without inf or nan.
        decr_ratio: between 0 and 1: the scale shrinks by it, not below 1, after ``decr_every_n_nan_or_inf`` steps in
            a row with inf or nan.
        incr_every_n_steps, decr_every_n_nan_or_inf: at least 1.
        use_dynamic_loss_scaling: False: the scale stays; steps with inf or nan are skipped all the same.

    Raises:
        ValueError: an argument is none of these.
    """

    _names, _rule, _kind = _NAMES, _Rule, _Scaling
    _empty_state = "the state dict is empty: it was saved by a GradScaler that is not enabled"
    _scaling: _Scaling

    def __init__(
        self, enable: bool = True, init_loss_scaling: float = 2.0**16, incr_ratio: float = 2.0, decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000, decr_every_n_nan_or_inf: int = 1, use_dynamic_loss_scaling: bool = True,
    ) -> None:  # fmt: skip
        enable = yes_or_no(type(self).__name__, "enable", enable)
        moves = use_dynamic_loss_scaling
        if enable:
            moves = yes_or_no(type(self).__name__, "use_dynamic_loss_scaling", moves)
        self._init_scale = init_loss_scaling
        settings = {"growth": incr_ratio, "backoff": decr_ratio, "interval": incr_every_n_steps}
        self._set_up(enable, init_loss_scaling, **settings, hysteresis=decr_every_n_nan_or_inf)
        self._scaling.moves = moves

    # ------------------------------------------------------------------------------------------ a step

    def scale(self, var: Node | Tensor) -> Any:
        """``var * scale``, float32; run backward from it.

        Raises:
            TypeError: var is no node or tensor, or not float32, float16 or bfloat16.
        """
        if not self._enabled:
            return bridge.with_backward(var)
        if not isinstance(var, Node | Tensor):
            raise TypeError(f"scale() takes a node or a tensor, got {type(var).__name__}")
        session.ensure_patched()  # so that what is returned has a backward()
        if isinstance(var.value, Tensor):
            warn_if_nothing_is_gained(var.value, "float16")
        return self._scaling.scale(var)

    def step(self, optimizer: Any) -> Any:
        """``optimizer.step()`` if all gradients are finite; unscales them unless that is done. Call ``update`` after.

        With a scale that stays, ``update`` has nothing to do and may be left out, as in Paddle.

        Raises:
            RuntimeError: twice since the last update, no gradients, or before any ``scale``.
        """
        return self._scaling.step(optimizer) if self._enabled else optimizer.step()

    def update(self) -> None:
        """Moves the scale by what the steps since the last update met.

        Raises:
            RuntimeError: there was no step, or no gradients.
        """
        if self._enabled:
            self._scaling.update()

    def minimize(
        self, optimizer: Any, loss: Any = None, startup_program: Any = None, parameters: Any = None,
        no_grad_set: Any = None,
    ) -> Any:  # fmt: skip
        """``step(optimizer)`` and ``update()``.

        Args:
            optimizer: netcl's, or one like it.
            loss: the scaled loss, which is not used.
            startup_program, parameters, no_grad_set: of Paddle's ``Optimizer.minimize``; must be None.

        Raises:
            RuntimeError: as ``step``.
            TypeError: an argument that Paddle's has not, or a loss that is none.
            ValueError: an argument that chooses parameters: an optimizer steps all of its own.
        """
        if not isinstance(loss, Node | Tensor | None):
            raise TypeError(f"minimize() takes the scaled loss, a node or a tensor, got {type(loss).__name__}")
        if startup_program is not None:
            raise ValueError("minimize(startup_program=...) is for Paddle's static graph: leave it out")
        if parameters is not None or no_grad_set is not None:
            raise ValueError(
                "minimize(parameters=..., no_grad_set=...) cannot choose parameters: the optimizer steps all of its "
                "own. Build one of the parameters that are to be trained, or freeze the others with "
                "requires_grad=False."
            )
        with uninterrupted():
            result = self.step(optimizer)
            self.update()
        return result

    # ------------------------------------------------------------------------------------------ settings

    def is_enable(self) -> bool:
        """Returns whether this scaler does anything."""
        return self._enabled

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Returns whether the scale moves."""
        return self._scaling.moves

    def get_loss_scaling(self) -> float:
        """The scale now; reads the device. 1.0 if disabled."""
        return self._scale_now()

    def get_init_loss_scaling(self) -> float:
        """The first scale."""
        return self._init_scale

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Sets the scale."""
        if self._enabled:
            self._scaling.set_scale(new_init_loss_scaling)
        self._init_scale = new_init_loss_scaling

    get_incr_ratio, set_incr_ratio = setting(
        "incr_ratio", "growth", "new_incr_ratio", "factor by which the scale grows", "above 1"
    )
    get_decr_ratio, set_decr_ratio = setting(
        "decr_ratio", "backoff", "new_decr_ratio", "factor by which the scale shrinks", "between 0 and 1"
    )
    get_incr_every_n_steps, set_incr_every_n_steps = setting(
        "incr_every_n_steps", "interval", "new_incr_every_n_steps",
        "number of steps without inf or nan after which the scale grows",
    )  # fmt: skip
    get_decr_every_n_nan_or_inf, set_decr_every_n_nan_or_inf = setting(
        "decr_every_n_nan_or_inf", "hysteresis", "new_decr_every_n_nan_or_inf",
        "number of steps in a row with inf or nan after which the scale shrinks",
    )  # fmt: skip

    # ------------------------------------------------------------------------------------------ state

    def _known(self) -> dict[str, Any]:
        known = super()._known()
        scale = np.array([known["loss_scale"]], np.float32)  # as Paddle has it, an array of one
        return {**known, "loss_scale": scale, "dynamic": self._scaling.moves}

    def _load(self, known: Mapping[str, Any]) -> None:
        scale = np.asarray(known["loss_scale"])
        if scale.size != 1:
            raise ValueError(f"the scale must be one number, got an array of shape {scale.shape}")
        moves = yes_or_no("load_state_dict", "use_dynamic_loss_scaling", known["dynamic"])
        super()._load({**known, "loss_scale": scale.item()})
        self._scaling.set_scale(scale.item())  # what a static scale's steps have left moves it no more
        self._scaling.moves = moves
        self._init_scale = scale.item()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "init_loss_scaling": self._init_scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scaling.moves = state["use_dynamic_loss_scaling"]
        self._init_scale = state["init_loss_scaling"]


class AmpScaler(GradScaler):
    """Paddle's older scaler: ``GradScaler`` with other defaults."""

    def __init__(
        self, enable: bool = True, init_loss_scaling: float = 2.0**15, incr_ratio: float = 2.0, decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000, decr_every_n_nan_or_inf: int = 2, use_dynamic_loss_scaling: bool = True,
    ) -> None:  # fmt: skip
        settings = incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf
        super().__init__(enable, init_loss_scaling, *settings, use_dynamic_loss_scaling)
