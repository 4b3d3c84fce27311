"""An attempt to record: given up, not ended by an error, where a replay could not do what comes next.

By then the code that is being recorded has done a part of its work, an optimizer's step perhaps, and could not be run
again. So it runs on as it would without a recording, and right. Among that is what no state shows: the answers of
clocks, queues, files and other processes.
"""

from __future__ import annotations

import builtins
import datetime
import gc
import io
import os
import pickle
import queue
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dis import opmap
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_ITERABLE_COROUTINE
from types import BuiltinMethodType, FrameType
from typing import Any

import numpy as np
from netcl.runtime.capture import KernelCapture

from clamp.bridge import Tensor
from clamp.interrupts import contextmanager, holding, undoing
from clamp.opencl.host_steps import HostValue, recorder, refuse, value_now
from clamp.params.weight_cache import Together
from clamp.recordings.code_names import LIBRARIES, is_of_library
from clamp.recordings.watch import Watch
from clamp.recordings.watched_state import WatchedPart

_NOTHING: frozenset[str] = frozenset()
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, of classes that are written in C


@dataclass
class Upload:
    """An array of a call's that the code brings to the device."""

    given: HostValue  # what the code was given for the array
    tensor: Tensor  # what it got
    again: Callable[[Any], Tensor]  # does it with another array


class Attempt(KernelCapture):  # type: ignore[misc]
    """A list of launches that may be given up.

    Args:
        watch: what the code must not change itself, but in host steps.
        together: which weights an earlier one cast together that this is only to be compared with (comparison.py):
            nobody will replay it.
        raises: whether what no replay could do is an error, in the user's code, and does not end it.
    """

    def __init__(self, watch: Watch, together: Together | None = None, raises: bool = False) -> None:
        super().__init__()
        self.together = {} if together is None else together
        self.compares, self.raises = together is not None, raises
        self.why = ""  # it was given up; empty if it was not
        self.uploads: list[Upload] = []  # in the order in which they were made
        self.watch = watch
        self.moved: dict[str, WatchedPart] = {}  # by steps on the host, by their names
        self.read: dict[int, set[str]] = {}  # attributes of what steps on the host change, read outside of these

    def give_up(self, why: str) -> None:
        """Ends the recording and drops what it has; what runs on is not recorded."""
        self.why = self.why or why
        self.clear()

    def stale_read(self) -> str:
        """Returns what it may have read that steps on the host change, as each replay does again; empty if nothing."""
        noted = {
            f"{name}.": self.read.get(id(x), _NOTHING) for x, name in self.watch.stepped.values() if _is_pythons(x)
        }

        def is_read(label: str) -> bool:
            label = label.removeprefix("len(")
            for begin, names in noted.items():
                if label.startswith(begin):
                    return "__dict__" in names or re.split(r"\W", label.removeprefix(begin))[0] in names
            return True  # it belongs to no object whose reads are noted

        moved = (label for label, part in self.moved.items() if not (part.is_library or part.is_random))
        return next(filter(is_read, moved), "")

    def upload(self, from_host: Callable[..., Tensor], given: HostValue, args: Any, kwargs: Any) -> Tensor:
        """Brings an array of the call's to the device, and notes it."""

        def again(array: Any) -> Tensor:
            def put(x: Any) -> Any:
                return array if x is given else value_now(x)

            return from_host(*map(put, args), **{key: put(x) for key, x in kwargs.items()})

        self.uploads.append(Upload(given, again(value_now(given)), again))
        return self.uploads[-1].tensor


# ---------------------------------------------------------------------------------------------- what is refused

_ADVICE = "Ask outside of it, and pass the answer: a number as an argument, data as a tensor."
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_LOOKS = frozenset({os.stat, os.listdir, os.scandir})  # whether there is a file
_FILES = (*_LOOKS, os.read, np.fromfile, pickle.load, *(getattr(os, x) for x in ("pread", "readv") if hasattr(os, x)))
_FUNCTIONS = frozenset(
    (time.localtime, time.gmtime, time.ctime, time.strftime, os.urandom, os.getloadavg, os.times, input, *_FILES)
).union(getattr(time, f"{clock}{unit}") for clock in _CLOCKS for unit in ("", "_ns"))
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (queue.SimpleQueue, frozenset({"get", "get_nowait", "qsize", "empty"})),
    (io.IOBase, frozenset({"read", "readline", "readlines", "readinto", "read1"})),
    (socket.socket, frozenset({"recv", "recv_into", "recvfrom"})),
)
_GOES_ON = CO_GENERATOR | CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR
_CLOSED = {opmap.get(name) for name in ("RERAISE", "CLEANUP_THROW")}  # where one is left that nobody holds any more
_TODAY = frozenset({"now", "utcnow", "today"})
#: Modules that read a file, or ask for whoever calls them.
_READERS = frozenset({"genericpath", "posixpath", "ntpath", "pathlib", "pathlib._local", "pathlib._abc", "json"})
_READERS |= {"numpy.lib.npyio", "numpy.lib._npyio_impl", "numpy.lib.format", "numpy.lib._format_impl"}
_READERS |= {"numpy.core.memmap", "numpy._core.memmap", "configparser", "fileinput", "subprocess"}
_READERS |= {"random", "secrets", "uuid"}
#: What in these looks only for the sake of what it is to write, or of a path, and tells its caller nothing of it.
_WRITERS = frozenset({"mkdir", "touch", "resolve", "copy", "copy_into", "move", "move_into"})
#: Code of libraries that waits for what others send, or reads a text, by module and name.
_WAITING = {("queue", "get"), ("multiprocessing.queues", "get"), ("multiprocessing.connection", "recv")}
_WAITING |= {("subprocess", "communicate")}
_WAITING |= {(f"numpy.lib.{x}", name) for x in ("npyio", "_npyio_impl") for name in ("loadtxt", "genfromtxt")}


