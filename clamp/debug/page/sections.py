"""A run as one page, which holds all that it needs: open it anywhere, mail it, keep it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from clamp.debug.memory_report import Moment
from clamp.debug.page.figures import HELD, held, memory_timeline, shortened, timeline
from clamp.debug.page.ranges import ranges
from clamp.debug.page.schema import END, LOWEST, Input, Memory, Module, Op, Run, checked
from clamp.debug.ranges import FLOAT16
from clamp.debug.words import UNKNOWN, digits, duration, placed, size
from clamp.interrupts import replacing
from clamp.params.lost_updates import LayerUpdates

_TRACK = LOWEST - 6, END + 8  # exponents that the track of an operand shows
_PLACE: Final = ("op", "direction", "module", "line")  # by which the op of the verdict is found in the table
_OPEN = 60  # modules up to which all branches of the tree are open
_SIGNS = {"healthy": "✓", "overflow": "!", "not finite": "!", "slow": "~", "unknown": "?"}


def page_of(run: Run) -> str:
    """The page as HTML. It asks for nothing from anywhere, and its policy forbids it to.

    Raises:
        ValueError: see `clamp.debug.page.schema.checked`.
        ModuleNotFoundError: jinja2, which fills it in, or matplotlib, which draws the pictures, is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        missing = "the page of a run is filled in by jinja2, which is not installed: pip install jinja2"
        raise ModuleNotFoundError(missing, name=error.name) from error
    run = checked(run)
    script, bad = _text("page.js"), run["first_bad"]
    skipped = [step for step in sorted(run["steps"], key=lambda step: step["step"]) if not step["stepped"]]
    took = sum(op["milliseconds"] or 0.0 for op in run["ops"])
    moments = [Moment(**cast(Any, one)) for one in run["memory"]["timeline"]]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return template.from_string(_text("page.html")).render(
        run=run,
        bad=bad,
        style=_text("page.css"),
        script=script,
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        facts=_facts(run),
        tops=_tree(run["modules"]),
        is_small=len(run["modules"]) <= _OPEN,
        calls=Counter(op["module"] for op in run["ops"]),
        skipped=skipped,
        timeline=timeline(run["steps"], skipped),
        ranges=ranges(run["ranges"], run["suggested_scale"], bad),
        # In the backward of one line several modules may meet.
        lit=next((op for op in run["ops"] if bad and all(op[key] == bad[key] for key in _PLACE)), None),
        numbers_of=lambda op: _numbers_of(op, took),
        updates=[LayerUpdates(**row) for row in run["updates"]["layers"]],
        memory=_bars(run["memory"], run["dtype"]),
        saving=_saving(run["memory"]),
        held=memory_timeline(moments),
        peak=max(moments, key=held, default=None),
        HELD=HELD,
        size=size,
        placed=placed,
        SIGNS=_SIGNS,
        cell=number,
        percent=percent,
        code_in=re.compile("`([^`]*)`").split,  # each second part stood between backticks
        track_of=_track_of,
        beside_float16=_beside_float16,
    )


def write_page(run: Run, path: str | Path) -> None:
    """Writes the page of a run.

    Raises:
        ValueError, ModuleNotFoundError: see `page_of`.
        OSError: the file cannot be written.
    """
    page = page_of(run)
    with replacing(path) as file:
        file.write(page)


def _text(name: str) -> str:
    return (files("clamp.debug.page") / name).read_text(encoding="utf-8")


def _facts(run: Run) -> dict[str, str]:
    """Returns what ran, on what."""
    skipped = sum(not step["stepped"] for step in run["steps"])
    suggested = run["suggested_scale"]
    return {
        "Device": run["device"]["name"],
        "Driver": f"{run['device']['platform']}, {run['device']['driver']}",
        "Precision": f"{run['dtype']}, level {run['level']}",
        "Steps": f"{len(run['steps']):,}, {skipped:,} skipped",
        **({} if suggested is None else {"Better loss scale": f"{suggested:,.10g}"}),
        "Took": duration(run["seconds"]),
        "Written": f"{run['date'].replace('T', ' ').replace('+00:00', ' UTC')}, clamp {run['clamp']}",
    }


# ---------------------------------------------------------------------------------------------- numbers


