"""Built programs on disk, so that a process need not compile what an earlier one has compiled.

A file holds one program::

    <key>.program     digest of the key and all that follows
                      the kernels' signatures, JSON: Intel's runtime forgets them in a program loaded from a binary
                      the binary

Its folder is ``CLAMP_CACHE_DIR`` (``off``: nothing is kept), else ``clamp/programs`` in ``XDG_CACHE_HOME`` or
``~/.cache``. A binary is code that will run, so folder and file must belong to the user, and nobody else may be able to
write to them. A file that does not do is ignored and written anew; a folder that cannot be written to is no error.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pyopencl as cl

from clamp.opencl.processor import host_cpu_flags

#: Kernel -> the types of its arguments, by their names in OpenCL C.
Signatures: TypeAlias = dict[str, list[str]]

#: Platforms whose binaries are known to be complete once a program is built. PoCL's are not: it compiles a kernel at
#: its first launch (and has a cache of its own).
_COMPLETE = ("Intel(R) OpenCL",)


@dataclass(frozen=True)
class Kept:
    """A program of one device as it lies on disk."""

    binary: bytes
    signatures: Signatures


def file_of(context: cl.Context, source: str, options: list[str]) -> Path | None:
    """The file of a program, named by all that its binary depends on; None if programs of this context are not kept."""
    folder = _folder()
    if folder is None or len(context.devices) > 1 or context.devices[0].platform.name not in _COMPLETE:
        return None
    device = context.devices[0]
    versions = (device.platform.version, device.driver_version, cl.VERSION_TEXT)
    processor = sorted(host_cpu_flags())  # its code may use all of them; a home folder may serve several machines
    added = os.environ.get("PYOPENCL_BUILD_OPTIONS")  # which pyopencl adds to the options
    key = json.dumps([device.name, device.native_vector_width_float, processor, *versions, options, added, source])
    return folder / f"{sha256(key.encode()).hexdigest()}.program"


def load(file: Path) -> Kept | None:
    """The program that is kept in a file; None if there is none, or the file cannot be trusted."""
    try:
        with file.open("rb") as opened:
            if not _is_private(os.fstat(opened.fileno())):
                return None
            digest, content = opened.readline().strip(), opened.read()
        if digest != _digest(file, content):
            return None
    except OSError:
        return None
    signatures, _, binary = content.partition(b"\n")
    return Kept(binary, json.loads(signatures))


def store(file: Path, kept: Kept) -> None:
    """Keeps a program in a file, if that can be written."""
    content = json.dumps(kept.signatures).encode() + b"\n" + kept.binary
    try:
        # Renamed into place, so that a process starting beside this one never reads half a file.
        number, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with open(number, "wb") as opened:
                opened.write(_digest(file, content) + b"\n" + content)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
    except OSError:  # a disk that is full or read-only
        pass


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


def _is_private(status: os.stat_result) -> bool:
    """Whether it belongs to the user and nobody else can write to it; Windows answers by other means than these."""
    return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _digest(file: Path, content: bytes) -> bytes:
    return sha256(file.stem.encode() + content).hexdigest().encode()
