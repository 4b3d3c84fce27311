"""The worst error of each op, for ``pytest tests/conformance --report``."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

#: op -> kind ("forward" or "gradient") and dtype -> (worst error in ulps, allowed, device)
WORST: dict[str, dict[tuple[str, str], tuple[float, float, str]]] = defaultdict(dict)


def note(op: str, kind: str, dtype: str, ulps: float, allowed: float, device: str) -> None:
    """Remembers an error if it is the worst so far of its op, kind and dtype."""
    worst = WORST[op].get((kind, dtype), (-1.0, 0.0, ""))
    if ulps > worst[0]:
        WORST[op][kind, dtype] = (ulps, allowed, device)


def print_report(console: Console) -> None:
    """Prints one row per op: worst error / allowed, in ulps of the result's type, after the bound for fp32 sums."""
    dtypes = ("float16", "bfloat16", "float32")
    table = Table(title="worst error in ulps / allowed (beyond the bound for sums in fp32)")
    table.add_column("function", overflow="fold")
    for kind in ("forward", "gradient"):
        for dtype in dtypes:
            table.add_column(f"{kind}\n{dtype}", justify="right")
    for op in sorted(WORST):
        cells = []
        for kind in ("forward", "gradient"):
            for dtype in dtypes:
                found = WORST[op].get((kind, dtype))
                cells.append("" if found is None else f"{found[0]:.2f} / {found[1]:g}")
        table.add_row(op, *cells)
    console.print(table)
