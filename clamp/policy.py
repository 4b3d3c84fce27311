"""Which function is computed in which precision: the policies, and the table read from ``lists/``."""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path


class CastPolicy(enum.Enum):
    """What AMP does with a function's floating-point inputs and output. PyTorch's names are aliases."""

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


class PolicyError(ValueError):
    """A list file, a level or a custom list that does not make sense; says where and what to do."""


@dataclass(frozen=True)
class Entry:
    """One line of a list: a function, its policy, and why.

    Attributes:
        name: full name, ``"netcl.autograd.matmul_op"``.
        policy: its policy.
        reason: one sentence.
    """

    name: str
    policy: CastPolicy
    reason: str

    @property
    def module(self) -> str:
        """Name of the module that defines the function."""
        return self.name.rpartition(".")[0]

    @property
    def function(self) -> str:
        """The function's own name."""
        return self.name.rpartition(".")[2]


LEVELS = ("O0", "OD", "O1", "O2")


class PolicyTable:
    """Functions and their policies. Immutable; ``at_level`` and ``customized`` return changed copies."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def policy_of(self, entry: Entry) -> CastPolicy:
        """The policy this table gives to an entry of another table (its own, if this table has no such name)."""
        return self._entries.get(entry.name, entry).policy

    def find(self, function: str) -> list[Entry]:
        """Entries whose full or own name is ``function``."""
        return [entry for entry in self._entries.values() if function in (entry.name, entry.function)]

    def merged(self, other: Iterable[Entry]) -> PolicyTable:
        """This table with the entries of another on top."""
        return PolicyTable([*self._entries.values(), *other])

    def at_level(self, level: str) -> PolicyTable:
        """The table as Paddle's levels see it.

        O0 computes everything in fp32; OD only the half list in half and the rest in fp32; O1 is the lists as
        they are; O2 computes everything in half but what the lists keep in fp32.
        """
        if level not in LEVELS:
            raise PolicyError(f"unknown level {level!r}: pass one of {', '.join(LEVELS)}")
        kept = {CastPolicy.HALF, CastPolicy.BANNED, CastPolicy.NONE}
        if level == "O0":
            return self._with_policy(CastPolicy.FLOAT, lambda entry: entry.policy is not CastPolicy.NONE)
        if level == "OD":
            return self._with_policy(CastPolicy.FLOAT, lambda entry: entry.policy not in kept)
        if level == "O2":
            return self._with_policy(
                CastPolicy.HALF, lambda entry: entry.policy in (CastPolicy.PROMOTE, CastPolicy.MATCH)
            )
        return self

    def customized(self, white: Iterable[str], black: Iterable[str]) -> PolicyTable:
        """The table with the functions of ``white`` in half and those of ``black`` in fp32.

        Raises:
            PolicyError: a name is on both lists, or no function has it.
        """
        white, black = set(white), set(black)
        if both := white & black:
            raise PolicyError(f"on the custom white list and on the custom black list: {', '.join(sorted(both))}")
        for name in sorted(white | black):
            if not self.find(name):
                raise PolicyError(f"custom list: no function named {name!r}; `python -m clamp lists` prints all names")
        table = self._with_policy(CastPolicy.HALF, lambda entry: bool(white & {entry.name, entry.function}))
        return table._with_policy(CastPolicy.FLOAT, lambda entry: bool(black & {entry.name, entry.function}))

    def _with_policy(self, policy: CastPolicy, chosen: Callable[[Entry], bool]) -> PolicyTable:
        return PolicyTable(
            replace(entry, policy=policy) if chosen(entry) else entry for entry in self._entries.values()
        )


def default_table() -> PolicyTable:
    """The table of the list files that ship with clamp."""
    folder = files("clamp.lists")
    entries: list[Entry] = []
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        if file.name.endswith(".toml"):
            entries += parse_list(file.read_text(encoding="utf-8"), file.name)
    return PolicyTable(entries)


def read_list(path: str | Path) -> list[Entry]:
    """Entries of a user's list file.

    Raises:
        PolicyError: the file cannot be read or is malformed; the message gives file, line and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read the list file {path}: {error}") from error
    return parse_list(text, str(path))


def parse_list(text: str, file: str) -> list[Entry]:
    """Entries of a list: one TOML table per policy, each key a function's full name, each value the reason.

    Raises:
        PolicyError: malformed; the message gives file, line and key.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{file}: {error}") from error
    policies = {policy.value: policy for policy in CastPolicy}
    entries: dict[str, Entry] = {}
    for policy_name, functions in tables.items():
        where = f"{file}, line {_line_of(text, policy_name)}"
        if policy_name not in policies:
            raise PolicyError(f"{where}: unknown policy [{policy_name}]; use one of {', '.join(policies)}")
        if not isinstance(functions, Mapping):
            raise PolicyError(f"{where}: {policy_name} must be a table of functions and reasons")
        for name, reason in functions.items():
            where = f"{file}, line {_line_of(text, name)}: {name!r}"
            if "." not in name:
                raise PolicyError(f'{where} is no full name; write it as "package.module.function"')
            if not isinstance(reason, str) or not reason.strip():
                raise PolicyError(f"{where} needs its reason, a sentence, as its value; got {reason!r}")
            if name in entries:
                raise PolicyError(f"{where} is already listed as {entries[name].policy.value}")
            entries[name] = Entry(name, policies[policy_name], reason)
    return list(entries.values())


def _line_of(text: str, key: str) -> int:
    """Line of a key or table header in a TOML text. (tomllib keeps no positions.)"""
    pattern = re.compile(rf"""^\s*\[?\s*["']?{re.escape(key)}["']?\s*[\]=]""")
    last = key.rpartition(".")[2]
    fallback = re.compile(rf"\b{re.escape(last)}\b")
    lines = text.splitlines()
    for wanted in (pattern, fallback):
        for number, line in enumerate(lines, start=1):
            if wanted.search(line):
                return number
    return 1
