"""Builds the OpenCL programs of clamp and launches their kernels. The only place that compiles anything.

A kernel is declared once, beside the function that launches it, and called with tensors and numbers::

    CAST = Kernel("cast.cl", "cast")
    ...
    CAST(queue, (groups,), (1,), x, y, x.size, 4096, X_T="f32", Y_T="f16")

A kernel that is declared with names of its first arguments, ``Kernel("pad.cl", "pad_rows", "X Y")``, finds out the
storage types of these tensors by itself, and its file's section for it (``PAD_ROWS``).

Numbers are converted to the types that the compiled kernel says its arguments have. Programs are built once per context
and set of macros. Kernels are held per thread, because a ``cl.Kernel`` carries its arguments from one call to the next;
they are launched by calling them: netcl records launches by wrapping ``cl.Kernel.__call__``. `Kernel.bind` gives what
is launched often with most of its arguments the same a kernel of its own, which keeps them.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import compress
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyopencl as cl

from clamp.opencl import cache, cache_writer
from clamp.opencl.cache import Kept, Signatures
from clamp.opencl.launches import Launch
from clamp.opencl.progress import PROGRESS
from clamp.opencl.shortage import explain_shortage

_COMMON = "common.clh"
#: netcl's names for a storage type -> the name that kernels use (common.clh)
STORAGE = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}
#: the same, and of whole numbers that some kernels read
READ_STORAGE = {**STORAGE, "int32": "i32", "int": "i32", "int64": "i64"}
# Scalars by their names in OpenCL C. A program is built with -cl-kernel-arg-info, so that its kernels know them.
_SCALARS = {"int": np.int32, "uint": np.uint32, "long": np.int64, "ulong": np.uint64, "float": np.float32}
_OPTIONS = ("-cl-kernel-arg-info",)
# What a kernel takes as it is; a tensor stands for its buffer.
_ARGUMENTS = frozenset((int, float, bool, np.float32, cl.Buffer, cl.SVM))
# The PoCL that kernels/builtins.clh is written for, and what has its compiler read that in place of a longer header.
_SHORTENED = "PoCL 3.1"
_SHORTENING = ("-D_OPENCL_H_", "-DDECLARE_BUILTINS")

_dtype_of = attrgetter("dtype")

T = TypeVar("T")
Finish: TypeAlias = Callable[[bytes], bytes]

_lock = threading.RLock()  # around the two tables, never around a build
_programs: dict[tuple[Any, ...], Built] = {}
_building: dict[tuple[Any, ...], threading.RLock] = {}
_per_thread = threading.local()
_prepared: set[Prepared] = set()  # which hold kernels, and so their programs


@dataclass(frozen=True)
class Built:
    """A program, the signatures of its kernels, and whether it was loaded from where an earlier process has kept it."""

    program: cl.Program
    signatures: Signatures
    was_kept: bool = False

    def fits(self) -> bool:
        """Returns whether the signatures are those of the program's kernels, as far as its binary tells."""
        known = all(name.endswith("*") or name in _SCALARS for types in self.signatures.values() for name in types)
        return (
            known
            and set(_kernel_names(self.program)) == self.signatures.keys()
            and all(cl.Kernel(self.program, name).num_args == len(types) for name, types in self.signatures.items())
        )

    def kernel(self, name: str) -> cl.Kernel:
        """A new kernel, which knows the types of its numbers."""
        kernel = cl.Kernel(self.program, name)
        types = self.signatures[name]
        kernel.set_scalar_arg_dtypes([None if type_.endswith("*") else _SCALARS[type_] for type_ in types])
        return kernel


class Prepared(threading.local):
    """Launches that this thread has prepared, by everything that it depends on: not more than ``most``, for what
    never comes back must not pile up."""

    def __init__(self, most: int) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}
        self._most = most
        _prepared.add(self)

    def keep(self, key: tuple[Any, ...], value: T) -> T:
        """Keeps what was prepared, and returns it."""
        if len(self.known) >= self._most:
            self.known.clear()
        self.known[key] = value
        return value


class KernelBuildError(RuntimeError):
    """A kernel of clamp did not compile on a device; the message holds the compiler's log."""


