"""Engines: an operation's ways of running, of which the first in their list that fits a problem and pays runs.

An engine is a module. A problem is a frozen dataclass of plain values: extents, dtypes, what the device can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

P = TypeVar("P", contravariant=True)


class Engine(Protocol[P]):
    """What all engines have; the operations that they run are in each package's own protocol.

    Attributes:
        name: what a caller names it by.
        in_words: how it computes, for ``python -m clamp lists``; where it does not fit everything, also what it takes.
    """

    name: str
    in_words: str

    def fits(self, problem: P, /) -> bool:
        """Whether it can compute the problem at all."""

    def pays(self, problem: P, /) -> bool:
        """Whether no engine after it in the list is expected to be faster; asked only where it fits."""


E = TypeVar("E", bound=Engine[Any])


def always(problem: object) -> bool:
    """``fits`` of an engine that computes anything, ``pays`` of the one that is left when no other does."""
    return True


def on_cpus(problem: Any) -> bool:
    """``pays`` of an engine whose kernels are made for the caches and vector registers of CPU devices."""
    return bool(problem.device.is_cpu)


def choose(engines: Sequence[E], problem: Any, given: str | None = None) -> E:
    """The first engine that fits the problem and pays, or that of the name ``given``.

    Raises:
        ValueError: no engine has that name, or it does not fit; or none is given and none fits and pays.
    """
    if given is None:
        for engine in engines:
            if engine.fits(problem) and engine.pays(problem):
                return engine
        raise ValueError(f"no engine fits {problem} and pays")
    named = {engine.name: engine for engine in engines}
    if given not in named:
        raise ValueError(f"no engine is called {given!r}; there are {', '.join(named)}")
    if not named[given].fits(problem):
        raise ValueError(f"the engine {given} ({named[given].in_words}) does not fit {problem}")
    return named[given]


def all_in_words(chosen: Mapping[str, Engine[Any]]) -> str:
    """How the problems that the keys name are computed: "these and those by ...; others by ..."."""
    ways: dict[str, list[str]] = {}
    for problem, engine in chosen.items():
        ways.setdefault(engine.in_words, []).append(problem)
    return next(iter(ways)) if len(ways) == 1 else "; ".join(f"{' and '.join(ways[way])} by {way}" for way in ways)
