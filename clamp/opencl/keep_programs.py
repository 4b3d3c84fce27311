"""What a process runs that keeps programs for others (keeper.py)."""

from __future__ import annotations

import os
from contextlib import suppress

import pyopencl as cl

from clamp.opencl import child_process, keeper
from clamp.opencl.program import KernelBuildError, build


def keep_given() -> None:
    """Builds the programs that this process was given, each of which is kept then."""
    if hasattr(os, "nice"):
        os.nice(19)
    place, programs = child_process.given()
    context = cl.Context([child_process.device_at(place)])
    with keeper.at_once():
        for file, macros in programs:
            with suppress(KernelBuildError):
                build(context, file, macros)
