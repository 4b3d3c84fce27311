"""Tables of text, for terminals."""

from __future__ import annotations

from collections.abc import Sequence


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
