"""Built programs on disk, so that a process need not compile what an earlier one has compiled.

A file of ``user_cache`` holds one program: in its first line, as JSON, the binary's size, because drivers end the
process over half a one, and the kernels' signatures, because Intel's runtime forgets them in a program that is loaded
from a binary; and then the binary.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyopencl as cl

from clamp.opencl import user_cache
from clamp.opencl.processor import host_cpu_flags

#: Kernel -> the types of its arguments, by their names in OpenCL C.
Signatures: TypeAlias = dict[str, list[str]]

#: Platforms whose binaries are known to load again, and to compute the same.
_KEPT = ("Intel(R) OpenCL", "Portable Computing Language")
_COSTLY = "Portable Computing Language"

#: What a user tells pyopencl and drivers of how to compile: Intel's CPU runtime for which processor, for one. With a
#: binary for another one it computes at half the speed, or not at all.
_TOLD = (
    "PYOPENCL_BUILD_OPTIONS", "CL_CONFIG_CPU_TARGET_ARCH", "CL_CONFIG_CPU_VECTORIZER_MODE", "POCL_EXTRA_BUILD_FLAGS",
    "POCL_WORK_GROUP_METHOD",
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """A program of one device as it lies on disk."""

    binary: bytes
    signatures: Signatures


def file_of(context: cl.Context, source: str, options: list[str]) -> Path | None:
    """The file of a program, named by all that its binary depends on; None if programs of this context are not kept."""
    if len(context.devices) > 1 or context.devices[0].platform.name not in _KEPT:
        return None
    device = context.devices[0]
    versions = (device.platform.version, device.driver_version, cl.VERSION_TEXT)
    processor = sorted(host_cpu_flags())  # its code may use all of them; a home folder may serve several machines
    told = [os.environ.get(name) for name in _TOLD]
    key = [device.name, device.native_vector_width_float, processor, *versions, options, told, source]
    return user_cache.file_for(key, ".program")


def are_costly(context: cl.Context) -> bool:
    """Whether to ask for the binary of a program takes as long as to compile all its kernels (keeper.py)."""
    return bool(context.devices[0].platform.name == _COSTLY)


def load(file: Path) -> Kept | None:
    """The program that is kept in a file; None if there is none, or the file cannot be trusted."""
    return user_cache.read(file, _meaning)


def _meaning(content: bytes) -> Kept:
    line, _, binary = content.partition(b"\n")
    size, signatures = json.loads(line)
    kept = Kept(binary, signatures)
    if size != len(binary):
        raise ValueError(f"{len(binary)} bytes of a binary of {size}")
    for kernel, types in kept.signatures.items():
        if not isinstance(types, list) or not all(isinstance(x, str) for x in (kernel, *types)):
            raise TypeError(f"{types!r} are no types of arguments")
    return kept


def store(file: Path, kept: Kept) -> None:
    """Keeps a program in a file, if that can be written."""
    line = json.dumps([len(kept.binary), kept.signatures])
    user_cache.write(file, line.encode() + b"\n" + kept.binary)
