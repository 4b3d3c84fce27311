"""Handwritten digits three times from the same seed: netcl's fp32, clamp in float32, and mixed precision.

    python examples/digits.py
    python examples/digits.py --dtype bfloat16 --seeds 3 --plot digits.png

An MLP learns the 1797 digits of 8 x 8 pixels that come with scikit-learn. ``train`` is the example: a netcl
training loop in which two lines, marked below, turn mixed precision on. The three runs differ in what
``amp.init`` is given, and in nothing else:

    netcl fp32       enabled=False: netcl as it was installed
    clamp float32    dtype="float32": clamp's kernels without any casting, what better kernels alone gain
    AMP              dtype="float16" (or --dtype bfloat16): 16-bit storage, fp32 sums, loss scaling
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
import pyopencl as cl
from common import add_device_option, describe, open_queue
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Module, ReLU, Sequential
from netcl.optim import Adam
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from clamp import amp
from clamp.debugging import MemoryMeter

CLASSES = 10


# ---------------------------------------------------------------------------------------------- the example


def make_model(queue: cl.CommandQueue) -> Sequential:
    """An MLP for images of 64 pixels."""
    return Sequential(
        Linear(queue, 64, 256),
        ReLU(),
        Linear(queue, 256, 256),
        ReLU(),
        Linear(queue, 256, CLASSES),
    )


def train(
    queue: cl.CommandQueue,
    digits: Digits,
    amp_options: dict[str, Any],
    seed: int = 0,
    epochs: int = 20,
    batch: int = 64,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Run:
    """One training run.

    Args:
        amp_options: what ``amp.init`` is given.
        seed: of the weights and of the order of the images.
        on_step: called with the loss after every step.
    """
    np.random.seed(seed)  # netcl draws its weights from numpy's global generator
    model = make_model(queue)
    optimizer = Adam(model.parameters(), lr=1e-3)
    run = Run(steps_per_epoch=len(digits.train_y) // batch)
    order = np.random.default_rng(seed)

    handle = amp.init(**amp_options)  # <- line 1
    try:
        model.train()
        for x, y in batches(queue, digits, epochs, batch, order):
            start = time.perf_counter()
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
                tape.backward(scaled_loss)
            optimizer.step()

            run.losses.append(float(loss.value.to_host()[0]))  # waits for the device
            run.milliseconds.append((time.perf_counter() - start) * 1e3)
            run.scales.append(handle.loss_scale)
            run.skipped += handle.last_step is not None and not handle.last_step.stepped
            on_step(run.losses[-1])

        run.accuracy = accuracy(model, queue, digits)
        run.weights = [str(parameter.dtype) for parameter in model.parameters()]
    finally:
        handle.shutdown()
    return run


def accuracy(model: Module, queue: cl.CommandQueue, digits: Digits) -> float:
    """Share of the test images that the model names right."""
    model.eval()
    with ag.no_grad():
        logits = amp.cast(model(ag.tensor(Tensor.from_host(queue, digits.test_x))), "float32")
    return float((logits.value.to_host().argmax(axis=1) == digits.test_y).mean())


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Digits:
    """The images, float32 of (n, 64) in [0, 1], and their classes, of (n,)."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load() -> Digits:
    """The digits of scikit-learn, the same fifth of every class held back for the test."""
    images, classes = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, classes, test_size=0.2, stratify=classes, random_state=0
    )
    return Digits(train_x, train_y, test_x, test_y)


