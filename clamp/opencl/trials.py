"""Trials of what is used on a device only because it has computed right there.

A driver may refuse an instruction, compile it to something else, lack the local memory that it promised, or end the
process. So each such thing has a trial: built, run, compared. Trials run in a process of their own, once for a device,
a driver and a version of the kernels; verdicts are remembered (``opencl/cache``). `python -m clamp doctor` prints them,
and tries anew.

What has trials is found by a name, "module:attribute", in both processes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Protocol, TypeAlias

import pyopencl as cl

from clamp.opencl import cache, cache_writer
from clamp.opencl.program import release_programs

Trial: TypeAlias = tuple[str, Callable[[cl.CommandQueue], bool]]

RIGHT = "right"
_WRONG = "wrong numbers"
_SECONDS = 180.0  # for a driver's compiler that never ends

_verdicts: dict[tuple[int, str], Mapping[str, str]] = {}


class HasTrials(Protocol):
    """Something that must be tried."""

    def trials(self) -> Iterable[Trial]:
        """Names of the trials, and functions of a queue that return whether its device has computed right."""

    def trial_key(self) -> object:
        """Returns what verdicts depend on besides the device: kernels' sources, say. It is written as JSON."""


def verdicts(device: cl.Device, where: str, *, anew: bool = False) -> Mapping[str, str]:
    """Returns the verdict of each trial on a device: ``RIGHT``, or what went wrong.

    Args:
        where: the name of what has the trials.
        anew: whatever is remembered: what failed once may have failed for want of memory.
    """
    key = (device.int_ptr, where)
    if anew or key not in _verdicts:
        _verdicts[key] = _remembered(device, where, anew)
    return _verdicts[key]


def identity(device: cl.Device) -> list[str]:
    """Returns names that tell a device and its driver from others, for the keys of files."""
    return [device.platform.name, device.platform.version, device.name, device.driver_version, cl.VERSION_TEXT]


def _remembered(device: cl.Device, where: str, anew: bool) -> Mapping[str, str]:
    what: HasTrials = resolve_name(where)
    file = cache.file_for([*identity(device), where, what.trial_key()], ".proof")
    names = [name for name, _ in what.trials()]

    def meaning(content: bytes) -> dict[str, str]:
        verdicts: dict[str, str] = json.loads(content)
        if verdicts.keys() != set(names) or not all(isinstance(verdict, str) for verdict in verdicts.values()):
            raise ValueError("verdicts of other trials")
        return verdicts

    if file is not None and not anew and (known := cache.read(file, meaning)) is not None:
        return known
    found = _tried(device, where, names)
    if file is not None and found.keys() == set(names):
        cache.write(file, json.dumps(found).encode())
    return found


def _tried(device: cl.Device, where: str, names: list[str]) -> dict[str, str]:
    """Verdicts of processes of their own: one ends with the trial that it does not survive, another goes on."""
    found: dict[str, str] = {}
    while waiting := [name for name in names if name not in found]:
        began, new, end = _run(device, where, waiting)
        found |= new
        if began is not None and began not in new:
            found[began] = end
        elif not new:
            break  # it did not come so far as to try anything: nothing is known
    return found


def _run(device: cl.Device, where: str, names: list[str]) -> tuple[str | None, dict[str, str], str]:
    """The trial that a process began last, its verdicts, and how it ended."""
    environment = cache_writer.environment()
    command = cache_writer.command(__name__, "report", [cache_writer.place_of(device), where, names])
    try:
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               timeout=_SECONDS)  # fmt: skip
        printed, end = ended.stdout, f"the process that tried it ended with status {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, end = error.stdout or b"", f"not done after {_SECONDS:.0f} s"
    except OSError as error:  # no Python to start
        return None, {}, str(error)
    began, found = None, {}
    for line in printed.splitlines():
        try:
            name, verdict = json.loads(line)
        except ValueError:  # a driver prints, too
            continue
        began = name
        if verdict is not None:
            found[name] = verdict
    return began, found, end


def report() -> None:
    """Tries what the command line asks for, and prints before each trial its name, and its verdict after."""
    place, where, names = cache_writer.given()
    for name, verdict in tried_here(cache_writer.device_at(place), resolve_name(where), names):
        print(json.dumps([name, verdict]), flush=True)


def tried_here(device: cl.Device, what: HasTrials, names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Each trial's name with None before it, and with its verdict after it; in this process.

    Each has a context of its own: what a launch that failed leaves of a context, nobody else should live with.
    """
    trials = dict(what.trials())
    for name in names:
        yield name, None
        try:
            context = cl.Context([device])
            try:
                verdict = RIGHT if trials[name](cl.CommandQueue(context, device)) else _WRONG
            finally:
                release_programs(context)
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error)[:500]}"
        yield name, verdict
