"""The timeline of a step: every command that its device ran, and every wait for it; printed, drawn, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import pyopencl as cl
from rich.console import Console

from clamp.cli.bench.networks import Network
from clamp.cli.bench.training import Variant
from clamp.cli.console import table_of
from clamp.debug.page.figures import save
from clamp.debug.profiler import NANO, Profiler, Wait

_GAPS = 8  # as many are printed
_COLOURED = 9  # names with a colour of their own in the picture
_OTHERS = "others"


@dataclass(frozen=True)
class Command:
    """A command that a device ran."""

    name: str  # the kernel's, or ``"read"``, ``"write"``, ``"copy"``, ...
    kind: str  # ``"kernel"`` or ``"transfer"``
    queued: float
    submitted: float
    start: float
    end: float  # all of them: seconds of the device's clock since the step's first command was enqueued


@dataclass(frozen=True)
class Gap:
    """A time between two commands in which the device ran none."""

    after: str
    before: str  # after, before: names of the two
    seconds: float
    waited_for_host: float  # so much of it, in which no command was enqueued


@dataclass(frozen=True)
class Timeline:
    """One step."""

    commands: tuple[Command, ...]  # in the order in which they started
    waits: tuple[Wait, ...]  # in the order in which they began
    step_seconds: float  # until the device had finished
    host_seconds: float  # until the program had enqueued all, its waits included
    unseen: int = 0  # commands without times, of queues without profiling

    @property
    def span(self) -> float:
        """From the first command enqueued to the last one ended."""
        return max(one.end for one in self.commands)

    @cached_property
    def busy(self) -> float:
        """The part of the span in which the device ran a command."""
        return self._part_from("start")

    @cached_property
    def full(self) -> float:
        """The part of the span in which the device had work: a command waited for it, or ran."""
        return self._part_from("queued")

    def _part_from(self, begin: str) -> float:
        """The part of the span in which a command was between this field's time and its end."""
        without = min(getattr(one, begin) for one in self.commands) + sum(idle for *_, idle in self._without(begin))
        return 1 - without / self.span if self.span > 0 else 1.0

    def _without(self, begin: str) -> Iterator[tuple[Command, Command, float]]:
        """Two commands, and the time between them in which none was between this field's time and its end."""
        last, *others = sorted(self.commands, key=attrgetter(begin))
        for one in others:
            if (idle := getattr(one, begin) - last.end) > 0:
                yield last, one, idle
            last = max(last, one, key=attrgetter("end"))

    @cached_property
    def seconds_of(self) -> dict[str, list[float]]:
        """The time of each command, by name, those first that took longest in all."""
        by_name: dict[str, list[float]] = {}
        for one in self.commands:
            by_name.setdefault(one.name, []).append(one.end - one.start)
        return dict(sorted(by_name.items(), key=lambda item: -sum(item[1])))

    @cached_property
    def gaps(self) -> list[Gap]:
        """The times without a running command, the longest first."""
        gaps = [
            Gap(last.name, one.name, idle, min(idle, max(0.0, one.queued - last.end)))
            for last, one, idle in self._without("start")
        ]
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


def timeline(seen: Profiler, seconds: float) -> Timeline:
    """The timeline of what a profiler has seen, once the queue has finished, after so many seconds.

    Raises:
        ValueError: nothing was: nothing was enqueued, or on queues without profiling only.
    """
    profiled, unseen = [], 0
    for name, kind, event in seen.events:
        try:
            times = event.profile
            profiled.append((name, kind, times.queued, times.submit, times.start, times.end))
        except cl.Error:
            unseen += 1
    if not profiled:
        raise ValueError("no command of the step has times: its queue needs PROFILING_ENABLE")
    zero = min(times[2] for times in profiled)
    commands = [Command(name, kind, *((time - zero) * NANO for time in times)) for name, kind, *times in profiled]
    return Timeline(tuple(sorted(commands, key=lambda one: one.start)), tuple(seen.waits), seconds,
                    seen.host_seconds, unseen)  # fmt: skip


