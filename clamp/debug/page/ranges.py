"""Which magnitudes the tensors of each layer have, beside those that float16 holds.

The picture is that of Micikevicius et al. 2018, "Mixed precision training", a row for each module: how many of a
tensor's numbers lie in which octave, and, dashed, where the gradients would lie at the suggested loss scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clamp.debug.page.figures import COLOUR, WIDTHS, empty_figure, picture, plain_axes, power, save, shortened
from clamp.debug.page.schema import END, LOWEST, FirstBad, Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 40  # modules that the picture shows; the table below it has all
_ROW = {False: 34, True: 44}  # pixels, in wide windows, and in narrow ones, where names stand in the rows
_TALL = {False: 0.82, True: 0.58}  # part of a row that a histogram takes
_NORMAL = -14  # exponent of float16's smallest normal number
_EDGE = 5.5  # octaves beside the range, for percentages
_WORTH_A_WORD = 1e-3  # a fraction lost that the picture has in words
_PANELS = (
    ("Activations, parameters", ("activation", "parameter")),
    ("Gradients, times the loss scale", ("gradient", "parameter gradient")),
)

Rows = Mapping[str, Sequence[Range]]


class RangesDrawn(NamedTuple):
    """A picture as HTML, and how many modules it has no room for."""

    drawn: str
    left_out: int


def ranges(found: Sequence[Range], suggested: float | None, first_bad: FirstBad | None) -> RangesDrawn:
    """The picture of the modules that lose most; empty without ranges."""
    if not found:
        return RangesDrawn("", 0)
    modules = _modules(found)
    rows = {name: modules[name] for name in _chosen(modules)}
    bad = first_bad["module"] or first_bad["op"] if first_bad else None

    label = f"Histograms of the magnitudes in {len(rows)} modules, activations and gradients, beside float16's range"
    draw = partial(_draw, colour=COLOUR, rows=rows, suggested=suggested, bad=bad)
    drawn = picture("ranges", label, draw, (_height(len(rows), False), _height(len(rows), True)))
    return RangesDrawn(drawn, len(modules) - len(rows))


def save_ranges(path: str | Path, found: Sequence[Range], suggested: float | None) -> None:
    """Writes the picture to a file, of all modules, for wide windows, in the page's light colours.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    css = (files("clamp.debug.page") / "page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--(\w+): light-dark\((#\w{6})", css))
    rows = _modules(found)
    height, missing = _height(len(rows), False), "draw needs matplotlib: pip install matplotlib"
    with empty_figure(WIDTHS["wide"], height, light, missing) as figure:
        _draw(figure, False, light, rows, suggested)
        save(figure, path, 130)


def _draw(
    figure: Figure, narrow: bool, colour: Mapping[str, str], rows: Rows, suggested: float | None, bad: str | None = None
) -> None:
    for place, axes in enumerate(figure.subplots(*((2, 1) if narrow else (1, 2)))):
        title, kinds = _PANELS[place]
        panel = _Panel(axes, narrow, colour)
        panel.frame(title, len(rows))
        for height, of in enumerate(rows.values()):
            panel.row(height, [one for one in of if one["kind"] in kinds], suggested)
        if narrow or not place:
            panel.name_rows(list(rows), bad)


def _height(rows: int, narrow: bool) -> int:
    return (rows * _ROW[narrow] + 90) * (2 if narrow else 1)


def shifted(octaves: Sequence[int], by: int) -> list[int]:
    """The counts as they were if all magnitudes were multiplied by 2^by.

    What leaves the range is counted at its end; what lay outside before stays there, because nobody knows how far.
    """
    low, *inside, high = octaves
    result = [low] + [0] * len(inside) + [high]
    for place, count in enumerate(inside, 1):
        result[min(max(place + by, 0), len(result) - 1)] += count
    return result


def _modules(found: Sequence[Range]) -> dict[str, list[Range]]:
    rows: dict[str, list[Range]] = {}
    for one in found:
        rows.setdefault(one["module"] or one["name"], []).append(one)
    return rows


def _chosen(modules: Rows) -> list[str]:
    """The modules of the picture, in their order: where there are too many, those that lose most."""
    worst = sorted(modules, key=lambda name: -max(max(one["underflow"], one["overflow"]) for one in modules[name]))
    kept = set(worst[:_ROWS])
    return [name for name in modules if name in kept]


