"""The picture of magnitudes: what of it follows from the statistics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from clamp.debug.layer_ranges import LayerRange, LayerRanges
from clamp.debug.page.figures import COLOUR
from tests.ops.test_statistics import expected


def rows(name: str, activations: Any, gradients: Any, scale: float = 1.0) -> list[LayerRange]:
    kinds = (("activation", 1.0, activations), ("gradient", scale, gradients))
    return [
        LayerRange("op", name, kind, "float16", factor, expected(np.asarray(x, np.float32)))
        for kind, factor, x in kinds
        if x is not None
    ]


def drawn(found: list[LayerRange], monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> list[Any]:
    """The two halves of the picture: of activations, and of gradients."""
    figure = Figure()
    monkeypatch.setattr("clamp.debug.page.ranges.save_picture", lambda path, draw, height: draw(figure, COLOUR))
    LayerRanges(found, scale, "float16").draw("of nobody.svg")
    return list(figure.axes)


def outlines(axes: Any) -> list[tuple[float, float, float]]:
    """Of each histogram, the row's lower end, and the exponents at which its highest bar begins and ends."""
    found = []
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, baseline = patch.get_data()
            highest = int(np.argmin(values))
            found.append((float(baseline), float(edges[highest]), float(edges[highest + 1])))
    return found


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bars_stand_at_their_exponents_and_the_ghost_at_the_suggested_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        *rows("first", [1.5, 1.5, 0.1], [2.0**-5, 1.2 * 2.0**-5, 0.0], 2.0**10),
        *rows("second", [100.0], [2.0**-20] * 3, 2.0**10),
    ]
    activations, gradients = drawn(found, monkeypatch, 2.0**10)
    assert outlines(activations) == [(0, 0, 1), (1, 6, 7)]
    # All of it would fit at larger scales, but none is above 2^24: 14 octaves on.
    assert outlines(gradients) == [(0, -5, -4), (0, 9, 10), (1, -20, -19), (1, -6, -5)]
    assert "times the loss scale" in gradients.get_title(loc="left")
    assert [label.get_text() for label in activations.get_yticklabels()] == ["first", "second"]


def test_float16_is_shaded_and_zeros_and_infs_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    axes, of_gradients = drawn(rows("one", [0.0, 0.0, 1.0, np.inf, 70000.0], [2.0**-30, 1.0]), monkeypatch)
    assert {"float16's normal numbers", "subnormal"} <= set(words(axes))
    spans = {(patch.get_x(), patch.get_width()) for patch in axes.patches if not isinstance(patch, StepPatch)}
    assert {(-14, 30), (-24, 10)} <= spans
    assert "20 %" in words(axes)  # 70000
    assert "50 %" in words(of_gradients)
    low, high = (next(text for text in one.texts if "%" in text.get_text()) for one in (of_gradients, axes))
    assert low.get_position()[0] < -25
    assert high.get_position()[0] > 17


def test_what_is_missing_or_empty_leaves_its_row_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*rows("empty", [], []), *rows("zeros", [0.0], [0.0])]
    for axes in drawn(found, monkeypatch):
        assert outlines(axes) == []


@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(tmp_path: Path, count: int, suffix: str) -> None:
    rng = np.random.default_rng(0)
    numbers = ((f"layers.{n}", rng.standard_normal(50), rng.standard_normal(50) * 1e-7) for n in range(count))
    found = [row for one in numbers for row in rows(*one)]
    file = tmp_path / f"ranges.{suffix}"
    LayerRanges(found, 1.0, "bfloat16" if count == 3 else "float16").draw(file)
    assert file.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]
    if suffix == "svg":
        text = file.read_text("utf-8")
        assert all(f">layers.{n}<" in text for n in range(count))
        assert "#0101" not in text  # colours that stand for those of the page


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rows"):
        LayerRanges([], 1.0, "float16").draw("x.svg")
    without = expected(np.ones(3, np.float32), histogram=False)
    with pytest.raises(ValueError, match="histogram=True"):
        LayerRanges([LayerRange("op", "one", "activation", "float32", 1.0, without)], 1.0, "float16").draw("x.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="draw needs matplotlib: pip install matplotlib"):
        LayerRanges(rows("one", [1.0], None), 1.0, "float16").draw("x.svg")
