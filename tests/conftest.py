"""Devices for the tests: every OpenCL device found, or those that CLAMP_TEST_DEVICES names.

A test that takes the fixture ``queue`` runs on each device: in the full sweep the cases of kernels do; in an everyday
run, and of other tests, the cases are dealt out among the devices. Oclgrind simulates a device slowly and watches every
access: only tests marked ``kernel`` run on it, at small sizes (fixture ``sizes``), and a data race or an invalid access
that it reports fails the test.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

# Oclgrind reads its settings when its library is loaded, at the first platform query.
_OCLGRIND_LOG = Path(tempfile.mkdtemp(prefix="clamp-tests-")) / "oclgrind.log"
os.environ["OCLGRIND_DATA_RACES"] = "1"
os.environ["OCLGRIND_LOCAL_MEM_SIZE"] = str(64 * 1024)  # as every GPU with matrix units has at least
os.environ["OCLGRIND_MAX_WGSIZE"] = "256"  # as GPUs have at least: it simulates idle work-items, too
os.environ["CLAMP_CACHE_LATER"] = "off"  # no process beside each test's that keeps PoCL's programs
# netcl times its products for convolutions of one pixel, and a dozen kernels for others, and builds all of them for it:
# which one a test meets would be chance.
os.environ["NETCL_AUTOTUNE"] = "0"
os.environ["OCLGRIND_LOG"] = str(_OCLGRIND_LOG)
os.environ.pop("PYTEST_ADDOPTS", None)  # of this run, which has read it, and not of those that tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts compiles all of clamp's Python

import numpy as np
import pyopencl as cl
import pytest
from hypothesis.internal.conjecture import providers
from rich.console import Console

import clamp  # noqa: F401  (makes Intel's pip-installed runtime visible)
from clamp import amp, bridge, session
from clamp.bridge import device_memory, objects
from clamp.cli.devices import UnknownDeviceError, choose_device
from clamp.opencl import program
from clamp.opencl.device import NoDeviceError, capabilities, list_devices
from tests.conformance import report
from tests.covering import covering
from tests.launches import forget_prepared_launches
from tests.loop import SWEEP
from tests.networks import Task
from tests.poison import Poison

# Hypothesis would read the source of every module there is, for constants to try: five seconds a process, and what a
# seed gives would depend on which modules have been imported before.
providers._get_local_constants = lambda: providers._local_constants

# What clamp looks for in the variables around a call is not among all tests, which xdist has in one: to go through them
# at each look takes a hundred times as long.
if (xdist := find_spec("xdist")) and xdist.origin:
    objects._OURS = (objects._OURS, str(Path(xdist.origin).parent))  # type: ignore[assignment]

_SIMULATOR = "oclgrind"
_PLATFORMS = {"Portable Computing Language": "pocl", "Intel(R) OpenCL": "intel", "Oclgrind": _SIMULATOR}


# Of cases dealt out, so many are on a device, in the sweep and in an everyday run: PoCL takes five times as long
# to build a kernel as Intel's runtime, without optimisation.
_TURNS = {"intel": (15, 120), "pocl": (1, 1)}
_TURNS_OF_OTHERS = (1, 4)

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
    config.addinivalue_line(
        "markers", "once: tests what is the same on every CPU, a GPU's kernels, say: on that which compiles fastest"
    )
    config.addinivalue_line(
        "markers", "simulated_elsewhere: another test's case shows the simulator the same kernels in an everyday run"
    )
    config.addinivalue_line(
        "markers", "unsimulated: kernels that take too long on the simulator, or show nothing there"
    )
    config.addinivalue_line("markers", "long: takes about a second a case: an everyday run has one of its cases")
    config.addinivalue_line("markers", "slow: part of the full sweep, which runs where CLAMP_TEST_SLOW is set (CI)")
    wanted = [_test_name(name) for name in os.environ.get("CLAMP_TEST_DEVICES", "").split(",") if name]
    missing = [name for name in wanted if name not in _QUEUES]
    if missing or not _QUEUES:
        raise pytest.UsageError(
            f"CLAMP_TEST_DEVICES asks for {wanted or 'any'}, found {sorted(_QUEUES) or 'none'}; missing: {missing}"
        )
    for name in list(_QUEUES):
        if wanted and name not in wanted:
            del _QUEUES[name]


def _test_name(name: str) -> str:
    """The name here of a device that may be called as by ``--device``: "nvidia"."""
    if name in _QUEUES:
        return name
    with suppress(UnknownDeviceError, NoDeviceError):
        device = choose_device(name)
        return next((known for known, queue in _QUEUES.items() if queue.device == device), name)
    return name


def _is_sweep(config: pytest.Config) -> bool:
    return bool(os.environ.get("CLAMP_TEST_SLOW") or config.option.markexpr)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Lets each of xdist's workers begin to import at another place, so that it compiles a part of the tests, which
    with pytest's assertions takes as long as to collect them, and finds what the others have compiled."""
    if collector.path != Path(__file__).parent or not hasattr(collector.config, "workerinput"):
        return
    given = collector.config.workerinput
    root = collector.config.rootpath
    files = sorted(file for folder in collector.config.args for file in (root / folder).rglob("test_*.py"))
    first = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # the collection says what
            import_module(".".join(file.relative_to(root).with_suffix("").parts))