def batches(
    queue: cl.CommandQueue, digits: Digits, epochs: int, batch: int, order: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every batch of every epoch on the device: images of (batch, 64), one-hot classes of (batch, 10).

    netcl's fp32 takes classes as one-hot rows; its version for indices hangs on PoCL.
    """
    one_hot = np.eye(CLASSES, dtype=np.float32)
    for _ in range(epochs):
        shuffled = order.permutation(len(digits.train_y))
        for first in range(0, len(shuffled) - batch + 1, batch):
            chosen = shuffled[first : first + batch]
            x = Tensor.from_host(queue, digits.train_x[chosen])
            y = Tensor.from_host(queue, one_hot[digits.train_y[chosen]])
            yield x, y


# ---------------------------------------------------------------------------------------------- what was measured


@dataclass
class Run:
    """What one training run measured, a list entry per step."""

    steps_per_epoch: int
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    accuracy: float = 0.0
    weights: list[str] = field(default_factory=list)

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
        peak_bytes: the most that one step has on the device at a time; not the parameters, not the images.
    """

    name: str
    activation_bytes: int = 0
    peak_bytes: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every run, in percent."""
        return [100 * run.accuracy for run in self.runs]

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


def memory(queue: cl.CommandQueue, digits: Digits, amp_options: dict[str, Any], batch: int) -> tuple[int, int]:
    """Bytes of the activations and at the peak, of one training step."""
    model = make_model(queue)
    optimizer = Adam(model.parameters(), lr=1e-3)
    x, y = next(batches(queue, digits, 1, batch, np.random.default_rng(0)))
    with amp.init(**amp_options) as handle, MemoryMeter() as meter:
        with ag.Tape() as tape:
            loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
        activations = meter.activations
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            tape.backward(scaled_loss)
        optimizer.step()
    return activations, meter.peak


def settings(dtype: str) -> dict[str, dict[str, Any]]:
    """The three ways of training: their names, and what ``amp.init`` is given."""
    return {
        "netcl fp32": {"enabled": False},
        "clamp float32": {"dtype": "float32"},
        f"AMP {dtype}": {"dtype": dtype},
    }


def compare(queue: cl.CommandQueue, options: argparse.Namespace, console: Console) -> list[Result]:
    """Trains every way with every seed, under a live display."""
    digits = load()
    steps = options.epochs * (len(digits.train_y) // options.batch)
    results = []
    with progress_display(console) as display:
        tasks = {
            name: display.add_task(name, start=False, total=steps * options.seeds, loss="")
            for name in settings(options.dtype)
        }
        for name, amp_options in settings(options.dtype).items():
            result = Result(name, *memory(queue, digits, amp_options, options.batch))
            display.start_task(tasks[name])
            for seed in range(options.seeds):
                on_step = advance(display, tasks[name])
                result.runs.append(train(queue, digits, amp_options, seed, options.epochs, options.batch, on_step))
            results.append(result)
    return results


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


def advance(display: Progress, task: TaskID) -> Callable[[float], None]:
    """What ``train`` calls after a step to move a bar."""
    return lambda loss: display.update(task, advance=1, loss=f"{loss:.4f}")


def table(results: list[Result], options: argparse.Namespace) -> Table:
    """The comparison, one row for each way of training."""
    shown = Table(
        title=f"Digits: epochs {options.epochs}, batch {options.batch}, seeds {options.seeds}",
        caption="Speed: against netcl fp32, median step. Memory: what forward leaves for\n"
        "backward / the peak of a step, with weight copies and workspaces.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    shown.add_column("\nrun", no_wrap=True)
    columns = "test\naccuracy", "final\nloss", "\nms/step", "\nspeed", "loss\nscale", "steps\nskipped", "memory\nKiB"
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    baseline = results[0].step_milliseconds
    for result in results:
        scale = result.runs[-1].scales[-1]
        shown.add_row(
            result.name,
            f"{fmean(result.accuracies):.2f} %",
            f"{result.final_loss:.4f}",
            f"{result.step_milliseconds:.2f}",
            f"{baseline / result.step_milliseconds:.1f}x",
            f"{scale:g}" if scale != 1 else "-",
            str(sum(run.skipped for run in result.runs)),
            f"{result.activation_bytes / 1024:.0f} / {result.peak_bytes / 1024:.0f}",
        )
    return shown


STYLES = (
    {"color": "#9aa0aa", "linewidth": 6.0, "marker": "o", "markersize": 9},  # what the others are compared with
    {"color": "#1f77b4", "linewidth": 2.5, "marker": "o", "markersize": 5},
    {"color": "#d62728", "linewidth": 1.2, "marker": "o", "markersize": 2.5, "dashes": (4, 2)},
)


def plot(results: list[Result], title: str, file: str) -> None:
    """Draws every loss curve, how far each is from netcl's, and the loss scale."""
    figure = Figure(figsize=(9, 8.5), layout="constrained")  # a bare Figure needs no display and no global state
    figure.suptitle(title, fontsize=11)
    loss, distance, scale = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.7, 1.3))
    baseline = results[0].mean_losses
    epoch_of_step = (np.arange(len(baseline)) + 1) / results[0].runs[0].steps_per_epoch
    for result, style in zip(results, STYLES, strict=True):
        thin = {"color": style["color"], "linewidth": 0.9}
        per_epoch = np.mean([run.epoch_losses for run in result.runs], axis=0)
        loss.plot(np.arange(len(per_epoch)) + 0.5, per_epoch, label=result.name, **style)
        if result is results[0]:
            loss.plot(epoch_of_step, baseline, alpha=0.4, **thin)
            if len(result.runs) > 1:
                curves = [run.epoch_losses for run in result.runs]
                lowest, highest = np.min(curves, axis=0), np.max(curves, axis=0)
                loss.fill_between(
                    np.arange(len(per_epoch)) + 0.5, lowest, highest, color="#e4e6ea", label="netcl's seeds"
                )
        else:
            distance.plot(epoch_of_step, np.abs(result.mean_losses - baseline) / baseline, label=result.name, **thin)
    scale.step(epoch_of_step, results[-1].runs[-1].scales, where="post", color=STYLES[-1]["color"])

    loss.set(yscale="log", ylabel="training loss, mean of an epoch\n(thin: every step of netcl's)")
    distance.set_yscale("log", nonpositive="mask")
    distance.set(ylabel="relative distance\nfrom netcl's loss")
    scale.set_yscale("log", base=2)
    scale.set(ylabel=f"loss scale\n{results[-1].name}", xlabel="epoch")
    scale.set_ylim(min(results[-1].runs[-1].scales) / 4, max(results[-1].runs[-1].scales) * 4)
    scale.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss.legend(frameon=False)
    distance.legend(frameon=False, ncols=2, fontsize=9, loc="upper left")
    for axes in (loss, distance, scale):
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=140)


# ---------------------------------------------------------------------------------------------- main


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="netcl's fp32, clamp in float32 and mixed precision on the digits")
    add_device_option(parser)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of the third run")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="runs to take the mean of")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the loss curves and the loss scale")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def main() -> None:
    """Trains, prints the table, draws the plot."""
    options = parse_options()
    queue = open_queue(options.device)
    console = Console()
    console.print(f"Device: [bold]{describe(queue)}[/]")
    results = compare(queue, options, console)
    console.print(table(results, options))
    if options.plot:
        plot(results, f"Digits on {describe(queue)}", options.plot)
        console.print(f"Curves: {options.plot}")


if __name__ == "__main__":
    main()
