"""The answer first: the verdict, and the op that was the first to go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clamp.debug.page.markup import Markup, joined, prose, tag
from clamp.debug.page.schema import END, LOWEST, FirstBad, Input, Run, Verdict
from clamp.debug.page.tables import Column, Row, digits, duration, number, table

LARGEST = 65504.0  # of float16
SMALLEST = 2.0**LOWEST
_KINDS = {
    "healthy": ("✓", "Healthy"),
    "overflow": ("!", "Overflow"),
    "not finite": ("!", "Not finite"),
    "slow": ("~", "Slow"),
    "unknown": ("?", "Unknown"),
}
_TRACK = LOWEST - 6, END + 8  # exponents that the track of an operand shows


def verdict(found: Verdict) -> Markup:
    """Headline, details, and the cure as code to copy."""
    sign, word = _KINDS[found["kind"]]
    badge = tag("p", tag("span", sign, aria_hidden="true"), f" {word}", class_="badge")
    parts = [badge, tag("h1", prose(found["headline"]))]
    if found["details"]:
        parts.append(tag("ul", *(tag("li", prose(detail)) for detail in found["details"])))
    if found["cure"] is not None:
        parts += [tag("h2", "Change this"), _code(found["cure"])]
    return tag("section", *parts, id="verdict", class_=f"card verdict {found['kind'].replace(' ', '-')}")


def facts(run: Run) -> Markup:
    """What ran, on what."""
    skipped = sum(not step["stepped"] for step in run["steps"])
    suggested = run["suggested_scale"]
    given = {
        "Device": run["device"]["name"],
        "Driver": f"{run['device']['platform']}, {run['device']['driver']}",
        "Precision": f"{run['dtype']}, level {run['level']}",
        "Steps": f"{len(run['steps']):,}, {skipped:,} skipped",
        **({} if suggested is None else {"Better loss scale": f"{suggested:,.10g}"}),
        "Took": duration(run["seconds"]),
        "Written": f"{run['date'].replace('T', ' ').replace('+00:00', ' UTC')}, clamp {run['clamp']}",
    }
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in given.items())
    return tag("dl", *pairs, class_="facts")


def first_bad(found: FirstBad | None) -> Markup:
    """The first op whose result was not finite: where it is, what it read, what ran before it; nothing if none is."""
    if found is None:
        return Markup("")
    place = f"in `{found['module']}`" if found["module"] else "outside of any module"
    line = f", called at `{found['line']}`" if found["line"] else ""
    numbers = f"{found['count']:,} element{'s' * (found['count'] != 1)}"
    said = f"`{found['op']}`, {found['direction']}, {place}{line}: {numbers} of its {found['dtype']} result"
    parts = [tag("p", prose(f"{said} {'are' if found['count'] != 1 else 'is'} "), tag("strong", found["what"]), ".")]
    if found["inputs"]:
        parts.append(_inputs(found["inputs"]))
    if found["frames"]:
        frames = tag(
            "ol", *(tag("li", tag("code", frame)) for frame in reversed(found["frames"])), class_="frames", tabindex=0
        )
        parts.append(
            tag(
                "details",
                tag("summary", f"The {len(found['frames'])} ops before it, the nearest first"),
                frames,
                open=True,
            )
        )
    title = tag("h2", "The first op that went wrong", id="first-bad-title")
    return tag("section", title, *parts, id="first-bad", class_="card", aria_labelledby="first-bad-title")


def _code(text: str) -> Markup:
    copy = tag("button", "Copy", type="button", class_="copy", aria_label="Copy the code")
    return tag("div", tag("pre", tag("code", text), tabindex=0), copy, class_="code")


def _inputs(inputs: Sequence[Input]) -> Markup:
    columns = (
        Column("Operand"),
        Column("Magnitudes"),
        Column("Smallest", numeric=True),
        Column("Largest", numeric=True),
        Column("inf", numeric=True),
        Column("nan", numeric=True),
        Column("Beside float16"),
    )
    rows: list[Row] = [
        [
            joined([one["name"], " ", tag("small", one["dtype"])]),
            _track(one),
            *(number(one[key]) for key in ("smallest", "largest", "infs", "nans")),
            _beside_float16(one),
        ]
        for one in inputs
    ]
    frame = tag("p", "The frame is float16's range, from 2⁻²⁴ to 65504.", class_="hint")
    return joined([table("What it read", columns, rows, is_sortable=False), frame])


def _track(one: Input) -> Markup:
    """A bar from the smallest to the largest magnitude, over float16's range."""
    if not 0 < one["smallest"] <= one["largest"]:
        return Markup("")
    start, end = (_on_track(value) for value in (one["smallest"], one["largest"]))
    low, high = (100 * (exponent - _TRACK[0]) / (_TRACK[1] - _TRACK[0]) for exponent in (LOWEST, END))
    inside = tag("b", style=f"left:{low:.1f}%;right:{100 - high:.1f}%")
    bar = tag("i", style=f"left:{start:.1f}%;right:{100 - max(end, start + 1.5):.1f}%")
    return tag("span", inside, bar, class_="track", aria_hidden="true")


def _on_track(value: float) -> float:
    exponent = math.log2(value) if math.isfinite(value) else _TRACK[1]
    return 100 * (min(max(exponent, _TRACK[0]), _TRACK[1]) - _TRACK[0]) / (_TRACK[1] - _TRACK[0])


def _beside_float16(one: Input) -> str:
    if one["infs"] or one["nans"]:
        return "not finite before"
    if one["largest"] > LARGEST:
        return f"above {LARGEST:g}"
    words = [f"{digits(LARGEST / one['largest'])}x below {LARGEST:g}"] if one["largest"] > 0 else ["all zero"]
    return ", ".join(words + ["some below 2⁻²⁴"] * (0 < one["smallest"] < SMALLEST))
