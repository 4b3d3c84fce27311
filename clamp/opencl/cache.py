"""Files that one process leaves for the next: built programs, and what was found out of a device.

They lie in ``CLAMP_CACHE_DIR`` (``off``: nothing is kept), else in ``clamp/programs`` in ``XDG_CACHE_HOME`` or
``~/.cache``. What is in them will be run, or believed, so folder and file must belong to the user, and nobody else may
be able to write to them. A file that does not do, or has something else in it than was looked for, is ignored and
written anew; a folder that cannot be written to is no error.

The file of a program holds, in its first line, as JSON, the binary's size, because drivers end the process over half a
one, and the kernels' signatures, because Intel's runtime forgets them in a program that is loaded from a binary; and
then the binary.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyopencl as cl

from clamp.opencl.processor import host_cpu_flags

T = TypeVar("T")

#: what is in the files, part of their names: raise it when any of them is written otherwise
_FORMAT = 2

#: flags that not every system has: not to follow a link, not to wait for a pipe
_AS_ASKED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

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
    return file_for(key, ".program")


def are_costly(context: cl.Context) -> bool:
    """Returns whether to ask for the binary of a program takes as long as to compile all its kernels
    (cache_writer.py)."""
    return bool(context.devices[0].platform.name == _COSTLY)


def load(file: Path | None) -> Kept | None:
    """The program that is kept in a file; None if there is none, or the file cannot be trusted."""
    return read(file, _meaning)


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
    write(file, line.encode() + b"\n" + kept.binary)


def file_for(key: object, suffix: str) -> Path | None:
    """The file of what depends on all that is in a key, which is written as JSON; None if nothing is kept."""
    folder = _folder()
    return None if folder is None else folder / f"{sha256(json.dumps([_FORMAT, key]).encode()).hexdigest()}{suffix}"


def read(file: Path | None, meaning: Callable[[bytes], T]) -> T | None:
    """Returns what was kept in a file; None if there is none, or the file cannot be trusted or understood.

    Args:
        meaning: makes of the content what it stands for; whatever it raises, the content is none of ours.
    """
    try:
        # Whose it is is asked before it is opened, which may wait (a pipe), and again of what was opened.
        if file is None or not _is_trusted(os.lstat(file)):
            return None
        with open(os.open(file, os.O_RDONLY | _AS_ASKED), "rb") as opened:
            if not _is_trusted(os.fstat(opened.fileno())):
                return None
            digest, content = opened.readline().strip(), opened.read()
    except OSError:
        return None
    if digest != _digest(file, content):
        return None
    try:
        return meaning(content)
    except Exception:
        return None


def write(file: Path | None, content: bytes) -> None:
    """Keeps something in a file, if there is one that can be written."""
    if file is None:
        return
    # Renamed into place, so that a process starting beside this one never reads half a file. Its name is known before
    # it is there, so that Ctrl-C never leaves it.
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        try:
            with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as opened:
                opened.write(_digest(file, content) + b"\n" + content)
            os.replace(temporary, file)
        except BaseException:  # a full disk, Ctrl-C
            with suppress(FileNotFoundError):  # it has been renamed, or is not there yet
                os.unlink(temporary)
            raise
    except OSError:  # a disk that is full or read-only
        pass


def keeps() -> bool:
    """Returns whether a later process finds what this one leaves: tried with a file."""
    file = file_for(["whether it is kept", os.getpid()], ".trial")
    if file is None:
        return False
    write(file, b"")
    is_kept = read(file, bytes) is not None
    with suppress(OSError):
        file.unlink(missing_ok=True)
    return is_kept


def _folder() -> Path | None:
    named = os.environ.get("CLAMP_CACHE_DIR")
    if named == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(named) if named else caches / "clamp" / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(os.stat(folder)) else None
    except (OSError, RuntimeError):  # a home that cannot be written to, or none
        return None


def _is_trusted(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and _is_private(status)


def _is_private(status: os.stat_result) -> bool:
    """Returns whether it belongs to the user and nobody else can write to it; Windows answers by other means than
    these."""
    return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _digest(file: Path, content: bytes) -> bytes:
    return sha256(file.stem.encode() + content).hexdigest().encode()
