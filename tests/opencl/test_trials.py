"""What a device is trusted with is tried in another process, and remembered."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from subprocess import Popen

import pyopencl as cl
import pytest

from clamp.opencl import cache, trials
from tests.opencl import some_trials

_HERE = "tests.opencl.some_trials"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for verdicts, and none in this process, nor trials that others have begun."""
    monkeypatch.setattr(trials, "_verdicts", {})
    monkeypatch.setattr(trials, "_begun", {})
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Popen[bytes]]:
    """The processes that were started."""
    processes, start = [], trials._started
    monkeypatch.setattr(trials, "_started", lambda *args: processes.append(start(*args)) or processes[-1])
    return processes


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(trials, "_verdicts", {})


def test_whatever_a_trial_does_the_others_have_their_verdicts(queue: cl.CommandQueue) -> None:
    assert trials.verdicts(queue.device, f"{_HERE}:ALL") == {
        "prints": trials.RIGHT,
        "is wrong": "wrong numbers",
        "fails": "RuntimeError: clBuildProgram failed",
        "crashes": "the process that tried it ended with status -6",
        "prints again": trials.RIGHT,
    }


@pytest.mark.once
@pytest.mark.slow
def test_a_trial_that_does_not_end_is_ended(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    found, seconds = {}, 1
    while (len(found) < 2 or found["prints"] != trials.RIGHT) and seconds < 81:  # a slow machine needs more to begin
        seconds *= 3
        monkeypatch.setattr(trials, "_SECONDS", seconds)
        found = trials.verdicts(queue.device, f"{_HERE}:ENDLESS", anew=True)
    assert found == {"prints": trials.RIGHT, "never ends": f"not done after {seconds} s"}


def test_verdicts_are_remembered_and_tried_anew_on_demand(
    queue: cl.CommandQueue, folder: Path, started: list[Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trials.verdicts(queue.device, f"{_HERE}:ONE")
    assert len(list(folder.iterdir())) == 1
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") is first
    _forget(monkeypatch)
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == first == {"prints": trials.RIGHT}
    assert len(started) == 1
    assert trials.verdicts(queue.device, f"{_HERE}:ONE", anew=True) == first
    assert len(started) == 2


def test_other_kernels_are_tried_for_themselves(
    queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("one", "another"):
        monkeypatch.setattr(some_trials.ONE, "key", key)
        _forget(monkeypatch)
        trials.verdicts(queue.device, f"{_HERE}:ONE")
    assert len(list(folder.iterdir())) == 2


OTHER_VERDICTS = (
    b"",
    b"?",
    b"[]",
    b"null",
    b"{}",
    b'{"another": "right"}',
    b'{"prints": 1}',
    b'{"prints": "right", "more": "right"}',
)


def test_verdicts_of_other_trials_are_not_taken(queue: cl.CommandQueue, started: list[Popen[bytes]]) -> None:
    """Whatever has a right check sum; that a file is the user's and whole is test_cache.py's."""
    where = f"{_HERE}:ONE"
    file, _, _ = trials._remembered(queue.device, where)
    for content in OTHER_VERDICTS:
        cache.write(file, content)
        assert trials._remembered(queue.device, where)[2] is None, content
    cache.write(file, b'{"prints": "right"}')
    assert trials.verdicts(queue.device, where) == {"prints": trials.RIGHT}
    assert started == []


def test_without_a_python_to_start_nothing_is_known_nor_remembered(
    queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == {}
    assert not list(folder.iterdir())


def test_nothing_is_kept_where_nothing_shall_be(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAMP_CACHE_DIR", "off")
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == {"prints": trials.RIGHT}


def test_each_trial_has_a_context_of_its_own(queue: cl.CommandQueue) -> None:
    contexts = []
    some = some_trials.Some(*((name, lambda queue: bool(contexts.append(queue.context)) or True) for name in "ab"))
    assert [json.dumps(x) for x in trials.tried_here(queue.device, some, "ab")] == [
        '["a", null]', '["a", "right"]', '["b", null]', '["b", "right"]',
    ]  # fmt: skip
    assert contexts[0] != contexts[1]


def test_trials_that_have_begun_are_asked_for_later(
    queue: cl.CommandQueue, started: list[Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        trials.begin(queue.device, f"{_HERE}:ONE")
    assert os.getpgid(started[0].pid) != os.getpgid(0)  # Ctrl-C is no verdict
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == {"prints": trials.RIGHT}
    _forget(monkeypatch)
    trials.begin(queue.device, f"{_HERE}:ONE")  # remembered
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == {"prints": trials.RIGHT}
    assert [process.returncode for process in started] == [0]


def test_trials_that_others_have_begun_are_begun_anew(queue: cl.CommandQueue, started: list[Popen[bytes]]) -> None:
    """After a fork: two processes that read from one pipe would both miss some."""
    trials.begin(queue.device, f"{_HERE}:ONE")
    trials._leave_all()
    assert trials.verdicts(queue.device, f"{_HERE}:ONE") == {"prints": trials.RIGHT}
    assert len(started) == 2
    assert os.waitpid(started[0].pid, 0)[1] == 0
    started[0].stdout.close()


def test_what_nobody_has_asked_for_ends_with_the_process(queue: cl.CommandQueue, started: list[Popen[bytes]]) -> None:
    trials.begin(queue.device, f"{_HERE}:ENDLESS")
    trials._end_all()
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert not trials._begun
