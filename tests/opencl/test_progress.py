"""What a terminal shows while kernels are compiled."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
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
    monkeypatch.setattr(progress, "_PAUSE", 3600.0)  # nor do the timers ring
    monkeypatch.setattr(progress, "_EVERY", 3600.0)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    return terminal


@pytest.fixture
def ticking(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    """One that tells again and again, and is still when the test is over."""
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    shown = Progress()
    yield shown
    shown._ended = float("-inf")
    while (ticks := shown._ticks) is not None:
        ticks.join(60)


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


def test_a_file_gets_no_line_that_grows(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal(is_terminal=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=file))
    compile_for(Progress(), clock, 5.0)
    assert file.getvalue() == ""


def test_where_nobody_looks_it_goes_on(clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, shown = Terminal(), Progress()
    closed.isatty = lambda: True  # type: ignore[method-assign]
    closed.close()
    for gone in (None, closed):  # pythonw has no standard error
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=gone))
        compile_for(shown, clock, 5.0)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    compile_for(shown, clock, 1.0)
    assert terminal.getvalue() == lines((3, 11))


class Listened(Terminal):
    """A file that says when the second line has come."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(is_terminal=is_terminal)
        self.has_two = threading.Event()

    def flush(self) -> None:
        if self.getvalue().count("clamp: ") >= 2:
            self.has_two.set()


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("what", ["compiling", "measuring"])
def test_what_takes_long_is_told_of_again_and_again(
    what: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, ticking: Progress
) -> None:
    file, shown = Listened(is_terminal=is_terminal), ticking
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=file))
    with shown.compiling() if what == "compiling" else shown.busy("measuring"):
        assert file.has_two.wait(60)
    said = {
        "compiling": "clamp: compiling kernels for this device, once: 0 programs, 0 s",
        "measuring": "clamp: measuring, 0 s so far",
    }
    line = f"\r{said[what]}" if is_terminal else f"{said[what]}\n"
    assert file.getvalue().startswith(2 * line)
    shown.end_line()
    assert file.getvalue().endswith("\n")


def test_who_measures_tells_of_what_is_compiled_meanwhile_by_its_own_line(
    monkeypatch: pytest.MonkeyPatch, ticking: Progress
) -> None:
    file = Listened(is_terminal=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=file))
    with ticking.busy("measuring"), ticking.compiling():
        assert file.has_two.wait(60)
    assert set(file.getvalue().splitlines()) == {"clamp: measuring, 0 s so far"}
