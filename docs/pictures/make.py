"""Draws the pictures of the documents: ``python docs/pictures/make.py`` writes the files beside it.

Those of the page of a run are taken by ``python -m tests.debug.screenshots``.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import matplotlib
import pyopencl as cl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from clamp import amp
from clamp.cli.bench.networks import CNN, Trainer
from clamp.cli.devices import choose_device

HERE = Path(__file__).parent
INK, FAINT, PAPER = "#24292f", "#6b7280", "#fbfbf8"  # a page of its own, for light and dark surroundings
FLOAT32 = {"facecolor": "#cfe3fa", "edgecolor": "#2166ac"}
HALF = {"facecolor": "#ffdfb0", "edgecolor": "#c26a00"}

# ---------------------------------------------------------------------------------------------- the dtypes of one step

COLUMN, ROW = 2.7, 1.5  # distances of boxes
WIDTH, HEIGHT = 1.35, 0.72  # of a box

#: name -> text, column, row from below, dtype
TENSORS = {
    "W": ("W", 0, 3, FLOAT32),
    "W16": ("copy of W", 1, 3, HALF),
    "x": ("x", 0, 2, FLOAT32),
    "x16": ("copy of x", 1, 2, HALF),
    "h": ("h", 2, 2, HALF),
    "r": ("r", 3, 2, HALF),
    "loss": ("loss", 4, 2, FLOAT32),
    "scaled": ("loss · S", 5, 2, FLOAT32),
    "one": ("1", 5, 1, FLOAT32),
    "gloss": ("S", 4, 1, FLOAT32),
    "gr": ("S · dr", 3, 1, HALF),
    "gh": ("S · dh", 2, 1, HALF),
    "gW": ("S · dW", 1, 1, FLOAT32),
    "dW": ("dW", 0, 1, FLOAT32),
}

#: from, to, what happens between them
STEPS = (
    ("W", "W16", "cast, once\na step"),
    ("x", "x16", "cast"),
    ("x16", "h", "matmul"),
    ("h", "r", "relu"),
    ("r", "loss", "cross\nentropy"),
    ("loss", "scaled", "times S"),
    ("one", "gloss", "times S"),
    ("gloss", "gr", "cross\nentropy"),
    ("gr", "gh", "relu"),
    ("gh", "gW", "matmul"),
    ("gW", "dW", "divide by S,\ninf or nan?"),
)


def centre(name: str) -> tuple[float, float]:
    """Where a tensor stands."""
    _, column, row, _ = TENSORS[name]
    return column * COLUMN, row * ROW


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """An arrow between two points."""
    properties = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", end, start, arrowprops=properties)


def dtypes() -> Figure:
    """Which tensor of one training step is stored in which dtype, for matmul, relu and cross entropy."""
    figure = Figure(figsize=(11, 5.1), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    for text, column, row, kind in TENSORS.values():
        x, y = column * COLUMN, row * ROW
        box = FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.12", lw=1.6, **kind
        )
        axes.add_patch(box)
        axes.text(x, y, text, ha="center", va="center", fontsize=11.5, color=INK)
    for source, target, label in STEPS:
        (x0, y), (x1, _) = centre(source), centre(target)
        side = WIDTH / 2 if x1 > x0 else -WIDTH / 2
        arrow(axes, (x0 + side, y), (x1 - side, y))
        axes.text((x0 + x1) / 2, y + 0.1, label, ha="center", va="bottom", fontsize=10, color=INK)
    x, y = centre("W16")
    arrow(axes, (x + WIDTH / 2, y), (x + COLUMN / 2, centre("h")[1] + 0.42), connectionstyle="angle,angleA=0,angleB=90")
    left, x = -WIDTH / 2 - 0.45, -WIDTH / 2
    axes.plot([x, left, left], [centre("dW")[1]] * 2 + [centre("W")[1]], color=INK, linewidth=1.3)
    arrow(axes, (left, centre("W")[1]), (x, centre("W")[1]))
    axes.text(left - 0.12, centre("x")[1], "step, skipped on inf or nan", rotation=90, ha="right", va="center",
              fontsize=10, color=INK)  # fmt: skip
    right = 5 * COLUMN + WIDTH / 2 + 0.3
    for text, row in (("forward", 2), ("backward", 1)):
        axes.text(right, row * ROW, text, rotation=90, ha="left", va="center", fontsize=12, color=FAINT)
    notes = (
        "Products of 16-bit numbers are summed in float32; only the result is rounded.",
        "dW is written in float32 straight from those sums. S is the loss scale.",
    )
    axes.text(2 * COLUMN, 3 * ROW + 0.2, "\n".join(notes), ha="left", va="center", fontsize=11, color=FAINT,
              linespacing=1.5)  # fmt: skip
    swatches = [Patch(label="float32", lw=1.6, **FLOAT32), Patch(label="16-bit: float16 or bfloat16", lw=1.6, **HALF)]
    axes.legend(handles=swatches, loc="lower center", ncols=2, frameon=False, fontsize=12, labelcolor=INK)
    axes.set(xlim=(left - 0.5, right + 0.5), ylim=(0.25, 3 * ROW + 0.75))
    axes.axis("off")
    return figure


# ---------------------------------------------------------------------------------------------- time and memory

#: Fashion-MNIST as in README: milliseconds a step, MiB of activations, MiB at the peak
FASHION = {
    "netcl float32": (329.0, 20.7, 89.8),
    "clamp float32": (15.0, 20.7, 42.0),
    "AMP float16": (10.8, 10.3, 21.6),
    "AMP bfloat16": (10.1, 10.3, 21.6),
}
LONGEST = 20.0  # milliseconds that the axis shows; netcl's bar is torn off there


def bars() -> Figure:
    """Time of a step, and memory, of the four ways to train Fashion-MNIST."""
    figure = Figure(figsize=(11, 3.4), facecolor=PAPER, layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    colours = ["#b8bdc5", "#6aa5dd", "#f0a040", "#d97c10"]
    places = range(len(FASHION))
    milliseconds, kept, peak = zip(*FASHION.values(), strict=True)
    time.barh(places, [min(value, LONGEST * 0.9) for value in milliseconds], color=colours, height=0.62)
    for place, value in zip(places, milliseconds, strict=True):
        torn = value > LONGEST
        time.text(min(value, LONGEST * 0.9) + 0.3, place, f"{value:.0f}" if torn else f"{value:.1f}", va="center",
                  color=INK, fontsize=12)  # fmt: skip
        if torn:
            time.text(LONGEST * 0.72, place, "//", ha="center", va="center", fontsize=30, color=PAPER, weight="bold")
    memory.barh(places, peak, color=colours, height=0.62, alpha=0.55)
    memory.barh(places, kept, color=colours, height=0.62)
    for place, (inner, outer) in enumerate(zip(kept, peak, strict=True)):
        memory.text(outer + 1.2, place, f"{inner:.1f} / {outer:.1f}", va="center", color=INK, fontsize=12)
    time.set(title="milliseconds a step", xlim=(0, LONGEST), yticks=list(places), yticklabels=list(FASHION))
    memory.set(title="MiB kept for backward (dark) / at the peak of a step", xlim=(0, 120))
    time.invert_yaxis()
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    for axes in (time, memory):
        axes.set_facecolor(PAPER)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=12, labelcolor=INK, labelbottom=False)
        axes.title.set(color=INK, fontsize=12)
    return figure


# ---------------------------------------------------------------------------------------------- ranges


def draw_ranges() -> None:
    """The magnitudes of the Fashion-MNIST network of ``bench``, after five steps on noise."""
    warnings.simplefilter("ignore", cl.CompilerWarning)
    context = cl.Context([choose_device(None)])
    trainer = Trainer(cl.CommandQueue(context), CNN)
    batch = trainer.batch()
    with amp.init() as handle:

        def step() -> None:
            trainer.train(handle, *batch)

        for _ in range(5):
            step()
        handle.ranges(step).draw(HERE / "ranges.png")


def main() -> None:
    """Draws them all."""
    matplotlib.rcParams["svg.hashsalt"] = "clamp"  # the same bytes in every run
    for name, figure in (("dtypes", dtypes()), ("fashion_mnist", bars())):
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    draw_ranges()


if __name__ == "__main__":
    main()
