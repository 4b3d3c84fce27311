"""Clock of netcl's writes to device memory: what was known of its content then no longer holds.

Kernels of a user's own, and pyopencl's copies, tell nobody.
"""

from __future__ import annotations

import itertools
from typing import Any

_MOST = 10_000  # buffers that are remembered


class Writes:
    """The last write to each buffer, by the time on a clock that ticks with every write.

    Buffers take no weak references, so they are known by id: one that has been there all the time has its own.
    """

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._last: dict[int, int] = {}
        self._all = 0  # time before which every buffer counts as written to
        self.now = 0

    def note(self, buffer: Any) -> None:
        """This buffer is being written to."""
        self.now = next(self._clock)
        if len(self._last) >= _MOST:
            self._all = sorted(self._last.values())[_MOST // 2]  # what was checked since is still known
            self._last = {key: time for key, time in self._last.items() if time > self._all}
        self._last[id(buffer)] = self.now

    def since(self, buffer: Any, time: int) -> bool:
        """Returns whether a buffer that exists since then has been written to after that time."""
        return self.now > time and max(self._last.get(id(buffer), 0), self._all) > time

    def surely_since(self, buffer: Any, time: int) -> bool:
        """As ``since``, for an error: False of a buffer of which nothing is known any more."""
        return self.now > time and self._last.get(id(buffer), 0) > time


#: Those of the process.
writes = Writes()
