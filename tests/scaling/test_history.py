"""The history of steps: a sequence, a table of other programs', scalars of TensorBoard's."""

from __future__ import annotations

import csv
import json
import struct
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from clamp import amp
from clamp.amp import StepReport
from clamp.scaling.step_guard import StepGuards
from clamp.scaling.step_report import History, Reports
from tests.networks import UsersSGD

REPORTS = (
    StepReport(True, "", 65536.0, scale_before=65536.0, step=1, absent=("head.bias",)),
    StepReport(
        False,
        'inf in 3 elements of the gradients of "a", b',
        32768.0,
        scale_before=65536.0,
        step=2,
        infs=3,
        nans=1,
        parameters=("a", "b"),
    ),
    StepReport(True, "", 32768.0, scale_before=32768.0, step=3),
)


@pytest.fixture
def history() -> History:
    return History(REPORTS)


def test_it_is_a_sequence(history: History) -> None:
    assert len(history) == 3
    assert history[-1] is REPORTS[2]
    assert list(history) == list(REPORTS)
    assert list(reversed(history)) == list(reversed(REPORTS))
    assert REPORTS[1] in history
    assert history == list(REPORTS) == history == History(list(REPORTS))
    assert history != REPORTS[:2]
    assert history != 3
    assert not History()
    with pytest.raises(IndexError):
        history[3]


def test_slices_are_histories(history: History, tmp_path: Path) -> None:
    assert history[1:] == REPORTS[1:]
    assert history[::-1] == REPORTS[::-1]
    history[-1:].to_csv(tmp_path / "last.csv")
    assert len((tmp_path / "last.csv").read_text().splitlines()) == 2


def test_it_shows_what_is_added() -> None:
    reports = deque(REPORTS[:1], maxlen=2)
    history = History(reports)
    part = history[:]
    reports.extend(REPORTS[1:])
    assert history == REPORTS[1:]
    assert part == REPORTS[:1]
    assert history[1:] == REPORTS[2:]


def test_a_step_while_it_is_gone_through_raises() -> None:
    reports = deque(REPORTS[:1], maxlen=2)
    reader = iter(History(reports))
    reports.append(next(reader))
    with pytest.raises(RuntimeError, match="mutated"):
        next(reader)


def test_handles_have_one() -> None:
    with amp.init() as handle:
        assert isinstance(handle.history, History)
    assert amp.init(enabled=False).history == []


def test_csv(history: History, tmp_path: Path) -> None:
    history.to_csv(tmp_path / "steps.csv")
    with open(tmp_path / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["stepped"] for row in rows] == ["True", "False", "True"]
    assert [float(row["scale"]) for row in rows] == [65536.0, 32768.0, 32768.0]
    assert rows[1]["reason"] == REPORTS[1].reason
    assert rows[1]["parameters"] == "a b"
    assert rows[0]["absent"] == "head.bias"


def test_json(history: History, tmp_path: Path) -> None:
    history.to_json(tmp_path / "steps.json")
    rows = json.loads((tmp_path / "steps.json").read_text())
    lists = {"parameters", "absent"}
    back = [StepReport(**{name: tuple(x) if name in lists else x for name, x in row.items()}) for row in rows]
    assert history == back
    History().to_json(str(tmp_path / "empty.json"))
    assert json.loads((tmp_path / "empty.json").read_text()) == []


def events(file: Path) -> list[Event]:
    """The events of TensorBoard's file: records of a length, its checksum, the event, its checksum."""
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_tensorboard(history: History, tmp_path: Path) -> None:
    history.to_tensorboard(tmp_path / "runs")
    (file,) = (tmp_path / "runs").iterdir()
    found = {(value.tag, event.step): value.simple_value for event in events(file) for value in event.summary.value}
    assert found == {
        (f"amp/{name}", step): value
        for name, values in {
            "loss_scale": (65536.0, 32768.0, 32768.0),
            "skipped": (0.0, 1.0, 0.0),
            "infs": (0.0, 3.0, 0.0),
            "nans": (0.0, 1.0, 0.0),
        }.items()
        for step, value in enumerate(values, 1)
    }


def test_without_tensorboardx_it_says_what_to_install(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboardX"):
        history.to_tensorboard(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_steps_of_threads_have_a_number_each() -> None:
    """One ends while another's report is being numbered."""
    reports, came = Reports(), threading.Event()

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is other:
                came.set()
            lock.acquire()

        def __exit__(self, *exception: object) -> None:
            lock.release()

    class Repeats(int):
        def __bool__(self) -> bool:
            other.start()
            came.wait()
            return False

    def add() -> None:
        reports.add(REPORTS[1])
        came.set()

    lock, other = threading.RLock(), threading.Thread(target=add)
    reports._lock = Lock()
    reports.add(replace(REPORTS[0], repeats=Repeats()))
    other.join()
    assert [(report.step, report.stepped) for report in reports.history] == [(1, True), (2, False)]


def test_what_is_learnt_late_of_a_step_is_not_told_of_another_threads() -> None:
    reports, guard = Reports(), StepGuards()._guard(UsersSGD([]))
    guard._guards.reports = reports
    guard.last = reports.add(REPORTS[0])
    reports.add(REPORTS[1])
    guard.decided_elsewhere(None, 8.0, 4.0)
    assert [report.scale for report in reports.history] == [4.0, REPORTS[1].scale]
