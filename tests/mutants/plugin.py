"""A plugin of pytest's: writes down which kernels each test launches, and ends a run whose time is over."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest
from coverage import Coverage

from clamp.opencl import program

_SECONDS = float(os.environ.get("CLAMP_MUTANTS_SECONDS", "inf"))  # of processors: the machine may do other things


class Recorder:
    """Of each test that passes: how many seconds it takes, and what is built of which files of kernels."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._test = ""
        self._builds = defaultdict[str, dict[tuple[str, ...], None]](dict)
        self._seconds = defaultdict[str, float](float)
        self._failed = set[str]()
        for name in ("on", "bind"):
            self._watch(name, getattr(program.Kernel, name))

    def _watch(self, name: str, method: Any) -> None:
        def noting(kernel: program.Kernel, queue: cl.CommandQueue, *args: Any, **macros: Any) -> Any:
            defined = dict(macros, ON_CPU=1) if program._is_cpu(queue.device) else macros
            options = (f"-D{macro}={value}" for macro, value in sorted(defined.items()))
            self._builds[self._test][kernel.file, *options] = None
            return method(kernel, queue, *args, **macros)

        setattr(program.Kernel, name, noting)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        if measuring := Coverage.current():
            measuring.switch_context(nodeid.partition("[")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        kept = [test for test in self._seconds if test not in self._failed]
        numbers = {build: number for number, build in enumerate({b: 0 for test in kept for b in self._builds[test]})}
        tests = {test: [round(self._seconds[test], 3), [numbers[b] for b in self._builds[test]]] for test in kept}
        self._file.write_text(json.dumps({"builds": list(numbers), "tests": tests}))


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("CLAMP_MUTANTS_RECORD"):
        config.pluginmanager.register(Recorder(Path(file)))
    elif "CLAMP_MUTANTS_SECONDS" in os.environ:
        most = int(2 * _SECONDS + 60)  # for a mutant that runs for ever
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def pytest_runtest_setup() -> None:
    if time.process_time() > _SECONDS:
        pytest.exit("the time is over", returncode=0)
