"""``python -m clamp lists``: which netcl function runs in which precision, in whose kernels, and why."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from collections import Counter
from itertools import groupby

import pyopencl as cl
from rich.console import Console
from rich.table import Table

from clamp.casting.policy import CastPolicy, Entry, PolicyTable, default_table
from clamp.cli.bench.report import make_console
from clamp.cli.devices import UnknownDeviceError, choose_device, describe
from clamp.cli.kernels import on_device, reached
from clamp.functions import OWNED
from clamp.opencl.device import NoDeviceError, capabilities

_WIDEST = (CastPolicy.PROMOTE,)
_AS_GIVEN = (CastPolicy.MATCH, CastPolicy.VIEW)


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    policies = default_table().at_level(args.level)
    console = make_console()
    if args.name is None:
        _print_all(console, policies, args)
        return 0
    entries = policies.find(args.name)
    if not entries:
        print(_unknown(args.name, policies), file=sys.stderr)
        return 2
    try:
        context = _context(args.device)
    except UnknownDeviceError as error:
        print(error, file=sys.stderr)
        return 2
    queue = None if context is None else cl.CommandQueue(context)  # Intel's queues do not keep their context alive
    for entry in entries:
        _print_one(console, policies, entry, args, queue)
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


def _print_all(console: Console, policies: PolicyTable, args: Namespace) -> None:
    table = Table(title=f"level {args.level}, {args.dtype}")
    table.add_column("function", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("runs as")
    table.add_column("reason")
    for module, entries in groupby(sorted(policies, key=lambda entry: entry.module), lambda entry: entry.module):
        table.add_section()
        table.add_row(f"[bold]{module}[/bold]")
        for entry in entries:
            own_name = "everything else" if entry.function == "*" else entry.function
            table.add_row(f"  {own_name}", entry.policy.value, runs_as(entry, args.level, args.dtype), entry.reason)
    console.print(table)
    console.print(f"{len(policies.calls)} more names only call one of these, Tensor's and Node's operators among them")
    counts = Counter(entry.policy.value for entry in policies)
    console.print(", ".join(f"{count} {policy}" for policy, count in counts.most_common()), highlight=False)


def _print_one(
    console: Console, policies: PolicyTable, entry: Entry, args: Namespace, queue: cl.CommandQueue | None
) -> None:
    console.print(f"[bold]{entry.name}[/bold]  level {args.level}, {args.dtype}", highlight=False)
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
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


def _unknown(name: str, policies: PolicyTable) -> str:
    """The error for a name that is on no list, with the names it may have meant."""
    known = {spelling: entry.name for entry in policies for spelling in (entry.name, entry.function)}
    known |= {spelling: caller for caller in policies.calls for spelling in (caller, caller.rpartition(".")[2])}
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(name, known, n=5))
    hint = f"; close to it: {', '.join(close)}" if close else "; `python -m clamp lists` prints all names"
    return f"no list names a function {name!r}{hint}"
