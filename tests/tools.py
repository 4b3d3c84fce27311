"""Programs that some tests need and most machines lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def go_without(reason: str) -> NoReturn:
    """Skips a test whose tools are missing; fails on a machine that shall have them."""
    if os.environ.get("CLAMP_TEST_OFFLINE") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
