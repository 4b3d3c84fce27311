"""The same training several times from the same seeds, under a live display, in a table and in a plot.

The examples that compare (digits, fashion_mnist, char_lm) say what a training run is; this says what is measured of
it and how that is shown. The runs differ in what ``amp.init`` is given, and in nothing else:

    netcl fp32       enabled=False: netcl as it was installed
    clamp float32    dtype="float32": clamp's kernels without any casting, what better kernels alone gain
    AMP              dtype="float16" (or --dtype bfloat16): 16-bit storage, fp32 sums, loss scaling
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn.layers import Module
from netcl.optim import Adam
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from clamp import amp
from clamp.cli import positive
from clamp.cli.console import print_fitting
from clamp.debugging import MemoryMeter
from clamp.handle import AmpHandle, NoOpHandle

AmpOptions = dict[str, Any]


# ---------------------------------------------------------------------------------------------- what is measured


@dataclass
class Run:
    """What one training run measured, a list entry per step."""

    steps_per_epoch: int
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    score: float = nan  # what the model is judged by in the end; nan if the run was stopped before
    weights: list[str] = field(default_factory=list)  # dtypes of the parameters at the end

    def record(self, loss: Tensor, handle: AmpHandle | NoOpHandle, start: float) -> None:
        """Notes a step that began at ``start``, and its loss."""
        self.losses.append(float(loss.to_host()[0]))  # waits for the device
        self.milliseconds.append((time.perf_counter() - start) * 1e3)
        self.scales.append(handle.loss_scale)
        self.skipped += handle.last_step is not None and not handle.last_step.stepped

    @property
    def epoch_losses(self) -> list[float]:
        """Mean loss of every epoch."""
        size = self.steps_per_epoch
        return [fmean(self.losses[first : first + size]) for first in range(0, len(self.losses), size)]


@dataclass(frozen=True)
class Plan:
    """What a training run is to be."""

    amp_options: AmpOptions  # what ``amp.init`` is given
    steps: int  # after how many it ends
    batch: int = 64  # of every step
    seed: int = 0  # of the weights and of the order of the data
    whole: int | None = None  # the steps after which the learning rate would be zero; by default ``steps``
    on_step: Callable[[Run], None] = lambda run: None  # called with the run so far after every step

    @property
    def is_whole(self) -> bool:
        """Whether the run goes on to its end."""
        return self.whole in (None, self.steps)

    def left(self, step: int) -> float:
        """How much of a whole run lies ahead: 1 at its beginning, 0 at its end."""
        return 1 - step / (self.whole or self.steps)


@dataclass
class Result:
    """The runs of one way of training, one for each seed."""

    name: str
    activation_bytes: int = 0  # what the forward of one batch leaves on the device for backward
    peak_bytes: int = 0  # the most that one step has on the device at a time; not the parameters, not the inputs
    runs: list[Run] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Mean score; nan if a run was stopped before it had one."""
        return fmean(run.score for run in self.runs)

    @property
    def final_loss(self) -> float:
        """Mean loss of the last epoch."""
        return fmean(run.epoch_losses[-1] for run in self.runs)

    @property
    def step_milliseconds(self) -> float:
        """Median time of a step; the kernels that the first steps compile do not show in it."""
        return median(time for run in self.runs for time in run.milliseconds)

    @property
    def mean_losses(self) -> np.ndarray:
        """Loss of every step, mean over the seeds."""
        return np.mean([run.losses for run in self.runs], axis=0)

    @property
    def epochs(self) -> np.ndarray:
        """How many epochs are done after each step."""
        return (np.arange(len(self.runs[0].losses)) + 1) / self.runs[0].steps_per_epoch


@dataclass(frozen=True)
class Task:
    """A training that is run in several ways."""

    title: str  # of the table
    score: str  # what a model is judged by, a column of the table
    show_score: Callable[[float], str]  # a score as text
    steps: int  # of a whole run
    train: Callable[[Plan], Run]  # makes a run
    memory: Callable[[AmpOptions], tuple[int, int]]  # bytes of the activations and at the peak, of one training step
    epoch: str = "epoch"  # what the plot counts in
    note: str = ""  # what one must know to read the table

    def whole(self, result: Result) -> bool:
        """Whether a way was trained to the end."""
        return len(result.runs[0].losses) == self.steps and not isnan(result.score)

    def shown_score(self, result: Result) -> str:
        """The score as text; of a way that was not trained to the end, the steps it had."""
        return self.show_score(result.score) if self.whole(result) else f"({len(result.runs[0].losses)} steps)"


BASELINE = "netcl fp32"


def settings(dtype: str) -> dict[str, AmpOptions]:
    """The three ways of training: their names, and what ``amp.init`` is given."""
    return {
        BASELINE: {"enabled": False},
        "clamp float32": {"dtype": "float32"},
        f"AMP {dtype}": {"dtype": dtype},
    }


