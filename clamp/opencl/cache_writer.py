"""Python processes beside this one, on one of its devices: how each is started, and the one that writes programs to the
cache, of drivers that have no whole binary of a program when it is built.

PoCL compiles a kernel at its first launch, and those that were not launched when somebody asks for the binary: 0.1 s
each and more, for which nobody should wait. So another process asks, at the lowest priority: some seconds after the
last program was built, or when this process ends. It builds quickly, from what PoCL itself keeps of a source.
`python -m clamp warm` asks at once.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import pyopencl as cl

from clamp.interrupts import holding

#: Numbers of a platform and, there, of a device: what tells another process which one is meant.
Place: TypeAlias = tuple[int, int]
Process: TypeAlias = "subprocess.Popen[bytes]"

_SECONDS = 5.0  # without a build: the first step is over
_MOST = 100  # programs that a process is given on its command line

_lock = threading.Lock()
_waiting: dict[Place, list[tuple[str, dict[str, object]]]] = {}
_timer: threading.Timer | None = None
_at_once = False


def command(module: str, function: str, argument: object) -> list[str]:
    """The command line of a process that calls a function, which finds its argument by `given`."""
    script = f"from {module} import {function}; {function}()"
    return [sys.executable, "-W", "ignore", "-c", script, json.dumps(argument)]


def given() -> Any:
    """Returns what the process was given, as JSON brings it over."""
    return json.loads(sys.argv[1])


def environment() -> dict[str, str]:
    """This process's, with its way to find modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def begin(module: str, function: str, argument: object, stdout: int = subprocess.DEVNULL) -> Process | None:
    """A process that calls a function, beside this one; None if there is no Python to start."""
    nothing = subprocess.DEVNULL
    with suppress(OSError):
        # In a session of its own: Ctrl-C is for the user's program.
        return subprocess.Popen(command(module, function, argument), env=environment(), start_new_session=True,
                                stdin=nothing, stdout=stdout, stderr=nothing)  # fmt: skip
    return None


def outcome(
    command: Sequence[str], environment: Mapping[str, str], under_way: set[subprocess.Popen[str]] | None = None
) -> tuple[list[str], str]:
    """Runs a process to its end: the lines that it printed; and if it failed, the last line of what it said of that.

    Args:
        under_way: has it while it runs, for who ends what other threads have begun.
    """
    under_way, pipe = set() if under_way is None else under_way, subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            under_way.add(process)
            printed, error = process.communicate()
        except BaseException:  # Ctrl-C, say
            process.kill()
            raise
        finally:
            under_way.discard(process)
    said = error.strip().splitlines() or [f"ended with status {process.returncode}"]
    return printed.splitlines(), said[-1] if process.returncode else ""


def place_of(device: cl.Device) -> Place:
    """Returns where another process finds a device."""
    platforms = [platform.get_devices() for platform in cl.get_platforms()]
    return next((number, devices.index(device)) for number, devices in enumerate(platforms) if device in devices)


def device_at(place: Place) -> cl.Device:
    """The device at a place."""
    platform, number = place
    device: cl.Device = cl.get_platforms()[platform].get_devices()[number]
    return device


def keep_later(context: cl.Context, file: str, macros: Mapping[str, object]) -> bool:
    """Has a program kept, soon and by another process.

    Args:
        context: where it was built, of one device.
        file, macros: what it was built from.

    Returns:
        Whether that will be; False if whoever built it is to keep it (`at_once`).
    """
    global _timer
    if _at_once:
        return False
    if os.environ.get("CLAMP_CACHE_LATER") == "off":
        return True
    with _lock:
        _waiting.setdefault(place_of(context.devices[0]), []).append((file, dict(macros)))
        if _timer is not None:
            _timer.cancel()
        _timer = threading.Timer(_SECONDS, _keep_and_wait)
        _timer.daemon = True
        _timer.start()
    return True


def at_once() -> AbstractContextManager[None]:
    """While it lasts programs are kept by those that build them, however long that takes. For all threads."""
    return holding(sys.modules[__name__], "_at_once", True)


def keep_in_background() -> list[Process]:
    """Starts processes that keep what waits for it; they go on when this one ends."""
    with _lock:
        waiting = dict(_waiting)
        _waiting.clear()
    started = []
    for place, programs in waiting.items():
        for first in range(0, len(programs), _MOST):
            begun = begin("clamp.opencl.program", "keep_given", [place, programs[first : first + _MOST]])
            if begun is not None:
                started.append(begun)
    return started


def _keep_and_wait() -> None:
    for process in keep_in_background():
        process.wait()


@atexit.register
def _keep_at_the_end() -> None:
    for process in keep_in_background():
        process.returncode = 0  # nobody waits for it, and nobody need say so
