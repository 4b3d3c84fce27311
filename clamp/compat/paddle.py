"""Paddle's face: ``decorate``, ``auto_cast`` and ``GradScaler``. docs/coming-from-paddle.md has every difference."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from clamp import session
from clamp.autocast import Region, current_region, depth, in_region
from clamp.bridge import DTypeLike, Node, Tensor, on_device
from clamp.cache import weights
from clamp.device import capabilities
from clamp.functions.casting import note_numpy_backend
from clamp.manual_scaling import ManualScaling
from clamp.models import SAVE_DTYPES, as_list, save_as, to_16_bit
from clamp.patching.patch import Registration
from clamp.policy import LEVELS, CastPolicy, PolicyTable
from clamp.scaler import DynamicLossScale, ScaleRule

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

    Args:
        models: a model, or a list of them.
        optimizers: an optimizer built before, a list of them, or None. They keep the state that they have.
        level: ``"O0"``, ``"OD"`` and ``"O1"`` change nothing; ``"O2"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        master_weight: None or True: masters; False: no precision is kept from one step to the next.
        save_dtype: dtype of what ``state_dict`` saves, float32 if not given. (numpy has no bfloat16: numbers rounded
            to it are saved as float32.)
        master_grad: gradients of 16-bit parameters come from backward in float32.
        excluded_layers: layers, or classes of layers, or a list of them, whose parameters stay fp32.

    Returns:
        The models, or (models, optimizers), in the form in which they were passed.

    Raises:
        ValueError: an unknown level or dtype.
        TypeError: something is no model, no optimizer, or no layer.
    """
    result = models if optimizers is None else (models, optimizers)
    _check("level", level, LEVELS)
    dtype = session.check_dtype(dtype, "dtype")
    if save_dtype is not None:
        save_dtype = session.check_dtype(save_dtype, "save_dtype", SAVE_DTYPES)
    model_list = as_list(models, "a model", "parameters")
    optimizer_list = [] if optimizers is None else as_list(optimizers, "an optimizer", "step")
    excluded = [] if excluded_layers is None else _layers(excluded_layers)
    if level != "O2" or dtype == "float32":
        return result
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


def warn_if_nothing_is_gained(tensor: Tensor, dtype: str) -> None:
    """Warns, once for a device, where the dtype cannot be stored: nothing becomes smaller or faster there."""
    if not on_device(tensor):
        note_numpy_backend()
    elif dtype == "float16" and not capabilities(tensor.queue).half_storage:
        _warn_of(tensor.queue.device.name)


@cache
def _warn_of(device: str) -> None:
    warnings.warn(
        f"{device} cannot store float16: mixed precision in float16 gains nothing there. Pass dtype='bfloat16'.",
        UserWarning,
        stacklevel=4,
    )


# ---------------------------------------------------------------------------------------------- auto_cast


def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: DTypeLike = "float16",
    use_promote: bool = True,
) -> AbstractContextManager[None]:
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
    """
    _check("level", level, LEVELS)
    dtype = session.check_dtype(dtype, "dtype")
    white, black = frozenset(custom_white_list or ()), frozenset(custom_black_list or ())
    policies = _policies(level, white, black, use_promote, tuple(session.registrations))
    return _region(enable and level != "O0", dtype, policies)


@lru_cache(maxsize=32)
def _policies(
    level: str, white: frozenset[str], black: frozenset[str], promote: bool, registrations: tuple[Registration, ...]
) -> PolicyTable:
    table = session.policies_for(level, white, black)
    if level == "O2" and promote:
        listed = session.policies_for("O1", white, black)
        table = table.merged(entry for entry in listed if entry.policy is CastPolicy.PROMOTE)
    return table


@contextmanager
def _region(enabled: bool, dtype: str, policies: PolicyTable) -> Iterator[None]:
    session.ensure_patched()
    outer = current_region() or Region(enabled=False, dtype=dtype, policies=policies)
    try:
        with in_region(replace(outer, enabled=enabled, dtype=dtype, policies=policies, castings={})):
            yield
    finally:
        if depth() == 0:
            weights.clear()


# ---------------------------------------------------------------------------------------------- loss scaling


class _Scaling(ManualScaling):
    """A loss scale that does not sink below 1, as Paddle's does not (unless it starts there)."""

    def _make(self, state: Mapping[str, Any]) -> DynamicLossScale:
        scaler = super()._make(state)
        scaler.rule = replace(scaler.rule, min_scale=min(1.0, float(state["loss_scale"])))
        return scaler


_STATE_KEYS = (
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
)


