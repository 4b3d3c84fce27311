"""Files that one process leaves for the next: built programs, and what was found out of a device.

They lie in ``CLAMP_CACHE_DIR`` (``off``: nothing is kept), else in ``clamp/programs`` in ``XDG_CACHE_HOME`` or
``~/.cache``. What is in them will be run, or believed, so folder and file must belong to the user, and nobody else may
be able to write to them. A file that does not do is ignored and written anew; a folder that cannot be written to is no
error.
"""

from __future__ import annotations

import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path


def file_for(key: object, suffix: str) -> Path | None:
    """The file of what depends on all that is in a key, which is written as JSON; None if nothing is kept."""
    folder = _folder()
    return None if folder is None else folder / f"{sha256(json.dumps(key).encode()).hexdigest()}{suffix}"


def read(file: Path) -> bytes | None:
    """What was kept in a file; None if there is none, or the file cannot be trusted."""
    try:
        with file.open("rb") as opened:
            if not _is_private(os.fstat(opened.fileno())):
                return None
            digest, content = opened.readline().strip(), opened.read()
    except OSError:
        return None
    return content if digest == _digest(file, content) else None


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


def _is_private(status: os.stat_result) -> bool:
    """Whether it belongs to the user and nobody else can write to it; Windows answers by other means than these."""
    return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _digest(file: Path, content: bytes) -> bytes:
    return sha256(file.stem.encode() + content).hexdigest().encode()
