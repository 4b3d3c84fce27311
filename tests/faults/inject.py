"""One fault in a run: the n-th call into OpenCL raises, or Ctrl-C comes at the n-th event in clamp or netcl."""

from __future__ import annotations

import dis
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import netcl
import pyopencl as cl

import clamp
from clamp.opencl import launches

_FOLDERS = tuple(str(Path(module.__file__).parent) + "/" for module in (clamp, netcl))


class Failure(cl.RuntimeError):  # type: ignore[misc]
    """A call into OpenCL that failed, and that nobody else's can be taken for."""


class Calls:
    """Counts calls into OpenCL while a run is in a phase, and lets one fail.

    Args:
        fails_at: which, from 0; None: none.
    """

    phase = ""

    def __init__(self, fails_at: int | None = None) -> None:
        self.count = 0
        self.failed: str | None = None
        self._fails_at = fails_at
        self._inside = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside the ``with``, calls count."""
        places = [(cl, name) for name in vars(cl) if name.startswith("enqueue_") or name == "svm_empty"]
        places += [(cl.Kernel, "__call__"), (cl.Kernel, "__init__"), (cl.Kernel, "clone"), (cl.Buffer, "__init__")]
        places += [(cl.Buffer, "get_sub_region"), (cl.Program, "build")]
        with ExitStack() as stack:
            for owner, name in places:
                counting = self._counting(f"{owner.__name__}.{name}", getattr(owner, name))
                stack.enter_context(patch.object(owner, name, counting))
            # A launch takes its short way only where nobody watches.
            stack.enter_context(patch.object(launches, "_own_call", cl.Kernel.__call__))
            stack.enter_context(patch.object(launches, "_own_enqueue", cl.enqueue_nd_range_kernel))
            yield

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.phase:  # pyopencl's functions call each other
                return original(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            if number == self._fails_at:
                self.failed = name
                raise Failure(f"call {number}, {name}, failed")
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return call


class Events:
    """Counts the places of a run where Ctrl-C may come, in the code of clamp and netcl, and lets it come at one.

    The handler of the day is called there, as Python does in the main thread. Python looks for signals where a function
    begins, after a call of what is not written in Python, and where a loop goes back; ``"line"`` and ``"opcode"`` are
    stricter, and interrupt what Python never does: between the end of a ``with`` and the call of ``__exit__``, say.

    Args:
        at: in which phase of the run, and at which place of it, from 0, or the next that is not in
            a finalizer, which swallows it; None: nowhere.
        unit: ``"check"``, where Python looks; ``"line"`` or ``"opcode"``, each.
    """

    phase = ""

    def __init__(self, at: tuple[str, int] | None = None, unit: str = "check") -> None:
        self.counts: Counter[str] = Counter()
        self.where: str | None = None
        self._at, self._unit = at, unit
        self._in_python: set[int] = set()  # ids of frames that have called a function of Python's

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside the ``with``, places count."""
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._in_python.add(id(frame.f_back))
        if not self.phase or (self._at is not None and self._at[0] != self.phase):
            return None
        if not frame.f_code.co_filename.startswith(_FOLDERS):
            return None
        if self._unit == "check" and _begins(frame):
            self._pass(frame)
        frame.f_trace_opcodes = self._unit != "line"
        frame.f_trace_lines = not frame.f_trace_opcodes
        return self._every if self._unit != "check" else self._where_python_looks()

    def _every(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self._unit:
            self._pass(frame)
        return self._every

    def _where_python_looks(self) -> Callable[[FrameType, str, Any], Any]:
        last = -1  # the offset of the bytecode before, which has looked

        def passed(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                looks, handlers = _looks(frame.f_code)
                back, now = last, frame.f_lasti
                last = now
                if dis.opname[frame.f_code.co_code[now]] == "CALL" and _is_first_half(frame.f_code, back):
                    return passed
                called = id(frame) in self._in_python
                self._in_python.discard(id(frame))
                # What is raised after a bytecode is raised in its place: there another handler may be near.
                how = looks.get(back) if handlers[back // 2] == handlers[now // 2] else None
                has_called = how == "call" and not called
                if has_called or (how == "back" and now < back):
                    self._pass(frame)
            return passed

        return passed

    def _pass(self, frame: FrameType) -> None:
        if not self.phase:
            return
        number = self.counts[self.phase]
        self.counts[self.phase] += 1
        phase, at = self._at or ("", 0)
        if phase == self.phase and at <= number and self.where is None and not is_in_a_finalizer(frame):
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
            sys.settrace(None)  # what follows takes a fifth of the time
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, frame)


def is_in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python swallows what is raised here: also where a generator that is left unfinished ends, on no line."""
    if frame is not None and frame.f_lineno is None:
        return True
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _begins(frame: FrameType) -> bool:
    """Whether Python looks where a function begins or a generator goes on: of no bytecode there is it told."""
    code = frame.f_code.co_code
    return dis.opname[code[frame.f_lasti]] == "RESUME" and code[frame.f_lasti + 1] < 2


def _is_first_half(code: CodeType, offset: int) -> bool:
    """Whether a bytecode only prepares a call, in Python 3.11."""
    return offset >= 0 and dis.opname[code.co_code[offset]] == "PRECALL"


@cache
def _looks(code: CodeType) -> tuple[dict[int, str], list[Any]]:
    """By offset, the bytecodes after which Python looks for signals, and how; and the handler of each place."""
    looks: dict[int, str] = {}
    for instruction in dis.get_instructions(code, adaptive=False):
        name = instruction.opname
        if "CALL" in name:  # CALL, CALL_FUNCTION_EX; PRECALL where it does what CALL would
            looks[instruction.offset] = "call"
        elif "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name:
            looks[instruction.offset] = "back"
    handlers: list[Any] = [None] * (len(code.co_code) // 2 + 1)
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for place in range(entry.start // 2, entry.end // 2):
            handlers[place] = entry.target
    return looks, handlers
