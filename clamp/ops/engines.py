"""How an operation that can be computed in several ways chooses one.

An engine is a module with the names of `Engine` beside the functions that compute. An operation has one ordered list
of them; the first that fits and pays runs. Problems are plain values, so choosing touches no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

E = TypeVar("E", bound="Engine")


class Engine(Protocol):
    """What a choice asks of an engine.

    Attributes:
        NAME: as callers and `python -m clamp doctor` name it.
        TAKES: the problems that fit, in words.
        IN_WORDS: how it computes, as `python -m clamp lists` prints it.
    """

    NAME: str
    TAKES: str
    IN_WORDS: str

    def fits(self, problem: Any) -> bool:
        """Whether it can compute a problem at all."""
        ...

    def pays(self, problem: Any) -> bool:
        """Whether it is the fastest for a problem that fits it, engines before it in the list aside."""
        ...


def always(problem: object) -> bool:
    """The ``fits`` or ``pays`` of an engine that takes every problem."""
    return True


def choose(function: str, engines: Iterable[E], problem: object, name: str | None = None) -> E:
    """The first engine that fits a problem and pays; the named one, if there is a name.

    Raises:
        ValueError: no engine has the name, or the problem does not fit it; the message begins with ``function``.
    """
    if name is None:
        return next(engine for engine in engines if engine.fits(problem) and engine.pays(problem))
    named = {engine.NAME: engine for engine in engines}
    if name not in named:
        raise ValueError(f"{function}: no engine is called {name!r}; there are {', '.join(named)}")
    if not named[name].fits(problem):
        raise ValueError(
            f"{function}: the engine {name} does not compute {problem} on this device; it takes {named[name].TAKES}"
        )
    return named[name]
