"""OneFlow's ``GradScaler`` and ``StaticGradScaler``: how a graph's loss scale moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clamp.compat import pytorch
from clamp.scaling.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from clamp.scaling.scale_rule import LARGEST, ScaleRule


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
        lowest = min(1.0, StaticLossScale(self.init_scale).scale)
        rule = ScaleRule(
            self.growth_factor, self.backoff_factor, self.growth_interval, min_scale=lowest, max_scale=LARGEST
        )
        return DynamicLossScale(self.init_scale, rule)


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
        scale = StaticLossScale(self.scale_factor)
        scale.cure = "graph.set_grad_scaler(amp.GradScaler())"
        return scale


def loss_scale_of(scaler: Any) -> LossScale:
    """The loss scale of a graph that is given this scaler.

    Raises:
        TypeError: it is no scaler.
    """
    if isinstance(scaler, pytorch.GradScaler):  # a disabled one
        return NoLossScale()
    if not isinstance(scaler, GradScaler | StaticGradScaler):
        raise TypeError(f"set_grad_scaler takes a GradScaler or a StaticGradScaler, got {type(scaler).__name__}")
    return scaler.make()
