"""The precision that each function is computed in: the policies, and the table read from ``lists/``."""

from __future__ import annotations

import enum
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from clamp import bridge


class CastPolicy(enum.Enum):
    """Policy of AMP for a function's floating-point inputs and output. PyTorch's names are aliases."""

    HALF = "half"  #: inputs used in the AMP dtype, fp32 accumulation, output in the AMP dtype
    FLOAT = "float"  #: computed and returned in fp32
    FLOAT_SET_DTYPE = "float_set_dtype"  #: as FLOAT, but an output dtype that the caller passes is respected
    FLOAT_APPEND_DTYPE = "float_append_dtype"  #: fp32 is passed as the argument ``dtype=``
    PROMOTE = "promote"  #: to the widest of the floating inputs
    MATCH = "match"  #: runs in its first input's dtype, other inputs are read in their own
    VIEW = "view"  #: moves elements without computing; any dtype
    BANNED = "banned"  #: raises with advice, unless ``allow_banned``: then FLOAT
    NONE = "none"  #: not a tensor function

    LOWER_PRECISION_FP = "half"
    FP32 = "float"
    FP32_SET_OPT_DTYPE = "float_set_dtype"
    FP32_APPEND_DTYPE = "float_append_dtype"

    @classmethod
    def named(cls, name: CastPolicy | str) -> CastPolicy:
        """A policy by its value or by PyTorch's name.

        Raises:
            ValueError: there is no such policy.
        """
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(sorted({known.value for known in cls} | {known.lower() for known in cls.__members__}))
            raise ValueError(f"unknown policy {name!r}: pass one of {names}") from None


class PolicyError(ValueError):
    """A list file, a level or a custom list that does not make sense; says where and what to do."""


@dataclass(frozen=True)
class Entry:
    """One line of a list: a function, its policy, and why.

    Attributes:
        name: full name, ``"netcl.autograd.matmul_op"``.
        policy: its policy.
        reason: one sentence.
        in_place: whether the function writes into tensors that it is given.
        by_level: whether its policy is that of a level, in place of what the lists say.
    """

    name: str
    policy: CastPolicy
    reason: str
    in_place: bool = False
    by_level: bool = False

    @cached_property
    def module(self) -> str:
        """Name of the module that defines the function."""
        return self.name.rpartition(".")[0]

    @cached_property
    def function(self) -> str:
        """The function's own name."""
        return self.name.rpartition(".")[2]


AMP_DTYPES = ("float16", "bfloat16", "float32")


def check_dtype(dtype: bridge.DTypeLike, what: str = "AMP dtype", known: Iterable[str] = AMP_DTYPES) -> str:
    """The name of one of clamp's dtypes, however it is written: ``np.float16``, ``"half"`` and ``"fp16"`` are float16.

    Raises:
        ValueError: it is none of them.
    """
    name = bridge.dtype_name(dtype)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {dtype!r}: pass one of {', '.join(known)}")
    return name


#: Paddle's levels -> a policy, and the functions that get it: those of these policies
_AT_LEVEL = {
    "O0": (CastPolicy.FLOAT, set(CastPolicy) - {CastPolicy.NONE}),
    "OD": (CastPolicy.FLOAT, set(CastPolicy) - {CastPolicy.HALF, CastPolicy.BANNED, CastPolicy.NONE}),
    "O1": (CastPolicy.NONE, set()),
    "O2": (CastPolicy.HALF, {CastPolicy.PROMOTE, CastPolicy.MATCH}),
}
LEVELS = tuple(_AT_LEVEL)