@dataclass(frozen=True, eq=False)
class _Case:
    """Values of a test's parameters, of which pytest has not made a test yet."""

    test: pytest.Item
    call: Any  # pytest's

    @property
    def device(self) -> str | None:
        return self.call.params.get("queue")

    @property
    def values(self) -> dict[str, int]:
        """The parameters, and which objects they are: they need not be hashable."""
        return {name: id(value) for name, value in self.call.params.items()}

    def marked(self, name: str) -> bool:
        return any(mark.name == name for mark in self.call.marks) or self.test.get_closest_marker(name) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = {
        item for item in items if _is_of_other_runs(config, _device(item), item.get_closest_marker("slow") is not None)
    }
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
    # The longest first; what is built optimised comes before what may take that as well as build its own.
    items.sort(key=lambda item: 0 if _trains_for_long(item) else 2 if _is_unoptimised(item) else 1)


def _is_of_other_runs(config: pytest.Config, device: str | None, is_slow: bool) -> bool:
    """The simulator takes a hundred times as long: its small sizes are in the everyday run, the sweep is not for it.
    Where it is the only device, pytest makes one case, of no device, of what does not run on it."""
    return (is_slow and (not _is_sweep(config) or device == _SIMULATOR)) or device not in (None, *_QUEUES)


def _is_random_loop(item: pytest.Item) -> bool:
    return item.path.parent.name == "loop" and item.get_closest_marker("slow") is not None


def _trains_for_long(item: pytest.Item) -> bool:
    """Whether a test trains for long: more than it takes to build its kernels well."""
    return _is_random_loop(item) or (item.path.name == "test_examples.py" and "learns" in item.name)


def _is_unoptimised(item: pytest.Item) -> bool:
    """Whether kernels are built without optimisation for a test, in a third of the time on Intel's runtime: in an
    everyday run for all, in the sweep for permutations of what has been built optimised and for what is asked of
    neither kernels nor drivers, if PoCL optimises there. (PoCL 3.1 saves less by it, and computes a batched product of
    netcl's wrongly.)"""
    if _device(item) != "intel" or len(_QUEUES.keys() - {_SIMULATOR}) == 1:
        return False
    if not _is_sweep(item.config):
        return True
    is_slow = item.get_closest_marker("slow") is not None
    return not _trains_for_long(item) and (is_slow or not (_is_of_kernels(item) or _is_of_drivers(item)))


def _device(item: pytest.Item) -> str | None:
    return item.callspec.params.get("queue") if hasattr(item, "callspec") else None


def _chosen(test: pytest.Item, cases: list[_Case]) -> list[_Case]:
    """Of a test with many parameters, the cases that a run makes: all of them, where tests are asked for by name."""
    made = [case for case in cases if not _is_of_other_runs(test.config, case.device, case.marked("slow"))]
    if not made:
        return cases[:1]  # dropped by pytest_collection_modifyitems: pytest makes a test of none without parameters
    if test.config.option.keyword or any("::" in argument for argument in test.config.args):
        return made
    return sorted(_left_in(made, _is_sweep(test.config)), key=made.index)


