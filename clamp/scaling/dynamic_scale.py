"""The loss scale that moves, and the rule by which it does."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.arguments import tensors_in
from clamp.interrupts import holding, of_threads
from clamp.ops.loss_scale import ADJUST, UPDATE, ScaleState, scale_lock
from clamp.scaling.loss_scale import LossScale, NoLossScale, check_masks, count, positive


@dataclass(frozen=True)
class ScaleRule:
    """The rule by which a dynamic loss scale moves; ``DynamicLossScale`` has the algorithm.

    Args:
        initial: the first scale, from ``min`` to ``max``.
        growth: the scale is multiplied by it after ``interval`` clean steps; above 1.
        backoff: the scale is multiplied by it after an overflow; between 0 and 1.
        interval: clean steps, at least 1.
        min, max: the smallest and the largest scale; finite, positive, in this order.
        hysteresis: overflowed steps in a row that lower the scale once, at least 1.
        layerwise: whether each layer has a scale of its own besides, for nets in which gradients of some layers are so
            much smaller than those of others that no one scale fits both (Zhao et al., "Adaptive Loss Scaling for Mixed
            Precision Training", 2019). It is found anew in each backward, and taken off the layer's gradients again;
            between layers they are in float32.

    Raises:
        ValueError: a value is none of these, as a float32. An ``initial`` beyond the limits is refused by ``amp.init``.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    min: float = 2.0**-14
    max: float = 2.0**24
    hysteresis: int = 1
    layerwise: bool = False

    #: What messages call a field, where its user has given it another name.
    called: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        name = {field.name: self.called.get(field.name, field.name) for field in fields(self)}
        positive(name["initial"], self.initial)
        if not positive(name["growth"], self.growth) > 1:
            raise ValueError(f"{name['growth']} must be above 1, not {self.growth!r}")
        if not positive(name["backoff"], self.backoff) < 1:
            raise ValueError(f"{name['backoff']} must be between 0 and 1, not {self.backoff!r}")
        count(name["interval"], self.interval, least=1)
        count(name["hysteresis"], self.hysteresis, least=1)
        if not isinstance(self.layerwise, bool):
            raise ValueError(f"layerwise must be True or False, not {self.layerwise!r}")
        if positive(name["min"], self.min) > positive(name["max"], self.max):
            raise ValueError(f"{name['min']} {self.min!r} is above {name['max']} {self.max!r}")


DEFAULT_RULE = ScaleRule()


class DynamicLossScale(LossScale):
    """The largest scale at which gradients are finite: lowered when they overflow, raised after a while without::

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
                    if bad_steps == hysteresis:
                        bad_steps = 0
                        scale = max(scale * backoff, min)
            elif fresh == mask:                       # the first pass of a step
                bad_steps = 0
                growth_tracker += 1
                if growth_tracker == interval:
                    growth_tracker = 0
                    if isfinite(scale * growth):
                        scale = min(scale * growth, max)

    Several ``assign`` before one ``adjust`` count as one pass: overflowed if any of them was.

    Args:
        init_scale: the first scale, within the rule's limits; the rule's if None.
        rule: factors, interval and limits; may be replaced at any time.

    Raises:
        ValueError: init_scale is not a finite positive number within the limits.

    Example:
        >>> scale = DynamicLossScale(2.0**10, ScaleRule(interval=500))
    """

    is_dynamic = comes_down = True
    #: Whether an overflow lifts a scale that somebody has set below the rule's ``min`` to it.
    lifts = False

    def __init__(self, init_scale: float | None = None, rule: ScaleRule = DEFAULT_RULE) -> None:
        self._rule = [rule]  # which copies on other queues have as well
        super().__init__(self._check_scale(rule.initial if init_scale is None else init_scale))

    @property
    def rule(self) -> ScaleRule:
        """The rule by which the scale moves; may be replaced at any time."""
        return self._rule[0]

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self._rule[0] = rule

    @property
    def floor(self) -> float:
        return self.rule.min

    @property
    def layerwise(self) -> bool:
        return self.rule.layerwise

    @property
    def _arguments(self) -> tuple[float, ...]:
        rule = self.rule
        return (
            rule.growth,
            rule.backoff,
            rule.interval,
            rule.hysteresis,
            -rule.min if self.lifts else rule.min,
            rule.max,
        )

    def adjust(self) -> None:
        self._state.launch(ADJUST, *self._arguments)

    def update(self, mask: int, fresh: int) -> None:
        check_masks(mask, fresh)
        self._state.launch(UPDATE, mask, fresh, *self._arguments)

    def rewind(self, state: ScaleState, mask: int, found: int = 0) -> None:
        """Makes the state what it was, or would be; what was assigned since the last ``adjust`` is forgotten. Waits for
        the device.

        Args:
            mask: bits of the optimizers whose overflows are to be as in ``state``. What the passes of others have met,
                in other threads, is no part of it.
            found: what a pass that has not ended has met: 0 nothing, 1 an inf, 2 a nan.
        """
        with scale_lock:
            now = self.read()
            overflow, nans = state.overflow & mask | now.overflow & ~mask, state.nans & mask | now.nans & ~mask
            self._state.write(**state._replace(overflow=overflow, nans=nans)._asdict(), event=0, found=found)

    def mend(self, mask: int, most: float) -> None:
        """Forgets the last overflows of optimizers, which repeats have mended; the scale is ``most`` from now on, or
        where passes, of other threads, say, have led further down. Waits for the device."""
        with scale_lock:
            now = self.read()
            overflow, nans = now.overflow & ~mask, now.nans & ~mask
            self._state.write(scale=min(most, now.scale), overflow=overflow, nans=nans)

    def _check_scale(self, value: float) -> float:
        value = positive("the loss scale", value)
        if not (self.lifts or self.rule.min <= value) or value > self.rule.max:
            called = self.rule.called
            raise ValueError(
                f"the loss scale {value!r} is not between {called.get('min', 'min')} {self.rule.min!r} "
                f"and {called.get('max', 'max')} {self.rule.max!r}"
            )
        return value


class Outcome:
    """What is to be heard of a pass when somebody needs to know, once, by whichever thread is the first.

    Args:
        settle: waits for what has become of the pass. Called again, where it has raised an error.
        left: the gradients that the pass has left. Whoever reads what lies in their memory needs to know.
    """

    def __init__(self, settle: Callable[[], object], left: Iterable[Tensor] = ()) -> None:
        self._settle: Callable[[], object] | None = partial(copy_context().run, settle)  # of no pass that is open there
        self._lock = threading.RLock()  # who needs the gradients waits for those who make them: one for each pass
        self._left = list(left)
        _unheard[id(self)] = weakref.ref(self, partial(_forget, id(self)))

    def hear(self) -> None:
        """Hears it, or waits until another thread has. What hears it, does not wait for itself."""
        with self._lock:
            settle, self._settle = self._settle, None
            try:
                if settle is not None:
                    settle()
            except BaseException:
                self._settle = settle
                raise
            if settle is not None:
                self.forget()

    def forget(self) -> None:
        """Nobody hears it."""
        self._settle = None
        _unheard.pop(id(self), None)

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        storages = filter(None, map(bridge.storage_of, self._left))  # numpy's backend has none
        return sorted(map(bridge.span_of, storages))

    def is_of(self, storage: Any) -> bool:
        """Returns whether a gradient that the pass has left lies in this memory, or in a part of it."""
        try:
            whole, begin, end = bridge.span_of(storage)
            place = bisect(self._spans, (whole, begin, end))
        except cl.LogicError:  # it may be, or not
            return True
        near = self._spans[max(place - 1, 0) : place + 1]
        return any(of == whole and low < end and begin < high for of, low, high in near)


#: Outcomes, of all threads, that nobody has heard yet, by id; held by guards, and by the threads whose they are.
_unheard: dict[int, weakref.ref[Outcome]] = {}


def _forget(key: int, ref: weakref.ref[Outcome]) -> None:
    if _unheard.get(key) is ref:  # another one may have its id by now
        del _unheard[key]


class _Outcomes(threading.local):
    def __init__(self) -> None:
        self.late: list[Outcome] = []
        self.is_settling = False


_thread = of_threads(_Outcomes())


def settle_later(settle: Callable[[], object], left: Iterable[Tensor] = ()) -> Outcome:
    """Lets this thread call ``settle()``, which waits for what has become of a pass, when somebody needs to know; or
    another one, by what this returns, or if it reads one of the gradients that the pass has ``left``."""
    _thread.late.append(Outcome(settle, left))
    return _thread.late[-1]


def settle_late(another: Outcome | None = None) -> None:
    """Hears what has become of this thread's passes, before their gradients are used, or what their graphs read is
    written to.

    Args:
        another: a pass, of another thread it may be.
    """
    if not (_thread.late or another) or _thread.is_settling:  # a repeat writes to tensors, too
        return
    with holding(_thread, "is_settling", True):
        while _thread.late:
            _thread.late[0].hear()
            _thread.late.pop(0)
        if another is not None:
            another.hear()


def settle_before_use(storages: Iterable[Any]) -> None:
    """Hears what has become of a pass, of whichever thread, if a gradient that it has left lies in this memory, or in a
    part of it: what is computed from that, a step by hand, say, must not be of an overflow that is yet to be
    repeated."""
    if not _unheard or _thread.is_settling:
        return
    outcomes = [outcome for ref in list(_unheard.values()) if (outcome := ref()) is not None]
    for storage in storages:
        for outcome in outcomes if storage is not None else ():
            if outcome.is_of(storage):
                settle_late(outcome)


def settle_before_reading(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """As ``settle_before_use``, of the tensors among the arguments of a call."""
    if _unheard:  # of every call: short
        settle_before_use(map(bridge.storage_of, tensors_in((args, kwargs))))


def settle_all() -> None:
    """Hears what has become of every pass, of whichever thread. Where an error comes of it, nobody hears the others."""
    try:
        for ref in list(_unheard.values()):
            settle_late(ref())
    finally:
        for outcome in [ref() for ref in list(_unheard.values())]:
            if outcome is not None:
                outcome.forget()


def is_anything_late() -> bool:
    """Returns whether there are passes, of any thread, of which nobody has heard yet what became of them."""
    return bool(_unheard)


def forget_late() -> None:
    """Nobody hears what has become of this thread's passes."""
    while _thread.late:
        _thread.late.pop().forget()


def make_loss_scale(loss_scale: str | float | ScaleRule, dtype: str) -> LossScale:
    """The loss scale for an AMP dtype.

    Args:
        loss_scale: ``"auto"`` (dynamic for float16, off otherwise), ``"dynamic"``, a rule for one that moves by it, or
            a number: a static scale.
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
    if isinstance(loss_scale, ScaleRule):
        return DynamicLossScale(rule=loss_scale)
    if not isinstance(loss_scale, str | bool):
        with suppress(ValueError):
            return LossScale(loss_scale)
    raise ValueError(
        f"loss_scale must be 'auto', 'dynamic', a ScaleRule or a finite positive number, not {loss_scale!r}"
    )
