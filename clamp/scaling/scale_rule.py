"""The rule by which a dynamic loss scale moves, and checks of its numbers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # its reciprocal is finite, so that a scale down there can recover


def positive(name: str, value: Any) -> float:
    """The value rounded to float32, which the device computes with."""
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
    except (TypeError, ValueError):
        rounded = 0.0
    if isinstance(value, str) or not 0 < rounded <= LARGEST:
        raise ValueError(f"{name} must be a finite positive number, not {value!r}")
    return rounded


def count(name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value as an integer of the device's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, not {value!r}")
    return number


@dataclass(frozen=True)
class ScaleRule:
    """The rule by which a dynamic loss scale moves; ``clamp.scaling.loss_scale.DynamicLossScale`` has the algorithm.

    Args:
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: clean steps, at least 1.
        decr_every_n_nan_or_inf: overflowed steps in a row that lower the scale once, at least 1.
        min_scale, max_scale: finite, positive, in this order.

    Raises:
        ValueError: a value is none of these, as a float32.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    decr_every_n_nan_or_inf: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        if not positive("growth_factor", self.growth_factor) > 1:
            raise ValueError(f"growth_factor must be above 1, not {self.growth_factor!r}")
        if not positive("backoff_factor", self.backoff_factor) < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {self.backoff_factor!r}")
        count("growth_interval", self.growth_interval, least=1)
        count("decr_every_n_nan_or_inf", self.decr_every_n_nan_or_inf, least=1)
        if positive("min_scale", self.min_scale) > positive("max_scale", self.max_scale):
            raise ValueError(f"min_scale {self.min_scale!r} is above max_scale {self.max_scale!r}")

    @property
    def arguments(self) -> tuple[float, ...]:
        """Its numbers, in the order of the kernels."""
        return tuple(vars(self).values())


DEFAULT_RULE = ScaleRule()