class PolicyTable:
    """Functions and their policies. Immutable; ``at_level`` and ``customized`` return changed copies.

    Attributes:
        calls: functions and methods that only hand over to a listed function, by full name, and which that is.
    """

    def __init__(self, entries: Iterable[Entry], calls: Mapping[str, str] | None = None) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self.calls = dict(calls or {})

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry_like(self, entry: Entry) -> Entry:
        """This table's entry of the same name as one of another table; that one, if this table has none."""
        return self._entries.get(entry.name, entry)

    def called_by(self, name: str) -> str:
        """The listed function that a function of ``calls`` hands over to; any other name stays itself."""
        while name in self.calls:
            name = self.calls[name]
        return name

    def find(self, function: str) -> list[Entry]:
        """Entries whose full or own name is ``function``, or which functions of that name hand over to."""
        callers = [name for name in self.calls if function in (name, name.rpartition(".")[2])]
        names = {self.called_by(name) for name in callers}
        return [
            entry for entry in self._entries.values() if function in (entry.name, entry.function) or entry.name in names
        ]

    def merged(self, other: Iterable[Entry]) -> PolicyTable:
        """This table with the entries of another on top."""
        return PolicyTable([*self._entries.values(), *other], self.calls)

    def at_level(self, level: str) -> PolicyTable:
        """The table as Paddle's levels see it.

        O0 computes everything in fp32; OD only the half list in half and the rest in fp32; O1 is the lists as
        they are; O2 computes everything in half but what the lists keep in fp32.
        """
        if not isinstance(level, str) or level not in LEVELS:
            raise PolicyError(f"unknown level {level!r}: pass one of {', '.join(LEVELS)}")
        policy, of = _AT_LEVEL[level]
        return self._with_policy(policy, lambda entry: entry.policy in of, by_level=True) if of else self

    def customized(self, white: Iterable[str] | None, black: Iterable[str] | None) -> PolicyTable:
        """The table with the functions of ``white`` in half and those of ``black`` in fp32.

        Raises:
            PolicyError: a function is on both lists, under whichever of its names, or no function has a name.
            TypeError: white or black is no list of names.
        """
        white = set(names_in("custom_white_list", white))
        black = set(names_in("custom_black_list", black))
        for name in sorted(white | black):
            if not self.find(name):
                raise PolicyError(f"custom list: no function named {name!r}; `python -m clamp lists` prints all names")
        if not white | black:
            return self
        white, black = ({entry.name for name in names for entry in self.find(name)} for names in (white, black))
        if both := white & black:
            raise PolicyError(f"on the custom white list and on the custom black list: {', '.join(sorted(both))}")
        table = self._with_policy(CastPolicy.HALF, lambda entry: entry.name in white)
        return table._with_policy(CastPolicy.FLOAT, lambda entry: entry.name in black)

    def _with_policy(
        self, policy: CastPolicy, chosen: Callable[[Entry], bool], *, by_level: bool = False
    ) -> PolicyTable:
        entries = self._entries.values()
        changed = (replace(entry, policy=policy, by_level=by_level) if chosen(entry) else entry for entry in entries)
        return PolicyTable(changed, self.calls)


def names_in(what: str, names: Iterable[str] | None) -> tuple[str, ...]:
    """The names of functions that a user passed in a list; none of None.

    Raises:
        TypeError: it is no list, or has something else in it.
    """
    if isinstance(names, str):
        raise TypeError(f"{what} takes a list of names, not one: pass [{names!r}]")
    if not isinstance(names, Iterable | None):
        raise TypeError(f"{what} takes a list of names, got {names!r}")
    found = tuple(names or ())
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{what} takes names of functions, as `python -m clamp lists` prints them, got {name!r}")
    return found


_CALLS = "calls.toml"
_DEFECTS = "defects.toml"
_IN_PLACE = "in_place"  # a table of functions of policy FLOAT
MODULES = "modules"  # a table of patterns of paths of modules, and their dtypes


@cache  # a table is immutable, and an autocast region without an init asks for it every time
def default_table() -> PolicyTable:
    """The table of the list files that ship with clamp."""
    folder = files("clamp.lists")
    entries: list[Entry] = []
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        if file.name.endswith(".toml") and file.name not in (_CALLS, _DEFECTS):
            entries += parse_list(file.read_text(encoding="utf-8"), file.name)
    calls = tomllib.loads(folder.joinpath(_CALLS).read_text(encoding="utf-8"))["calls"]
    return PolicyTable(entries, calls)


def netcl_defects() -> Mapping[str, str]:
    """netcl's functions that are wrong in float32, by full name, and what is wrong.

    clamp's run in their place wherever patches are installed, where nothing is cast too.
    """
    return _defects()["defects"]


def netcl_misreads() -> Mapping[str, str]:
    """netcl's functions whose kernels take every tensor for float32, also where all are of one other dtype, by full
    name, with the reason."""
    return _defects()["misreads"]


@cache
def _defects() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(files("clamp.lists").joinpath(_DEFECTS).read_text(encoding="utf-8"))