def compare(task: Task, options: argparse.Namespace, console: Console, results: list[Result]) -> None:
    """Trains every way with every seed, under a live display, and adds what it measures to the results.

    netcl's own, which may take minutes where the others take seconds, comes last, and stands first in the results.

    Raises:
        KeyboardInterrupt: at Ctrl-C; the way that was being trained is among the results as far as it got.
    """
    ways = settings(options.dtype)
    ways[BASELINE] = ways.pop(BASELINE)  # as the last
    limits = {
        name: min(task.steps, options.netcl_steps or task.steps) if name == BASELINE else task.steps  # None: all
        for name in ways
    }
    unfinished: list[Run] = []
    with progress_display(console) as display:
        bars = {
            name: display.add_task(name, start=False, total=steps * options.seeds, loss="")
            for name, steps in limits.items()
        }
        for name, amp_options in ways.items():

            def on_step(run: Run, bar: TaskID = bars[name]) -> None:
                unfinished[:] = [run]
                display.update(bar, advance=1, loss=f"{run.losses[-1]:.4f}")

            result = Result(name, *task.memory(amp_options))
            display.start_task(bars[name])
            try:
                for seed in range(options.seeds):
                    plan = Plan(amp_options, limits[name], options.batch, seed, task.steps, on_step)
                    result.runs.append(task.train(plan))
                    unfinished.clear()
            finally:
                result.runs = result.runs or unfinished
                if result.runs:
                    results.insert(0 if name == BASELINE else len(results), result)


def step_memory(model: Module, loss_of: Callable[[], Any], amp_options: AmpOptions) -> tuple[int, int]:
    """Bytes of the activations and at the peak, of one training step with the loss that ``loss_of`` computes."""
    optimizer = Adam(model.parameters(), lr=1e-3)
    with amp.init(**amp_options) as handle, MemoryMeter() as meter:
        with ag.Tape() as tape:
            loss = loss_of()
        activations = meter.activations
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            tape.backward(scaled_loss)
        optimizer.step()
    return activations, meter.peak


# ---------------------------------------------------------------------------------------------- what is shown


def progress_display(console: Console) -> Progress:
    """A line for each way of training; where there is room, with a bar."""
    return Progress(
        TextColumn("{task.description:<13}"),
        *([BarColumn(bar_width=36)] if console.width >= 72 else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:<6}" if console.width < 50 else "loss {task.fields[loss]:<7}"),
        TimeElapsedColumn(),
        console=console,
    )


def table(task: Task, results: list[Result]) -> Table:
    """The comparison, one row for each way of training."""
    shown = Table(
        title=task.title,
        caption="Speed: against netcl fp32, median step. Memory: what forward leaves for "
        "backward / the peak of a step, with weight copies and workspaces.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    shown.add_column("\nrun")
    columns = task.score, "final\nloss", "\nms/step", "\nspeed", "loss\nscale", "steps\nskipped", "memory\nMiB"
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    baseline = results[0].step_milliseconds if results[0].name == BASELINE else None

    def times(ratio: float) -> str:
        return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x"

    for result in results:
        scale = result.runs[-1].scales[-1]
        shown.add_row(
            result.name,
            task.shown_score(result),
            f"{result.final_loss:.4f}" if task.whole(result) else "",
            f"{result.step_milliseconds:.2f}",
            times(baseline / result.step_milliseconds) if baseline else "",
            f"{scale:g}" if scale != 1 else "-",
            str(sum(run.skipped for run in result.runs)),
            memory_of(result),
        )
    return shown


def memory_of(result: Result) -> str:
    """What a forward leaves, and the peak of a step, in MiB."""
    both = (count / 2**20 for count in (result.activation_bytes, result.peak_bytes))
    return " / ".join(f"{mib:.0f}" if mib >= 10 else f"{mib:.2g}" for mib in both)


STYLES = (
    {"color": "#9aa0aa", "linewidth": 6.0, "markersize": 9},  # what the others are compared with
    {"color": "#1f77b4", "linewidth": 2.5, "markersize": 5},
    {"color": "#d62728", "linewidth": 1.2, "markersize": 2.5, "dashes": (4, 2)},
)


def plot(task: Task, results: list[Result], device: str, file: Path) -> None:
    """Draws the losses, their distance from the first whole run and the loss scale; beside them score, time, memory."""
    figure = Figure(figsize=(12, 8), layout="constrained")  # a bare Figure needs no display and no global state
    figure.suptitle(f"{task.title}\n{device}", fontsize=11)
    panels = figure.subplots(3, 2, width_ratios=(3, 1), height_ratios=(3, 2, 1.5))
    whole = max(len(result.mean_losses) for result in results)
    baseline = next(result for result in results if len(result.mean_losses) == whole)
    draw_curves(task, results, baseline, panels[:, 0])
    draw_bars(panels[0, 1], task.score, [one.score if task.whole(one) else 0 for one in results],
              [task.shown_score(one) for one in results])  # fmt: skip
    times = [result.step_milliseconds for result in results]
    draw_bars(panels[1, 1], "ms per step, median", times, [f"{time:.2f}" for time in times])
    draw_bars(panels[2, 1], "MiB kept for backward (dark) / peak",
              [result.peak_bytes for result in results], [memory_of(result) for result in results],
              [result.activation_bytes for result in results])  # fmt: skip
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=140)


