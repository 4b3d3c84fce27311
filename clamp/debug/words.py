"""How numbers are written for people, and tables in plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "—"


def digits(value: float) -> str:
    """A number with three digits, and no more zeros than it takes: "0.052", "1,240", "1.2e+09"."""
    return f"{value:,.0f}" if 99.95 <= abs(value) < 1e7 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in words: "3.1 ms", "1.24 s", "3 min 20 s", "2 h 5 min"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.9995:
        return f"{digits(1e3 * seconds)} ms"
    if seconds < 99.5:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float | None) -> str:
    """Bytes in words: "1.5 MiB"."""
    if count is None:
        return UNKNOWN
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{digits(count) if unit != 'bytes' else f'{count:,}'} {unit}"
        count /= 1024
    return f"{digits(count)} GiB"


def mib(count: int) -> str:
    """Bytes in a column of MiB: "1.50"."""
    return f"{count / 2**20:.2f}"


def bad_counts(infs: int, nans: int) -> list[str]:
    """Returns the counts of inf and nan in words: ``["3 inf", "1 nan"]``."""
    return [f"{count} {kind}" for count, kind in ((infs, "inf"), (nans, "nan")) if count]


def placed(op: str, module: str, line: str = "") -> str:
    """An op, and where it is, as far as that is known: "matmul_op in layers.2 (train.py:31)"."""
    return op + (f" in {module}" if module else "") + (f" ({line})" if line else "")


def aligned(
    table: Sequence[Sequence[str]], numbers: range = range(0), indent: str = "  ", most: int | None = None,
    rest: str = "",
) -> list[str]:  # fmt: skip
    """The rows of a table in columns as wide as they must be; those of numbers end at one place.

    Args:
        most: rows that are shown below the head; of more, how many there are stands below them, and then ``rest``.
    """
    shown = table if most is None else table[: most + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        indent
        + "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    ]
    return lines if len(shown) == len(table) else [*lines, f"  and {len(table) - len(shown)} more{rest}"]
