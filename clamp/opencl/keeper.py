"""Keeps the programs of drivers that have no whole binary of a program when it is built, as PoCL.

PoCL compiles a kernel at its first launch, and those that were not launched when somebody asks for the binary: 0.1 s
each and more, for which nobody should wait. So another process asks, at the lowest priority: some seconds after the
last program was built, or when this process ends. It builds quickly, from what PoCL itself keeps of a source.
`python -m clamp warm` asks at once.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import pyopencl as cl

from clamp.opencl import child_process
from clamp.opencl.child_process import Place

_SECONDS = 5.0  # without a build: the first step is over
_MOST = 100  # programs that a process is given on its command line

_lock = threading.Lock()
_waiting: dict[Place, list[tuple[str, dict[str, object]]]] = {}
_timer: threading.Timer | None = None
_at_once = False


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
        _waiting.setdefault(child_process.place_of(context.devices[0]), []).append((file, dict(macros)))
        if _timer is not None:
            _timer.cancel()
        _timer = threading.Timer(_SECONDS, _keep_and_wait)
        _timer.daemon = True
        _timer.start()
    return True


@contextmanager
def at_once() -> Iterator[None]:
    """While it lasts programs are kept by those that build them, however long that takes. For all threads."""
    global _at_once
    before, _at_once = _at_once, True
    try:
        yield
    finally:
        _at_once = before


def keep_in_background() -> list[subprocess.Popen[bytes]]:
    """Starts processes that keep what waits for it; they go on when this one ends."""
    with _lock:
        waiting = dict(_waiting)
        _waiting.clear()
    started = []
    for place, programs in waiting.items():
        for first in range(0, len(programs), _MOST):
            command = child_process.command(
                "clamp.opencl.keep_programs", "keep_given", [place, programs[first : first + _MOST]]
            )
            with suppress(OSError):
                nothing = subprocess.DEVNULL
                started.append(
                    subprocess.Popen(
                        command, stdin=nothing, stdout=nothing, stderr=nothing,
                        start_new_session=True, env=child_process.environment(),
                    )
                )  # fmt: skip
    return started


def _keep_and_wait() -> None:
    for process in keep_in_background():
        process.wait()


@atexit.register
def _keep_at_the_end() -> None:
    for process in keep_in_background():
        process.returncode = 0  # nobody waits for it, and nobody need say so
