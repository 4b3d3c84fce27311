"""Where commands print their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import replace

from rich.console import Console
from rich.table import Column, Table

_WIDTH = 150


def make_console() -> Console:
    """A console on standard output as wide as the terminal, or as the variable COLUMNS says.

    In a pipe or file, where rich would assume 80 columns, it is wide enough for tables.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed, as by `>&-`
    return Console() if is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)


def table_of(words: Iterable[str], figures: Iterable[str], title: str, caption: str | None = None) -> Table:
    """A table with these columns, of which the second ones stand to the right and are not wrapped."""
    columns = (Column(name, justify="right", no_wrap=True) for name in figures)
    return Table(*words, *columns, title=title, caption=caption)


def print_fitting(console: Console, table: Table) -> None:
    """Prints a table whose columns need not fit: others follow below, beside the first column again."""
    first, *waiting = table.columns
    first = replace(first, overflow="fold", max_width=console.width // 2)
    title, unlimited = table.title, console.options.update(max_width=sys.maxsize)
    while waiting:
        part, number = copy(table), len(waiting)
        part.columns = [first, *waiting]
        while number > 1 and console.measure(part, options=unlimited).maximum > console.width:
            number -= 1
            part.columns = [first, *waiting[:number]]
        waiting = waiting[number:]
        part.title, part.caption = title, None if waiting else table.caption
        console.print(part)
        title = None
