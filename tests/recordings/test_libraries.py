"""Whose code a recording looks into: the user's, and that of installed packages which are about netcl."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clamp.recordings import code_names
from clamp.recordings.watch import Watch

_STATE = """
RATE = 1.0
held = [object() for _ in range(100)]

def rate():
    return RATE, held
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "beginning", "is_installed", "requires", "is_seen"),
    [
        ("apart", "", True, "", False),
        ("apart_as_well", "import numpy", True, "numpy", False),
        ("script", "", False, "", True),
        ("names_a_module", "from netcl import autograd as ag", True, "", True),
        ("names_a_function", "from netcl.autograd import relu", True, "", True),
        ("names_a_class", "from netcl.optim import SGD", True, "", True),
        ("holds_an_object", "from netcl.autograd import Tape; tape = Tape(); del Tape", True, "", True),
        ("names_clamp", "from clamp import amp", True, "", True),
        ("asks_late", "", True, "netcl>=0.4", True),
        ("asks_clamp_late", "", True, "clamp-amp", True),
    ],
)
@pytest.mark.parametrize("how", ["function", "module"])
def test_what_counts_as_the_users(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, beginning: str, is_installed: bool, requires: str,
    is_seen: bool, how: str,
) -> None:  # fmt: skip
    (place / name).mkdir()
    (place / name / "__init__.py").write_text(_STATE)
    (place / name / "inner.py").write_text(beginning)
    (place / f"{name}-1.0.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (place / f"{name}-1.0.dist-info" / "METADATA").write_text(
        metadata + f"Requires-Dist: {requires}\n" * bool(requires)
    )
    package: Any = importlib.import_module(name)
    importlib.import_module(f"{name}.inner")
    if is_installed:
        monkeypatch.setattr(code_names, "_INSTALLED", (str(place),))
    rate = package.rate

    def by_function() -> Any:
        return rate()

    def by_module() -> Any:
        return package.RATE, package.held

    watch = Watch({"step": by_function if how == "function" else by_module})
    package.RATE = 2.0
    assert watch.holds() is not is_seen
    assert (len(watch._known) > 100) is is_seen