def _left_in(cases: list[_Case], is_sweep: bool) -> list[_Case]:
    """Of a test's cases, those in which something meets that does not meet elsewhere.

    In an everyday run each value is met, on some device: each case is run on one. In the sweep any two meet so, but for
    drivers, of which the device is one of the parameters, and for kernels: of these any two meet (any three where
    CLAMP_TEST_SLOW is 3) on the CPU whose driver compiles fastest and on each GPU, and each value is met on the others,
    the simulator among them, which in an everyday run has one case of a test that shows it kernels of its own, unless
    it is the only device there is.
    What is marked ``once`` has its device.
    """
    by_device = defaultdict[str | None, list[_Case]](list)
    for case in cases:
        by_device[case.device].append(case)
    simulated = by_device.pop(_SIMULATOR, [])
    if is_sweep or len(_QUEUES) == 1:
        kept = _covering(simulated, 1)
    else:
        kept = [case for case in simulated[:1] if not case.marked("simulated_elsewhere")]
    if not is_sweep and (one := _one_of_long(by_device)):
        return [*kept, one]
    usual = 2 if is_sweep else 1
    kept += _covering(by_device.pop(None, []), usual)
    chosen = _quickest_cpu_and_gpus()
    rest = [case for some in by_device.values() for case in some]
    if not rest:
        return kept
    if rest[0].marked("once"):
        return kept + _covering([case for case in rest if case.device in chosen], usual)
    if is_sweep and _is_of_drivers(rest[0].test):
        return kept + _covering(rest, 2)
    if is_sweep and rest[0].marked("kernel"):
        strength = 3 if os.environ.get("CLAMP_TEST_SLOW") == "3" else 2
        for device, some in by_device.items():
            kept += _covering(some, strength if device in chosen else 1)
        return kept
    return kept + _dealt_out(rest, _turns(is_sweep), usual)


def _one_of_long(by_device: dict[str | None, list[_Case]]) -> _Case | None:
    """The one case of a test that is marked ``long``, on the device whose driver compiles fastest."""
    for device in (*_quickest_cpu_and_gpus(), *by_device):
        for case in by_device.get(device, [])[:1]:
            return case if case.marked("long") else None
    return None


@cache
def _turns(is_sweep: bool) -> Iterator[str]:
    """The devices of cases dealt out, one after the other, through all tests of a run."""
    each = {name: _turns_of(name)[not is_sweep] for name in _QUEUES if name != _SIMULATOR}
    return cycle(name for name, count in each.items() for _ in range(count))


def _turns_of(name: str) -> tuple[int, int]:
    return _TURNS.get(name, _TURNS_OF_OTHERS)


def _quickest_cpu_and_gpus() -> set[str]:
    """The CPU whose driver compiles fastest, and all devices that are no CPU, but for the simulator."""
    cpus = [name for name, queue in _QUEUES.items() if queue.device.type & cl.device_type.CPU and name != _SIMULATOR]
    return _QUEUES.keys() - {_SIMULATOR, *cpus} | {*sorted(cpus, key=_turns_of)[-1:]}


def _is_of_drivers(item: pytest.Item) -> bool:
    return item.path.parent.name == "opencl"


def _is_of_kernels(item: pytest.Item) -> bool:
    return item.get_closest_marker("kernel") is not None


def _covering(cases: list[_Case], strength: int) -> list[_Case]:
    cases = cases.copy()
    random.Random(0).shuffle(cases)  # or most would be on the first of the devices
    return [cases[number] for number in covering([case.values for case in cases], strength)]


def _dealt_out(cases: list[_Case], turns: Iterator[str], strength: int) -> list[_Case]:
    if _is_of_drivers(cases[0].test):  # what differs from device to device
        return cases
    on_devices = defaultdict[frozenset[tuple[str, int]], dict[str | None, _Case]](dict)
    for case in cases:
        on_devices[frozenset(case.values.items() - {("queue", id(case.device))})][case.device] = case
    on_each = list(on_devices.values())
    chosen = [on_each[number] for number in covering([dict(values) for values in on_devices], strength)]
    random.Random(0).shuffle(chosen)  # or the first of two dtypes would always be on the first of two devices
    return [devices.get(device) or next(iter(devices.values())) for devices, device in zip(chosen, turns, strict=False)]


