"""The steps of a run: loss, loss scale and gradient norm, and which were skipped and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clamp.debug.page.drawing import COLOUR, picture, plain_axes, power
from clamp.debug.page.markup import Markup, joined, tag
from clamp.debug.page.schema import Step
from clamp.debug.page.tables import Column, Row, number, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEEP = 50.0  # a loss that changes by more than this factor is drawn on a logarithmic axis
_MARKS = "skipped"
_TICKS = 6  # at most, on a logarithmic axis


def timeline(steps: Sequence[Step]) -> Markup:
    """The picture, what is pointed at in it, and the skipped steps as a table."""
    if not steps:
        return tag("p", "No step was recorded.", class_="empty")
    steps = sorted(steps, key=lambda step: step["step"])
    skipped = [step for step in steps if not step["stepped"]]
    label = (
        f"Loss, loss scale and gradient norm of steps {steps[0]['step']} to {steps[-1]['step']}; {len(skipped)} skipped"
    )

    def draw(figure: Figure, narrow: bool) -> None:
        _draw(figure, steps, skipped)

    marks = {_MARKS: [f"step {step['step']} skipped: {step['reason']}{_move(step)}" for step in skipped]}
    drawn = picture("timeline", label, draw, lambda narrow: 430 if narrow else 470, marks if skipped else None)
    if not skipped:
        return tag("figure", drawn, tag("figcaption", "No step was skipped."))
    hint = "Point at a mark, or reach it with Tab and move with the arrow keys, to read why a step was skipped."
    caption = tag("figcaption", tag("output", hint, class_="pointed", aria_live="polite"))
    return joined([tag("figure", drawn, caption), _table(skipped)])


def _move(step: Step) -> str:
    before, after = step["scale_before"], step["scale"]
    return "" if before == after else f"; loss scale {before:g} → {after:g}"


def _table(skipped: Sequence[Step]) -> Markup:
    columns = (
        Column("Step", numeric=True),
        Column("Scale before", numeric=True),
        Column("Scale after", numeric=True),
        Column("inf", numeric=True),
        Column("nan", numeric=True),
        Column("Why"),
    )
    rows: list[Row] = [
        [*(number(step[key]) for key in ("step", "scale_before", "scale", "infs", "nans")), step["reason"]]
        for step in skipped
    ]
    listed = table("Skipped steps", columns, rows)
    return tag("details", tag("summary", f"{len(skipped)} skipped steps as a table"), listed)


def _draw(figure: Figure, steps: Sequence[Step], skipped: Sequence[Step]) -> None:
    loss, scale, norm = figure.subplots(3, 1, sharex=True, height_ratios=(5, 4, 4))
    numbers = [step["step"] for step in steps]
    for axes in (loss, scale, norm):
        plain_axes(axes)
        axes.grid(axis="y")
    if skipped:
        behind = figure.add_subplot(loss.get_gridspec()[:, 0], sharex=loss, zorder=-1, ylim=(0, 1))
        behind.axis("off")
        behind.fill_between(*_bands(skipped), step="post", color=COLOUR["bad"], alpha=0.16, linewidth=0)
    _curve(loss, numbers, [step["loss"] for step in steps], "loss", steep=_STEEP)
    _curve(norm, numbers, [step["gradient_norm"] for step in steps], "norm", steep=1)
    _scales(scale, numbers, [step["scale"] for step in steps])
    for axes, title in ((loss, "Loss"), (scale, "Loss scale"), (norm, "Gradient norm")):
        axes.set_title(title, loc="left", fontsize=12.5, weight="bold", pad=10)
    if skipped:
        top = scale.get_ylim()[1]
        scale.scatter(
            [step["step"] for step in skipped], [top] * len(skipped), marker="v", s=60, color=COLOUR["bad"],
            clip_on=False, gid=_MARKS,
        )  # fmt: skip
        scale.set_ylim(top=top)
    norm.set_xlabel("step")
    norm.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    norm.locator_params("x", integer=True, nbins=6)


def _bands(skipped: Sequence[Step]) -> tuple[list[float], list[int]]:
    """Where bands over the skipped steps begin, with a 1, and end, with a 0: one shape for a thousand of them."""
    edges: dict[float, int] = {}
    for step in skipped:
        edges |= {step["step"] - 0.5: 1, step["step"] + 0.5: 0}
    return list(edges), list(edges.values())


def _curve(axes: Axes, numbers: Sequence[int], values: Sequence[float | None], colour: str, *, steep: float) -> None:
    """A curve with gaps where nothing is known, and crosses on top where the value was inf or nan.

    The axis is logarithmic if all are positive and differ by more than a factor of ``steep``.
    """
    known = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    lost = [n for n, value in zip(numbers, values, strict=True) if value is not None and not math.isfinite(value)]
    finite = [value for value in known if not math.isnan(value)]
    axes.plot(numbers, known, color=COLOUR[colour], marker="o" if len(numbers) < 40 else "", markersize=3)
    ticks = _log_ticks(min(finite), max(finite)) if finite and 0 < steep * min(finite) < max(finite) else []
    if len(ticks) > 1:
        axes.set_yscale("log")
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif finite:
        axes.locator_params("y", nbins=5)
    inside: Any = {"transform": axes.get_xaxis_transform(), "color": COLOUR["bad"]}
    if lost:
        axes.plot(lost, [0.94] * len(lost), "x", **inside)
        axes.text(numbers[-1] + 0.5, 1.03, "x: inf or nan", fontsize=11, ha="right", va="bottom", **inside)
    if not finite:
        axes.set(yticks=[], ylim=(0, 1))
        words = "never finite" if lost else "not recorded"
        axes.text(0.5, 0.5, words, color=COLOUR["muted"], ha="center", va="center", transform=axes.transAxes)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that lie between, or, of many, some of the powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) <= _TICKS:
        return ticks
    powers = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    return powers[:: math.ceil(len(powers) / _TICKS)]


def _scales(axes: Axes, numbers: Sequence[int], scales: Sequence[float]) -> None:
    """Powers of two, mostly: on the axis are their exponents."""
    exponents = [math.log2(scale) if math.isfinite(scale) and scale > 0 else math.nan for scale in scales]
    axes.step(numbers, exponents, where="mid", color=COLOUR["scale"])
    finite = [exponent for exponent in exponents if not math.isnan(exponent)] or [0.0]
    axes.set_ylim(min(finite) - 0.7, max(finite) + 1.3)
    axes.locator_params("y", integer=True, nbins=5)
    axes.yaxis.set_major_formatter(lambda exponent, _: power(2, exponent))
