"""``python -m clamp lists``: which netcl function runs in which precision, and why."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from clamp import amp  # noqa: F401  (imports every family of functions, so that OWNED is complete)
from clamp.cli.report import make_console
from clamp.functions.casting import OWNED
from clamp.policy import CastPolicy, Entry, PolicyTable, default_table

_WIDEST = (CastPolicy.PROMOTE,)
_AS_GIVEN = (CastPolicy.MATCH, CastPolicy.VIEW)


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    policies = default_table().at_level(args.level)
    entries = list(policies) if args.name is None else policies.find(args.name)
    if not entries:
        print(_unknown(args.name, policies), file=sys.stderr)
        return 2
    console = make_console()
    console.print(_table(entries, args.level, args.dtype))
    if args.name is None:
        counts = Counter(entry.policy.value for entry in entries)
        console.print(", ".join(f"{count} {policy}" for policy, count in counts.most_common()), highlight=False)
    return 0


def runs_as(entry: Entry, level: str, dtype: str) -> str:
    """Whose kernel runs for a function at a level, and in which dtype it returns."""
    if entry.policy is CastPolicy.NONE:
        return "netcl, as it is"
    if entry.policy is CastPolicy.BANNED:
        return "raises"
    if entry.name not in OWNED:
        return "netcl in float32"
    if entry.policy is CastPolicy.HALF:
        return f"clamp in {dtype}"
    if entry.policy in _WIDEST:
        return "clamp in the widest input's dtype"
    return "clamp in its input's dtype" if entry.policy in _AS_GIVEN else "clamp in float32"


def _table(entries: Sequence[Entry], level: str, dtype: str) -> Table:
    table = Table(title=f"level {level}, {dtype}")
    table.add_column("function", overflow="fold")
    table.add_column("policy")
    table.add_column("runs as")
    table.add_column("reason")
    for entry in entries:
        table.add_row(entry.name, entry.policy.value, runs_as(entry, level, dtype), entry.reason)
    return table


def _unknown(name: str, policies: PolicyTable) -> str:
    """The error for a name that is on no list, with the names it may have meant."""
    known = {spelling: entry.name for entry in policies for spelling in (entry.name, entry.function)}
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(name, known, n=5))
    hint = f"; close to it: {', '.join(close)}" if close else "; `python -m clamp lists` prints all names"
    return f"no list names a function {name!r}{hint}"