class GradScaler:
    """Paddle's loss scaler::

        scaler = GradScaler(init_loss_scaling=1024)
        with auto_cast():
            loss = loss_of(model(x), y)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(optimizer, scaled)      # or scaler.step(optimizer) and scaler.update()
        optimizer.zero_grad()

    Args:
        enable: False: every method passes through.
        init_loss_scaling: the first scale, finite and positive.
        incr_ratio: above 1: the scale grows by it after ``incr_every_n_steps`` steps without inf or nan.
        decr_ratio: between 0 and 1: the scale shrinks by it, not below 1, after ``decr_every_n_nan_or_inf`` steps in
            a row with inf or nan.
        incr_every_n_steps, decr_every_n_nan_or_inf: at least 1.
        use_dynamic_loss_scaling: False: the scale stays; steps with inf or nan are skipped all the same.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        self._enable = bool(enable)
        self._dynamic = bool(use_dynamic_loss_scaling)
        self._init_scale = init_loss_scaling
        rule = ScaleRule(incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
        self._scaling = _Scaling(init_loss_scaling, rule)

    # ------------------------------------------------------------------------------------------ a step

    def scale(self, var: Node | Tensor) -> Any:
        """``var * scale``, float32; run backward from it.

        Raises:
            TypeError: var is no node or tensor, or not float32, float16 or bfloat16.
        """
        if not self._enable:
            return var
        if not isinstance(var, Node | Tensor):
            raise TypeError(f"scale() takes a node or a tensor, got {type(var).__name__}")
        session.ensure_patched()  # so that what is returned has a backward()
        if isinstance(var.value, Tensor):
            warn_if_nothing_is_gained(var.value, "float16")
        return self._scaling.scale(var)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, to look at them or clip them.

        Raises:
            RuntimeError: twice since the last update, after ``step``, or before any ``scale``.
        """
        if self._enable:
            self._scaling.unscale_(optimizer)

    def step(self, optimizer: Any) -> Any:
        """``optimizer.step()`` if all gradients are finite; unscales them unless that is done. Call ``update`` after.

        Raises:
            RuntimeError: twice since the last update, no gradients, or before any ``scale``.
        """
        return self._scaling.step(optimizer) if self._enable else optimizer.step()

    def update(self) -> None:
        """Moves the scale by what the steps since the last update met.

        Raises:
            RuntimeError: there was no step, or no gradients.
        """
        if not self._enable:
            return
        if self._dynamic:
            self._scaling.update()
        else:
            self._scaling.set_scale(self._scaling.state_dict()["loss_scale"])

    def minimize(self, optimizer: Any, *losses: Any) -> Any:
        """``step(optimizer)`` and ``update()``. The scaled loss, which Paddle wants here, is not used."""
        result = self.step(optimizer)
        self.update()
        return result

    # ------------------------------------------------------------------------------------------ settings

    def is_enable(self) -> bool:
        """Whether this scaler does anything."""
        return self._enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale moves."""
        return self._dynamic

    def get_loss_scaling(self) -> float:
        """The scale now; reads the device. 1.0 if disabled."""
        return float(self._scaling.state_dict()["loss_scale"]) if self._enable else 1.0

    def get_init_loss_scaling(self) -> float:
        """The first scale."""
        return self._init_scale

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Sets the scale."""
        self._scaling.set_scale(new_init_loss_scaling)
        self._init_scale = new_init_loss_scaling

    def get_incr_ratio(self) -> float:
        """Factor by which the scale grows."""
        return self._scaling.rule.growth_factor

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Sets the factor by which the scale grows, above 1."""
        self._scaling.rule = replace(self._scaling.rule, growth_factor=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Factor by which the scale shrinks."""
        return self._scaling.rule.backoff_factor

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Sets the factor by which the scale shrinks, between 0 and 1."""
        self._scaling.rule = replace(self._scaling.rule, backoff_factor=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Steps without inf or nan after which the scale grows."""
        return self._scaling.rule.growth_interval

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Sets the number of steps without inf or nan after which the scale grows."""
        self._scaling.rule = replace(self._scaling.rule, growth_interval=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Steps in a row with inf or nan after which the scale shrinks."""
        return self._scaling.rule.decr_every_n_nan_or_inf

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Sets the number of steps in a row with inf or nan after which the scale shrinks."""
        self._scaling.rule = replace(self._scaling.rule, decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Scale, settings and counts under Paddle's keys (``scale`` is an array of one); empty if disabled."""
        if not self._enable:
            return {}
        state, rule = self._scaling.state_dict(), self._scaling.rule
        return {
            "scale": np.array([state["loss_scale"]], np.float32),
            "incr_ratio": rule.growth_factor,
            "decr_ratio": rule.backoff_factor,
            "incr_every_n_steps": rule.growth_interval,
            "decr_every_n_nan_or_inf": rule.decr_every_n_nan_or_inf,
            "incr_count": state["unskipped"],
            "decr_count": state.get("bad_steps", 0),
            "use_dynamic_loss_scaling": self._dynamic,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a ``state_dict``, Paddle's too. Does nothing if disabled.

        Raises:
            RuntimeError: it is empty: it was saved by a disabled scaler.
            ValueError: it is malformed. Nothing was changed.
        """
        if not self._enable:
            return
        if not state_dict:
            raise RuntimeError("the state dict is empty: it was saved by a GradScaler that is not enabled")
        if missing := [key for key in _STATE_KEYS if key not in state_dict]:
            raise ValueError(f"a GradScaler's state dict has the keys {', '.join(_STATE_KEYS)}; missing: {missing}")
        scale, *settings, good, bad, dynamic = (state_dict[key] for key in _STATE_KEYS)
        scale = np.asarray(scale, np.float64)
        if scale.size != 1:
            raise ValueError(f"the scale must be one number, got an array of shape {scale.shape}")
        rule = ScaleRule(*settings)
        self._scaling.load_state_dict({"loss_scale": scale.item(), "unskipped": good, "bad_steps": bad})
        self._scaling.rule = rule
        self._dynamic = bool(dynamic)


class AmpScaler(GradScaler):
    """Paddle's older scaler: ``GradScaler`` with other defaults."""

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        super().__init__(
            enable,
            init_loss_scaling,
            incr_ratio,
            decr_ratio,
            incr_every_n_steps,
            decr_every_n_nan_or_inf,
            use_dynamic_loss_scaling,
        )