@functools.cache
def source(name: str) -> str:
    """Text of ``kernels/<name>``, with the files that it includes in place of its ``#include`` lines.

    They are put in here because compilers of OpenCL differ in where they look for files.
    """
    lines = files("clamp.kernels").joinpath(name).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if match := re.fullmatch(r'#include "(.+)"', line):
            lines[number - 1] = f'#line 1 "{match[1]}"\n{source(match[1])}#line {number + 1} "{name}"'
    return "\n".join(lines)


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``kernels/``; two of the same fields are one."""

    file: str  # name of the file
    name: str  # of the kernel in it
    # Of its first arguments, tensors, the names whose macros say how they are stored: "X Y" are X_T and Y_T; "-" is an
    # argument without. With any of these, the macro of the kernel's own name, in capitals, is 1: its section.
    tensors: str = ""
    # what makes the program's binary out of the compiler's; None where that is good as it is
    finish: Finish | None = None
    options: tuple[str, ...] = ()  # of one maker's compiler

    def __call__(
        self, queue: cl.CommandQueue, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, /, *args: Any,
        **macros: object,
    ) -> cl.Event:  # fmt: skip
        """Launches the kernel, built with ``macros`` (for example ``X_T="f16"``) on the queue's first such call.

        Args:
            args: tensors, buffers and numbers, in the order of the kernel's arguments.

        Raises:
            KernelBuildError: the device's compiler rejected the program.
        """
        if self.tensors:
            kernel = self.on(queue, *map(_dtype_of, compress(args, self._are_typed)), **macros)
        else:
            kernel = self.on(queue, **macros)
        buffers = [x if type(x) in _ARGUMENTS else getattr(x, "buffer", x) for x in args]
        try:
            event: cl.Event = kernel(queue, global_size, local_size, *buffers)
        except cl.Error as error:  # drivers may allocate as late as here
            explain_shortage(error, f"launching {self.name}")
            raise
        return event

    @property
    def in_plain_c(self) -> Kernel:
        """The kernel for any device, where macros make it plain C: without what is for one maker's compiler."""
        return replace(self, finish=None, options=())

    @functools.cached_property
    def _are_typed(self) -> list[bool]:
        return [name != "-" for name in self.tensors.split()]

    @functools.cached_property
    def _fields(self) -> tuple[Any, ...]:
        return self.file, self.name, self.tensors, self.finish, self.options

    def on(self, queue: cl.CommandQueue, /, *dtypes: str, **macros: object) -> cl.Kernel:
        """This thread's kernel for the queue's context, compiled with ``macros``.

        Args:
            dtypes: of the ``tensors`` that it is declared with.

        Raises:
            KernelBuildError: the device's compiler rejected the program, or ``finish`` raised ValueError.
        """
        # Its fields and the macros' names and values, which know their hashes: this runs at each launch.
        key = (queue.context.int_ptr, *self._fields, *dtypes, *macros, *macros.values())
        try:
            return _per_thread.kernels[key]
        except AttributeError:
            _per_thread.kernels = {}
        except KeyError:
            pass
        built = self._built(queue.context, self.macros(dtypes, macros))
        _per_thread.kernels[key] = kernel = built.kernel(self.name)
        return kernel

    def macros(self, dtypes: Iterable[str], macros: Mapping[str, object]) -> dict[str, object]:
        """Returns what `on` compiles with: these, those of the storage types and that of the kernel's section."""
        if not self.tensors:
            return dict(macros)
        names = compress(self.tensors.split(), self._are_typed)
        types = {f"{name}_T": READ_STORAGE[dtype] for name, dtype in zip(names, dtypes, strict=True)}
        return {self.name.upper(): 1, **types, **macros}

    def bind(
        self, queue: cl.CommandQueue, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, /, *args: Any,
        **macros: object,
    ) -> Launch:  # fmt: skip
        """A launch to be repeated, in this thread.

        Args:
            args: buffers and numbers, in the order of the kernel's arguments; ``...`` in the place of what each launch
                has another of: a buffer, or a number of numpy's, of the argument's type.

        Raises:
            KernelBuildError: as `on`.
        """
        assert not self.tensors, "the storage types of repeated launches are given as macros"
        built = self._built(queue.context, macros)
        kernel = built.kernel(self.name)
        numbers = [place for place, name in enumerate(built.signatures[self.name]) if not name.endswith("*")]
        unset = (0 if place in numbers else None for place in range(len(args)))
        kernel.set_args(*[nothing if arg is ... else arg for arg, nothing in zip(args, unset, strict=True)])
        return Launch(kernel, global_size, local_size, args)

    def _built(self, context: cl.Context, macros: dict[str, object]) -> Built:
        # The program keeps its context alive, so the pointer in the key stays unique.
        key = (context.int_ptr, self.file, self.finish, self.options, *sorted(macros.items()))
        with _lock:
            if key in _programs:
                return _programs[key]
            building = _building.setdefault(key, threading.RLock())
        with building:  # others may build other programs meanwhile
            if key not in _programs:
                built = build(context, self.file, macros, self.finish, self.options)
                with _lock:
                    _programs[key] = built
            return _programs[key]


def built_programs() -> int:
    """Returns the number of programs that are held."""
    return len(_programs)


