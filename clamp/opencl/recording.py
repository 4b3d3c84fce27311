"""Whether this thread's launches are being recorded for replay, and what of a step a replay must run on the host.

netcl records launches (``netcl.runtime.capture``), and a replay repeats them with the arguments they had. What a
step decides on the host, whether an optimizer steps, say, is none of a launch's arguments: it is recorded as a host
step, which runs among the launches, in its place, when it is recorded and again in every replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

#: Stands in a recorded list where a kernel stands: called with queue, global size, local size and arguments.
Launch = Callable[..., Any]


class Recorder(Protocol):
    """Who records: takes launches and host steps in the order in which they run."""

    def add(self, launch: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
        """Appends a launch that has run just now."""


class _Thread(threading.local):
    recorder: Recorder | None = None
    suspended: int = 0


_thread = _Thread()


def recorder() -> Recorder | None:
    """Who records this thread's launches here; None where nobody does."""
    return None if _thread.suspended else _thread.recorder


def set_recorder(recorder: Recorder | None) -> None:
    """Makes ``recorder`` record this thread's launches; None ends it."""
    _thread.recorder = recorder


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside the ``with``, this thread's launches run without being recorded."""
    _thread.suspended += 1
    try:
        yield
    finally:
        _thread.suspended -= 1


def refuse(what: str, instead: str) -> None:
    """Raises RuntimeError if a recording is on: a replay could not do ``what``."""
    if recorder() is not None:
        raise RuntimeError(
            f"{what} while launches are being recorded: a replay repeats launches only, and would go on with what "
            f"was there when they were recorded. {instead}"
        )


def host_step(run: Callable[[], Any]) -> Any:
    """Runs ``run()``, and if a recording is on, again at this place of every replay; returns its result now.

    What it launches is not recorded: it is launched anew, with the arguments current at replay.
    """
    recording = recorder()
    if recording is None:
        return run()
    with unrecorded():
        result = run()
    recording.add(lambda queue, global_size, local_size: run(), None, (), None)
    return result


def launch_with(number: int, kernel: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
    """Launches a kernel with ``args``, in which functions stand for what depends on the number."""
    kernel(queue, global_size, local_size, *[arg(number) if callable(arg) else arg for arg in args])


class Drawn:
    """A random number that every replay draws anew.

    Args:
        draw: draws it; called now, and at this place of every replay.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        def again() -> None:
            self.value = draw()

        self.value = 0
        host_step(again)

    def launch(self, kernel: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
        """Launches a kernel with ``args``, in which functions stand for what depends on the number: they are called
        with it, now and in every replay."""

        def with_number(queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
            launch_with(self.value, kernel, queue, global_size, local_size, *args)

        recording = recorder()
        with unrecorded():
            with_number(queue, global_size, local_size, *args)
        if recording is not None:
            recording.add(with_number, queue, global_size, local_size, *args)