def pytest_report_header(config: pytest.Config) -> list[str]:
    devices = [
        f"device {name}: {queue.device.name} ({queue.device.platform.version})" for name, queue in _QUEUES.items()
    ]
    return [*devices, f"random loops: seeds {SWEEP[0]} to {SWEEP[-1]} in the sweep (CLAMP_LOOP_SEED)"]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Has pytest make tests of the cases that run: to make one takes as long as to make ten and leave nine out."""
    test = metafunc.definition
    if "queue" in metafunc.fixturenames:
        is_simulated = _is_of_kernels(test) and not test.get_closest_marker("unsimulated")
        names = [name for name in _QUEUES if is_simulated or name != _SIMULATOR]
        metafunc.parametrize("queue", names, indirect=True, scope="session")
    yield
    chosen = _chosen(test, [_Case(test, case) for case in metafunc._calls])
    metafunc._calls = [case.call for case in chosen]


@pytest.fixture(scope="session")
def queue(request: pytest.FixtureRequest) -> cl.CommandQueue:
    """A command queue of the device under test, which has been probed: no test counts what a probe launches."""
    made = _QUEUES[request.param]
    bool(capabilities(made).dot_bf16)
    bool(capabilities(made).amx)
    return made


@pytest.fixture
def simulated(queue: cl.CommandQueue) -> bool:
    """Whether the device is the (slow) simulator, so that a test takes its smallest sizes."""
    return queue.device.platform.name == "Oclgrind"


@pytest.fixture
def amx_queue(request: pytest.FixtureRequest, queue: cl.CommandQueue) -> cl.CommandQueue:
    """The queue of a processor's device that has the matrix unit, or (tests/opencl/test_amx.py) seems to."""
    assert "unit" in request.node.name, "tests of the unit are found by that word"
    if not capabilities(queue).amx:
        pytest.skip("needs a processor with AMX, and its tile registers")
    return queue


_UNOPTIMISED = "-cl-opt-disable"


@pytest.fixture(autouse=True)
def build_options(request: pytest.FixtureRequest) -> None:
    """Compilers take most of the time of all tests: some have theirs build without optimisation."""
    before = os.environ.pop("PYOPENCL_BUILD_OPTIONS", "")
    if _is_unoptimised(request.node):
        os.environ["PYOPENCL_BUILD_OPTIONS"] = _UNOPTIMISED
    if os.environ.get("PYOPENCL_BUILD_OPTIONS", "") != before and _is_sweep(request.config):
        _release_programs()  # a device's programs of the sweep are of both kinds


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets tests of kernels find NaN in memory that nobody has written to; none may write behind a tensor's end."""
    poison = Poison()
    if request.node.get_closest_marker("kernel"):
        monkeypatch.setattr(bridge, "empty", poison.empty)
    yield
    poison.require_nothing_beyond()


@pytest.fixture(autouse=True)
def own_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test prepare its launches itself: in another one the device may have passed for a GPU."""
    forget_prepared_launches(monkeypatch)


@pytest.fixture(autouse=True)
def no_patches_left() -> object:
    """Takes off what regions without a handle leave installed, so that tests may run in any order and process. A lock
    that is held, for which another thread of a later test would wait for ever, fails the test that has left it so."""
    yield
    session.forget_patches()
    held = [
        f"{holder}.{name}" for holder, name, lock in _clamps_locks() if isinstance(lock, _RLOCK) and lock._is_owned()
    ]  # type: ignore[attr-defined]
    assert held == []


_RLOCK = type(threading.RLock())


@cache
def _clamps_locks() -> list[tuple[Any, str, Any]]:
    """What holds a lock of clamp's (a module, a class, an object of a module's), under which name, and the lock."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "clamp"]
    found = [x for module in modules for x in vars(module).values()]
    holders = [*modules, *(x for x in found if isinstance(x, type) or type(x).__module__.startswith("clamp."))]
    return [
        (holder, name, value)
        for holder in {id(x): x for x in holders if hasattr(x, "__dict__")}.values()
        for name, value in vars(holder).items()
        if isinstance(value, _RLOCK | type(threading.Lock()))
    ]


