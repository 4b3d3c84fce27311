"""Choosing and naming OpenCL devices, on the command line and off it."""

from __future__ import annotations

import argparse
import re
from typing import Any, TypeAlias

import pyopencl as cl

from clamp.opencl.device import list_devices

#: An option, or an argument, as ``add_argument`` takes it.
Option: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]

_SIMULATORS = ("Oclgrind",)


class UnknownDeviceError(ValueError):
    """No device has the name asked for; the message lists those that are there."""

    status = 2  # of a command's exit


def is_simulator(device: cl.Device) -> bool:
    """Returns whether the device simulates one: right but slow, and never what a user means by "the device"."""
    return device.platform.name in _SIMULATORS


def describe(device: cl.Device) -> str:
    """Platform and device in one line."""
    return f"{device.platform.name.strip()}: {device.name.strip()}"


def choose_device(name: str | None) -> cl.Device:
    """The first device whose platform, or else whose own name, contains ``name``; without a name the first of all.

    A number is an index into the list of devices, if the list is that long. Simulators are chosen only by name or
    index.

    Raises:
        NoDeviceError: there is no device.
        UnknownDeviceError: none has that name.
    """
    devices = list_devices()
    if name is None:
        return next((device for device in devices if not is_simulator(device)), devices[0])
    if name.isdecimal() and int(name) < len(devices):
        return devices[int(name)]
    wanted = name.strip().lower()
    # Platforms first: "intel" means Intel's runtime, not another one on a CPU made by Intel. PoCL calls itself so
    # only in its version.
    for text_of in (lambda device: f"{device.platform.name} {device.platform.version}", lambda device: device.name):
        for device in devices:
            if wanted and wanted in text_of(device).lower():
                return device
    found = "\n".join(f"  {index}: {describe(device)}" for index, device in enumerate(devices))
    raise UnknownDeviceError(f"no OpenCL device is called {name!r}; found:\n{found}")


def slug(device: cl.Device) -> str:
    """A short name for files: ``pocl-amd-epyc``."""
    platform = "pocl" if device.platform.name == "Portable Computing Language" else device.platform.name
    name = re.sub(r"^(pthread|cpu)-[a-z0-9-]*-", "", device.name)  # PoCL's thread model and LLVM's CPU come first
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", "", f"{platform} {name}".lower()))
    return "-".join(dict.fromkeys(words))[:60]


def device_option(default: str = "the first device") -> Option:
    """The option ``--device``, which `choose_device` understands."""
    what = (
        'part of a platform\'s or device\'s name ("pocl", "intel", "nvidia"), or the index that `python -m clamp '
        f"doctor` gives it; {default} by default"
    )
    return ("--device",), {"metavar": "NAME|INDEX", "help": what}


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` to a script's options."""
    names, how = device_option()
    parser.add_argument(*names, **how)
