"""Which ops somebody looks at: of some modules, of some functions, in some steps."""

from __future__ import annotations

import difflib
import os
import tomllib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from clamp import bridge
from clamp.casting.policy_table import CastPolicy, default_table
from clamp.debug.callsite import CAST, Place
from clamp.opencl.host_steps import recorder
from clamp.scaling.scaled_loss import SCALE_OP
from clamp.scaling.step_report import warn_user

SUM = "grad_add"  #: where the gradients of a result that is used twice are added up; Paddle's name for it
_MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class Sampling:
    """Which ops are looked at; all of them if nothing is said.

    Attributes:
        modules: patterns (of ``fnmatch``) of the paths of layers: ``("layers.2",)``, ``("encoder.*",)``. An op is
            looked at in a layer of such a path, and in the layers inside it. No op outside of layers is.
        ops: names of netcl's functions, as the lists have them (``"matmul_op"``) or without ``_op``, of ops of clamp's
            own (``"cast"``, ``"scale_loss"``, ``"grad_add"``), or patterns, for ops of the user's own, too.
        skip_ops: those that are not looked at, in the same words; they win over ``ops``.
        every: in every which step, from the first on.
        steps: numbers of the first and the last step, from 1; None: all. What is computed up to an optimizer's
            ``step()`` is a step.

    Raises:
        TypeError: a value is of another type.
        ValueError: no function has a name, ``every`` is less than 1, or ``steps`` is no range.
    """

    modules: Sequence[str] = ()
    ops: Sequence[str] = ()
    skip_ops: Sequence[str] = ()
    every: int = 1
    steps: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("modules", "ops", "skip_ops"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in (*self.ops, *self.skip_ops):
            functions_named(name)
        if not _is_whole(self.every) or self.every < 1:
            raise ValueError(f"every must be a whole number from 1 on, got {self.every!r}")
        if self.steps is not None:
            steps = tuple(self.steps) if isinstance(self.steps, list | tuple) else ()
            if len(steps) != 2 or not all(map(_is_whole, steps)) or not 1 <= steps[0] <= steps[1]:
                raise ValueError(f"steps must be the first and the last step, from 1, like (1, 5), got {self.steps!r}")
            object.__setattr__(self, "steps", steps)

    @classmethod
    def read(cls, path: str | Path) -> Sampling:
        """A sampling from a TOML file, whose keys are the names of the attributes.

        Raises:
            TypeError: it is no path.
            ValueError: the file cannot be read, has an unknown key, or a value that is not taken; says which.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"a sampling is read from the path of a file, got {path!r}")
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"cannot read the sampling {path}: {error}") from error
        known = [field.name for field in fields(cls)]
        for key in found:
            if key not in known:
                raise ValueError(f"{path}: unknown key {key!r}{_near(key, known)}; known are {', '.join(known)}")
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def takes_step(self, number: int) -> bool:
        """Returns whether ops of the step of this number, from 1, are looked at."""
        first, last = self.steps or (1, number)
        return first <= number <= last and (number - first) % self.every == 0

    def takes_op(self, op: str, place: Place) -> bool:
        """Returns whether ops of this name, called at this place, are looked at, whatever the module."""
        if not (self.ops or self.skip_ops):
            return True
        names = {op, place.name_of(op)}
        return (not self.ops or self._are(names, self._wanted)) and not self._are(names, self._left_out)

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset().union(*map(functions_named, self.ops))

    @cached_property
    def _left_out(self) -> frozenset[str]:
        return frozenset().union(*map(functions_named, self.skip_ops))

    @staticmethod
    def _are(names: set[str], wanted: frozenset[str]) -> bool:
        if not names.isdisjoint(wanted):
            return True
        return any(fnmatchcase(name, pattern) for pattern in wanted if _MAGIC & set(pattern) for name in names)


class Sampler:
    """A sampling at work: counts steps, and knows the paths of the modules that it has met.

    Attributes:
        step: number of the step that is under way.
    """

    def __init__(self, sampling: Sampling | None = None) -> None:
        self._sampling = sampling = sampling or Sampling()
        self.step = 1
        self.paths = ModulePaths()
        self._met = False  # whether something was computed in this step
        self._unmet = set(sampling.modules)  # patterns that no module has had

    def looks(self) -> bool:
        """Returns whether this step is looked at. To be asked at each op, first.

        While launches are being recorded it is: what is recorded runs in many steps.
        """
        self._met = True
        return recorder() is not None or self._sampling.takes_step(self.step)

    def takes(self, op: str, place: Place) -> bool:
        """Returns whether an op at a place is looked at, in a step that is."""
        return self._sampling.takes_op(op, place) and (not self._sampling.modules or self._is_inside(place.modules))

    def end_step(self) -> None:
        """The step is over; steps of several optimizers after one another end the same one."""
        if self._met:
            if self._unmet and self._sampling.takes_step(self.step):
                self._warn()
            self.step += 1
            self._met = False

    def _is_inside(self, modules: Iterable[Any]) -> bool:
        found = {
            pattern
            for module in modules
            for path in self.paths.of(module)
            for pattern in self._sampling.modules
            if fnmatchcase(path, pattern)
        }
        self._unmet -= found
        return bool(found)

    def _warn(self) -> None:
        """Says, once, that patterns have met no module in a whole step."""
        unmet, self._unmet = sorted(self._unmet), set()
        known = sorted(filter(None, self.paths.known))
        near = "".join(_near(pattern, known) for pattern in unmet)
        warn_user(f"no op of step {self.step} was in a module of the path {' or '.join(map(repr, unmet))}{near}")


class ModulePaths:
    """The paths of modules, ``"layers.2"``: looked for once for each module."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}

    def of(self, module: Any) -> tuple[str, ...]:
        """The path of a module; several of one that netcl's Sequential has made of several; ``("",)`` of a model."""
        ref, paths = self._found.get(id(module), (None, ()))
        if ref is None or ref() is not module:
            paths = tuple(bridge.module_names([module])[0].split(", "))
            self._found[id(module)] = weakref.ref(module), paths
        return paths

    @property
    def known(self) -> set[str]:
        """All that were asked for."""
        return {path for _, paths in self._found.values() for path in paths}


@cache
def functions_named(name: str) -> frozenset[str]:
    """The functions and ops that a name on a list of ops is for; of a pattern, itself.

    Raises:
        ValueError: there is none; says which ones are near.
    """
    if _MAGIC & set(name) or name in (CAST, SCALE_OP, SUM):
        return frozenset({name})
    table = default_table()
    entries = [x for x in (*table.find(name), *table.find(f"{name}_op")) if x.policy is not CastPolicy.NONE]
    if entries:
        return frozenset({name, *(entry.function for entry in entries)})
    functions = {x.function for x in table if x.policy is not CastPolicy.NONE} | {CAST, SCALE_OP, SUM}
    raise ValueError(
        f"no function is called {name!r}{_near(name, functions)}. `python -m clamp lists` prints all names; an op of "
        f"your own is named by a pattern: {name + '*'!r}"
    )


def _near(name: str, known: Iterable[str]) -> str:
    """Names that are like one that nothing has, in words."""
    stem = name.removesuffix("_v2").removesuffix("2").removeprefix("elementwise_").removeprefix("reduce_")
    names = {x.removesuffix("_op"): x for x in sorted(known)}
    near = [x for x in names if x == stem] or difflib.get_close_matches(stem, names, n=3)
    return f" (near: {', '.join(names[x] for x in near)})" if near else ""


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, list | tuple | set | frozenset) and all(isinstance(x, str) for x in values):
        return tuple(values)
    raise TypeError(f"{name} must be a list of names, got {values!r}")


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
