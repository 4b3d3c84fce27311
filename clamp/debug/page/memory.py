"""What a run took of the device's memory, beside what float32 takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clamp.debug.page.drawing import COLOUR, picture, plain_axes, shortened
from clamp.debug.page.markup import Markup, tag
from clamp.debug.page.schema import Memory
from clamp.debug.page.tables import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 30  # pixels


def memory(found: Memory, dtype: str) -> Markup:
    """Bars, of what was measured."""
    bars = [
        (name, colour, value)
        for name, colour, value in (
            ("Activations, AMP", "amp", found["activations"]),
            ("Activations, float32", "float32", found["float32_activations"]),
            (f"Weights' copies in {shortened(dtype, 12)}", "amp", found["weight_copies"]),
            ("Peak, AMP", "amp", found["peak"]),
            ("Peak, float32", "float32", found["float32_peak"]),
        )
        if value is not None
    ]
    if not bars:
        return tag("p", "Memory was not measured.", class_="empty")

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        plain_axes(axes)
        axes.spines[:].set_visible(False)
        longest = max(value for _, _, value in bars) or 1
        for place, (name, colour, value) in enumerate(bars):
            axes.barh(place, value, color=COLOUR[colour], height=0.42 if narrow else 0.62)
            axes.text(value + longest / 80, place, size(value), va="center", color=COLOUR["ink"])
            if narrow:
                axes.text(0, place - 0.38, name, va="center", color=COLOUR["muted"], fontsize=11)
        names = [] if narrow else [name for name, _, _ in bars]
        axes.set_yticks(range(len(names)), names)
        axes.set(xticks=[], xlim=(0, longest * (1.3 if narrow else 1.12)), ylim=(len(bars) - 0.5, -0.7))

    def height(narrow: bool) -> int:
        return len(bars) * (_BAR + 14 if narrow else _BAR) + 12

    label = "Device memory: " + "; ".join(f"{name} {size(value)}" for name, _, value in bars)
    return tag("figure", picture("memory", label, draw, height), tag("figcaption", _saving(found)))


def _saving(found: Memory) -> str:
    parts = [
        f"{name} {100 * (1 - mine / theirs):.0f} % less than in float32" if mine <= theirs else
        f"{name} {100 * (mine / theirs - 1):.0f} % more than in float32"
        for name, mine, theirs in (
            ("activations take", found["activations"], found["float32_activations"]),
            ("the peak is", found["peak"], found["float32_peak"]),
        )
        if mine is not None and theirs
    ]  # fmt: skip
    return (" and ".join(parts) + ".").capitalize() if parts else "Float32 was not measured beside it."
