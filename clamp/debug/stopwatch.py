"""How long each op of a step takes, forward and backward, and what casts take of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.casting.results import RESULTS
from clamp.debug.op_counter import Glance, Key, Row
from clamp.debug.profiler import Recorder
from clamp.ops.cast import CAST
from clamp.ops.optimizer_step import COPY

_CASTS = frozenset((CAST.name, COPY.name))  # what only converts; a product that does as well is the op's own


class Stopwatch(Glance):
    """A glance at one step that knows what each op launched: all since the op before was done.

    Args:
        alone: see `Recorder`: for queues that take no times.

    Attributes:
        cast_seconds: of launches that only convert; a part of what the ops that wanted them take.
        after_backward: seconds of what came after the last op: gradients divided by the loss scale, and looked at.
        launches: how many commands were enqueued.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self._recorder = Recorder(alone)
        self._launched: dict[Key, list[range]] = {}
        self._cast_launches: set[int] = set()
        self._seen = 0
        self.cast_seconds = self.after_backward = 0.0
        self.launches = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one step whose end waits for the device."""
        RESULTS.attach(self)
        self.start()
        try:
            with self._recorder:
                yield
        finally:
            self.stop()
            RESULTS.detach(self)
        self._take_times()

    def counted(self, key: Key) -> None:
        """See `Tally`."""
        now = len(self._recorder)
        self._launched.setdefault(key, []).append(range(self._seen, now))
        self._seen = now

    def converted(self, source: Tensor, target: Tensor) -> None:
        """See `Tally`. Of several weights that are cast together all launches are told of when they have run."""
        names = self._recorder.names
        last = len(names) - 1
        while last >= self._seen and names[last] == names[-1] and names[last] in _CASTS:
            self._cast_launches.add(last)
            last -= 1

    def _take_times(self) -> None:
        seconds = self._recorder.seconds
        self.launches = len(seconds)
        self.cast_seconds = sum(seconds[index] for index in self._cast_launches)
        self.after_backward = sum(seconds[self._seen :])
        for key, ranges in self._launched.items():
            self.took(key, sum(seconds[index] for indices in ranges for index in indices))


def time_ops(step: Callable[[], Any], queues: list[cl.CommandQueue], alone: bool) -> tuple[Stopwatch, list[Row]]:
    """Runs a step and takes the time of each of its ops.

    Args:
        queues: that it uses.
        alone: see `Recorder`.
    """
    watch = Stopwatch(alone)
    with watch.watching():
        step()
        for queue in queues:
            queue.finish()
    return watch, watch.rows
