"""What every example needs: a command queue on the device that the user names."""

from __future__ import annotations

import argparse
import warnings

import pyopencl as cl

import clamp  # noqa: F401  (makes Intel's pip-installed CPU runtime visible)
from clamp.cli.devices import UnknownDeviceError, choose_device
from clamp.opencl.device import NoDeviceError, list_devices

# Drivers write progress into their build logs, and pyopencl warns of every log that is not empty.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

_contexts: list[cl.Context] = []  # Intel's runtime frees a context that only its queue refers to


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` to an example's options."""
    parser.add_argument(
        "--device",
        metavar="NAME|INDEX",
        help="part of a platform's or device's name, pocl or intel say, or an index into the list (default: the first)",
    )


def open_queue(wanted: str | None = None) -> cl.CommandQueue:
    """A queue on the wanted device; without a wish on netcl's default, the first one that is no simulator.

    Args:
        wanted: part of a platform's or device's name, or an index into the list of devices.

    Raises:
        SystemExit: no device matches; the message lists those there are.
    """
    try:
        devices = list_devices()
        by_index = wanted is not None and wanted.isdecimal() and int(wanted) < len(devices)
        device = devices[int(wanted)] if by_index else choose_device(wanted)
    except (NoDeviceError, UnknownDeviceError) as error:
        raise SystemExit(str(error)) from None
    _contexts.append(cl.Context([device]))
    return cl.CommandQueue(_contexts[-1], device)


def describe(queue: cl.CommandQueue) -> str:
    """Name of a queue's device, and of its driver."""
    return f"{queue.device.name.strip()} ({queue.device.platform.name})"