class Cell(NamedTuple):
    """Text of a cell of numbers, and the number that a script sorts it by, where that is not what it shows."""

    shown: str
    key: str | None = None


def number(value: float | None, shown: str | None = None) -> Cell:
    """A cell with a number, or with a dash where none is known."""
    if value is None:
        return Cell(UNKNOWN)
    shown = shown if shown is not None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    key = f"{value:.7g}".replace("inf", "Infinity") if isinstance(value, float) else str(value)
    return Cell(shown, None if key == shown else key)


def percent(fraction: float) -> Cell:
    """A cell with a fraction: what is more than nothing does not look like nothing."""
    shown = f"{100 * fraction:.3g} %" if fraction >= 1e-4 or fraction <= 0 else "< 0.01 %"
    return number(fraction, shown if math.isfinite(fraction) else UNKNOWN)


def _numbers_of(op: Op, took: float) -> list[Cell]:
    """The numbers of an op's row, where all ops together took so many milliseconds."""
    own = op["milliseconds"]
    share = own / took if own is not None and took else None
    return [
        number(op["calls"]),
        number(own, None if own is None else f"{own:,.3f}"),
        number(share, None if share is None else f"{100 * share:.1f}"),
        number(op["bytes"], size(op["bytes"])),
    ]


# ---------------------------------------------------------------------------------------------- the first bad op


def _track_of(one: Input) -> list[str] | None:
    """How far from the left and the right of a track float16's range is, and a bar from the smallest to the largest
    magnitude, in percent; None without magnitudes."""
    if not 0 < one["smallest"] <= one["largest"]:
        return None
    low, high, start, end = map(_on_track, (FLOAT16.smallest, 2.0**END, one["smallest"], one["largest"]))
    return [f"{x:.1f}" for x in (low, 100 - high, start, 100 - max(end, start + 1.5))]


def _on_track(value: float) -> float:
    exponent = math.log2(value) if math.isfinite(value) else _TRACK[1]
    return 100 * (min(max(exponent, _TRACK[0]), _TRACK[1]) - _TRACK[0]) / (_TRACK[1] - _TRACK[0])


def _beside_float16(one: Input) -> str:
    if one["infs"] or one["nans"]:
        return "not finite before"
    limit = FLOAT16.largest
    if one["largest"] > limit:
        return f"above {limit:g}"
    words = [f"{digits(limit / one['largest'])}x below {limit:g}"] if one["largest"] > 0 else ["all zero"]
    return ", ".join(words + ["some below 2⁻²⁴"] * (0 < one["smallest"] < FLOAT16.smallest))


# ---------------------------------------------------------------------------------------------- memory


def _bars(found: Memory, dtype: str) -> list[tuple[str, str, int]]:
    """Returns what was measured, each with its colour and its bytes."""
    bars = (
        ("Activations, AMP", "amp", found["activations"]),
        ("Activations, float32", "float32", found["float32_activations"]),
        (f"Weights' copies in {shortened(dtype, 12)}", "amp", found["weight_copies"]),
        ("Peak, AMP", "amp", found["peak"]),
        ("Peak, float32", "float32", found["float32_peak"]),
    )
    return [(name, colour, count) for name, colour, count in bars if count is not None]


def _saving(found: Memory) -> str:
    """Returns what AMP saves, in words."""
    parts = [
        f"{name} {100 * abs(mine / theirs - 1):.0f} % {'less' if mine <= theirs else 'more'} than in float32"
        for name, mine, theirs in (
            ("activations take", found["activations"], found["float32_activations"]),
            ("the peak is", found["peak"], found["float32_peak"]),
        )
        if mine is not None and theirs
    ]  # fmt: skip
    return (" and ".join(parts) + ".").capitalize() if parts else "Float32 was not measured beside it."


# ---------------------------------------------------------------------------------------------- the modules, as a tree


@dataclass
class _Branch:
    """A module, or a list of modules that is none itself."""

    path: str
    module: Module | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def _tree(found: Sequence[Module]) -> list[_Branch]:
    """The model, or what stands at the top where it is not known."""
    root = _Branch("")
    for module in found:
        node = root
        parts = module["path"].split(".") if module["path"] else []
        for depth, part in enumerate(parts, 1):
            node = node.children.setdefault(part, _Branch(".".join(parts[:depth])))
        node.module = module
    return [root] if root.module else list(root.children.values())
