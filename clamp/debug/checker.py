"""Each op's results and gradients checked as they are made, after Paddle's tensor checker: a line for each that its
mode asks for, and an error where inf or nan must end the program.

Paddle's lines (``paddle/fluid/framework/details/nan_inf_utils``) are read again by ``clamp.debug.dumps``.
"""

from __future__ import annotations

import difflib
import enum
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor, TensorLike
from clamp.casting.operands import note_numpy_backend
from clamp.casting.policy_table import CastPolicy, default_table
from clamp.casting.results import GradFn, Gradients, Observer
from clamp.debug.callsite import CAST, NOWHERE, Place, here
from clamp.opencl.device import list_devices
from clamp.opencl.host_steps import host_step, recorder
from clamp.ops.statistics import Numerics, PendingNumerics
from clamp.scaling.scaled_loss import SCALE_OP
from clamp.scaling.step_report import warn_user

#: Paddle's names of dtypes
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

_GRADIENT = "@GRAD"  # behind the name of a tensor that is one

Write = Callable[[str, str], None]


class DebugMode(enum.Enum):
    """Mode of the checker: what it prints of a tensor, and whether it ends the program. Paddle's names and values."""

    CHECK_NAN_INF_AND_ABORT = 0  #: a line for each tensor with inf or nan, and FloatingPointError
    CHECK_NAN_INF = 1  #: a line for each tensor with inf or nan
    CHECK_ALL_FOR_OVERFLOW = 2  #: also for float32 tensors with numbers that float16 does not hold
    CHECK_ALL = 3  #: a line for every tensor

    def wants(self, dtype: str, found: Numerics) -> bool:
        """Returns whether a tensor is worth a line."""
        if self is DebugMode.CHECK_ALL or not found.is_finite:
            return True
        return self is DebugMode.CHECK_ALL_FOR_OVERFLOW and dtype == "float32" and bool(found.beyond or found.below)

    def aborts(self, found: Numerics) -> bool:
        """Returns whether a tensor ends the program."""
        return self is DebugMode.CHECK_NAN_INF_AND_ABORT and not found.is_finite


# ---------------------------------------------------------------------------------------------- which ops


SUM = "grad_add"  #: where the gradients of a result that is used twice are added up; Paddle's name for it
_MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class Sampling:
    """Selection of the ops that are checked; all of them by default.

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
            values = getattr(self, name)
            if not (isinstance(values, list | tuple | set | frozenset) and all(isinstance(x, str) for x in values)):
                raise TypeError(f"{name} must be a list of names, got {values!r}")
            object.__setattr__(self, name, tuple(values))
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
        names = {op, place.name_of(op)}
        return (not self.ops or _are_on(self.ops, names)) and not _are_on(self.skip_ops, names)


def _are_on(listed: Sequence[str], names: set[str]) -> bool:
    """Returns whether one of an op's names is meant by a list."""
    return any(fnmatchcase(name, each) for one in listed for each in functions_named(one) for name in names)


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


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


# ---------------------------------------------------------------------------------------------- the checker


