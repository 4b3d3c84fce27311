"""The loss scale that moves, and the rule by which it does."""

from __future__ import annotations

from dataclasses import dataclass

from clamp.ops.loss_scale import ADJUST, UPDATE
from clamp.scaling.loss_scale import LossScale, NoLossScale, check_masks, count, positive


@dataclass(frozen=True)
class ScaleRule:
    """The rule by which a dynamic loss scale moves; ``DynamicLossScale`` has the algorithm.

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


class DynamicLossScale(LossScale):
    """As large a scale as gradients bear: lowered when they overflow, raised after a while without::

        when a pass ends (assign):
            overflow[fresh] = False                   # their last overflows were answered by skipped steps
            if found:                                 # an inf or a nan
                first = not any(overflow[mask])       # the first overflow of this step
                overflow[mask] = True

        then (adjust):
            if found:
                growth_tracker = 0
                if first:                             # once a step, however many of its passes overflow
                    bad_steps += 1
                    if bad_steps == decr_every_n_nan_or_inf:
                        bad_steps = 0
                        scale = max(scale * backoff_factor, min_scale)
            elif fresh == mask:                       # the first pass of a step
                bad_steps = 0
                growth_tracker += 1
                if growth_tracker == growth_interval:
                    growth_tracker = 0
                    if isfinite(scale * growth_factor):
                        scale = min(scale * growth_factor, max_scale)

    Several ``assign`` before one ``adjust`` count as one pass: overflowed if any of them was.

    Args:
        init_scale: the first scale, within the rule's limits.
        rule: factors, interval and limits; may be replaced at any time.

    Raises:
        ValueError: init_scale is not a finite positive number within the limits.

    Example:
        >>> scale = DynamicLossScale(2.0**10, ScaleRule(growth_interval=500))
    """

    is_dynamic = comes_down = True
    #: Whether an overflow lifts a scale that somebody has set below the rule's ``min_scale`` to it.
    lifts = False

    def __init__(self, init_scale: float = 2.0**16, rule: ScaleRule = DEFAULT_RULE) -> None:
        self._rule = [rule]  # which copies on other queues have as well
        super().__init__(self._check_scale(init_scale))

    @property
    def rule(self) -> ScaleRule:
        """The rule by which the scale moves; may be replaced at any time."""
        return self._rule[0]

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self._rule[0] = rule

    @property
    def floor(self) -> float:
        return self.rule.min_scale

    @property
    def _arguments(self) -> tuple[float, ...]:
        """The rule's numbers, as kernels take them."""
        if not self.lifts:
            return self.rule.arguments
        *others, min_scale, max_scale = self.rule.arguments
        return (*others, -min_scale, max_scale)

    def adjust(self) -> None:
        self._state.launch(ADJUST, *self._arguments)

    def update(self, mask: int, fresh: int) -> None:
        check_masks(mask, fresh)
        self._state.launch(UPDATE, mask, fresh, *self._arguments)

    def _check_scale(self, value: float) -> float:
        value = positive("the loss scale", value)
        if not (self.lifts or self.rule.min_scale <= value) or value > self.rule.max_scale:
            raise ValueError(
                f"the loss scale {value!r} is not between min_scale {self.rule.min_scale!r} "
                f"and max_scale {self.rule.max_scale!r}"
            )
        return value


def make_loss_scale(loss_scale: str | float, dtype: str) -> LossScale:
    """The loss scale for an AMP dtype.

    Args:
        loss_scale: ``"auto"`` (dynamic for float16, off otherwise), ``"dynamic"``, or a number: a static scale.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``.

    Raises:
        ValueError: neither argument is any of these, or the number is not finite and positive.
    """
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype must be 'float16', 'bfloat16' or 'float32', not {dtype!r}")
    if loss_scale == "auto":
        return DynamicLossScale() if dtype == "float16" else NoLossScale()
    if loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, str | bool):
        raise ValueError(f"loss_scale must be 'auto', 'dynamic' or a positive number, not {loss_scale!r}")
    return LossScale(loss_scale)
