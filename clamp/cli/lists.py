"""``python -m clamp lists``: which netcl function runs in which precision, in whose kernels, and why."""

from __future__ import annotations

import difflib
import re
import sys
from argparse import Namespace
from collections import Counter
from itertools import groupby

import pyopencl as cl
from rich.console import Console
from rich.table import Table

from clamp.casting.meanings import MEANINGS
from clamp.casting.policy import CastPolicy, Entry, PolicyTable, default_table
from clamp.cli.console import make_console
from clamp.cli.devices import UnknownDeviceError, choose_device, describe
from clamp.cli.kernels import on_device, reached
from clamp.cli.layers import functions_of, layers
from clamp.functions import OWNED
from clamp.opencl.device import NoDeviceError, capabilities

_RECURRENT = re.compile("lstm|gru|rnn|recurrent", re.IGNORECASE)


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    table = default_table().at_level(args.level)
    what, entries = _search(args.name, table)
    chosen = [entry for entry in entries if args.policy in (None, entry.policy.value)]
    if not chosen:
        print(_nothing(args, table, entries), file=sys.stderr)
        return 2
    console = make_console()
    if what:
        console.print(f"[bold]{what}[/], level {args.level}, {args.dtype}", highlight=False)
    if what and len(chosen) > 1:
        if len(chosen) == len(list(table)):
            console.print(f"{len(table.calls)} more only call one of these, operators of Tensor and Node among them")
        _print_many(console, chosen, args)
        return 0
    try:
        context = _context(args.device)
    except UnknownDeviceError as error:
        print(error, file=sys.stderr)
        return 2
    queue = None if context is None else cl.CommandQueue(context)  # Intel's queues do not keep their context alive
    for entry in chosen:
        _print_one(console, table, entry, args, queue)
    return 0


def _search(name: str | None, table: PolicyTable) -> tuple[str, list[Entry]]:
    """What entries a name stands for, in words (none for a function's name), and these entries.

    First come functions of this name, then what the layers call whose name it is or begins, then names it is a part of.
    """
    if name is None:
        return "netcl's functions", list(table)
    if found := table.find(name):
        return "", found
    if meant := [name] if name in layers() else [layer for layer in layers() if layer.startswith(name)]:
        called = {table.called_by(function) for layer in meant for function in functions_of(layers()[layer])}
        entries = [entry for entry in table if entry.name in called and entry.policy is not CastPolicy.NONE]
        return f"What {', '.join(meant)} of netcl.nn call{'s' if len(meant) == 1 else ''}", entries
    callers = {table.called_by(caller) for caller in table.calls if name.lower() in caller.lower()}
    found = [entry for entry in table if name.lower() in entry.name.lower() or entry.name in callers]
    return f"Functions with {name!r} in their names", found


def runs_as(entry: Entry, level: str, dtype: str) -> str:
    """Whose kernel runs for a function at a level, and in which dtype it returns."""
    if entry.policy is CastPolicy.NONE:
        return "netcl, as it is"
    if entry.policy is CastPolicy.BANNED:
        return "raises"
    if entry.name not in OWNED:
        return "netcl in float32"
    return f"clamp {MEANINGS[entry.policy].in_words.format(dtype=dtype)}"


def kernels(entry: Entry) -> str:
    """Which function of clamp takes a function's place, and the kernel files it may launch."""
    if entry.policy is CastPolicy.NONE:
        return "netcl's own, if any"
    if entry.name not in OWNED:
        return "netcl's, and clamp's for what it calls, in float32: 16-bit inputs are widened" + (
            ", results written back" if entry.in_place else ""
        )
    function = OWNED[entry.name]
    files = ", ".join(sorted(reached(function).files)) or "none: it moves nothing"
    return f"{files}  ({function.__module__}.{function.__qualname__})"


def _print_many(console: Console, entries: list[Entry], args: Namespace) -> None:
    """Functions and reasons, under a heading for each module and policy."""
    names = {entry: "  everything else" if entry.function == "*" else f"  {entry.function}" for entry in entries}

    def heading(entry: Entry) -> tuple[str, str, str]:
        return entry.module, entry.policy.value, runs_as(entry, args.level, args.dtype)

    for (module, policy, how), group in groupby(sorted(entries, key=lambda entry: entry.module), heading):
        console.print(f"\n[bold]{module}[/]  [cyan]{policy}[/]: {how}", highlight=False)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=min(console.width // 2, max(map(len, names.values()))), overflow="fold")
        table.add_column(overflow="fold")
        for entry in group:
            table.add_row(names[entry], entry.reason)
        console.print(table)
    counts = Counter(entry.policy.value for entry in entries)
    console.print("\n" + ", ".join(f"{count} {policy}" for policy, count in counts.most_common()), highlight=False)


def _print_one(
    console: Console, policies: PolicyTable, entry: Entry, args: Namespace, queue: cl.CommandQueue | None
) -> None:
    console.print(f"[bold]{entry.name}[/bold]  level {args.level}, {args.dtype}", highlight=False)
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("policy", entry.policy.value)
    table.add_row("reason", entry.reason)
    table.add_row("runs as", runs_as(entry, args.level, args.dtype))
    table.add_row("kernels", kernels(entry))
    callers = [name for name in policies.calls if policies.called_by(name) == entry.name]
    if callers:
        table.add_row("called by", ", ".join(callers))
    for line in _here(entry, "float32" if args.level == "O0" else args.dtype, queue):
        table.add_row("on this device", line)
    console.print(table, highlight=False)


def _here(entry: Entry, dtype: str, queue: cl.CommandQueue | None) -> list[str]:
    """What happens on a device; the numpy backend is the one that needs none."""
    if entry.policy is CastPolicy.NONE:
        return []
    if queue is None:
        return ["no OpenCL device here; netcl's numpy backend is left alone"]
    name = describe(queue.device)
    if entry.name not in OWNED:
        return [f"{name}: netcl's kernels"]
    if not capabilities(queue).half_storage and dtype == "float16":
        return [f"{name}: cannot load and store float16; use bfloat16"]
    shape = "long loops with vectors, one to a core" if capabilities(queue).is_cpu else "many short work-items"
    return [f"{name}: {shape}", *on_device(reached(OWNED[entry.name]), queue, dtype)]


def _context(name: str | None) -> cl.Context | None:
    """A context of the device asked for, or of the first; None if there is no device at all.

    Raises:
        UnknownDeviceError: no device has that name.
    """
    try:
        return cl.Context([choose_device(name)])
    except NoDeviceError:
        return None


def _nothing(args: Namespace, table: PolicyTable, found: list[Entry]) -> str:
    """The error for arguments that name no function, with the names that may have been meant."""
    if found:
        what = f"no function that {args.name!r} means" if args.name else "no function"
        return f"{what} has the policy {args.policy!r} at level {args.level}"
    known = {spelling: entry.name for entry in table for spelling in (entry.name, entry.function)}
    known |= {spelling: caller for caller in table.calls for spelling in (caller, caller.rpartition(".")[2])}
    known |= {name: name for name in layers()}
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(args.name, known, n=5))
    hint = f"; close to it: {', '.join(close)}" if close else "; `python -m clamp lists` prints all names"
    if _RECURRENT.search(args.name):
        hint = ". netcl has no recurrent layers: examples/rnn_cell.py makes an LSTM cell of functions that are listed"
    return f"no list names a function {args.name!r}, and netcl has no layer of that name{hint}"
