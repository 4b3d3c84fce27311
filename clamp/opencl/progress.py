"""One line on the terminal while kernels are compiled for longer than a second, so that a first step does not seem to
hang."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

_PATIENCE = 1.0  # seconds that need no word
_PAUSE = 1.0  # seconds without a build, after which the next one is another matter


class Progress:
    """Counts what is compiled one after the other, and says so on standard error if that is a terminal.

    Attributes:
        programs: how many have been compiled in this process.
        seconds: for how long threads have compiled, each for itself.
    """

    def __init__(self) -> None:
        self.programs, self.seconds = 0, 0.0
        self._lock = threading.RLock()
        self._began = self._ended = float("-inf")
        self._count = 0
        self._is_open = False  # whether the line waits for its end
        self._timer: threading.Timer | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the compilation of a program."""
        with self._lock:
            if monotonic() - self._ended > _PAUSE:
                self._began, self._count = monotonic(), 0
        began = monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._ended = monotonic()
                self._count += 1
                self.programs += 1
                self.seconds += self._ended - began
                if self._ended - self._began >= _PATIENCE:
                    self._say()

    def end_line(self) -> None:
        """Ends the line, if there is one: the step is over, and its loss may be printed next."""
        if not self._is_open:
            return
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._write("\n")

    def _say(self) -> None:
        if not (sys.stderr and sys.stderr.isatty()):
            return
        seconds = self._ended - self._began
        self._write(f"\rclamp: compiling kernels for this device, once: {self._count} programs, {seconds:.0f} s")
        self._is_open = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_PAUSE, self.end_line)
        self._timer.daemon = True
        self._timer.start()

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that has gone
            sys.stderr.write(text)
            sys.stderr.flush()


PROGRESS = Progress()
