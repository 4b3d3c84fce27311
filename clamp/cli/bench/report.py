"""What `bench` found, as tables and as JSON: rows with ratios."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from clamp.cli import CommandError
from clamp.cli.bench.timing import Case, Race
from clamp.cli.console import print_fitting, table_of
from clamp.interrupts import replacing

RATIOS = (
    "ratios[x] compares a row with contender x of the same case. GFLOP/s and GB/s: own figure / x's; ms: x's time / "
    "own time; so above 1 is faster than x. MiB: own bytes / x's, so below 1 is less memory than x."
)


@dataclass(frozen=True)
class Row:
    """One contender's result in one case."""

    work: str
    case: str
    contender: str  # work, case, contender: what was measured
    unit: str  # of ``median``, ``best`` and ``slow``: GFLOP/s, GB/s, ms or MiB
    median: float  # of the timed calls
    best: float  # the fastest call
    slow: float  # the call that nine in ten are faster than
    samples: int  # timed calls
    ratios: dict[str, float]  # to the baselines of the case; `RATIOS` says how
    # further figures: launches, loss, loss scale; ``of_limit``, the share of the matrix unit's limit
    extra: dict[str, float] = field(default_factory=dict)


def rows_of(case: Case, race: Race) -> list[Row]:
    """A case's rows, in its order; contenders that failed have none."""

    def in_unit(seconds: float, amount: float) -> float:
        return seconds * 1e3 if case.unit == "ms" else amount / seconds / 1e9

    running = [contender for contender in case.contenders if contender.name in race.seconds]
    medians = {one.name: in_unit(median(race.seconds[one.name]), one.amount) for one in running}
    baselines = {one.name: medians[one.name] for one in running if one.is_baseline}
    rows = []
    for one in running:
        seconds, middle = race.seconds[one.name], medians[one.name]
        nine_in_ten = quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
        best, slow = in_unit(min(seconds), one.amount), in_unit(nine_in_ten, one.amount)
        extra = one.extra()
        if one.name in case.limits:
            extra["of_limit"] = middle / case.limits[one.name]
        head = (case.work, case.name, one.name, case.unit)
        rows.append(Row(*head, middle, best, slow, len(seconds), _ratios(head, middle, baselines), extra))
    return rows


def memory_rows(case: str, bytes_of: Mapping[str, Mapping[str, int]]) -> list[Row]:
    """Rows of memory: ``bytes_of[contender][what]``, the first contender being the baseline."""
    baseline = next(iter(bytes_of), "")
    rows = []
    for what in bytes_of.get(baseline, {}):
        mib = {name: figures[what] / 2**20 for name, figures in bytes_of.items()}
        for name, value in mib.items():
            head = ("memory", f"{what}, {case}", name, "MiB")
            rows.append(Row(*head, value, value, value, 1, _ratios(head, value, {baseline: mib[baseline]})))
    return rows


def _ratios(head: tuple[str, str, str, str], value: float, baselines: Mapping[str, float]) -> dict[str, float]:
    *_, name, unit = head
    return {
        other: base / value if unit == "ms" else value / base
        for other, base in baselines.items()
        if other != name and value > 0 and base > 0
    }


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A table for each kind of work."""
    for work, group in groupby(rows, key=lambda row: row.work):
        print_fitting(console, _table(work, list(group)))


def _table(work: str, rows: Sequence[Row]) -> Table:
    compared = {base for row in rows for base in row.ratios}
    bases = [name for name in dict.fromkeys(row.contender for row in rows) if name in compared]
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    is_timed = rows[0].unit != "MiB"
    meaning = "above 1 is faster" if is_timed else "below 1 is less memory"
    figures = ["median", "best", "90 %", "calls"] if is_timed else [""]
    figures += [name.replace("_", " ") for name in (*(f"/ {base}" for base in bases), *extras)]
    caption = f"/ {' / '.join(bases)}: {meaning}" if bases else None
    table = table_of([""], figures, title=f"{work}, {rows[0].unit}", caption=caption)
    for case, group in groupby(rows, key=lambda row: row.case):
        table.add_row(f"[bold]{case}[/]")
        for row in group:
            spread = (_figure(row.best), _figure(row.slow), str(row.samples)) if is_timed else ()
            ratios = (f"{row.ratios[base]:.2f}" if base in row.ratios else "" for base in bases)
            extra = (_figure(row.extra[name]) if name in row.extra else "" for name in extras)
            table.add_row(f"  {row.contender}", _figure(row.median), *spread, *ratios, *extra)
        table.add_section()
    return table


def _figure(value: float) -> str:
    """Three or more significant digits without an exponent, where that is readable."""
    if value.is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.1f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def json_file(path: str, default_name: str) -> Path:
    """The file to write: ``path``, or the default name in it if it is a folder. Folders that lack are made.

    Raises:
        CommandError: it cannot be written.
    """
    file = Path(path)
    if file.is_dir():
        file = file / default_name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandError(f"cannot write {path}: no permission to write {file}")
    return file


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes everything, over what an earlier call wrote: who is cut off keeps the one or the other whole. A link stays
    one, and what is no file, a pipe or ``/dev/stdout``, is written to."""
    text = json.dumps(content, indent=1) + "\n"
    with replacing(file) as opened:
        opened.write(text)
