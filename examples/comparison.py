"""The same training several times from the same seeds, under a live display, in a table and in a plot.

The examples that compare (digits, fashion_mnist, char_lm) say what a training run is; this says what is measured of
it and how that is shown. The runs differ in what ``amp.init`` is given, and in nothing else:

    netcl fp32       enabled=False: netcl as it was installed
    clamp float32    dtype="float32": clamp's kernels without any casting, what better kernels alone gain
    AMP              dtype="float16" (or --dtype bfloat16): 16-bit storage, fp32 sums, loss scaling
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn.layers import Module
from netcl.optim import Adam
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from clamp import amp
from clamp.debugging import MemoryMeter
from clamp.handle import AmpHandle, NoOpHandle

AmpOptions = dict[str, Any]
OnStep = Callable[[float], None]


# ---------------------------------------------------------------------------------------------- what is measured


@dataclass
class Run:
    """What one training run measured, a list entry per step.

    Attributes:
        score: what the model is judged by in the end.
        weights: dtypes of the parameters at the end.
    """

    steps_per_epoch: int
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    score: float = 0.0
    weights: list[str] = field(default_factory=list)

    def record(self, loss: Tensor, handle: AmpHandle | NoOpHandle, start: float) -> float:
        """Notes a step that began at ``start`` and its loss, which it returns."""
        self.losses.append(float(loss.to_host()[0]))  # waits for the device
        self.milliseconds.append((time.perf_counter() - start) * 1e3)
        self.scales.append(handle.loss_scale)
        self.skipped += handle.last_step is not None and not handle.last_step.stepped
        return self.losses[-1]

    @property
    def epoch_losses(self) -> list[float]:
        """Mean loss of every epoch."""
        size = self.steps_per_epoch
        return [fmean(self.losses[first : first + size]) for first in range(0, len(self.losses), size)]


@dataclass
class Result:
    """The runs of one way of training, one for each seed.

    Attributes:
        activation_bytes: what the forward of one batch leaves on the device for backward.
        peak_bytes: the most that one step has on the device at a time; not the parameters, not the inputs.
    """

    name: str
    activation_bytes: int = 0
    peak_bytes: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """Score of every run."""
        return [run.score for run in self.runs]

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


@dataclass(frozen=True)
class Task:
    """A training that is run in several ways.

    Attributes:
        title: of the table.
        score: what a model is judged by, a column of the table.
        show_score: a score as text.
        steps: of a whole run.
        epoch: what the plot counts in.
        train: ``train(amp_options, seed, steps, on_step)``.
        memory: ``memory(amp_options)``: bytes of the activations and at the peak, of one training step.
    """

    title: str
    score: str
    show_score: Callable[[float], str]
    steps: int
    train: Callable[[AmpOptions, int, int, OnStep], Run]
    memory: Callable[[AmpOptions], tuple[int, int]]
    epoch: str = "epoch"


def settings(dtype: str) -> dict[str, AmpOptions]:
    """The three ways of training: their names, and what ``amp.init`` is given."""
    return {
        "netcl fp32": {"enabled": False},
        "clamp float32": {"dtype": "float32"},
        f"AMP {dtype}": {"dtype": dtype},
    }


def compare(task: Task, options: argparse.Namespace, console: Console) -> list[Result]:
    """Trains every way with every seed, under a live display."""
    limits = {
        name: min(task.steps, options.netcl_steps or task.steps) if name == "netcl fp32" else task.steps  # None: all
        for name in settings(options.dtype)
    }
    results = []
    with progress_display(console) as display:
        bars = {
            name: display.add_task(name, start=False, total=steps * options.seeds, loss="")
            for name, steps in limits.items()
        }
        for name, amp_options in settings(options.dtype).items():
            result = Result(name, *task.memory(amp_options))
            display.start_task(bars[name])
            for seed in range(options.seeds):
                result.runs.append(task.train(amp_options, seed, limits[name], advance(display, bars[name])))
            results.append(result)
    return results


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
    """One bar for each way of training."""
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:<7}"),
        TimeElapsedColumn(),
        console=console,
    )


def advance(display: Progress, bar: TaskID) -> OnStep:
    """What a training calls after a step to move its bar."""
    return lambda loss: display.update(bar, advance=1, loss=f"{loss:.4f}")


def table(task: Task, results: list[Result]) -> Table:
    """The comparison, one row for each way of training."""
    shown = Table(
        title=task.title,
        caption="Speed: against netcl fp32, median step. Memory: what forward leaves for\n"
        "backward / the peak of a step, with weight copies and workspaces.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    shown.add_column("\nrun", no_wrap=True)
    columns = task.score, "final\nloss", "\nms/step", "\nspeed", "loss\nscale", "steps\nskipped", "memory\nMiB"
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    baseline = results[0].step_milliseconds
    for result in results:
        scale = result.runs[-1].scales[-1]
        steps = len(result.runs[0].losses)
        whole = steps == task.steps
        shown.add_row(
            result.name,
            task.show_score(fmean(result.scores)) if whole else f"({steps} steps)",
            f"{result.final_loss:.4f}" if whole else "",
            f"{result.step_milliseconds:.2f}",
            f"{baseline / result.step_milliseconds:.1f}x",
            f"{scale:g}" if scale != 1 else "-",
            str(sum(run.skipped for run in result.runs)),
            f"{mebibytes(result.activation_bytes)} / {mebibytes(result.peak_bytes)}",
        )
    return shown


def mebibytes(count: int) -> str:
    """A number of bytes in MiB, short."""
    mib = count / 2**20
    return f"{mib:.0f}" if mib >= 10 else f"{mib:.2g}"


STYLES = (
    {"color": "#9aa0aa", "linewidth": 6.0, "marker": "o", "markersize": 9},  # what the others are compared with
    {"color": "#1f77b4", "linewidth": 2.5, "marker": "o", "markersize": 5},
    {"color": "#d62728", "linewidth": 1.2, "marker": "o", "markersize": 2.5, "dashes": (4, 2)},
)


def plot(task: Task, results: list[Result], device: str, file: str) -> None:
    """Draws every loss curve, how far each is from the first whole one, and the loss scale."""
    figure = Figure(figsize=(9, 8.5), layout="constrained")  # a bare Figure needs no display and no global state
    figure.suptitle(f"{task.title}\n{device}", fontsize=11)
    loss, distance, scale = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.7, 1.3))
    whole = max(len(result.mean_losses) for result in results)
    baseline = next(result for result in results if len(result.mean_losses) == whole)
    for result, style in zip(results, STYLES, strict=True):
        draw_loss(loss, result, style, with_seeds=result is baseline)
        if result is not baseline:
            draw_distance(distance, result, baseline, style)
    scale.step(epochs_of(results[-1]), results[-1].runs[-1].scales, where="post", color=STYLES[-1]["color"])

    loss.set(yscale="log", ylabel=f"training loss, mean of one {task.epoch}\n(thin: every step, {baseline.name})")
    distance.set_yscale("log", nonpositive="mask")
    distance.set(ylabel=f"relative distance\nfrom {baseline.name}")
    scale.set_yscale("log", base=2)
    scale.set(ylabel=f"loss scale\n{results[-1].name}", xlabel=task.epoch)
    scale.set_ylim(min(results[-1].runs[-1].scales) / 4, max(results[-1].runs[-1].scales) * 4)
    scale.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss.legend(frameon=False)
    distance.legend(frameon=False, ncols=2, fontsize=9, loc="upper left")
    for axes in (loss, distance, scale):
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=140)


def epochs_of(result: Result) -> np.ndarray:
    """How many epochs are done after each step."""
    return (np.arange(len(result.mean_losses)) + 1) / result.runs[0].steps_per_epoch


def draw_loss(axes: Any, result: Result, style: dict[str, Any], with_seeds: bool) -> None:
    """The loss by epochs; with_seeds: by steps as well, and the range of the seeds."""
    curves = [run.epoch_losses for run in result.runs]
    middles = np.arange(len(curves[0])) + 0.5
    axes.plot(middles, np.mean(curves, axis=0), label=result.name, **style)
    if with_seeds:
        axes.plot(epochs_of(result), result.mean_losses, alpha=0.4, color=style["color"], linewidth=0.9)
        if len(curves) > 1:
            axes.fill_between(middles, np.min(curves, axis=0), np.max(curves, axis=0), color="#e4e6ea", label="seeds")


def draw_distance(axes: Any, result: Result, baseline: Result, style: dict[str, Any]) -> None:
    """How far the loss of every step is from the baseline's."""
    reference = baseline.mean_losses[: len(result.mean_losses)]
    distance = np.abs(result.mean_losses - reference) / reference
    axes.plot(epochs_of(result), distance, label=result.name, color=style["color"], linewidth=0.9)


# ---------------------------------------------------------------------------------------------- the command line


def add_options(parser: argparse.ArgumentParser, *, batch: int, netcl_steps: int | None = None) -> None:
    """Adds what all comparisons take."""
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of the third run")
    parser.add_argument("--batch", type=positive, default=batch)
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="runs to take the mean of")
    parser.add_argument(
        "--netcl-steps",
        type=count_or_all,
        default=netcl_steps,
        metavar="N|all",
        help="stop netcl's own run after so many",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the loss curves and the loss scale")


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def count_or_all(text: str) -> int | None:
    """An integer of at least 1, or None for "all", for argparse."""
    return None if text == "all" else positive(text)


def show(task: Task, options: argparse.Namespace, device: str) -> None:
    """Trains, prints the table, draws the plot."""
    console = Console()
    console.print(f"Device: [bold]{device}[/]")
    results = compare(task, options, console)
    console.print(table(task, results))
    if options.plot:
        plot(task, results, device, options.plot)
        console.print(f"Curves: {options.plot}")