@pytest.fixture
def interrupted_anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is stricter than Python, interrupts between any two bytecodes or lines. One that comes before a lock is
    released leaves it held: the test has locks of its own. One that comes before Python has put an ``except`` behind it
    leaves an exception being handled, which would be the context of what later tests raise: that ends with the test.
    """
    own: dict[int, Any] = {}
    for holder, name, lock in _clamps_locks():
        made = threading.RLock() if isinstance(lock, _RLOCK) else threading.Lock()
        monkeypatch.setattr(holder, name, own.setdefault(id(lock), made))

    def forget() -> None:  # in no generator, which would have handled exceptions of its own
        ctypes.pythonapi.PyErr_SetHandledException(ctypes.py_object(None))
        assert sys.exception() is None

    request.addfinalizer(forget)  # noqa: PT021


@pytest.fixture
def handle() -> Iterator[amp.AmpHandle]:
    with amp.init() as handle:
        yield handle


@pytest.fixture
def queues(queue: cl.CommandQueue) -> list[cl.CommandQueue]:
    """Two queues of the device under test, in one context."""
    return [queue, cl.CommandQueue(queue.context, queue.device)]


@pytest.fixture
def task(queue: cl.CommandQueue) -> Task:
    """A weight whose gradients are known."""
    return Task(queue)


@pytest.fixture
def shut_down() -> object:
    """Ends the handle that a test leaves, and what it has registered."""
    yield
    session.shutdown()
    session.registrations.clear()


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a test the same random numbers, whichever tests ran before it in its process."""
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


@pytest.fixture(scope="module", autouse=True)
def old_objects_stay() -> Iterator[None]:
    """Takes what other modules have left out of what each collection goes through: netcl collects after each step.

    No test looks for it, so that it need not be brought back.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "_count_set_aside", lambda: 0)
        yield


_PROGRAMS = 300  # built ones that are kept from test to test


@pytest.fixture(autouse=True)
def few_programs() -> object:
    """Keeps a process of all tests, which needs thousands of programs, from growing by GBs."""
    yield
    if program.built_programs() > _PROGRAMS:
        _release_programs()


def _release_programs() -> None:
    for queue in _QUEUES.values():
        queue.finish()  # Intel's runtime may be building a launch of what would be gone
    program.release_programs()


@pytest.fixture(scope="session")
def warned_kernels() -> Iterator[list[str]]:
    """What PoCL's compiler, which is clang, has warned of; other compilers write progress into the same log."""
    warned: list[str] = []
    compiled = program._compiled

    def noting(context: cl.Context, file: str, *args: Any) -> cl.Program:
        made = compiled(context, file, *args)
        for device in context.devices:
            if _PLATFORMS.get(device.platform.name) == "pocl":
                log = made.get_build_info(device, cl.program_build_info.LOG)
                warned.extend(f"{file}: {line}" for line in log.splitlines() if "warning:" in line)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_compiled", noting)
        yield warned


@pytest.fixture(autouse=True)
def no_compiler_warnings(warned_kernels: list[str]) -> object:
    """Fails a test in which a kernel of clamp's was compiled with warnings."""
    before = len(warned_kernels)
    yield
    if warned_kernels[before:]:
        pytest.fail("\n".join(warned_kernels[before:]))


@pytest.fixture(autouse=True)
def no_oclgrind_diagnostics() -> object:
    """Fails a test during which Oclgrind reported anything."""
    before = _OCLGRIND_LOG.stat().st_size if _OCLGRIND_LOG.exists() else 0
    yield
    if _OCLGRIND_LOG.exists() and _OCLGRIND_LOG.stat().st_size > before:
        with _OCLGRIND_LOG.open() as log:
            log.seek(before)
            pytest.fail(f"Oclgrind reports:\n{log.read()[:4000]}")


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay is run and compared with its recording: what was run was run or recorded."""
    monkeypatch.setattr("clamp.recordings.replayable.Replayable.is_due", False)
