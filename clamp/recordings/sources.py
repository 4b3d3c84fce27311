"""Where code asks for what nobody has set: the clock, queues, files, other processes. No state shows what they give."""

from __future__ import annotations

import datetime
import gc
import io
import os
import queue
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, CodeType, FrameType
from typing import Any

from clamp.opencl.host_steps import refuse
from clamp.recordings.watch import LIBRARIES

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_FUNCTIONS = frozenset(
    (time.localtime, time.gmtime, time.ctime, time.strftime, os.urandom, os.getloadavg, os.times, input)
).union(getattr(time, f"{clock}{unit}") for clock in _CLOCKS for unit in ("", "_ns"))
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (queue.SimpleQueue, frozenset({"get", "get_nowait", "qsize", "empty"})),
    (io.IOBase, frozenset({"read", "readline", "readlines", "readinto", "read1"})),
    (socket.socket, frozenset({"recv", "recv_into", "recvfrom"})),
)
_TODAY = frozenset({"now", "utcnow", "today"})
#: Python's own code that waits for what others send, by module and name.
_WAITING = {("queue", "get"), ("multiprocessing.queues", "get"), ("multiprocessing.connection", "recv")}


@contextmanager
def refused() -> Iterator[None]:
    """Inside the ``with``, in which something is recorded, code of the user's that asks one of them is refused.

    Raises:
        RuntimeError: or what is recorded is given up.
    """
    outer = sys.getprofile()
    if outer is not None:  # somebody is measuring
        yield
        return
    try:
        sys.setprofile(_look)
        yield
    finally:
        sys.setprofile(None)


def _look(frame: FrameType, event: str, arg: Any) -> None:
    if event == "c_call":
        asked = _name_of(arg) if _is_users(frame) else ""
    elif event == "call" and frame.f_back is not None and _is_waiting(frame) and _is_users(frame.f_back):
        asked = frame.f_code.co_qualname
    else:
        return
    if asked and not _is_collecting(frame):
        refuse(
            f"{asked}() was called",
            "Ask outside of it, and pass the answer: a number as an argument, data as a tensor.",
        )


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES


def _is_collecting(frame: FrameType | None) -> bool:
    """Whether Python came here by itself, to collect garbage: no part of what is recorded."""
    told = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in told and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_waiting(frame: FrameType) -> bool:
    code: CodeType = frame.f_code
    return (frame.f_globals.get("__name__"), code.co_name) in _WAITING


def _name_of(called: Any) -> str:
    """What was called, if it gives another answer each time; empty if not."""
    if not isinstance(called, BuiltinMethodType):
        return ""
    owner, name = called.__self__, called.__name__
    is_date = isinstance(owner, type) and issubclass(owner, datetime.date) and name in _TODAY
    is_method = any(isinstance(owner, kind) and name in names for kind, names in _METHODS)
    return called.__qualname__ if is_date or is_method or called in _FUNCTIONS else ""
