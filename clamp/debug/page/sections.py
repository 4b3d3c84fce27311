"""A run as one page, which holds all that it needs: open it anywhere, mail it, keep it."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template

from clamp.debug.page.figures import memory, timeline
from clamp.debug.page.markup import (
    Attribute,
    Cell,
    Cells,
    Column,
    Markup,
    digits,
    duration,
    joined,
    number,
    prose,
    size,
    table,
    tag,
)
from clamp.debug.page.ranges import ranges
from clamp.debug.page.schema import END, LOWEST, FirstBad, Input, Module, Op, Run, Verdict, checked


def page_of(run: Run) -> str:
    """The page as HTML. It asks for nothing from anywhere, and its policy forbids it to.

    Raises:
        ValueError: see `clamp.debug.page.schema.checked`.
        ModuleNotFoundError: matplotlib, which draws the pictures, is not installed.
    """
    run = checked(run)
    script = _text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_text("page.html")).substitute(
        title=joined([run["verdict"]["headline"].replace("`", "")]),
        style=_text("page.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        verdict=verdict(run["verdict"]),
        facts=facts(run),
        first_bad=first_bad(run["first_bad"]),
        first_bad_link=tag("a", "First bad op", href="#first-bad") if run["first_bad"] else "",
        modules=modules(run["modules"], run["ops"], run["first_bad"]),
        timeline=timeline(run["steps"]),
        ranges=ranges(run["ranges"], run["suggested_scale"], run["first_bad"]),
        ops=ops(run["ops"], run["first_bad"]),
        memory=memory(run["memory"], run["dtype"]),
        version=tag("span", f"clamp {run['clamp']}"),
    )


def write_page(run: Run, path: str | Path) -> None:
    """Writes the page of a run.

    Raises:
        ValueError, ModuleNotFoundError: see `page_of`.
        OSError: the file cannot be written.
    """
    Path(path).write_text(page_of(run), encoding="utf-8")


def _text(name: str) -> str:
    return (files("clamp.debug.page") / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- the answer first


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
    rows: list[Cells] = [
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


# ---------------------------------------------------------------------------------------------- the modules, as a tree


_OPEN = 60  # modules up to which all branches are open


@dataclass
class _Branch:
    """A module, or a list of modules that is none itself."""

    path: str
    module: Module | None = None
    children: dict[str, _Branch] = field(default_factory=dict)

    def walk(self) -> Iterator[_Branch]:
        yield self
        for child in self.children.values():
            yield from child.walk()


def modules(found: Sequence[Module], ops: Sequence[Op], bad: FirstBad | None) -> Markup:
    """Nested lists; a module's ops are a link that filters the table of ops (page.js)."""
    if not found:
        return tag("p", "The modules are not known.", class_="empty")
    root = _tree(found)
    calls = Counter(op["module"] for op in ops)
    tops = [root] if root.module else list(root.children.values())
    is_small = len(found) <= _OPEN
    return tag("ul", *(_item(node, calls, bad, is_small) for node in tops), class_="tree", tabindex=0)


def _tree(found: Sequence[Module]) -> _Branch:
    root = _Branch("")
    for module in found:
        node = root
        parts = module["path"].split(".") if module["path"] else []
        for depth, part in enumerate(parts, 1):
            node = node.children.setdefault(part, _Branch(".".join(parts[:depth])))
        node.module = module
    return root


def _item(node: _Branch, calls: Counter[str], bad: FirstBad | None, is_small: bool) -> Markup:
    is_bad = bad is not None and bad["module"] == node.path
    own, link = _words(node, bad if is_bad else None), _link_to_ops(node.path, calls[node.path])
    if not node.children:
        return tag("li", own, link, class_="bad" if is_bad else None)
    is_above = bad is not None and any(one.path == bad["module"] for one in node.walk())
    inside = tag("ul", *(_item(child, calls, bad, is_small) for child in node.children.values()))
    branch = tag("details", tag("summary", own), link, inside, open=is_small or is_above)
    return tag("li", branch, class_="bad" if is_bad else None)