@contextmanager
def answers_refused(attempt: Attempt) -> Iterator[None]:
    """Inside the ``with``, in which something is recorded, code of the user's that asks one of them is refused. The
    attempt is given up where a generator goes on that began before: its place may look the same, as in a loop.

    Raises:
        RuntimeError: or what is recorded is given up.
    """
    outer = sys.getprofile()
    if outer is not None:  # somebody is measuring
        yield
        return
    opening = partial(_open, open)  # what is iterated line by line asks nothing that Python would tell of
    try:
        with holding(builtins, "open", opening), holding(io, "open", opening):
            sys.setprofile(partial(_look, attempt, {}))
            yield
    finally:
        sys.setprofile(None)


def _open(plain: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """``open``, while something is recorded: for writing only."""
    caller = _caller_of_readers(sys._getframe(1))
    if {"r", "+"} & {*str(mode)} and caller is not None and _is_users(caller) and not _is_collecting(caller):
        refuse("open() was called", _ADVICE)
    return plain(file, mode, *args, **kwargs)


def _is_pythons(x: Any) -> bool:
    """Returns whether an object's class was made in Python, and may be given another way to look up attributes."""
    return not type(x).__flags__ & _IMMUTABLE


@contextmanager
def reads_noted(attempt: Attempt) -> Iterator[None]:
    """Inside the ``with``, notes what is read of optimizers and averages outside of steps on the host; not what clamp
    looks at for itself."""

    def noting(original: Any) -> Callable[[Any, str], Any]:
        def __getattribute__(self: Any, name: str) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if id(self) in attempt.watch.stepped and recorder() is not None and not caller.startswith("clamp."):
                attempt.read.setdefault(id(self), set()).add(name)
            return original(self, name)

        return __getattribute__

    def put_back(cls: type, own: Any) -> None:
        if own is not None:
            cls.__getattribute__ = own  # type: ignore[method-assign]
        elif "__getattribute__" in vars(cls):
            del cls.__getattribute__

    with undoing() as undo:
        for cls in {type(x) for x, _ in attempt.watch.stepped.values() if _is_pythons(x)}:
            undo.callback(put_back, cls, vars(cls).get("__getattribute__"))
            cls.__getattribute__ = noting(cls.__getattribute__)  # type: ignore[assignment]
        yield


def _look(attempt: Attempt, begun: dict[int, bool], frame: FrameType, event: str, arg: Any) -> None:
    if event == "c_call":
        asked = _name_of(arg)
        caller = _caller_of_readers(frame) if asked else None
        asked = asked if caller is not None and _is_users(caller, arg in _LOOKS) else ""
    elif event in ("call", "return") and frame.f_code.co_flags & _GOES_ON:
        operation, argument = frame.f_code.co_code[frame.f_lasti :][:2]
        if event == "call" and operation == opmap["RESUME"]:
            begun.setdefault(id(frame), not argument & 3)
        elif event == "return" and begun.get(id(frame)) is False and operation not in _CLOSED and _is_users(frame):
            attempt.give_up(
                f"it changes where {frame.f_code.co_qualname}() has come to, which began before the call and which "
                "no replay takes anything from. Pass what it gives as an argument"
            )
        if event == "return" and operation != opmap["YIELD_VALUE"]:  # it has ended: another may get its id
            begun.pop(id(frame), None)
        return
    elif event == "call" and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITING:
        caller = _caller_of_readers(frame.f_back)
        asked = frame.f_code.co_qualname if caller is not None and _is_users(caller) else ""
    else:
        return
    if asked and not _is_collecting(frame):
        refuse(f"{asked}() was called", _ADVICE)


def _caller_of_readers(frame: FrameType | None) -> FrameType | None:
    """What a module that reads files was called by; None if it was called to write one."""
    while frame is not None and frame.f_globals.get("__name__") in _READERS:
        frame = None if frame.f_code.co_name in _WRITERS else frame.f_back
    return frame


def _is_users(frame: FrameType, looks: bool = False) -> bool:
    """Returns whether code is the user's, or an installed package's that asks on behalf of it: not where it only looks
    for a file, to write over a plot."""
    name = str(frame.f_globals.get("__name__"))
    return not is_of_library(name) if looks else name.partition(".")[0] not in LIBRARIES


def _is_collecting(frame: FrameType | None) -> bool:
    """Returns whether Python came here by itself, to collect garbage: no part of what is recorded."""
    told = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in told and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _name_of(called: Any) -> str:
    """Returns what was called, if it gives another answer each time; empty if not."""
    if not isinstance(called, BuiltinMethodType):
        return ""
    owner, name = called.__self__, called.__name__
    is_date = isinstance(owner, type) and issubclass(owner, datetime.date) and name in _TODAY
    is_method = any(isinstance(owner, kind) and name in names for kind, names in _METHODS)
    return called.__qualname__ if is_date or is_method or called in _FUNCTIONS else ""
