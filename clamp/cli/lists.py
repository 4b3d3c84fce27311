"""``python -m clamp lists``: which netcl function runs in which precision, in whose kernels, and why."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import Any

import netcl.nn
import pyopencl as cl
from netcl.nn.layers import Module
from rich.console import Console
from rich.table import Table

from clamp.casting.module_rules import ModuleRule, rule_for, rules_for
from clamp.casting.policies import POLICIES
from clamp.casting.policy_table import CastPolicy, Entry, PolicyTable, default_table, read_list
from clamp.casting.registry import USES
from clamp.cli import CommandError
from clamp.cli.console import make_console
from clamp.cli.devices import choose_device, describe
from clamp.functions import OWNED
from clamp.opencl.device import NoDeviceError, capabilities
from clamp.opencl.program import Kernel

_MODULES = {"ag": "netcl.autograd", "F": "netcl.nn.functional"}  # by the names that netcl's layers give them
_RECURRENT = re.compile("lstm|gru|rnn|recurrent", re.IGNORECASE)


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    try:
        own = [] if args.lists is None else read_list(args.lists)
        table, rules = default_table().merged(own).at_level(args.level), rules_for(None, args.lists, args.level)
    except ValueError as error:
        raise CommandError(str(error), 2) from error
    what, entries = _search(args.name, table)
    chosen = [entry for entry in entries if args.policy in (None, entry.policy.value)]
    console = make_console()
    decided = "" if args.name is not None and not what else _decided(args.name, rules, args.dtype)
    console.print(decided, end="", highlight=False, markup=False)
    if decided and not entries:
        return 0
    if not chosen:
        raise CommandError(_nothing(args, table, entries), 2)
    if what:
        console.print(f"[bold]{what}[/], level {args.level}, {args.dtype}", highlight=False)
    if what and len(chosen) > 1:
        if len(chosen) == len(list(table)):
            console.print(f"{len(table.calls)} more only call one of these, operators of Tensor and Node among them")
        _print_many(console, chosen, args)
        return 0
    try:
        context = cl.Context([choose_device(args.device)])  # Intel's queues do not keep their context alive
        queue = cl.CommandQueue(context)
    except NoDeviceError:
        queue = None
    for entry in chosen:
        _print_one(console, table, entry, args, queue)
    return 0


def _decided(path: str | None, rules: Sequence[ModuleRule], dtype: str) -> str:
    """The rules for modules, in words; of one path, that which decides about it."""
    if path is None:
        return "".join(f"modules {rule}\n" for rule in rules)
    rule = rule_for(rules, path)
    return "" if rule is None else f"module {path}: {rule.dtype}, by the rule {rule.pattern!r}; {dtype} elsewhere\n"


def _search(name: str | None, table: PolicyTable) -> tuple[str, list[Entry]]:
    """Returns what entries a name stands for, in words (none for a function's name), and these entries.

    First come functions of this name, then what the layers call whose name it is or begins, then names it is a part of.
    """
    if name is None:
        return "netcl's functions", list(table)
    if found := table.find(name):
        return "", found
    if meant := [name] if name in layers() else [layer for layer in layers() if layer.startswith(name)]:
        called = {table.called_by(function) for layer in meant for function in functions_of(layers()[layer], set())}
        entries = [entry for entry in table if entry.name in called and entry.policy is not CastPolicy.NONE]
        return f"What {', '.join(meant)} of netcl.nn call{'s' if len(meant) == 1 else ''}", entries
    callers = {table.called_by(caller) for caller in table.calls if name.lower() in caller.lower()}
    found = [entry for entry in table if name.lower() in entry.name.lower() or entry.name in callers]
    return f"Functions with {name!r} in their names", found


def runs_as(entry: Entry, dtype: str) -> str:
    """Whose kernel runs for a function, and in which dtype it returns."""
    if entry.policy is CastPolicy.NONE:
        return "netcl, as it is"
    if entry.policy is CastPolicy.BANNED:
        return "raises"
    if entry.name not in OWNED:
        return "netcl in float32"
    return f"clamp {POLICIES[entry.policy].in_words.format(dtype=dtype)}"


def kernels(entry: Entry) -> str:
    """Returns which function of clamp takes a function's place, and the kernel files it may launch."""
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
        return entry.module, entry.policy.value, runs_as(entry, args.dtype)

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
    table.add_row("runs as", runs_as(entry, args.dtype))
    table.add_row("kernels", kernels(entry))
    callers = [name for name in policies.calls if policies.called_by(name) == entry.name]
    if callers:
        table.add_row("called by", ", ".join(callers))
    for line in _here(entry, "float32" if args.level == "O0" else args.dtype, queue):
        table.add_row("on this device", line)
    console.print(table, highlight=False)


def _here(entry: Entry, dtype: str, queue: cl.CommandQueue | None) -> list[str]:
    """Returns what happens on a device; the numpy backend is the one that needs none."""
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


# ---------------------------------------------------------------------------------------------- a layer's functions


@cache
def layers() -> dict[str, type]:
    """The public layers of netcl.nn by their own names."""
    modules = [importlib.import_module(f"netcl.nn.{found.name}") for found in pkgutil.iter_modules(netcl.nn.__path__)]
    return {
        name: member
        for module in modules
        for name, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Module) and member is not Module and not name.startswith("_")
    }


