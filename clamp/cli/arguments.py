"""What the arguments of commands and examples have in common; argparse refuses in one line what makes no sense."""

from __future__ import annotations

import argparse

INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it


def positive(text: str) -> int:
    """An integer of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return number


def add_device_option(parser: argparse.ArgumentParser, default: str = "the first device") -> None:
    """Adds ``--device``, which `clamp.cli.devices.choose_device` understands; ``default`` says what it is."""
    parser.add_argument(
        "--device",
        metavar="NAME|INDEX",
        help='part of a platform\'s or device\'s name ("pocl", "intel", "nvidia"), or the index that `python -m clamp '
        f"doctor` gives it; {default} by default",
    )
