"""Loss scalers of the faces: what PyTorch's and Paddle's have in common, their settings from a table of names; and
OneFlow's ``GradScaler`` and ``StaticGradScaler``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any, ClassVar

import numpy as np

from clamp import session
from clamp.ops.arguments import shown
from clamp.scaling.dynamic_scale import DynamicLossScale, ScaleRule
from clamp.scaling.loss_scale import LARGEST, LossScale, require_state
from clamp.scaling.manual import ManualScaling
from clamp.scaling.step_report import History


def require_number(name: str, value: Any) -> None:
    """Raises ValueError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be a number, not {shown(value)}")


_SETTINGS = ("growth", "backoff", "interval", "hysteresis")  # of a rule
_COUNTED = ("loss_scale", "unskipped", "bad_steps")  # of a loss scale's state


class FaceRule(ScaleRule):
    """A rule of which messages speak in PyTorch's names, and in which True and False are no numbers."""

    called: ClassVar[Mapping[str, str]] = {
        "growth": "growth_factor", "backoff": "backoff_factor", "interval": "growth_interval",
        "loss_scale": "the loss scale", "unskipped": "_growth_tracker",
    }  # fmt: skip

    def __post_init__(self) -> None:
        for name in _SETTINGS:
            require_number(self.called.get(name, name), getattr(self, name))
        super().__post_init__()


class UncheckedRule(FaceRule):
    """The settings of a scaler that is not enabled: kept for those who ask for them, and used by nobody."""

    def __post_init__(self) -> None:
        """Anything will do, as in PyTorch and Paddle."""


def setting(
    name: str, field: str, argument: str, what: str, bounds: str = ""
) -> tuple[Callable[[Any], Any], Callable[..., None]]:
    """The methods ``get_NAME()`` and ``set_NAME(ARGUMENT)`` of a scaler.

    Args:
        field: of its rule.
        what: it is, and between which bounds, for their docstrings.
    """
    signature = Signature([Parameter(x, Parameter.POSITIONAL_OR_KEYWORD) for x in ("self", argument)])

    def getter(self: FaceScaler) -> Any:
        return getattr(self._scaling.rule, field)

    def setter(self: FaceScaler, *given: Any, **named: Any) -> None:
        value = signature.bind(self, *given, **named).arguments[argument]
        self._scaling.rule = replace(self._scaling.rule, **{field: value})

    setter.__signature__ = signature  # type: ignore[attr-defined]
    for method, verb in ((getter, "get"), (setter, "set")):
        method.__name__ = f"{verb}_{name}"
    getter.__doc__ = f"{what[0].upper()}{what[1:]}."
    setter.__doc__ = f"Sets the {what}{bounds and ', '}{bounds}."
    return getter, setter


class FaceScaler:
    """A loss scaler under another system's names."""

    _names: ClassVar[Mapping[str, str]]  # what the keys of its state dict are called here
    _empty_state: str  # what is said of one that a disabled scaler has saved
    _rule, _kind = FaceRule, ManualScaling
    _enabled: bool
    _scaling: ManualScaling

    def _set_up(self, enabled: bool, scale: float, **settings: Any) -> None:
        self._enabled = enabled
        start, rule = (scale, self._rule(**settings)) if enabled else (1.0, UncheckedRule(**settings))
        self._scaling = self._kind(start, rule, around_step=session.around_step)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, in place, non-finite ones too, to look at
        them or clip them.

        Raises:
            RuntimeError: twice since the last update, after ``step``, or before any ``scale``.
            ValueError: a 16-bit parameter without fp32 master weights.
        """
        if self._enabled:
            self._scaling.unscale_(optimizer)

    @property
    def history(self) -> History:
        """Reports of the last 1000 steps, the newest last; a skipped one says why. Not of a disabled scaler."""
        return self._scaling.history

    def _known(self) -> dict[str, Any]:
        """Returns the entries of a state dict, by the names that it has here; reads the device."""
        return {**vars(self._scaling.rule), "bad_steps": 0, **self._scaling.state_dict()}

    def _state(self) -> dict[str, Any]:
        known = self._known()
        return {key: known[name] for key, name in self._names.items()}

    def _load(self, known: Mapping[str, Any]) -> None:
        """Continues from what `_known` gave."""
        rule = self._rule(**{name: known[name] for name in _SETTINGS if name in known})
        self._scaling.load_state_dict({name: known[name] for name in _COUNTED if name in known})
        self._scaling.rule = rule

    def state_dict(self) -> dict[str, Any]:
        """Scale, settings and counts under the other system's keys; empty if disabled. Reads the device.

        PyTorch's keys are ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and
        ``_growth_tracker``; in Paddle's dict ``scale`` is an array of one.
        """
        return self._state() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a ``state_dict``, the other system's too. Does nothing if disabled.

        Raises:
            TypeError: it is no dict, or has a text where True or False belongs.
            RuntimeError: it is empty: it was saved by a disabled scaler.
            ValueError: it is malformed. Nothing was changed.
        """
        if not self._enabled:
            return
        require_state(state_dict, "state_dict()")
        if not state_dict:
            raise RuntimeError(self._empty_state)
        if missing := [key for key in self._names if key not in state_dict]:
            raise ValueError(f"a GradScaler's state dict has the keys {', '.join(self._names)}; missing: {missing}")
        self._load({name: state_dict[key] for key, name in self._names.items()})

    def __getstate__(self) -> dict[str, Any]:
        if self._scaling.between_updates:
            raise RuntimeError("a GradScaler can be copied or pickled at the start of an iteration, or after update()")
        return {"enabled": self._enabled, **self._state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = {name: state[key] for key, name in self._names.items()}
        self._set_up(state["enabled"], 1.0, **{name: known[name] for name in _SETTINGS if name in known})
        if self._enabled:
            self._load(known)

    def _scale_now(self) -> float:
        return float(self._scaling.state_dict()["loss_scale"]) if self._enabled else 1.0


# ---------------------------------------------------------------------------------------------- a graph's


@dataclass(frozen=True)
class GradScaler:
    """The rule of a graph's loss scale; OneFlow's arguments. Give it to ``Graph.set_grad_scaler``.

    Like OneFlow's scale it never falls below 1, or below ``init_scale`` if that is smaller. OneFlow takes no
    ``backoff_factor`` but ``1 / growth_factor``; any one between 0 and 1 does here.

    Args:
        init_scale: the first scale.
        growth_factor: above 1: the scale grows by it after ``growth_interval`` clean steps in a row.
        backoff_factor: the scale is multiplied by it after a step with inf or nan.
        growth_interval: at least 1.

    Raises:
        ValueError: an argument is none of these.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> LossScale:
        """A loss scale that moves so."""
        smallest = min(1.0, LossScale(self.init_scale).scale)
        settings = self.growth_factor, self.backoff_factor, self.growth_interval
        return DynamicLossScale(self.init_scale, FaceRule(FaceRule.initial, *settings, min=smallest, max=LARGEST))


@dataclass(frozen=True)
class StaticGradScaler:
    """A graph's loss scale that stays as it is. A step with inf or nan is skipped all the same, unlike OneFlow's.

    Raises:
        ValueError: ``scale_factor`` is not finite and positive.
    """

    scale_factor: float

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> LossScale:
        """A loss scale that stays so."""
        scale = LossScale(self.scale_factor)
        scale.cure = "graph.set_grad_scaler(amp.GradScaler())"
        return scale
