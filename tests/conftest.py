"""Devices for the tests: every OpenCL device found, or those that CLAMP_TEST_DEVICES names.

A test that takes the fixture ``queue`` runs on each device: in the full sweep every case does, in an everyday run
the cases of a test are dealt out among the devices. Oclgrind simulates a device slowly and
watches every access: only tests marked ``kernel`` run on it, at small sizes (fixture ``sizes``), and a data
race or an invalid access that it reports fails the test.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path

# Oclgrind reads its settings when its library is loaded, at the first platform query.
_OCLGRIND_LOG = Path(tempfile.mkdtemp(prefix="clamp-tests-")) / "oclgrind.log"
os.environ["OCLGRIND_DATA_RACES"] = "1"
os.environ["OCLGRIND_LOG"] = str(_OCLGRIND_LOG)

import numpy as np
import pyopencl as cl
import pytest
from rich.console import Console

import clamp  # noqa: F401  (makes Intel's pip-installed runtime visible)
from clamp import bridge, session
from clamp.opencl import program
from clamp.opencl.device import NoDeviceError, list_devices
from tests.conformance import report
from tests.loop import SWEEP
from tests.poison import poisoned_empty

_SIMULATOR = "oclgrind"
_PLATFORMS = {"Portable Computing Language": "pocl", "Intel(R) OpenCL": "intel", "Oclgrind": _SIMULATOR}


_CONTEXTS: list[cl.Context] = []  # Intel's runtime frees a context that only its queue refers to


def _find_queues() -> dict[str, cl.CommandQueue]:
    queues: dict[str, cl.CommandQueue] = {}
    try:
        devices = list_devices()
    except NoDeviceError:
        return queues
    for device in devices:
        name = _PLATFORMS.get(device.platform.name, device.name.lower().replace(" ", "-"))
        if name not in queues:
            _CONTEXTS.append(cl.Context([device]))
            queues[name] = cl.CommandQueue(_CONTEXTS[-1], device)
    return queues


_QUEUES = _find_queues()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", action="store_true", help="print the worst error of each op of the conformance table")


def pytest_terminal_summary(config: pytest.Config) -> None:
    if config.getoption("--report"):
        report.print_report(Console(width=140))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernel: tests kernels; runs on the Oclgrind simulator as well")
    config.addinivalue_line("markers", "slow: part of the full sweep, which runs where CLAMP_TEST_SLOW is set (CI)")
    wanted = [name for name in os.environ.get("CLAMP_TEST_DEVICES", "").split(",") if name]
    missing = [name for name in wanted if name not in _QUEUES]
    if missing or not _QUEUES:
        raise pytest.UsageError(
            f"CLAMP_TEST_DEVICES asks for {wanted or 'any'}, found {sorted(_QUEUES) or 'none'}; missing: {missing}"
        )
    for name in list(_QUEUES):
        if wanted and name not in wanted:
            del _QUEUES[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_sweep = bool(os.environ.get("CLAMP_TEST_SLOW") or config.option.markexpr)
    # The simulator takes a hundred times as long: its small sizes are in the everyday run, the sweep is not for it.
    dropped = {
        item for item in items if item.get_closest_marker("slow") and (not is_sweep or _device(item) == _SIMULATOR)
    }
    if not (is_sweep or config.option.keyword or any("::" in argument for argument in config.args)):
        dropped |= _dealt_to_others([item for item in items if item not in dropped])
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
    # The longest first; and random loops are several times as fast in a young process, of few objects.
    items.sort(key=lambda item: not (item.get_closest_marker("slow") and item.path.parent.name == "loop"))


def _device(item: pytest.Item) -> str | None:
    return item.callspec.params.get("queue") if hasattr(item, "callspec") else None


def _dealt_to_others(items: list[pytest.Item]) -> set[pytest.Item]:
    """What an everyday run leaves out: the cases of a test are dealt out among the devices, in an order that is
    shuffled, or the first of two dtypes would always meet the first of two devices. A lone case is run on each."""
    tests = defaultdict[str, defaultdict[object, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items:
        if (device := _device(item)) not in (None, _SIMULATOR):
            test, _, case = item.nodeid.partition("[")
            tests[test][tuple(word for word in case.strip("]").split("-") if word != device)].append(item)
    dropped = set()
    for cases in tests.values():
        if len(cases) > 1:
            dealt = list(cases.values())
            random.Random(0).shuffle(dealt)
            dropped |= {item for n, case in enumerate(dealt) for k, item in enumerate(case) if k != n % len(case)}
    return dropped


def pytest_report_header(config: pytest.Config) -> list[str]:
    devices = [
        f"device {name}: {queue.device.name} ({queue.device.platform.version})" for name, queue in _QUEUES.items()
    ]
    return [*devices, f"random loops: seeds {SWEEP[0]} to {SWEEP[-1]} in the sweep (CLAMP_LOOP_SEED)"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "queue" not in metafunc.fixturenames:
        return
    is_kernel_test = metafunc.definition.get_closest_marker("kernel") is not None
    names = [name for name in _QUEUES if is_kernel_test or name != _SIMULATOR]
    metafunc.parametrize("queue", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def queue(request: pytest.FixtureRequest) -> cl.CommandQueue:
    """A command queue of the device under test."""
    return _QUEUES[request.param]


@pytest.fixture
def simulated(queue: cl.CommandQueue) -> bool:
    """Whether the device is the (slow) simulator, so that a test takes its smallest sizes."""
    return queue.device.platform.name == "Oclgrind"


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests of kernels find NaN in memory that nobody has written to."""
    if request.node.get_closest_marker("kernel"):
        monkeypatch.setattr(bridge, "empty", poisoned_empty)


@pytest.fixture(autouse=True)
def no_patches_left() -> object:
    """Takes off what regions without a handle leave installed, so that tests may run in any order and process."""
    yield
    session.forget_patches()


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a test the same random numbers, whichever tests ran before it in its process."""
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


_PROGRAMS = 300  # built ones that are kept from test to test


@pytest.fixture(autouse=True)
def few_programs() -> object:
    """Keeps a process of all tests, which needs thousands of programs, from growing by GBs."""
    yield
    if program.built_programs() > _PROGRAMS:
        for queue in _QUEUES.values():
            queue.finish()
        program.release_programs()


@pytest.fixture(autouse=True)
def no_oclgrind_diagnostics() -> object:
    """Fails a test during which Oclgrind reported anything."""
    before = _OCLGRIND_LOG.stat().st_size if _OCLGRIND_LOG.exists() else 0
    yield
    if _OCLGRIND_LOG.exists() and _OCLGRIND_LOG.stat().st_size > before:
        with _OCLGRIND_LOG.open() as log:
            log.seek(before)
            pytest.fail(f"Oclgrind reports:\n{log.read()[:4000]}")