def functions_of(layer: type, seen: set[type]) -> Iterator[str]:
    """Full names of the functions that a layer calls, and the layers in it but for those that were seen already, read
    from its source: netcl keeps no table of it."""
    seen.add(layer)
    if name := vars(layer).get("_AG_NAME"):  # netcl's activations without a forward of their own
        yield f"{_MODULES['ag']}.{name}"
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(layer)))):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id=alias), attr=name) if alias in _MODULES:
                yield f"{_MODULES[alias]}.{name}"
            case ast.Name(id=name) if (part := layers().get(name)) and part not in seen:
                yield from functions_of(part, seen)


# ---------------------------------------------------------------------------------------------- its kernels


@dataclass(frozen=True)
class Reached:
    """Objects that a function uses, and those that they lead to."""

    files: set[str]  # names of kernel files
    modules: set[str]  # names of modules of clamp.ops


def reached(function: Callable[..., Any]) -> Reached:
    """Kernel files that calls of a function of clamp may build, and the modules of clamp.ops on the way there.

    A module leads to its kernels, and to the modules of clamp.ops which it takes functions from; a package to its
    engines as well.
    """
    kernels: set[Kernel] = set()
    modules: set[str] = set()
    waiting = list(USES[inspect.unwrap(function)])
    while waiting:
        x = waiting.pop()
        if isinstance(x, Kernel):
            kernels.add(x)
        module = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", "")
        if str(module).startswith("clamp.ops.") and module not in modules:
            modules.add(module)
            waiting += _names_in(sys.modules[module])
    return Reached({kernel.file for kernel in kernels}, modules)


def _names_in(module: ModuleType) -> list[Any]:
    """Returns the values of a module's names, its tables and lists taken apart; in a package, without its modules."""
    is_package = hasattr(module, "__path__")
    found: list[Any] = [x for x in vars(module).values() if not (is_package and isinstance(x, ModuleType))]
    tables = [x.values() if isinstance(x, dict) else x for x in found if isinstance(x, dict | tuple)]
    return found + [x for table in tables for x in table]


def on_device(found: Reached, queue: cl.CommandQueue, dtype: str) -> list[str]:
    """Returns the choices of modules, or their packages, on the queue's device: some have ``on_device(queue,
    dtype)``."""
    names = found.modules | {name.rpartition(".")[0] for name in found.modules}
    speakers = (getattr(sys.modules[name], "on_device", None) for name in sorted(names))
    return [speak(queue, dtype) for speak in speakers if speak is not None]
