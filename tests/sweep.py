"""Marks most cases of a test as part of the slow sweep, so that an everyday run has one or a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], is_everyday: Callable[[int], bool] = lambda number: number == 0) -> list[Any]:
    """The cases for ``parametrize``: those whose number is an everyday one (the first), and slow ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if is_everyday(n) else pytest.mark.slow)
        for n, case in enumerate(cases)
    ]
