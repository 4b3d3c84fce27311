"""The loss scalers of PyTorch's and Paddle's faces: what both have in common, their settings from a table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from clamp import session
from clamp.scaling.loss_scale import require_state
from clamp.scaling.manual import ManualScaling
from clamp.scaling.scale_rule import ScaleRule
from clamp.scaling.step_report import History


def require_number(name: str, value: Any) -> None:
    """Raises ValueError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be a number, not {value!r}")


class FaceRule(ScaleRule):
    """A rule in which True and False are no numbers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_number(name, value)
        super().__post_init__()


class UncheckedRule(ScaleRule):
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

    _state_keys: tuple[str, ...]  # of its state dict, the scale first, then the rule's, then the counts
    _empty_state: str  # what is said of one that a disabled scaler has saved
    _enabled: bool
    _scaling: ManualScaling

    def _set_up(self, enabled: Any, scale: float, settings: tuple[Any, ...], kind: type[ManualScaling]) -> None:
        self._enabled = bool(enabled)
        start, rule = (scale, FaceRule(*settings)) if enabled else (1.0, UncheckedRule(*settings))
        self._scaling = kind(start, rule, around_step=session.around_step)

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

    def _scale_now(self) -> float:
        return float(self._scaling.state_dict()["loss_scale"]) if self._enabled else 1.0

    def _values_in(self, state: Mapping[str, Any]) -> list[Any]:
        """The values of a state dict in the order of ``_state_keys``; raises as ``load_state_dict`` does."""
        require_state(state, "state_dict()")
        if not state:
            raise RuntimeError(self._empty_state)
        if missing := [key for key in self._state_keys if key not in state]:
            raise ValueError(
                f"a GradScaler's state dict has the keys {', '.join(self._state_keys)}; missing: {missing}"
            )
        return [state[key] for key in self._state_keys]
