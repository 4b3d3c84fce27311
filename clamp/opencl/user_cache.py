"""Files that one process leaves for the next: built programs, and what was found out of a device.

They lie in ``CLAMP_CACHE_DIR`` (``off``: nothing is kept), else in ``clamp/programs`` in ``XDG_CACHE_HOME`` or
``~/.cache``. What is in them will be run, or believed, so folder and file must belong to the user, and nobody else may
be able to write to them. A file that does not do, or has something else in it than was looked for, is ignored and
written anew; a folder that cannot be written to is no error.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: what is in the files, part of their names: raise it when any of them is written otherwise
_FORMAT = 2


def file_for(key: object, suffix: str) -> Path | None:
    """The file of what depends on all that is in a key, which is written as JSON; None if nothing is kept."""
    folder = _folder()
    return None if folder is None else folder / f"{sha256(json.dumps([_FORMAT, key]).encode()).hexdigest()}{suffix}"


def read(file: Path, meaning: Callable[[bytes], T]) -> T | None:
    """What was kept in a file; None if there is none, or the file cannot be trusted or understood.

    Args:
        meaning: makes of the content what it stands for; whatever it raises, the content is none of ours.
    """
    try:
        # Whose it is is asked before it is opened, which may wait (a pipe), and again of what was opened.
        if not _is_trusted(os.lstat(file)):
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


def write(file: Path, content: bytes) -> None:
    """Keeps something in a file, if that can be written."""
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


#: flags that not every system has: not to follow a link, not to wait for a pipe
_AS_ASKED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def _is_trusted(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and _is_private(status)


def _is_private(status: os.stat_result) -> bool:
    """Whether it belongs to the user and nobody else can write to it; Windows answers by other means than these."""
    return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _digest(file: Path, content: bytes) -> bytes:
    return sha256(file.stem.encode() + content).hexdigest().encode()
