"""Tables to sort, and how numbers are written in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clamp.debug.page.markup import Attribute, Markup, tag


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

Row = Sequence[str | Cell]


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
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


def _cells(columns: Sequence[Column], row: Row) -> list[Markup]:
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
