"""HTML that is escaped where it is made (plain text becomes part of it only by way of `tag`); tables to sort, and how
numbers are written in them."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


_VOID = ("input",)  # elements that end where they begin

Attribute = str | int | float | bool | None


def tag(name: str, /, *inside: str, **attributes: Attribute) -> Markup:
    """An element. Of what is inside, all that is not `Markup` is escaped.

    Args:
        name: ``"td"``.
        inside: its content, in order.
        attributes: ``class_="number"``, ``aria_label="..."``; True for one without a value, None or False for none.
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """One piece of HTML of several; what is not `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def prose(text: str) -> Markup:
    """A sentence in which backticks mark code."""
    parts = re.split("`([^`]*)`", text)
    return joined(tag("code", part) if number % 2 else part for number, part in enumerate(parts))


def _attribute(key: str, value: str | int | float | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    return f' {name}="{html.escape(str(value))}"'


@dataclass(frozen=True)
class Column:
    """A column's name, and whether it has numbers: these stand to the right, and the largest come first."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number or text that it is sorted by, if not by what it shows."""

    shown: str
    key: float | str | None = None


def number(value: float | None, shown: str | None = None) -> Cell:
    """A cell with a number, or with a dash where none is known."""
    if value is None:
        return Cell(_UNKNOWN)
    return Cell(shown if shown is not None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}", value)


def percent(fraction: float) -> Cell:
    """A cell with a fraction: what is more than nothing does not look like nothing."""
    shown = f"{100 * fraction:.3g} %" if fraction >= 1e-4 or fraction <= 0 else "< 0.01 %"
    return number(fraction, shown if math.isfinite(fraction) else _UNKNOWN)


def digits(value: float) -> str:
    """A number with three digits, and no more zeros than it takes: "0.052", "1,240", "1.2e+09"."""
    return f"{value:,.0f}" if 99.95 <= abs(value) < 1e7 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in words: "3.1 ms", "1.24 s", "3 min 20 s", "2 h 5 min"."""
    if not math.isfinite(seconds):
        return _UNKNOWN
    if seconds < 0.9995:
        return f"{digits(1e3 * seconds)} ms"
    if seconds < 99.5:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float | None) -> str:
    """Bytes in words: "1.5 MiB"."""
    if count is None:
        return _UNKNOWN
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{digits(count) if unit != 'bytes' else f'{count:,}'} {unit}"
        count /= 1024
    return f"{digits(count)} GiB"


_UNKNOWN = "—"

Cells = Sequence[str | Cell]


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Cells],
    *,
    id_: str | None = None,
    is_sortable: bool = True,
    attributes: Iterable[dict[str, Attribute]] | None = None,
) -> Markup:
    """A table in a frame of its own, which scrolls where it is wider than the window; where that is narrow, each row is
    a list of names and values.

    Args:
        caption: names it.
        columns: of the head.
        rows: a cell or text for each column; the first is the row's head.
        id_: its id, for filters.
        is_sortable: whether the names of columns are buttons.
        attributes: of each row.
    """
    head = tag("tr", *(_head(column, is_sortable) for column in columns))
    rows = list(rows)
    given = list(attributes) if attributes is not None else [{}] * len(rows)
    body = [tag("tr", *_cells(columns, row), **more) for row, more in zip(rows, given, strict=True)]
    inside = tag("caption", caption), tag("thead", head), tag("tbody", *body)
    names = "; ".join(f"--column-{place}: {json.dumps(x.name)}" for place, x in enumerate(columns, start=1))
    return tag(
        "div", tag("table", *inside, id=id_, class_="sortable" if is_sortable else None, style=names),
        class_="scroll", role="region", aria_label=f"{caption}, table", tabindex=0,
    )  # fmt: skip


def _head(column: Column, is_sortable: bool) -> Markup:
    name = tag("button", column.name, type="button") if is_sortable else column.name
    return tag("th", name, scope="col", class_="number" if column.numeric else None)


def _cells(columns: Sequence[Column], row: Cells) -> list[Markup]:
    cells = []
    for place, (column, given) in enumerate(zip(columns, row, strict=True)):
        cell = given if isinstance(given, Cell) else Cell(given)
        more: dict[str, Attribute] = {"class_": "number" if column.numeric else None, "data_key": _for_script(cell)}
        cells.append(tag("td", cell.shown, **more) if place else tag("th", cell.shown, scope="row", **more))
    return cells


def _for_script(cell: Cell) -> str | None:
    """What a cell is sorted by, numbers as JavaScript reads them; None if that is what it shows."""
    key = f"{cell.key:.7g}".replace("inf", "Infinity") if isinstance(cell.key, float) else cell.key
    return None if key is None or str(key) == cell.shown else str(key)


def aligned(table: Sequence[Sequence[str]], numbers: range = range(0), indent: str = "  ") -> list[str]:
    """The rows of a table in columns as wide as they must be; those of numbers end at one place."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
