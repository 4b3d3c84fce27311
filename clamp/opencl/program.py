"""Builds the OpenCL programs of clamp and hands out their kernels. The only place that compiles anything.

A kernel is asked for by file, name and macros::

    kernel = get_kernel(queue, "cast.cl", "cast", args="ppq", X_T="f32", Y_T="f16", SPAN=4096)
    kernel(queue, (groups,), None, x.buffer, y.buffer, n)

Programs are built once per context and set of macros. Kernels are held per thread, because a ``cl.Kernel``
carries its arguments from one call to the next. Launch a kernel by calling it: netcl records launches by
wrapping ``cl.Kernel.__call__``.
"""

from __future__ import annotations

import re
import threading
import warnings
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pyopencl as cl

_COMMON = "common.clh"
_ARGUMENT_TYPES = {"p": None, "i": np.int32, "u": np.uint32, "q": np.uint64, "f": np.float32}

_lock = threading.Lock()
_programs: dict[tuple[Any, ...], cl.Program] = {}
_per_thread = threading.local()


class KernelBuildError(RuntimeError):
    """A kernel of clamp did not compile on a device; the message holds the compiler's log."""


@cache
def source(name: str) -> str:
    """Text of ``kernels/<name>``, with the files that it includes in place of its ``#include`` lines.

    They are put in here because compilers of OpenCL differ in where they look for files.
    """
    lines = files("clamp.kernels").joinpath(name).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if match := re.fullmatch(r'#include "(.+)"', line):
            lines[number - 1] = f'#line 1 "{match[1]}"\n{source(match[1])}#line {number + 1} "{name}"'
    return "\n".join(lines)


def get_kernel(queue: cl.CommandQueue, file: str, name: str, args: str, **macros: object) -> cl.Kernel:
    """The kernel ``name`` of ``kernels/<file>``, compiled with ``macros`` for the queue's context.

    Args:
        args: one letter per kernel argument: ``p`` pointer, ``i`` int, ``u`` uint, ``q`` ulong, ``f`` float.
        macros: preprocessor definitions, for example ``X_T="f16"``.

    Raises:
        KernelBuildError: the device's compiler rejected the kernel.
    """
    context = queue.context
    key = (context.int_ptr, file, name, *macros.items())
    try:
        return _per_thread.kernels[key]
    except AttributeError:
        _per_thread.kernels = {}
    except KeyError:
        pass
    kernel = cl.Kernel(_get_program(context, file, macros), name)
    kernel.set_scalar_arg_dtypes([_ARGUMENT_TYPES[letter] for letter in args])
    _per_thread.kernels[key] = kernel
    return kernel


def built_programs() -> int:
    """How many programs are held."""
    return len(_programs)


def release_programs() -> None:
    """Lets go of all programs, and of this thread's kernels. What is asked for again is built again.

    A driver holds a few MB for each program (Intel's 3.5): a process that goes through thousands may want them back.
    """
    with _lock:
        _programs.clear()
    _per_thread.kernels = {}


def _get_program(context: cl.Context, file: str, macros: dict[str, object]) -> cl.Program:
    # The program keeps its context alive, so the pointer in the key stays unique.
    key = (context.int_ptr, file, *sorted(macros.items()))
    with _lock:
        if key not in _programs:
            _programs[key] = _build(context, file, macros)
        return _programs[key]


def _prefetches(device: cl.Device) -> bool:
    """Whether the device is a CPU, whose compilers have __builtin_prefetch; Oclgrind's instructions are all its own."""
    return bool(device.type & cl.device_type.CPU) and device.platform.name != "Oclgrind"


def _build(context: cl.Context, file: str, macros: dict[str, object]) -> cl.Program:
    text = f'#line 1 "{_COMMON}"\n{source(_COMMON)}\n#line 1 "{file}"\n{source(file)}'
    options = [f"-D{name}={value}" for name, value in macros.items()]
    if all(map(_prefetches, context.devices)):
        options.append("-DPREFETCHES")
    with warnings.catch_warnings():
        # Drivers write progress to the build log of a program that is fine.
        warnings.simplefilter("ignore", cl.CompilerWarning)
        try:
            return cl.Program(context, text).build(options=options)
        except cl.RuntimeError as error:
            devices = ", ".join(device.name for device in context.devices)
            raise KernelBuildError(
                f"{file} with {' '.join(options)} does not compile on {devices}:\n{error}"
            ) from error