@dataclass
class _Panel:
    """One of the two pictures side by side, or one above the other."""

    axes: Axes
    narrow: bool
    colour: Mapping[str, str]

    def frame(self, title: str, rows: int) -> None:
        """Float16's range, and what it is called."""
        axes = self.axes
        plain_axes(axes)
        axes.spines["bottom"].set_visible(False)
        axes.set_title(title, loc="left", fontsize=12.5, weight="bold", pad=24)
        axes.set(xlim=(LOWEST - _EDGE, END + _EDGE), ylim=(rows - 0.85, -0.95), yticks=[])
        ticks = (LOWEST, _NORMAL, 0, END)
        axes.set_xticks(ticks, [power(2, tick) if tick else "1" for tick in ticks], fontsize=13)
        for start, end, colour, words in (
            (LOWEST, _NORMAL, "subnormal", "subnormal"),
            (_NORMAL, END, "normal", "float16's normal numbers"),
        ):
            axes.axvspan(start, end, color=self.colour[colour], linewidth=0)
            axes.text((start + end) / 2, 1.005, words, ha="center", va="bottom", fontsize=11,
                      color=self.colour["muted"], transform=axes.get_xaxis_transform())  # fmt: skip

    def row(self, height: int, of: Sequence[Range], suggested: float | None) -> None:
        """The histograms of a module's tensors, and what they lose in words."""
        self.axes.axhline(height, color=self.colour["line"], linewidth=0.8)
        for one in of:
            colour, octaves = self.colour[one["kind"].split()[0]], one["octaves"]
            if one["kind"].startswith("parameter"):
                self._histogram(height, octaves, edgecolor=colour, linewidth=1.2)
                continue
            self._histogram(height, octaves, edgecolor=colour, facecolor=(colour, 0.35), linewidth=1.4)
            for end in (slice(1), slice(-1, None)):
                self._histogram(height, octaves, end, facecolor=self.colour["bad"])
            if one["kind"] == "gradient" and suggested is not None and (by := _octaves_to(suggested, one["scale"])):
                ghost = shifted(octaves, by)
                self._histogram(height, ghost, edgecolor=colour, linewidth=1.3, linestyle=(0, (2.5, 1.8)))
        for place, side, lost in (
            (LOWEST - _EDGE, "left", [one["underflow"] for one in of]),
            (END + _EDGE, "right", [one["overflow"] for one in of]),
        ):
            worst = max(lost, default=0.0)
            if worst >= _WORTH_A_WORD:
                words = f"{100 * worst:.2g} %"
                self.axes.text(place, height - 0.12, words, ha=side, fontsize=11, color=self.colour["bad"])

    def name_rows(self, names: Sequence[str], bad: str | None) -> None:
        """Writes the modules' names beside the rows or, where there is no room, into them."""
        shown = [shortened(name, 28) for name in names]
        if not self.narrow:
            self.axes.set_yticks(range(len(names)), shown, va="bottom")
        for height, (name, text) in enumerate(zip(names, shown, strict=True)):
            label = (
                self.axes.text(LOWEST - _EDGE, height - 0.78, text, fontsize=11, va="center")
                if self.narrow
                else self.axes.get_yticklabels()[height]
            )
            label.set(color=self.colour["bad" if name == bad else "ink"], weight="bold" if name == bad else "normal")

    def _histogram(self, height: int, octaves: Sequence[int], part: slice = slice(None), **style: Any) -> None:
        """A histogram, or a part of it, on a row's line; octaves without a number at its ends are left out."""
        occupied = [place for place in range(*part.indices(len(octaves))) if octaves[place]]
        if occupied:
            first, end = occupied[0], occupied[-1] + 1
            tops = [height - _TALL[self.narrow] * count / max(octaves) for count in octaves[first:end]]
            edges = [LOWEST - 1 + place for place in range(first, end + 1)]
            is_filled = "facecolor" in style
            self.axes.stairs(tops, edges, baseline=height, fill=is_filled, **style)


def _octaves_to(suggested: float, scale: float) -> int:
    """By how many octaves gradients move if they are scaled by one number instead of another."""
    if not (0 < scale < math.inf and 0 < suggested < math.inf):
        return 0
    return round(math.log2(suggested) - math.log2(scale))
