"""Where commands print their tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 150


def make_console() -> Console:
    """A console on standard output as wide as the terminal, or as the variable COLUMNS says.

    In a pipe or file, where rich would assume 80 columns, it is wide enough for tables.
    """
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=_WIDTH)