def _words(node: _Branch, bad: FirstBad | None) -> Markup:
    parts: list[str] = [tag("b", node.path.rpartition(".")[2] or "model")]
    if node.module is not None:
        count = node.module["parameters"]
        parts += [" ", tag("span", node.module["class"], class_="class")]
        if count:
            parts += [" ", tag("small", f"{count:,} parameters")]
    if bad is not None:
        parts += [" ", tag("strong", f"first {bad['what']}: {bad['op']}, {bad['direction']}", class_="lit")]
    return tag("span", *parts)


def _link_to_ops(path: str, ops: int) -> Markup:
    """To a module's ops in their table; not part of a branch's summary, whose only action is to fold it."""
    if not ops:
        return Markup("")
    words = f"{ops} op{'s' * (ops > 1)}"
    return tag("a", words, href="#ops", data_module=path, aria_label=f"{words} of {path or 'no module'}, in the table")


# ---------------------------------------------------------------------------------------------- every op


_COLUMNS = (
    Column("Op"),
    Column("Direction"),
    Column("Module, line"),
    Column("Policy"),
    Column("Dtypes"),
    Column("Shape"),
    Column("Calls", numeric=True),
    Column("ms", numeric=True),
    Column("% of ms", numeric=True),
    Column("Bytes", numeric=True),
    Column("Note"),
)
_TABLE = "op-table"


def ops(found: Sequence[Op], bad: FirstBad | None) -> Markup:
    """The filters and the table."""
    if not found:
        return tag("p", "No op was recorded.", class_="empty")
    total = sum(op["milliseconds"] or 0.0 for op in found)
    lit = next((op for op in found if bad is not None and _is_first_bad(op, bad)), None)
    rows = [_row(op, total, f"first {bad['what']}" if bad is not None and op is lit else "") for op in found]
    attributes: Iterator[dict[str, Attribute]] = (
        {
            "class_": "bad" if op is lit else None,
            "data_policy": op["policy"],
            "data_direction": op["direction"],
            "data_module": op["module"],
        }
        for op in found
    )
    return joined([_filters(found), table("Ops", _COLUMNS, rows, id_=_TABLE, attributes=attributes)])


def _is_first_bad(op: Op, bad: FirstBad) -> bool:
    """Whether an op of the table is that of the verdict: in the backward of one line several modules may meet."""
    return all(op[key] == bad[key] for key in ("op", "direction", "module", "line"))


def _row(op: Op, total: float, found: str) -> Cells:
    name = joined([op["op"], tag("small", op["function"])]) if op["function"] not in (None, op["op"]) else op["op"]
    share = op["milliseconds"] / total if op["milliseconds"] is not None and total else None
    note = joined([tag("strong", found), " ", op["note"]]) if found else op["note"]
    return [
        Cell(name, key=op["op"]),
        op["direction"],
        Cell(joined([op["module"], tag("small", op["line"])]), key=f"{op['module']} {op['line']}"),
        op["policy"],
        f"{', '.join(op['inputs'])} → {op['dtype']}",
        "\N{MULTIPLICATION SIGN}".join(map(str, op["shape"])),
        number(op["calls"]),
        number(op["milliseconds"], None if op["milliseconds"] is None else f"{op['milliseconds']:,.3f}"),
        number(share, None if share is None else f"{100 * share:.1f}"),
        number(op["bytes"], size(op["bytes"])),
        note,
    ]


def _filters(found: Sequence[Op]) -> Markup:
    policies = dict.fromkeys(op["policy"] for op in found)
    search = tag("input", type="search", name="words", placeholder="op, module, line, dtype …", autocomplete="off")
    fields = (
        tag("label", "Search ", search),
        tag("label", "Policy ", _choice("policy", list(policies))),
        tag("label", "Direction ", _choice("direction", ["forward", "backward"])),
        tag("button", "Show all", type="reset"),
        tag("output", f"{len(found)} ops", aria_live="polite"),
    )
    return tag("form", *fields, class_="filters", data_of=_TABLE, aria_label="Filter the ops", role="search")


def _choice(name: str, values: Sequence[str]) -> Markup:
    return tag("select", tag("option", "all", value=""), *(tag("option", value) for value in values), name=name)
