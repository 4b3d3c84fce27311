"""Says on standard error that something takes long, so that it does not seem to hang: kernels that are compiled, a step
that is measured. On a terminal in one line that grows, elsewhere by a line every ten seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic

from clamp.interrupts import contextmanager

_PATIENCE = 1.0  # seconds that need no word on a terminal
_PAUSE = 1.0  # seconds without a build, after which the next one is another matter
_EVERY = 10.0  # seconds between two lines


class Progress:
    """Counts what is compiled one after the other, and says so, and what else takes long.

    Attributes:
        programs: how many have been compiled in this process.
        seconds: for how long threads have compiled, each for itself.
    """

    def __init__(self) -> None:
        self.programs, self.seconds = 0, 0.0
        self._lock = threading.RLock()
        self._began = self._ended = float("-inf")
        self._count = 0
        self._compiling = set[object]()  # what is under way
        self._busy = dict[object, Callable[[float], str]]()  # what else is, each with its word for it
        self._is_open = False  # whether the line waits for its end
        self._timer: threading.Timer | None = None
        self._ticks: threading.Timer | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the compilation of a program."""
        began, this = monotonic(), object()
        try:
            with self._lock:
                if began - self._ended > _PAUSE and not self._compiling:
                    self._began, self._count = began, 0
                self._compiling.add(this)
                self._tick_later()
            yield
        finally:
            with self._lock:
                self._ended = monotonic()
                self._compiling.discard(this)
                self._count += 1
                self.programs += 1
                self.seconds += self._ended - began
                if self._ended - self._began >= _PATIENCE and _is_terminal():
                    self._say(self._compiled(self._ended))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Around what takes long, and is not only compiling."""
        began, this = monotonic(), object()
        try:
            with self._lock:
                self._busy[this] = lambda now: f"clamp: {what}, {now - began:.0f} s so far"
                self._tick_later()
            yield
        finally:
            with self._lock:
                self._busy.pop(this, None)
            self.end_line()

    def end_line(self) -> None:
        """Ends the line, if there is one: the step is over, and its loss may be printed next."""
        if not self._is_open:
            return
        with self._lock:
            if self._is_open:
                self._is_open = False
                _write("\n")

    def _compiled(self, now: float) -> str:
        seconds = now - self._began
        return f"clamp: compiling kernels for this device, once: {self._count} programs, {seconds:.0f} s"

    def _tick_later(self) -> None:
        if self._ticks is not None:
            return
        ticks = threading.Timer(_EVERY, self._tick)
        ticks.daemon = True
        ticks.start()
        self._ticks = ticks  # only now: who sees it may join it

    def _tick(self) -> None:
        with self._lock:
            now, self._ticks = monotonic(), None
            if not self._compiling and not self._busy and now - self._ended > _PAUSE:
                return
            for text in [told(now) for told in self._busy.values()] or [self._compiled(now)]:
                self._say(text)
            self._tick_later()

    def _say(self, text: str) -> None:
        if not _is_terminal():
            _write(f"{text}\n")
            return
        _write(f"\r{text}")
        self._is_open = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_PAUSE, self.end_line)
        self._timer.daemon = True
        self._timer.start()


def _is_terminal() -> bool:
    with suppress(OSError, ValueError):  # a terminal that has gone
        return bool(sys.stderr) and sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a terminal that has gone; pythonw has no standard error
        sys.stderr.write(text)
        sys.stderr.flush()


PROGRESS = Progress()
