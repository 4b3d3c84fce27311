"""Engines: the choice among several ways to compute an operation.

An engine is a module, or an object, with the names of `Engine` beside the functions that compute. An operation has one
ordered list of them; the first that fits and pays runs. Problems are plain values (extents, dtypes, what the device can
do), so choosing touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

P = TypeVar("P", contravariant=True)


class Engine(Protocol[P]):
    """An engine as a choice sees it; the functions that compute, and what they do, are in each package's protocol."""

    @property
    def NAME(self) -> str:
        """Its name for callers and `python -m clamp doctor`."""

    @property
    def TAKES(self) -> str:
        """The problems that fit, in words."""

    @property
    def IN_WORDS(self) -> str:
        """Its way to compute, as `python -m clamp lists` prints it."""

    def fits(self, problem: P, /) -> bool:
        """Returns whether it can compute a problem at all."""

    def pays(self, problem: P, /) -> bool:
        """Returns whether no engine after it in the list is expected to be faster; asked only where it fits."""


E = TypeVar("E", bound=Engine[Any])


def always(problem: object) -> bool:  # noqa: ARG001  (as every engine's)
    """The ``fits`` or ``pays`` of an engine that takes every problem."""
    return True


def on_cpus(problem: Any) -> bool:
    """The ``pays`` of an engine whose kernels are made for the caches and vector registers of CPU devices."""
    return bool(problem.device.is_cpu)


def choose(function: str, engines: Sequence[E], problem: Any, name: str | None = None) -> E:
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


def all_in_words(chosen: Mapping[str, Engine[Any]]) -> str:
    """Says in words how the problems that the keys name are computed: "these and those by ...; others by ..."."""
    ways: dict[str, list[str]] = {}
    for problem, engine in chosen.items():
        ways.setdefault(engine.IN_WORDS, []).append(problem)
    return next(iter(ways)) if len(ways) == 1 else "; ".join(f"{' and '.join(ways[way])} by {way}" for way in ways)
