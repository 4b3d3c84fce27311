"""The picture of a network's magnitudes, layer by layer, beside what float16 can hold.

After figure 3 of Micikevicius et al., "Mixed precision training" (2018), in which a histogram of exponents shows what a
loss scale would save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clamp.bridge import DTypeLike, dtype_name
from clamp.debug.ranges import histogram_of, limits_of, lost, suggested_scale
from clamp.ops.statistics import FIRST_EXPONENT, OCTAVE, Statistics
from clamp.scaling.loss_scale import positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VISIBLE = 1e-4  # of a tensor's elements: octaves that are shown have as many in some row
_APART = 4  # octaves between the magnitudes and the bars of zeros, and of inf and nan
_BLUE, _ORANGE, _RED, _GREEN = "#4477aa", "#cc7722", "#bb2233", "#228833"


@dataclass(frozen=True)
class Layer:
    """A row of the picture; what is None stays empty.

    Attributes:
        name: of the layer.
        activations, gradients: with histograms; gradients as they were observed, times the loss scale.
    """

    name: str
    activations: Statistics | None = None
    gradients: Statistics | None = None


def draw(
    rows: Sequence[Layer], path: str | PathLike[str] | None = None, *, scale: float = 1.0, dtype: DTypeLike = "float16",
    suggested: float | None = None,
) -> Figure:  # fmt: skip
    """Draws histograms of the exponents of activations and gradients, a row a layer.

    The dtype's range is shaded, that of its subnormal numbers lighter. Bars of one row add up to what is not zero; its
    zeros have a bar apart, of a row's height if all are, and inf and nan another. An outline, the ghost, is where the
    gradients would be at the suggested scale. Beside each row is how many percent of it a cast loses: to zero (0), and
    to inf; of gradients also at the suggested scale.

    Args:
        rows: at least one.
        path: a file to write to besides; its suffix names the kind (``.png``, ``.svg``, ``.pdf``).
        scale: what the gradients were multiplied by when they were observed.
        dtype: float16 or bfloat16.
        suggested: the suggested scale, if that is known.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no row, another dtype, a bad scale, or statistics without a histogram.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError("draw needs matplotlib: pip install matplotlib") from error
    if not rows:
        raise ValueError("draw: there are no rows; each is a layer's statistics")
    scale = positive("scale", scale)
    suggested = suggested or suggested_scale([row.gradients for row in rows if row.gradients], scale, dtype)
    shift = math.log2(suggested / scale)
    height = float(np.clip(4 / len(rows), 0.2, 0.8))
    figure = Figure(figsize=(13, 1.5 + height * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    size = 9 if height > 0.3 else 6.5
    _panel(left, [row.activations for row in rows], "activations", _BLUE, 0.0, dtype, size)
    _panel(right, [row.gradients for row in rows], _title(scale, suggested), _ORANGE, shift, dtype, size)
    left.set(ylim=(len(rows), -0.1), yticks=np.arange(len(rows)) + 0.6)
    left.set_yticklabels([row.name for row in rows], fontsize=size)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _panel(
    axes: Axes, them: Sequence[Statistics | None], title: str, colour: str, moved: float, dtype: DTypeLike, size: float
) -> None:
    """Draws one column of the picture; ``moved`` is by how many octaves its ghost is, 0 for none."""
    first, last = _shown(them, moved, dtype)
    _shade(axes, first, last, dtype)
    for number, one in enumerate(them):
        if one is not None and one.count:
            _row(axes, number, one, colour, first, last)
            if moved:
                _ghost(axes, number, one, moved)
            axes.text(last + _APART + 2, number + 0.6, _lost(one, dtype, moved), fontsize=size, va="center")
    said = "a cast loses, now → outlined" if moved else "a cast loses"
    axes.text(last + _APART + 2, -0.02, said, va="bottom", fontsize=8, color="0.45")
    axes.set_title(title, fontsize=11, pad=18)
    _ticks(axes, first, last)


def _title(scale: float, suggested: float) -> str:
    observed = "gradients" if scale == 1 else f"gradients times {_power(scale)}"
    return observed if suggested == scale else f"{observed}; outlined: times {_power(suggested)}, as suggested"


def _power(x: float) -> str:
    mantissa, exponent = math.frexp(x)
    return f"$2^{{{exponent - 1}}}$" if mantissa == 0.5 else f"{x:g}"


def _shares(statistics: Statistics) -> NDArray[np.float64]:
    """Which part of the elements is in each octave of float32."""
    octaves = histogram_of(statistics).reshape(-1, len(OCTAVE)).sum(1)
    return octaves / max(statistics.count, 1)


def _shown(them: Sequence[Statistics | None], moved: float, dtype: DTypeLike) -> tuple[int, int]:
    """The exponents between which an axis reaches: float16's, and all that somebody has."""
    subnormal, _, above = limits_of(dtype)
    found = [subnormal, above] if above - subnormal < 64 else []
    for one in them:
        if one is not None:
            there = np.flatnonzero(_shares(one) > _VISIBLE) + FIRST_EXPONENT
            found += [*there, *(there + 1), *(there + moved), *(there + moved + 1)]
    return math.floor(min(found, default=-24)) - 1, math.ceil(max(found, default=16)) + 1


def _shade(axes: Axes, first: int, last: int, dtype: DTypeLike) -> None:
    subnormal, normal, above = limits_of(dtype)
    axes.axvspan(max(normal, first), min(above, last), color="0.9", lw=0, zorder=0)
    if normal > first:
        axes.axvspan(max(subnormal, first), normal, color="0.955", lw=0, zorder=0)
    for begin, end, name in ((subnormal, normal, "subnormal"), (normal, above, str(dtype_name(dtype)))):
        begin, end = max(begin, first), min(end, last)
        if end - begin > 4:
            axes.text((begin + end) / 2, -0.02, name, ha="center", va="bottom", fontsize=8, color="0.45")


def _row(axes: Axes, number: int, one: Statistics, colour: str, first: int, last: int) -> None:
    """The bars of a row, upwards from its lower end; the axis points down."""
    shares = _shares(one)
    base, tall = number + 1.0, 0.85
    exponents = FIRST_EXPONENT + np.arange(len(shares) + 1)
    heights = tall * shares / max(shares.max(), 1e-30)
    axes.stairs(base - heights, exponents, baseline=base, fill=True, color=colour, alpha=0.75, lw=0)
    axes.axhline(base, color="0.8", lw=0.5, zorder=1)
    zeros, bad = one.zeros / one.count, (one.infs + one.nans) / one.count
    axes.bar(first - _APART, -tall * zeros, width=1.6, bottom=base, color="0.35")
    # However few they are, they are seen.
    axes.bar(last + _APART, -max(tall * bad, 0.1 * (bad > 0)), width=1.6, bottom=base, color=_RED)


def _ghost(axes: Axes, number: int, one: Statistics, moved: float) -> None:
    shares = _shares(one)
    there = np.flatnonzero(shares)
    if there.size:
        shown = slice(there[0], there[-1] + 1)
        exponents = FIRST_EXPONENT + moved + np.arange(there[0], there[-1] + 2)
        heights = 0.85 * shares[shown] / shares.max()
        axes.stairs(number + 1 - heights, exponents, baseline=number + 1, color=_GREEN, lw=0.9)


def _lost(one: Statistics, dtype: DTypeLike, moved: float) -> str:
    """What casts lose of a row, now and where it would be moved to."""
    now, then = _percent(one, dtype, 1.0), _percent(one, dtype, 2.0**moved)
    return now if now == then else f"{now} → {then}"


def _percent(one: Statistics, dtype: DTypeLike, factor: float) -> str:
    found = lost(one, dtype, factor)
    parts = []
    for percent, to in ((100 * found.underflow, "0"), (100 * found.overflow, "inf")):
        if percent > 0:
            parts.append(f"{percent:.3g} % to {to}" if percent >= 1e-3 else f"< 0.001 % to {to}")
    return ", ".join(parts) or "nothing"


def _ticks(axes: Axes, first: int, last: int) -> None:
    step = next(step for step in (4, 8, 16, 32, 64) if (last - first) / step < 16)
    exponents = range(-(-first // step) * step, last + 1, step)
    axes.set_xlim(first - _APART - 1.5, last + _APART + 1.5)
    axes.set_xticks([first - _APART, *exponents, last + _APART])
    axes.set_xticklabels(["zero", *(f"$2^{{{exponent}}}$" for exponent in exponents), "inf, nan"], fontsize=8)
