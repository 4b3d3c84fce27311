"""What every example needs: a command queue on the device that the user names."""

from __future__ import annotations

import argparse
import warnings

import pyopencl as cl

import clamp  # noqa: F401  (makes Intel's pip-installed CPU runtime visible)
from clamp.opencl.device import list_devices

# Drivers write progress into their build logs, and pyopencl warns of every log that is not empty.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

_contexts: list[cl.Context] = []  # Intel's runtime frees a context that only its queue refers to


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` to an example's options."""
    parser.add_argument(
        "--device",
        metavar="NAME|INDEX",
        help="part of a device's or platform's name, or an index into the list (default: the first device)",
    )


def open_queue(wanted: str | None = None) -> cl.CommandQueue:
    """A queue on the wanted device; without a wish on netcl's default, the first one that is no simulator.

    Args:
        wanted: part of a device's or platform's name, or an index into the list of devices.

    Raises:
        SystemExit: no device matches; the message lists those there are.
    """
    devices = list_devices()
    names = [f"{device.name} ({device.platform.name})" for device in devices]
    if wanted is None:
        found = [device for device in devices if device.platform.name != "Oclgrind"]
    elif wanted.isdecimal():
        found = devices[int(wanted) : int(wanted) + 1]
    else:
        found = [device for device, name in zip(devices, names, strict=True) if wanted.lower() in name.lower()]
    if not found:
        known = "\n".join(f"  {index}: {name}" for index, name in enumerate(names))
        raise SystemExit(f"no device matches {wanted!r}; there are\n{known}")
    _contexts.append(cl.Context([found[0]]))
    return cl.CommandQueue(_contexts[-1], found[0])


def describe(queue: cl.CommandQueue) -> str:
    """Name of a queue's device, and of its driver."""
    return f"{queue.device.name.strip()} ({queue.device.platform.name})"
