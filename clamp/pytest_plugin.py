"""pytest's fixture ``clamp_golden``, which holds the numbers of a step, to the bit, against those of a file.

In ``conftest.py``::

    pytest_plugins = ["clamp.pytest_plugin"]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import clamp.amp  # noqa: F401  (all that stands over netcl's functions)
from clamp.cli.devices import slug
from clamp.debug.traces import Trace, trace_step


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--clamp-golden``."""
    what = "write what the steps of clamp_golden give, in place of comparing it"
    parser.getgroup("clamp").addoption("--clamp-golden", action="store_true", help=what)


@pytest.fixture
def clamp_golden(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], None]:
    """``clamp_golden(step)`` fails at the first op of a step, forward or backward, that gives other bits than its file
    has.

    The files lie in ``golden/`` beside the test, one for each test and device; ``pytest --clamp-golden`` writes them.
    ``step`` is a function without arguments that does forward and backward. It is run once, as by
    ``amp.debugging.save_trace``: optimizers do not step, and all is put back.
    """
    calls = 0

    def check(step: Callable[[], Any]) -> None:
        nonlocal calls
        calls += 1
        trace = trace_step(step)
        assert trace.device is not None
        name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
        number = f"-{calls}" if calls > 1 else ""
        file = request.path.parent / "golden" / f"{name}{number}.{slug(trace.device)}.json"
        if request.config.getoption("clamp_golden"):
            file.parent.mkdir(exist_ok=True)
            trace.write(file)
        elif not file.exists():
            pytest.fail(f"there is no {file}: write it by pytest --clamp-golden", pytrace=False)
        elif difference := Trace.read(file).first_difference(trace):
            pytest.fail(f"other bits than in {file}: {difference}", pytrace=False)

    return check
