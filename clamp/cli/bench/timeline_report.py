"""``python -m clamp bench --timeline``: one training step seen from the device, as a table, a picture and JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import pyopencl as cl
from rich.console import Console
from rich.table import Table

from clamp.cli.bench.cases.small_networks import Network
from clamp.cli.bench.cases.step import Variant
from clamp.debug.profiler import Recorder
from clamp.debug.timeline import Timeline

_GAPS = 8  # as many are printed
_COLOURED = 9  # names with a colour of their own in the picture
_OTHERS = "others"


def record(device: cl.Device, network: Network, what: str) -> Timeline:
    """The timeline of one step, after a few that build kernels and settle the loss scale.

    Args:
        what: ``"netcl"``, or clamp's dtype, or that and a level: ``"float16-O2"``.
    """
    dtype, _, level = what.partition("-")
    context = cl.Context([device])  # held here: Intel's runtime frees a context that only its queue refers to
    queue = cl.CommandQueue(context, device, properties=cl.command_queue_properties.PROFILING_ENABLE)
    variant = Variant(queue, network, None if what == "netcl" else dtype, level or "O1")
    recorder = Recorder()
    with variant.steps() as train:
        queue.finish()
        began = perf_counter()
        with recorder:
            train()
        queue.finish()
        seconds = perf_counter() - began
    return recorder.timeline(seconds)


def run(args: Namespace, device: cl.Device, networks: list[Network], file: Path | None, console: Console) -> int:
    """Records, prints, draws and writes what was asked for; returns the exit status."""
    if len(networks) != 1:
        print("--timeline is of one network: give --only step, cnn, guide or resnet", file=sys.stderr)
        return 2
    if args.plot and not Path(args.plot).absolute().parent.is_dir():
        print(f"cannot draw {args.plot}: there is no such folder", file=sys.stderr)
        return 2
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    timeline = record(device, networks[0], args.timeline)
    title = f"{networks[0]}, {args.timeline}, on {device.name.strip()}"
    print_timeline(console, timeline, title)
    if args.plot:
        plot(timeline, title, Path(args.plot))
        console.print(f"drawn: {args.plot}", highlight=False, soft_wrap=True)
    if file is not None:
        write(timeline, {"network": str(networks[0]), "what": args.timeline, "device": device.name.strip()}, file)
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
    return 0


def print_timeline(console: Console, timeline: Timeline, title: str) -> None:
    """Kernels by their total time, the gaps between them, and the step in a few lines."""
    run_time = sum(total.seconds for total in timeline.totals)
    table = Table("command", title=title)
    for name in ("calls", "total ms", "%", "mean us", "longest us"):
        table.add_column(name, justify="right", no_wrap=True)
    for total in timeline.totals:
        share = 100 * total.seconds / run_time if run_time else 0.0
        mean = total.seconds / total.calls
        figures = (f"{total.seconds * 1e3:.3f}", f"{share:.1f}", f"{mean * 1e6:.1f}", f"{total.longest * 1e6:.1f}")
        table.add_row(total.name, str(total.calls), *figures)
    console.print(table)
    table = Table("after", "before", title="longest gaps")
    for name in ("us", "for want of work"):
        table.add_column(name, justify="right", no_wrap=True)
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


def write(timeline: Timeline, head: Mapping[str, Any], file: Path) -> None:
    """The raw events, and the figures made of them."""
    content = {
        **head,
        "summary": timeline.summary(),
        "commands": [asdict(one) for one in timeline.commands],
        "waits": [asdict(wait) for wait in timeline.waits],
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plot(timeline: Timeline, title: str, file: Path) -> None:
    """Draws which commands ran when, and how many waited or ran at each time."""
    from matplotlib.figure import Figure

    names = [total.name for total in timeline.totals[:_COLOURED]]
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
    figure.savefig(file, dpi=120)