def read_list(path: str | Path) -> list[Entry]:
    """Entries of a user's list file. One that only hands over to a listed function stands for that.

    Raises:
        PolicyError: the file cannot be read or is malformed, or names what netcl, or a module that is imported, has no
            function for; the message gives file, line and key.
        TypeError: path is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"lists takes the path of a list file, got {path!r}")
    text, found = text_of(path), dict[str, tuple[str, Entry]]()
    for entry in parse_list(text, str(path)):
        name, where = _listed_name(entry), f"{path}, line {_line_of(text, entry.name)}: "
        if name is None:
            raise PolicyError(
                f"{where}there is no function {entry.name!r}; `python -m clamp lists` prints those of netcl. A method "
                "of yours is registered: amp.register(Class, name, policy)"
            )
        if name in found:
            other, listed = found[name]
            policy = listed.policy.value
            raise PolicyError(f"{where}{entry.name!r} is already listed as {policy} by another name, {other!r}")
        found[name] = entry.name, replace(entry, name=name)
    return [listed for _, listed in found.values()]


def _listed_name(entry: Entry) -> str | None:
    """Returns the name that the shipped lists have for what a user's entry names, or its own; None if there is no such
    function, as far as its module is imported (netcl's are for that)."""
    table = default_table()
    name = table.called_by(entry.name)
    if name in table:
        return name
    is_netcls = entry.module.startswith("netcl.")
    if is_netcls:
        with suppress(ImportError):
            import_module(entry.module)
    parent, _, last = entry.module.rpartition(".")
    module = sys.modules.get(entry.module)
    if module is None:
        return None if is_netcls or hasattr(sys.modules.get(parent), last) else entry.name
    function = getattr(module, entry.function, None)
    if not callable(function) or isinstance(function, type):
        return None
    same = (x.name for x in table if getattr(sys.modules.get(x.module), x.function, None) is function)
    return next(same, entry.name)


def text_of(path: str | Path) -> str:
    """The text of a list file; PolicyError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read the list file {path}: {error}") from error


def parse_list(text: str, file: str) -> list[Entry]:
    """Entries of a list: one TOML table per policy, each key a function's full name, each value the reason.

    The table ``in_place`` holds functions of policy FLOAT that write into tensors that they are given. The table
    ``modules``, which has patterns of the paths of modules with their dtypes, is checked and has no entries.

    Raises:
        PolicyError: malformed; the message gives file, line and key.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{file}: {error}") from error

    def fail(key: str, problem: str) -> NoReturn:
        raise PolicyError(f"{file}, line {_line_of(text, key)}: {problem}")

    policies = {policy.value: policy for policy in CastPolicy} | {_IN_PLACE: CastPolicy.FLOAT}
    entries: dict[str, Entry] = {}
    for policy_name, functions in tables.items():
        if policy_name == MODULES:
            _check_modules(functions, fail)
            continue
        if policy_name not in policies:
            fail(policy_name, f"unknown policy [{policy_name}]; use one of {', '.join(policies)}, or modules")
        if not isinstance(functions, Mapping):
            fail(policy_name, f"{policy_name} must be a table of functions and reasons")
        for name, reason in functions.items():
            if "." not in name:
                fail(name, f'{name!r} is no full name; write it as "package.module.function"')
            if not isinstance(reason, str) or not reason.strip():
                fail(name, f"{name!r} needs its reason, a sentence, as its value; got {reason!r}")
            if name in entries:
                fail(name, f"{name!r} is already listed as {entries[name].policy.value}")
            entries[name] = Entry(name, policies[policy_name], reason, policy_name == _IN_PLACE)
    return list(entries.values())


def _check_modules(modules: Any, fail: Callable[[str, str], NoReturn]) -> None:
    if not isinstance(modules, Mapping):
        fail(MODULES, f"{MODULES} must be a table of patterns and dtypes")
    for pattern, dtype in modules.items():
        if dtype not in AMP_DTYPES:
            fail(pattern, f"{pattern!r} needs a dtype, one of {', '.join(AMP_DTYPES)}; got {dtype!r}")


def _line_of(text: str, key: str) -> int:
    """Line of a key or table header in a TOML text. (tomllib keeps no positions.)"""
    as_key = rf"""^\s*\[?\s*["']?{re.escape(key)}["']?\s*[\]=]"""
    anywhere = rf"\b{re.escape(key.rpartition('.')[2])}\b"
    lines = list(enumerate(text.splitlines(), start=1))
    found = (number for wanted in (as_key, anywhere) for number, line in lines if re.search(wanted, line))
    return next(found, 1)