def release_programs(context: cl.Context | None = None) -> None:
    """Lets go of all programs, or of one context's, and of this thread's kernels. What is asked for is built again.

    A driver holds a few MB for each program (Intel's 3.5): a process that goes through thousands may want them back.
    """
    with _lock:
        for held in (_programs, _building):
            for key in [key for key in held if context is None or key[0] == context.int_ptr]:
                del held[key]
    _per_thread.kernels = {}
    for prepared in _prepared:
        prepared.known.clear()


def _rounding(devices: Sequence[cl.Device]) -> list[str]:
    """Makes divisions and roots those of IEEE 754, which a CPU's are: a GPU's may be off by 2.5 and 3 ulp otherwise."""
    asked = all(device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT for device in devices)
    return ["-cl-fp32-correctly-rounded-divide-sqrt"] if asked and not all(map(_is_cpu, devices)) else []


def _is_cpu(device: cl.Device) -> bool:
    """Returns whether the device is a processor; Oclgrind, whose instructions are all its own, is none."""
    return bool(device.type & cl.device_type.CPU) and device.platform.name != "Oclgrind"


def build(
    context: cl.Context, file: str, macros: dict[str, object], finish: Finish | None = None,
    more_options: tuple[str, ...] = (),
) -> Built:  # fmt: skip
    """Compiles a program, or loads it where an earlier process has kept it.

    Raises:
        KernelBuildError: as `Kernel.on`.
    """
    text = f'#line 1 "{_COMMON}"\n{source(_COMMON)}\n#line 1 "{file}"\n{source(file)}'
    options = [*_OPTIONS, *_rounding(context.devices), *more_options]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    if all(map(_is_cpu, context.devices)):
        options.append("-DON_CPU")
    file_kept = cache.file_of(context, text, options)
    with warnings.catch_warnings():
        # Drivers write progress to the build log of a program that is fine.
        warnings.simplefilter("ignore", cl.CompilerWarning)
        if (kept := cache.load(file_kept)) is not None:
            with suppress(cl.Error):  # a binary that the driver refuses, or of another program, is written anew
                built = Built(
                    cl.Program(context, context.devices, [kept.binary]).build(), kept.signatures, was_kept=True
                )
                if built.fits():
                    return built
        try:
            with PROGRESS.compiling():
                program = _compiled(context, file, text, options)
        except cl.RuntimeError as error:
            devices = ", ".join(device.name for device in context.devices)
            raise KernelBuildError(
                f"{file} with {' '.join(options)} does not compile on {devices}:\n{error}"
            ) from error
    signatures = {name: _argument_types(cl.Kernel(program, name)) for name in _kernel_names(program)}
    if finish is not None:
        program = _finished(context, program, finish, file)
    if file_kept is not None and not (cache.are_costly(context) and cache_writer.keep_later(context, file, macros)):
        made: Any = program.get_info(cl.program_info.BINARIES)
        cache.store(file_kept, Kept(made[0], signatures))
    return Built(program, signatures)


def keep_given() -> None:
    """Builds the programs that this process was given (cache_writer.py), each of which is kept then."""
    if hasattr(os, "nice"):
        os.nice(19)
    place, programs = cache_writer.given()
    context = cl.Context([cache_writer.device_at(place)])
    with cache_writer.at_once():
        for file, macros in programs:
            with suppress(KernelBuildError):
                build(context, file, macros)


def _compiled(context: cl.Context, file: str, text: str, options: list[str]) -> cl.Program:
    """The program, compiled with a shorter header where that is known to serve (kernels/builtins.clh)."""

    def compiled(*more: str) -> cl.Program:
        return cl.Program(context, text).build(options=[*options, *more], cache_dir=False)  # type: ignore[arg-type]

    if not all(_SHORTENED in device.platform.version for device in context.devices):
        return compiled()
    try:
        return compiled(*_SHORTENING)
    except cl.RuntimeError:
        program = compiled()
    warnings.warn(f"{file} is slow to compile: it calls what kernels/builtins.clh does not declare", stacklevel=2)
    return program


def _finished(context: cl.Context, program: cl.Program, finish: Finish, file: str) -> cl.Program:
    """The program that ``finish`` makes of one."""
    made: Any = program.get_info(cl.program_info.BINARIES)
    try:
        return cl.Program(context, context.devices, [finish(binary) for binary in made]).build()
    except (ValueError, cl.Error) as error:
        devices = ", ".join(device.name for device in context.devices)
        raise KernelBuildError(f"{file} as {devices} compiles it cannot be finished: {error}") from error


def _kernel_names(program: cl.Program) -> list[str]:
    # Program.all_kernels() of pyopencl keeps its kernels for good, and so the program.
    return [name for name in str(program.get_info(cl.program_info.KERNEL_NAMES)).split(";") if name]


def _argument_types(kernel: cl.Kernel) -> list[str]:
    return [str(kernel.get_arg_info(index, cl.kernel_arg_info.TYPE_NAME)) for index in range(kernel.num_args)]
