"""The picture of magnitudes: what of it follows from the statistics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from clamp.debug.ranges_picture import Layer, draw
from clamp.ops.statistics import FIRST_EXPONENT
from tests.ops.test_statistics import expected


def layer(name: str, activations: Any, gradients: Any) -> Layer:
    return Layer(name, *(None if x is None else expected(np.asarray(x, np.float32)) for x in (activations, gradients)))


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


def test_bars_stand_at_their_exponents_and_the_ghost_at_the_suggested_scale() -> None:
    rows = [layer("first", [1.5, 1.5, 0.1], [2.0**-5, 1.2 * 2.0**-5, 0.0]), layer("second", [100.0], [2.0**-30] * 3)]
    activations, gradients = draw(rows, scale=2.0**10).axes
    assert outlines(activations) == [(1, 0, 1), (2, 6, 7)]
    # All of it would fit at larger scales, but none is above 2^24: 14 octaves on.
    assert outlines(gradients) == [(1, -5, -4), (1, 9, 10), (2, -30, -29), (2, -16, -15)]
    assert "times $2^{10}$; outlined: times $2^{24}$" in gradients.get_title()
    assert [label.get_text() for label in activations.get_yticklabels()] == ["first", "second"]
    assert "100 % to 0 → nothing" in words(gradients)
    assert words(activations).count("nothing") == 2


def test_float16_is_shaded_and_zeros_and_infs_stand_apart() -> None:
    axes = draw([layer("one", [0.0, 0.0, 1.0, np.inf, 70000.0], None)], dtype=np.float16).axes[0]
    assert {"float16", "subnormal"} <= set(words(axes))
    spans = {(patch.get_x(), patch.get_width()) for patch in axes.patches if not isinstance(patch, StepPatch)}
    assert {(-14, 30), (-24, 10)} <= spans
    bars = [bar.patches[0] for bar in axes.containers]
    assert [bar.get_height() / 0.85 for bar in bars] == pytest.approx([-0.4, -0.2])
    low, high = axes.get_xlim()
    assert low < bars[0].get_x() < -25
    assert 17 < bars[1].get_x() < high
    assert "20 % to inf" in words(axes)


def test_what_is_missing_or_empty_leaves_its_row_empty() -> None:
    rows = [layer("none", None, None), layer("empty", [], []), layer("zeros", [0.0], [0.0])]
    for axes in draw(rows).axes:
        assert [(base, begin) for base, begin, _ in outlines(axes)] == [(3, FIRST_EXPONENT)]


@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(tmp_path: Path, count: int, suffix: str) -> None:
    rng = np.random.default_rng(0)
    rows = [layer(f"layers.{n}", rng.standard_normal(50), rng.standard_normal(50) * 1e-7) for n in range(count)]
    file = tmp_path / f"ranges.{suffix}"
    figure = draw(rows, file, dtype="bfloat16" if count == 3 else np.float16)
    assert len(figure.axes[0].get_yticks()) == count
    assert file.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rows"):
        draw([])
    with pytest.raises(ValueError, match="histogram=True"):
        draw([Layer("one", expected(np.ones(3, np.float32), histogram=False))])
    with pytest.raises(ValueError, match="int8"):
        draw([layer("one", [1.0], None)], dtype="int8")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        draw([layer("one", [1.0], None)])
