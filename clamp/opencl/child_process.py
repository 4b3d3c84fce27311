"""Python processes beside this one that do something for it on one of its devices."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TypeAlias

import pyopencl as cl

#: Numbers of a platform and, there, of a device: what tells another process which one is meant.
Place: TypeAlias = tuple[int, int]


def command(module: str, function: str, argument: object) -> list[str]:
    """The command line of a process that calls a function, which finds its argument by `given`."""
    script = f"from {module} import {function}; {function}()"
    return [sys.executable, "-W", "ignore", "-c", script, json.dumps(argument)]


def given() -> Any:
    """What the process was given, as JSON brings it over."""
    return json.loads(sys.argv[1])


def environment() -> dict[str, str]:
    """This process's, with its way to find modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def place_of(device: cl.Device) -> Place:
    """Where another process finds a device."""
    platforms = [platform.get_devices() for platform in cl.get_platforms()]
    return next((number, devices.index(device)) for number, devices in enumerate(platforms) if device in devices)


def device_at(place: Place) -> cl.Device:
    """The device at a place."""
    platform, number = place
    device: cl.Device = cl.get_platforms()[platform].get_devices()[number]
    return device
