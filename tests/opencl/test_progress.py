"""What a terminal shows while kernels are compiled."""

from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace

import pytest

from clamp.opencl import progress
from clamp.opencl.progress import Progress


class Terminal(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    monkeypatch.setattr(progress, "_PAUSE", 3600.0)  # nor does the timer ring
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    return terminal


def compile_for(shown: Progress, clock: Clock, *seconds: float) -> None:
    for each in seconds:
        with shown.compiling():
            clock.now += each


def lines(*counts_and_seconds: tuple[int, int]) -> str:
    said = "\rclamp: compiling kernels for this device, once: {} programs, {} s"
    return "".join(said.format(*each) for each in counts_and_seconds)


def test_a_second_needs_no_word(clock: Clock, terminal: Terminal) -> None:
    compile_for(Progress(), clock, 0.5, 0.49)
    assert terminal.getvalue() == ""


def test_more_is_said_in_one_line_which_grows(clock: Clock, terminal: Terminal) -> None:
    compile_for(shown := Progress(), clock, 0.6, 0.6, 1.0)
    assert terminal.getvalue() == lines((2, 1), (3, 2))
    said = terminal.getvalue().split("\r")[1:]
    assert all(len(first) <= len(second) for first, second in pairwise(said)), "nothing of an earlier line stays"
    shown.end_line()
    shown.end_line()
    assert terminal.getvalue() == lines((2, 1), (3, 2)) + "\n"


def test_what_comes_later_is_another_matter(clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PAUSE", 60.0)
    compile_for(shown := Progress(), clock, 2.0)
    shown.end_line()
    clock.now += 61.0
    compile_for(shown, clock, 0.5)
    assert terminal.getvalue() == lines((1, 2)) + "\n"


def test_the_line_ends_without_a_step(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.01)
    with (shown := Progress()).compiling():
        pass
    assert shown._timer is not None
    shown._timer.join(60)
    assert terminal.getvalue() == lines((1, 0)) + "\n"


def test_a_failed_build_counts_and_raises(clock: Clock, terminal: Terminal) -> None:
    def fail() -> None:
        with Progress().compiling():
            clock.now += 2
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        fail()
    assert terminal.getvalue() == lines((1, 2))


def test_nothing_is_written_where_nobody_looks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal(is_terminal=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=file))
    compile_for(Progress(), clock, 5.0)
    assert file.getvalue() == ""
    closed = Terminal()
    closed.isatty = lambda: True  # type: ignore[method-assign]
    closed.close()
    for gone in (None, closed):  # pythonw has no standard error
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=gone))
        compile_for(Progress(), clock, 5.0)