def timeline_of(device: cl.Device, network: Network, what: str) -> Timeline:
    """The timeline of one step, after a few that build kernels and settle the loss scale, of what trains it:
    ``"netcl"``, or clamp's dtype, or that and a level, ``"float16-O2"``."""
    dtype, _, level = what.partition("-")
    context = cl.Context([device])  # held here: Intel's runtime frees a context that only its queue refers to
    queue = cl.CommandQueue(context, device, properties=cl.command_queue_properties.PROFILING_ENABLE)
    variant = Variant(queue, network, None if what == "netcl" else dtype, level or None)
    recorder = Profiler()
    with variant.steps() as train:
        queue.finish()
        began = perf_counter()
        with recorder:
            train()
        queue.finish()
        seconds = perf_counter() - began
    return timeline(recorder, seconds)


# ---------------------------------------------------------------------------------------------- showing it


def print_timeline(console: Console, timeline: Timeline, title: str) -> None:
    """Kernels by their total time, the gaps between them, and the step in a few lines."""
    run_time = sum(map(sum, timeline.seconds_of.values()))
    table = table_of(["command"], ["calls", "total ms", "%", "mean us", "longest us"], title=title)
    for name, seconds in timeline.seconds_of.items():
        total, mean, longest = sum(seconds), fmean(seconds), max(seconds)
        share = 100 * total / run_time if run_time else 0.0
        figures = (f"{total * 1e3:.3f}", f"{share:.1f}", f"{mean * 1e6:.1f}", f"{longest * 1e6:.1f}")
        table.add_row(name, str(len(seconds)), *figures)
    console.print(table)
    table = table_of(["after", "before"], ["us", "for want of work"], title="longest gaps")
    for gap in timeline.gaps[:_GAPS]:
        table.add_row(gap.after, gap.before, f"{gap.seconds * 1e6:.1f}", f"{gap.waited_for_host * 1e6:.1f}")
    if timeline.gaps:
        console.print(table)
    for line in _in_words(timeline):
        console.print(line, highlight=False)


def _in_words(timeline: Timeline) -> list[str]:
    figures = timeline.summary()
    waits: dict[str, int] = {}
    for wait in timeline.waits:
        waits[wait.name] = waits.get(wait.name, 0) + 1
    named = ", ".join(f"{count} x {name}" for name, count in waits.items())
    lines = [
        f"step {timeline.step_seconds * 1e3:.3f} ms, of which the program took {timeline.host_seconds * 1e3:.3f} ms",
        f"queue full: {timeline.full:.0%} (a command waited or ran), device busy: {timeline.busy:.0%} (one ran)",
        f"gaps: {len(timeline.gaps)}, {figures['gap_seconds'] * 1e3:.3f} ms, of which "
        f"{figures['gap_seconds_for_host'] * 1e3:.3f} ms with nothing enqueued",
        f"{figures['launches']} launches, {figures['transfers']} transfers",
        f"waits for the device inside the step: {len(timeline.waits)}{f' ({named})' if named else ''}, "
        f"{figures['waited_seconds'] * 1e3:.3f} ms",
    ]
    return lines if not timeline.unseen else [*lines, f"{timeline.unseen} commands without times are left out"]


def content_of(timeline: Timeline) -> dict[str, Any]:
    """The raw events, and the figures made of them, for JSON."""
    return {
        "summary": timeline.summary(),
        "commands": [asdict(one) for one in timeline.commands],
        "waits": [asdict(wait) for wait in timeline.waits],
    }


def plot(timeline: Timeline, title: str, file: Path) -> None:
    """Draws which commands ran when, and how many waited or ran at each time."""
    from matplotlib.figure import Figure

    names = list(timeline.seconds_of)[:_COLOURED]
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    lane, depth = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, name in enumerate([*names, _OTHERS]):
        bars = [
            (one.start * 1e3, (one.end - one.start) * 1e3)
            for one in timeline.commands
            if (one.name if one.name in names else _OTHERS) == name
        ]
        if bars:
            lane.broken_barh(bars, (0, 1), facecolors=f"C{number}" if name != _OTHERS else "0.6", label=name)
    lane.set(yticks=[], ylabel="runs", title=f"{title}: queue full {timeline.full:.0%}, busy {timeline.busy:.0%}")
    lane.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    changes = sorted([(one.queued, 1) for one in timeline.commands] + [(one.end, -1) for one in timeline.commands])
    heights, height = [], 0
    for _, change in changes:
        height += change
        heights.append(height)
    depth.step([time * 1e3 for time, _ in changes], heights, where="post")
    depth.set(xlabel="ms since the step's first command was enqueued", ylabel="enqueued", ylim=(0, None))
    save(figure, file, 120)
