"""What must not be cut in two by Ctrl-C: dividing a gradient and noting that it is divided, stepping and noting it."""

from __future__ import annotations

# What is beneath signal, which looks every number and handler up in its enumerations.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any


class uninterrupted:
    """Inside the ``with``, Ctrl-C waits until its end; a second one does not. Only the main thread gets any."""

    def __enter__(self) -> None:
        self._caught: list[tuple[int, FrameType | None]] = []
        in_main = threading.get_ident() == threading.main_thread().ident
        self._handler: Any = _signal.getsignal(_signal.SIGINT) if in_main else None
        if callable(self._handler):
            _signal.signal(_signal.SIGINT, self._wait)

    def __exit__(self, *exception: object) -> None:
        if callable(self._handler):
            _signal.signal(_signal.SIGINT, self._handler)
            if len(self._caught) == 1:
                self._handler(*self._caught[0])

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))
        if len(self._caught) > 1:
            self._handler(number, frame)
