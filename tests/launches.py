"""Launches that are prepared once, for tests that watch how kernels are asked for."""

from __future__ import annotations

import pytest

from clamp.opencl import program


def forget_prepared_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test this thread knows no prepared launch; what it prepares meanwhile is forgotten then."""
    for prepared in program._prepared:
        monkeypatch.setattr(prepared, "known", {})
