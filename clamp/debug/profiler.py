"""What a device did in one training step: every command that was enqueued, and every wait for it.

Seen by wrapping pyopencl: clamp's kernels and netcl's are both launched by calling a ``cl.Kernel``; copies and fills
are functions of pyopencl's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import pyopencl as cl
import wrapt

from clamp.interrupts import holding

Interval = tuple[float, float]


@dataclass(frozen=True)
class Command:
    """A command that a device ran.

    Attributes:
        name: the kernel's, or ``"read"``, ``"write"``, ``"copy"``, ...
        kind: ``"kernel"`` or ``"transfer"``.
        queued, submitted, start, end: seconds of the device's clock since the step's first command was enqueued.
    """

    name: str
    kind: str
    queued: float
    submitted: float
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A wait of the program for the device.

    Attributes:
        name: ``"read"``, ``"write"``, ``"finish"``, ...
        began, seconds: of the program's clock, since the step began.
    """

    name: str
    began: float
    seconds: float


@dataclass(frozen=True)
class Gap:
    """A time between two commands in which the device ran none.

    Attributes:
        after, before: names of the two.
        seconds: how long.
        waited_for_host: so much of it, in which no command was enqueued.
    """

    after: str
    before: str
    seconds: float
    waited_for_host: float


@dataclass(frozen=True)
class Total:
    """All commands of one name."""

    name: str
    calls: int
    seconds: float
    longest: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        commands: in the order in which they started.
        waits: in the order in which they began.
        step_seconds: until the device had finished.
        host_seconds: until the program had enqueued all, its waits included.
        unseen: commands without times, of queues without profiling.
    """

    commands: tuple[Command, ...]
    waits: tuple[Wait, ...]
    step_seconds: float
    host_seconds: float
    unseen: int = 0

    @property
    def span(self) -> float:
        """From the first command enqueued to the last one ended."""
        return max(one.end for one in self.commands)

    @cached_property
    def busy(self) -> float:
        """The part of the span in which the device ran a command."""
        return _part(merged((one.start, one.end) for one in self.commands), self.span)

    @cached_property
    def full(self) -> float:
        """The part of the span in which the device had work: a command waited for it, or ran."""
        return _part(merged((one.queued, one.end) for one in self.commands), self.span)

    @cached_property
    def totals(self) -> list[Total]:
        """Commands by name, those that took longest first."""
        by_name: dict[str, list[float]] = {}
        for one in self.commands:
            by_name.setdefault(one.name, []).append(one.end - one.start)
        totals = [Total(name, len(times), sum(times), max(times)) for name, times in by_name.items()]
        return sorted(totals, key=lambda total: -total.seconds)

    @cached_property
    def gaps(self) -> list[Gap]:
        """The times without a running command, the longest first."""
        gaps, last = [], self.commands[0]
        for one in self.commands[1:]:
            if (idle := one.start - last.end) > 0:
                gaps.append(Gap(last.name, one.name, idle, min(idle, max(0.0, one.queued - last.end))))
            last = max(last, one, key=lambda other: other.end)
        return sorted(gaps, key=lambda gap: -gap.seconds)

    def summary(self) -> dict[str, float]:
        """The step in figures, for JSON."""
        return {
            "step_seconds": self.step_seconds,
            "host_seconds": self.host_seconds,
            "span_seconds": self.span,
            "busy": self.busy,
            "queue_full": self.full,
            "launches": sum(one.kind == "kernel" for one in self.commands),
            "transfers": sum(one.kind == "transfer" for one in self.commands),
            "waits": len(self.waits),
            "waited_seconds": sum(wait.seconds for wait in self.waits),
            "gap_seconds": sum(gap.seconds for gap in self.gaps),
            "gap_seconds_for_host": sum(gap.waited_for_host for gap in self.gaps),
            "unseen": self.unseen,
        }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns what intervals cover together, in order and without overlaps."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def _part(intervals: Iterable[Interval], span: float) -> float:
    return sum(end - begin for begin, end in intervals) / span if span > 0 else 1.0


# ---------------------------------------------------------------------------------------------- seeing it


_NANO = 1e-9


class Profiler:
    """Records a step, from ``with`` to the end of it.

    What it wraps calls itself by its wrapped names (`cl.enqueue_fill` calls another, say): only the outermost counts.

    Args:
        alone: whether each command runs alone, for queues that take no times: its queue is finished before and after
            it, and what passes between, on the program's clock, is its time.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._events: list[tuple[str, str, Any]] = []
        self._alone_seconds: list[float] = []
        self._waits: list[Wait] = []
        self._depth = threading.local()
        self._stack = ExitStack()
        self._began = self._ended = 0.0

    def __enter__(self) -> Profiler:
        for name in (name for name in vars(cl) if name.startswith("enqueue_")):
            self._wrap(cl, name, self._enqueue)
        self._wrap(cl.Kernel, "__call__", self._launch)
        self._wrap(cl.CommandQueue, "finish", self._wait)
        self._wrap(cl.Event, "wait", self._wait)
        self._wrap(cl, "wait_for_events", self._wait)
        self._began = perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = perf_counter()
        self._stack.close()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def names(self) -> list[str]:
        """What was enqueued so far, in order: kernels by their names, else ``"read"``, ``"write"``, ``"copy"``, ..."""
        return [name for name, _, _ in self._events]

    @property
    def seconds(self) -> list[float]:
        """Returns how long each of these ran, once the queue has finished; 0.0 of a queue without profiling."""
        return self._alone_seconds if self._alone else [_seconds_of(event) for _, _, event in self._events]

    def timeline(self, seconds: float) -> Timeline:
        """Returns what was seen, once the queue has finished.

        Args:
            seconds: of the step, until the device had finished.

        Raises:
            ValueError: nothing was: nothing was enqueued, or on queues without profiling only.
        """
        profiled, unseen = [], 0
        for name, kind, event in self._events:
            try:
                times = event.profile
                profiled.append((name, kind, times.queued, times.submit, times.start, times.end))
            except cl.Error:
                unseen += 1
        if not profiled:
            raise ValueError("no command of the step has times: its queue needs PROFILING_ENABLE")
        zero = min(times[2] for times in profiled)
        commands = [Command(name, kind, *((time - zero) * _NANO for time in times)) for name, kind, *times in profiled]
        return Timeline(tuple(sorted(commands, key=lambda one: one.start)), tuple(self._waits), seconds,
                        self._ended - self._began, unseen)  # fmt: skip

    def _wrap(self, owner: Any, name: str, meet: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def met(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if getattr(self._depth, "inside", False):
                return wrapped(*args, **kwargs)
            self._depth.inside = True
            try:
                return meet(name, wrapped, instance, args, kwargs)
            finally:
                self._depth.inside = False

        self._stack.enter_context(holding(owner, name, wrapt.FunctionWrapper(original, met)))

    def _launch(self, name: str, wrapped: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._on_its_own(args):
            event = wrapped(*args, **kwargs)
        self._events.append((kernel.function_name, "kernel", event))
        return event

    def _enqueue(self, name: str, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = perf_counter()
        with self._on_its_own(args):
            result = wrapped(*args, **kwargs)
        what = _transfer(args) if name == "enqueue_copy" else name.removeprefix("enqueue_")
        if kwargs.get("is_blocking", True) and (what in ("read", "write") or name == "enqueue_map_buffer"):
            self._waited(what, began)
        event = result[1] if isinstance(result, tuple) else result
        if name == "enqueue_nd_range_kernel":
            self._events.append((args[1].function_name, "kernel", event))
        else:
            self._events.append((what, "transfer", event))
        return result

    @contextmanager
    def _on_its_own(self, args: tuple[Any, ...]) -> Iterator[None]:
        queue = args[0] if self._alone and args and isinstance(args[0], cl.CommandQueue) else None
        if queue is not None:
            queue.finish()
        began = perf_counter()
        yield
        if queue is not None:
            queue.finish()
        if self._alone:
            self._alone_seconds.append(perf_counter() - began)

    def _wait(self, name: str, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = perf_counter()
        result = wrapped(*args, **kwargs)
        self._waited(name, began)
        return result

    def _waited(self, name: str, began: float) -> None:
        self._waits.append(Wait(name, began - self._began, perf_counter() - began))


def _seconds_of(event: Any) -> float:
    try:
        return (event.profile.end - event.profile.start) * _NANO
    except cl.Error:
        return 0.0


def _transfer(args: tuple[Any, ...]) -> str:
    """Returns which way ``enqueue_copy(queue, dest, src)`` copies."""
    dest, src = (isinstance(side, np.ndarray | np.generic | bytearray | memoryview | bytes) for side in args[1:3])
    return "read" if dest else "write" if src else "copy"