class Checker(Observer):
    """An observer that reads every result when it is made, in replays too.

    Args:
        mode: what is said.
        write: called with the name of a device and a line; prints it by default.
        sampling: which ops are checked.
        with_source: whether the line of the program follows one that tells of inf or nan.
        thread: whose ops alone are checked, by its identifier; None: all.
    """

    def __init__(
        self, mode: DebugMode, write: Write = lambda device, line: print(line), sampling: Sampling = Sampling(), *,
        with_source: bool = True, thread: int | None = None,
    ) -> None:  # fmt: skip
        self.on, self.thread = True, thread
        self._mode, self._write, self._with_source = mode, write, with_source
        self._sampling = sampling
        self._step = 1  # the one that is under way
        self._met = False  # whether something was computed in it
        self._unmet = set(self._sampling.modules)  # patterns that no module has had
        self._paths = bridge.ModulePaths()

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> tuple[str, Place] | None:
        if not (self.on and self._looks()):
            return None
        op, place = getattr(made, "op_name", None) or "op", here()
        if not self._takes(op, place):
            return None
        name = place.name_of(op)
        self._check(name, place, [made.value])
        return name, place

    def gradients(self, token: tuple[str, Place], grad: Tensor, grads: Gradients, again: GradFn) -> None:
        name, place = token
        if self.on:
            self._check(f"{name}_grad", place, [x for x in grads if x is not None], _GRADIENT)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        if self.on and self._looks() and self._takes(SUM, NOWHERE):
            self._check(SUM, NOWHERE, [made], _GRADIENT)

    def stepped(self, report: Any) -> None:
        self.end_step()

    def end_step(self) -> None:
        """Begins another step, if anything was computed in this one: steps of several optimizers after one another end
        the same one."""
        if self._met:
            if self._unmet and self._sampling.takes_step(self._step):
                self._warn_of_unmet()
            self._step += 1
            self._met = False

    def check_given(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Checks what no op has made."""
        self._check(name, here(), tensors)

    def _check(self, name: str, place: Place, made: Sequence[Any], suffix: str = "") -> None:
        tensors = [x for x in made if bridge.is_floating(x) and x.size]
        if any(isinstance(x, Tensor) and not bridge.on_device(x) for x in made):
            note_numpy_backend()
        if tensors:
            kinds = [(x.queue.device, bridge.canonical_dtype(x.dtype), tuple(x.shape)) for x in tensors]
            # Launched among the others, and so in replays, too; read at once, before something writes to it.
            host_step(partial(self._tell, name, place, suffix, kinds, PendingNumerics(tensors)))

    def _tell(
        self, name: str, place: Place, suffix: str, kinds: Sequence[tuple[cl.Device, str, tuple[int, ...]]],
        pending: PendingNumerics,
    ) -> None:  # fmt: skip
        if not (self.on and self._looks()):
            return
        for (device, dtype, shape), found in zip(kinds, pending.read(), strict=True):
            if not self._mode.wants(dtype, found):
                continue
            paths = self._paths.of(place.modules[0]) if place.modules else ("",)
            label = device_name(device)
            self._write(label, line_of(label, name, "+".join(paths) + suffix, dtype, found, place.short_line))
            if self._with_source and not found.is_finite and place.source:
                self._write(label, f"    {place.short_line}: {place.source}")
            if self._mode.aborts(found):
                where = (f" in {', '.join(paths)}" if any(paths) else "") + place.layer_kind
                at = f",{place.at}: {place.source}" if place.source else ""
                raise FloatingPointError(f"{name}{where} gave {counts_in_words(found, dtype, shape)}{at}")

    # ------------------------------------------------------------------------------------------ which ops

    def _looks(self) -> bool:
        """Returns whether this step is looked at. To be asked at each op, first.

        While launches are being recorded it is: what is recorded runs in many steps.
        """
        self._met = True
        return recorder() is not None or self._sampling.takes_step(self._step)

    def _takes(self, op: str, place: Place) -> bool:
        """Returns whether an op at a place is looked at, in a step that is."""
        return self._sampling.takes_op(op, place) and (not self._sampling.modules or self._is_inside(place.modules))

    def _is_inside(self, modules: Iterable[Any]) -> bool:
        found = {
            pattern
            for module in modules
            for path in self._paths.of(module)
            for pattern in self._sampling.modules
            if fnmatchcase(path, pattern)
        }
        self._unmet -= found
        return bool(found)

    def _warn_of_unmet(self) -> None:
        """Says, once, that patterns have met no module in a whole step."""
        unmet, self._unmet = sorted(self._unmet), set()
        known = sorted(filter(None, self._paths.known))
        near = "".join(_near(pattern, known) for pattern in unmet)
        warn_user(f"no op of step {self._step} was in a module of the path {' or '.join(map(repr, unmet))}{near}")


def counts_in_words(found: Numerics, dtype: str, shape: Sequence[int]) -> str:
    """``"0 nan and 3 inf among 8 elements of float16 (2, 4)"``."""
    return f"{found.nans} nan and {found.infs} inf among {found.count} elements of {dtype} {tuple(shape)}"


def line_of(device: str, op: str, tensor: str, dtype: str, found: Numerics, at: str = "") -> str:
    """Returns what Paddle prints of a tensor, how much of it float16 does not hold, and the line of the program."""
    error = "" if found.is_finite else "[ERROR] "
    lost = f", num_over_fp16={found.beyond}, num_under_fp16={found.below}" if dtype == "float32" else ""
    return (
        f"[PRECISION] {error}in [device={device}, op={op}, tensor={tensor}, dtype={SHORT[dtype]}], "
        f"numel={found.count}, num_nan={found.nans}, num_inf={found.infs}, num_zero={found.zeros}, "
        f"max={found.greatest:.6e}, min={found.least:.6e}, mean={found.mean:.6e}{lost}{f', at={at}' if at else ''}"
    )


@cache
def device_name(device: cl.Device) -> str:
    """A device as Paddle would write it, ``"gpu:0"``: its kind, and its place among all devices."""
    kind = "cpu" if device.type & cl.device_type.CPU else "gpu"
    return f"{kind}:{list_devices().index(device)}"
