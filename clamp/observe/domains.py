"""Where functions have no value in any dtype, in words, and what to write there instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clamp.observe.frames import BACKWARD, FORWARD, Frame, Value

#: what keeps numbers from where a function has no value, by their dtype: ``small``, whose reciprocal, and the square of
#: that, leave float16's gradients room for a loss scale; ``power``, which e is raised to, likewise
_NUMBERS = {"float16": {"small": 1e-3, "large": 65504.0, "power": 8.0}}
_NUMBERS_OF_OTHERS = {"small": 1e-6, "large": 3e38, "power": 80.0}


@dataclass(frozen=True)
class _Domain:
    """Numbers for which a function, or its gradient, has no value.

    Attributes:
        direction, function: of what.
        words: what the numbers are.
        cure: what to write, with names of ``_NUMBERS`` in it; x and y are what the function is called with.
        holds: whether an op has read such numbers, as far as its statistics tell.
    """

    direction: str
    function: str
    words: str
    cure: str
    holds: Callable[[Value], bool] = lambda read: True


def _has_zeros(read: Value) -> bool:
    return read.statistics is not None and read.statistics.zeros > 0


def _is_large(read: Value) -> bool:
    return read.statistics is not None and read.statistics.largest > 88


_DOMAINS = (
    _Domain(FORWARD, "div", "it divides by 0", "ag.div(x, ag.add(y, {small}))", _has_zeros),
    _Domain(FORWARD, "div", "it divides by 0, or by next to nothing", "ag.div(x, ag.add(y, {small}))"),
    _Domain(FORWARD, "sqrt", "negative numbers have no root", "ag.sqrt(ag.clamp(x, {small}, {large}))"),
    _Domain(BACKWARD, "sqrt", "the slope of a root is infinite at 0", "ag.sqrt(ag.add(x, {small}))", _has_zeros),
    _Domain(FORWARD, "rsqrt", "numbers up to 0 have none", "ag.rsqrt(ag.clamp(x, {small}, {large}))"),
    _Domain(FORWARD, "log", "numbers up to 0 have no logarithm", "ag.log(ag.clamp(x, {small}, {large}))"),
    _Domain(FORWARD, "log1p", "numbers up to -1 have none", "ag.log1p(ag.clamp(x, -0.999, {large}))"),
    _Domain(FORWARD, "pow", "some of what it reads has no such power", "ag.pow(ag.clamp(x, {small}, 1000.0), y)"),
    _Domain(BACKWARD, "pow", "its slope is infinite at 0", "ag.pow(ag.add(x, {small}), y)", _has_zeros),
    _Domain(
        FORWARD, "exp", "of numbers above 88 it is beyond 3.4e38", "ag.exp(ag.clamp(x, -80.0, {power}))", _is_large
    ),
)


def without_value(frame: Frame) -> tuple[str, str]:
    """What an op did, in words, whose result or gradient has no finite value in float32 either, and the cure.

    The words are empty where nothing is known of the function.
    """
    read = frame.parents if frame.direction == BACKWARD else frame.inputs
    at = f"  # at {frame.place.short_line}" if frame.place.file else ""
    for domain in _DOMAINS:
        if (domain.direction, domain.function) == (frame.direction, frame.function) and read and domain.holds(read[-1]):
            return domain.words, domain.cure.format(**_NUMBERS.get(read[-1].dtype, _NUMBERS_OF_OTHERS)) + at
    where = f", at {frame.place.short_line}," if frame.place.file else ""
    return "", f"# keep what {frame.function} reads{where} from where it has no value"
