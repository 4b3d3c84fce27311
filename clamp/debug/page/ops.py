"""Every op of a run, to sort and to filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clamp.debug.page.markup import Attribute, Markup, joined, tag
from clamp.debug.page.schema import FirstBad, Op
from clamp.debug.page.tables import Cell, Column, Row, number, size, table

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


def _row(op: Op, total: float, found: str) -> Row:
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
