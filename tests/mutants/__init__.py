"""Do the tests see a fault? Kernels that are written wrong by hand, each beside a problem that shows it."""

from __future__ import annotations

import threading

import pytest

from clamp.opencl import program
from tests import poison
from tests.launches import forget_prepared_launches


def write_wrong(patch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    """Replaces the one piece of a kernel's source that says so. Nothing is known of what was built of the right one."""
    source = program.source
    text = source(file)
    assert text.count(old) == 1, old
    patch.setattr(program, "source", lambda name: text.replace(old, new) if name == file else source(name))
    for held in ("_programs", "_building"):
        patch.setattr(program, held, {})
    patch.setattr(program, "_per_thread", threading.local())
    forget_prepared_launches(patch)
    patch.setattr(poison, "LOOKED_AT", 0)  # it may write beyond a tensor
