"""Python programs that tests run as a user does, in a process of their own, or here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyopencl as cl
import pytest

ROOT = Path(__file__).parent.parent


def run_here(queue: cl.CommandQueue, patch: pytest.MonkeyPatch) -> None:
    """Has scripts that this process runs compute on the device under test, and leave it as it was."""
    patch.setattr(cl, "create_some_context", lambda interactive=False: queue.context)
    patch.setattr(sys, "argv", sys.argv)
    patch.setattr(sys, "path", list(sys.path))
    patch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def run_script(queue: cl.CommandQueue, *command: str, folder: Path = ROOT, **environment: str) -> str:
    """Output of a program on the device under test; fails the test if the program fails, or complains at its end.

    Args:
        command: what ``python`` is given.
        folder: where it runs.
        environment: variables beside those of this process.
    """
    platforms = cl.get_platforms()
    platform = platforms.index(queue.device.platform)
    device = platforms[platform].get_devices().index(queue.device)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYOPENCL_CTX": f"{platform}:{device}", "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    is_fine = done.returncode == 0 and "Exception ignored" not in done.stderr
    assert is_fine, f"{done.stdout}\n{done.stderr}"
    return done.stdout
