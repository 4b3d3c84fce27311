"""Trials of what is used on a device only because it has computed right there.

A driver may refuse an instruction, compile it to something else, lack the local memory that it promised, or end the
process. So each such thing has a trial: built, run, compared. Trials run in a process of their own, once for a device,
a driver and a version of the kernels; verdicts are remembered (``opencl/cache``). `python -m clamp doctor` prints them,
and tries anew.

What has trials is found by a name, "module:attribute", in both processes.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, TypeAlias

import pyopencl as cl

from clamp.opencl import cache, cache_writer
from clamp.opencl.cache_writer import Process
from clamp.opencl.program import release_programs

Trial: TypeAlias = tuple[str, Callable[[cl.CommandQueue], bool]]

RIGHT = "right"
_WRONG = "wrong numbers"
_SECONDS = 180.0  # for a driver's compiler that never ends

_verdicts: dict[tuple[int, str], Mapping[str, str]] = {}
_lock = threading.RLock()  # around what begins trials and waits for them
_begun: dict[tuple[int, str], Process] = {}  # processes whose verdicts nobody has asked for yet


class HasTrials(Protocol):
    """Something that must be tried."""

    def trials(self) -> Iterable[Trial]:
        """Names of the trials, and functions of a queue that return whether its device has computed right."""

    def trial_key(self) -> object:
        """Returns what verdicts depend on besides the device: kernels' sources, say. It is written as JSON."""


def begin(device: cl.Device, where: str) -> None:
    """Starts the trials of what has a name, unless their verdicts are remembered: whoever asks later waits less."""
    key = (device.int_ptr, where)
    if key in _verdicts or key in _begun:
        return
    with _lock:
        if key in _verdicts or key in _begun:
            return
        _, names, known = _remembered(device, where)
        if known is not None:
            _verdicts[key] = known
        elif (process := _started(device, where, names)) is not None:
            _begun[key] = process


def are_under_way(device: cl.Device, where: str) -> bool:
    """Returns whether the trials run in a process that nobody has waited for yet."""
    return (device.int_ptr, where) in _begun


def verdicts(device: cl.Device, where: str, *, anew: bool = False) -> Mapping[str, str]:
    """Returns the verdict of each trial on a device: ``RIGHT``, or what went wrong.

    Args:
        where: the name of what has the trials.
        anew: whatever is remembered: what failed once may have failed for want of memory.
    """
    key = (device.int_ptr, where)
    if not anew and key in _verdicts:
        return _verdicts[key]
    with _lock:  # who else asks waits for the same
        if anew or key not in _verdicts:
            file, names, known = _remembered(device, where)
            if known is None or anew or key in _begun:
                known = _tried(device, where, names)
                if known.keys() == set(names):
                    cache.write(file, json.dumps(known).encode())
            _verdicts[key] = known
        return _verdicts[key]


def identity(device: cl.Device) -> list[str]:
    """Returns names that tell a device and its driver from others, for the keys of files."""
    return [device.platform.name, device.platform.version, device.name, device.driver_version, cl.VERSION_TEXT]


def _remembered(device: cl.Device, where: str) -> tuple[Path | None, list[str], Mapping[str, str] | None]:
    """The file of the verdicts, if any are kept, the names of the trials, and the verdicts, if they are known."""
    what: HasTrials = resolve_name(where)
    file = cache.file_for([*identity(device), where, what.trial_key()], ".proof")
    names = [name for name, _ in what.trials()]

    def meaning(content: bytes) -> dict[str, str]:
        verdicts: dict[str, str] = json.loads(content)
        if verdicts.keys() != set(names) or not all(isinstance(verdict, str) for verdict in verdicts.values()):
            raise ValueError("verdicts of other trials")
        return verdicts

    return file, names, cache.read(file, meaning)


def _tried(device: cl.Device, where: str, names: list[str]) -> dict[str, str]:
    """Verdicts of processes of their own: one ends with the trial that it does not survive, another goes on."""
    found: dict[str, str] = {}
    process = _begun.pop((device.int_ptr, where), None)
    while waiting := [name for name in names if name not in found]:
        process = process or _started(device, where, waiting)
        if process is None:
            break
        began, new, end = _ended(process)
        process = None
        found |= new
        if began is not None and began not in new:
            found[began] = end
        elif not new:
            break  # it did not come so far as to try anything: nothing is known
    return found


def _started(device: cl.Device, where: str, names: list[str]) -> Process | None:
    """A process that tries. Ctrl-C, which it does not get, is no verdict."""
    argument = [cache_writer.place_of(device), where, names]
    return cache_writer.begin(__name__, "report", argument, stdout=subprocess.PIPE)


def _ended(process: Process) -> tuple[str | None, dict[str, str], str]:
    """The trial that a process began last, its verdicts, and how it ended."""
    try:
        printed, _ = process.communicate(timeout=_SECONDS)
        end = f"the process that tried it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        end = f"not done after {_SECONDS:.0f} s"
    except BaseException:  # Ctrl-C, say
        process.kill()
        process.communicate()
        raise
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


@atexit.register
def _end_all() -> None:
    """Ends what nobody has asked for."""
    for process in _begun.values():
        process.kill()
        process.communicate()
    _begun.clear()


def _leave_all() -> None:
    """Leaves to a process what it began before its fork: two that read from one pipe both miss some."""
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    for process in _begun.values():
        process.returncode = 0  # nobody waits for it here
    _begun.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


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
            verdict = f"{type(error).__name__}: {_in_short(str(error))}"
        yield name, verdict


def _in_short(message: str) -> str:
    """An error's message, of a compiler's log the errors alone: it begins with the options, and may not end."""
    errors = [line for line in message.splitlines() if "error:" in line or line.startswith("ptxas")]
    return "\n".join(errors or [message])[:500]