def draw_curves(task: Task, results: list[Result], baseline: Result, panels: Any) -> None:
    """The three panels that share the axis of the epochs."""
    loss, distance, scale = panels
    by_epoch = len(baseline.runs[0].epoch_losses) > 2
    for result, style in zip(results, STYLES, strict=True):
        draw_loss(loss, result, style, by_epoch, with_seeds=result is baseline)
        if result is not baseline:
            reference = baseline.mean_losses[: len(result.mean_losses)]
            apart = np.abs(result.mean_losses - reference) / reference
            distance.plot(result.epochs, apart, label=result.name, color=style["color"], linewidth=0.9)
    scales = results[-1].runs[-1].scales
    scale.step(results[-1].epochs, scales, where="post", color=STYLES[-1]["color"])

    what = f"mean of one {task.epoch}\n(thin: every step, {baseline.name})" if by_epoch else "every step"
    loss.set(yscale="log", ylabel=f"training loss, {what}")
    loss.yaxis.set_minor_locator(LogLocator(subs=(1.5, 2, 3, 5, 7)))
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter("{x:g}")
    distance.set_yscale("log", nonpositive="mask")
    distance.set(ylabel=f"relative distance\nfrom {baseline.name}")
    scale.set_yscale("log", base=2)
    scale.set(ylabel=f"loss scale\n{results[-1].name}", xlabel=task.epoch, ylim=(min(scales) / 4, max(scales) * 4))
    for axes in panels:
        axes.sharex(loss)
        axes.xaxis.set_major_locator(MaxNLocator(integer=by_epoch))
        axes.tick_params(labelbottom=axes is scale)
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def draw_bars(axes: Any, title: str, values: list[float], texts: list[str], inner: list[float] | None = None) -> None:
    """A bar for each way of training, with its value; if there are inner ones, they are the darker part of it."""
    colors = [style["color"] for style in STYLES]
    bars = axes.barh(range(len(values)), values, color=colors, alpha=0.4 if inner else 1.0)
    if inner:
        axes.barh(range(len(inner)), inner, color=colors)
    axes.bar_label(bars, texts, padding=4)
    axes.set_title(title.replace("\n", " "), fontsize=10, loc="left")
    axes.set(xlim=(0, 1.45 * max(values)), xticks=[], yticks=[])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw_loss(axes: Any, result: Result, style: dict[str, Any], by_epoch: bool, with_seeds: bool) -> None:
    """The loss by epochs, or by steps; with_seeds: by epochs and by steps, and the range of the seeds."""
    if not by_epoch:
        axes.plot(result.epochs, result.mean_losses, label=result.name, **style)
        return
    curves = [run.epoch_losses for run in result.runs]
    middles = np.arange(len(curves[0])) + 0.5
    axes.plot(middles, np.mean(curves, axis=0), label=result.name, marker="o", **style)
    if with_seeds:
        axes.plot(result.epochs, result.mean_losses, alpha=0.4, color=style["color"], linewidth=0.9)
        if len(curves) > 1:
            axes.fill_between(middles, np.min(curves, axis=0), np.max(curves, axis=0), color="#e4e6ea", label="seeds")


# ---------------------------------------------------------------------------------------------- the command line


def add_options(parser: argparse.ArgumentParser, *, batch: int, netcl_steps: int | None = None) -> None:
    """Adds what all comparisons take."""
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of AMP (float16)")
    parser.add_argument("--batch", type=positive, default=batch, metavar="N", help=f"of every step ({batch})")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="runs to take the mean of (1)")
    parser.add_argument(
        "--netcl-steps",
        type=count_or_all,
        default=netcl_steps,
        metavar="N|all",
        help=f"stop netcl's own run after so many ({netcl_steps or 'all'})",
    )
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw losses, loss scale, time and memory")


def count_or_all(text: str) -> int | None:
    """An integer of at least 1, or None for "all", for argparse."""
    return None if text == "all" else positive(text)


def picture(text: str) -> Path:
    """A file that matplotlib can write a picture to, for argparse."""
    file = Path(text)
    if file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a picture: end it in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(file.parent)!r}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return file


def show(task: Task, options: argparse.Namespace, device: str) -> None:
    """Trains, prints the table, draws the plot; when interrupted, the table as far as it goes."""
    console = Console()
    console.print(f"Device: [bold]{device}[/]")
    results: list[Result] = []
    try:
        compare(task, options, console, results)
    finally:
        if results:
            print_fitting(console, table(task, results))
            console.print(task.note, end="\n" if task.note else "")
    if options.plot:
        plot(task, results, device, options.plot)
        console.print(f"Curves: {options.plot}", soft_wrap=True)
