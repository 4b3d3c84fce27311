"""What a device did in one training step, from the profiling events of its commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

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
        gaps = []
        for last, one, idle in self._idle():
            late = min(idle, max(0.0, one.queued - last.end))
            gaps.append(Gap(last.name, one.name, idle, late))
        return sorted(gaps, key=lambda gap: -gap.seconds)

    def _idle(self) -> Iterable[tuple[Command, Command, float]]:
        last = self.commands[0]
        for one in self.commands[1:]:
            if one.start > last.end:
                yield last, one, one.start - last.end
            last = max(last, one, key=lambda other: other.end)

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
    """What intervals cover together, in order and without overlaps."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def _part(intervals: Iterable[Interval], span: float) -> float:
    return sum(end - begin for begin, end in intervals) / span if span > 0 else 1.0
