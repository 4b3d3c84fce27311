"""Tables to sort, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clamp.report.markup import Attribute, Markup, tag


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


def size(count: float | None) -> str:
    """Bytes in words: "1.5 MiB"."""
    if count is None:
        return _UNKNOWN
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:,} bytes"
        count /= 1024
    return f"{count:.3g} GiB"


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
    """A table in a frame of its own, which scrolls where it is wider than the window.

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
    return tag(
        "div", tag("table", *inside, id=id_, class_="sortable" if is_sortable else None),
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
