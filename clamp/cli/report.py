"""``python -m clamp report``: a run, as a page to open in any browser."""

from __future__ import annotations

import sys
from argparse import Namespace

from clamp.report import read_run, write_page


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    try:
        found = read_run(args.run)
    except (OSError, ValueError) as error:
        print(f"cannot read a run: {error}", file=sys.stderr)
        return 2
    page = args.output or args.run.with_suffix(".html")
    try:
        write_page(found, page)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot write the page: {error}", file=sys.stderr)
        return 1
    print(f"written: {page}")
    return 0
