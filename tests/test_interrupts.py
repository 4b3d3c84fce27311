"""Ctrl-C at every bytecode of what changes a thread's state for a while: the state is as it was, at once. And files
that are whole, whatever happens while they are written."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clamp import amp, bridge, checkpoint, interrupts
from clamp.casting import regions
from clamp.casting.policy_table import default_table
from clamp.casting.regions import Region, called_in, casting_in, in_own_region, in_region
from clamp.casting.results import RESULTS, Observer, forward_again, untold
from clamp.cli.bench.report import write_json
from clamp.debug.accuracy import Accuracy
from clamp.debug.dry_run import same_start
from clamp.debug.traces import Trace, TracedValue
from clamp.handle import AmpHandle
from clamp.opencl.host_steps import replaying, unrecorded
from clamp.ops.cast import LISTENERS
from clamp.params.delivery import PassGradients, noting_reached, waiting_in
from clamp.params.gradient_marks import noting_held
from clamp.patching.user_functions import CustomBackward, CustomForward
from clamp.report import write_run
from clamp.scaling.loss_scale import NoLossScale
from clamp.scaling.passes import PassScaling
from clamp.scaling.step_guard import steps_withheld
from clamp.scaling.step_report import History, StepReport
from tests.debug.sample import empty_run
from tests.faults import inject
from tests.faults.check import as_python_does
from tests.faults.inject import Events

_REGION = Region(enabled=True, dtype="float16", policies=default_table())
_OFF = Region(enabled=False, dtype="float16", policies=default_table())


def _inside(enter: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def run() -> None:
        with enter():
            pass

    return run


def _fails(run: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        run()


def _nested() -> None:
    with in_region(_REGION), casting_in(None), in_region(_OFF):
        pass


def _draw() -> None:
    with same_start():
        np.random.random()


#: each changes something of this thread, and changes it back
BOUNDARIES: dict[str, Callable[[], Any]] = {
    "an op": lambda: called_in(None, int),
    "an op in float32": lambda: called_in(_REGION.in_float32, int),
    "an op that fails": lambda: _fails(lambda: called_in(None, int, "x")),
    "casts off": _inside(lambda: casting_in(None)),
    "casts as in a region": _inside(lambda: casting_in(_REGION)),
    "a region": _inside(lambda: in_region(_REGION)),
    "a region of a user": _inside(lambda: in_own_region(_REGION)),
    "regions in regions": _nested,
    "autocast": _inside(amp.autocast),
    "a decorated function": lambda: amp.autocast(enabled=False)(lambda: None)(),
    "disable_casts": _inside(lambda: AmpHandle(_REGION, [], NoLossScale).disable_casts()),
    "changed regions": _inside(lambda: regions.changed_regions(lambda region: region)),
    "custom_fwd": lambda: CustomForward(lambda: None, "float32")(),
    "custom_bwd": lambda: CustomBackward(lambda: [])(),
    "unrecorded": _inside(unrecorded),
    "a replay": _inside(lambda: replaying((), ())),
    "steps withheld": _inside(steps_withheld),
    "observers told of no op": _inside(untold),
    "an observer": _inside(lambda: RESULTS.attached(_OBSERVER)),
    "ops counted": _inside(amp.debugging.collect_operator_stats),
    "a run that is only looked at": _draw,
    "observers told in backward": _inside(forward_again),
    "a scaled pass": _inside(lambda: waiting_in(PassGradients([]))),
    "gradients noted": _inside(noting_reached),
    "gradients held": _inside(noting_held),
    "a step by a GradScaler": _inside(lambda: PassScaling.stepped_with(_HANDLE, _SCALING, object())),
    "no tape": _inside(lambda: bridge.on_tape(None)),
}


_OBSERVER: Observer = Observer()
_GUARD = SimpleNamespace(last=None)
_SCALING: Any = SimpleNamespace(guards=SimpleNamespace(of=lambda _: _GUARD, reports=SimpleNamespace(tells=True)))
_HANDLE: Any = SimpleNamespace(guard=lambda _: _GUARD)


def _state() -> dict[str, Any]:
    """All that is known of this thread, and which regions hold."""
    states = enumerate(interrupts._states)
    known = {f"{type(x).__name__} {i}.{name}": value for i, x in states for name, value in _values(x).items()}
    settings = {"tells": _SCALING.guards.reports.tells, "process": regions.process_region(), "change": regions._change}
    settings |= {"observers": RESULTS.observers, "listeners": list(LISTENERS)}
    _, words, *place = np.random.get_state()
    return known | settings | {"drawn": (words.tobytes(), place)}


def _values(state: Any) -> dict[str, Any]:
    names = {name for cls in (type(state), state) for name in vars(cls) if not name.startswith("_")}
    return {name: _content(getattr(state, name)) for name in names if not callable(getattr(state, name))}


def _content(value: Any) -> Any:
    return list(value) if isinstance(value, list | dict) else value


pytestmark = pytest.mark.usefixtures("interrupted_anywhere")


@pytest.mark.parametrize("around", ["nothing", "a region", "an op"])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_state_of_a_thread_is_as_it_was(name: str, around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "_FOLDERS", (*inject._FOLDERS, contextlib.__file__))
    run = BOUNDARIES[name]
    run()
    with {"nothing": untold, "a region": lambda: in_region(_REGION), "an op": lambda: casting_in(None)}[around]():
        before, first = _state(), Events(unit="opcode")
        with as_python_does(), first.counted():  # as of 3.13, code tells from its second traced run on
            first.phase = "here"
            run()
            first.phase = ""
        for number in range(10_000):
            events = Events(("here", number), "opcode")
            try:
                with as_python_does(), events.counted():
                    events.phase = "here"
                    run()
                    events.phase = ""
            except KeyboardInterrupt:
                events.phase = ""
                assert _state() == before, events.where  # while the exception, and its frames with it, is held
            assert _state() == before, events.where
            if events.where is None:
                break
        assert number > 10, "it was interrupted"


@interrupts.contextmanager
def _noting(notes: list[str]) -> Iterator[str]:
    try:
        yield "inside"
    except ValueError as error:
        notes.append(str(error))
    finally:
        notes.append("end")


def test_a_context_manager_is_as_contextlibs() -> None:
    notes: list[str] = []
    with _noting(notes) as got:
        notes.append(got)
    with _noting(notes):
        int("x")
    with ExitStack() as stack:
        notes.append(stack.enter_context(_noting(notes)))
        stack.enter_context(amp.autocast())
        raise ValueError("of a stack")
    with pytest.raises(KeyError) as raised, _noting(notes):
        raise KeyError(3)
    assert raised.value.__context__ is None
    with pytest.raises(StopIteration, match="a loop's"), _noting(notes):
        raise StopIteration("a loop's")
    assert [note[:7] for note in notes] == ["inside", "end", "invalid", "end", "inside", "of a st", "end", "end", "end"]
    used = _noting(notes)
    with used, pytest.raises(RuntimeError, match="make another one"), used:
        pass


@pytest.mark.parametrize("make", [lambda: in_region(_REGION), amp.autocast])
def test_a_with_may_ask_for_its_end_first(make: Callable[[], Any]) -> None:
    """As that of Python 3.14 does; and whoever asks whether it has one changes nothing."""
    before, region = regions.current_region(), make()
    for _ in range(2 if make is amp.autocast else 1):  # which may be used again
        leave = region.__exit__
        region.__enter__()
        assert regions.current_region() is not before
        leave(None, None, None)
        assert regions.current_region() is before
    if make is amp.autocast:
        assert hasattr(region, "__exit__")
        with region:
            assert regions.current_region() is not before
        assert hasattr(region, "__exit__")
        assert regions.current_region() is before


def test_clamp_has_no_context_managers_of_contextlibs() -> None:
    files = Path(interrupts.__file__).parent.rglob("*.py")
    others = [file.name for file in files if re.search(r"contextlib(\.| import .*)\bcontextmanager", file.read_text())]
    assert not others, "from clamp.interrupts import contextmanager"


# ---------------------------------------------------------------------------------------------- signals


@pytest.fixture
def pythons_handler() -> Iterator[Any]:
    """Python's own handler of Ctrl-C: netcl's ends the process at the second one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_what_belongs_together(pythons_handler: Any) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("still here")
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one does not wait")
    assert done[1:] == ["still here"]
    assert raised.value.__context__ is None, "one of two is raised"
    assert signal.getsignal(signal.SIGINT) is pythons_handler


@pytest.mark.parametrize("levels", [2, 4])
@pytest.mark.usefixtures("pythons_handler")
def test_what_is_in_another_waits_for_the_end_of_the_outermost(levels: int) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:  # noqa: PT012
        held = [stack.enter_context(interrupts.uninterrupted()) for _ in range(levels)]
        signal.raise_signal(signal.SIGINT)
        held[-1].pass_on()
        done.append("still here")
        signal.raise_signal(signal.SIGINT)
        done.append("the second one has waited")
    assert done == ["still here"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _TimeIsUpError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM", "SIGUSR1"])
@pytest.mark.usefixtures("pythons_handler")
def test_a_signal_whose_handler_raises_waits_as_well(name: str) -> None:
    def handler(*given: Any) -> None:
        raise _TimeIsUpError

    number = getattr(signal, name)
    before, done = signal.signal(number, handler), []
    try:
        with pytest.raises(_TimeIsUpError), interrupts.uninterrupted():  # noqa: PT012
            signal.raise_signal(number)
            done.append("the rest")
        assert done == ["the rest"]
        with pytest.raises(_TimeIsUpError) as raised, interrupts.uninterrupted():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(number)
        assert isinstance(raised.value.__context__, KeyboardInterrupt), "neither is lost"
        assert signal.getsignal(number) is handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.usefixtures("pythons_handler")
def test_all_handlers_are_back_where_one_raises_before_they_wait_or_do_not(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = interrupts._signal.signal, itertools.count()
    before = own(signal.SIGTERM, lambda *given: None)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def exchange(number: int, handler: Any) -> Any:
        found = own(number, handler)
        if next(calls) == at:
            raise _TimeIsUpError
        return found

    try:
        with monkeypatch.context() as patch:
            patch.setattr(interrupts._signal, "signal", exchange)
            with pytest.raises(_TimeIsUpError), interrupts.uninterrupted():
                pass
        assert next(calls) > at, "it was raised"
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    finally:
        own(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------- files

_LONG = "x" * 100
_TRACE = Trace([TracedValue("matmul_op", "forward", _LONG, "", "", "float32", (1,), "", 0, 0, 0.0, 0.0)])

#: each writes a file of more than _ROOM bytes
WRITERS: dict[str, Callable[[Path], Any]] = {
    "steps.csv": History().to_csv,
    "steps.json": History([StepReport(False, _LONG, 1.0)]).to_json,
    "accuracy.csv": Accuracy((), (), "float16", 8.0, 0.0, 0.0).to_csv,
    "trace.json": _TRACE.write,
    "trace.npz": _TRACE.write,
    "run.json": lambda path: write_run(empty_run(), path),
    "run.npz": lambda path: checkpoint.file.write(path, {}, {"0": np.zeros(100)}),
    "bench.json": lambda path: write_json(path, {"what": _LONG}),
}
_ROOM = 16


class _Full(io.FileIO):
    """A file on a disk that has no more room."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[:_ROOM])
        raise OSError(errno.ENOSPC, "No space left on device")


def _open_on_full_disk(path: Any, mode: str = "r", *_: Any, **how: Any) -> Any:
    raw = io.BufferedWriter(_Full(path, mode.replace("b", "")))
    return raw if "b" in mode else io.TextIOWrapper(raw, **how)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_whose_place_nothing_else_takes_is_written_itself(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mounted, or another user's in a folder of all."""

    def refuse(source: Path, place: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(place))

    file = tmp_path / "mounted"
    file.write_text("before, and longer")
    monkeypatch.setattr(os, "replace", refuse)
    with interrupts.replacing(file) as opened:
        opened.write("after")
    assert file.read_text() == "after"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["file", "."])
def test_a_file_that_may_not_be_replaced_is_written_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It or its folder may not be written to: what root is not told."""
    file, may = tmp_path / "file", os.access
    file.write_text("before")
    number = file.stat().st_ino
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / name and may(path, mode))
    with interrupts.replacing(file) as opened:
        opened.write("after")
    assert (file.read_text(), file.stat().st_ino) == ("after", number)


def test_a_file_is_on_the_disk_before_it_takes_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(f"{os.fstat(number).st_size} bytes"))
    monkeypatch.setattr(os, "replace", lambda *places: (done.append("its place"), replace(*places)))
    with interrupts.replacing(tmp_path / "file") as file:
        file.write("after")
    assert done == ["5 bytes", "its place"]


def test_a_file_that_two_threads_write_is_one_of_both(tmp_path: Path) -> None:
    def write() -> None:
        with interrupts.replacing(tmp_path / "file") as file:
            file.write("another's")

    with interrupts.replacing(tmp_path / "file") as file:
        file.write("this one's, ")
        other = threading.Thread(target=write)
        other.start()
        other.join()
        assert (tmp_path / "file").read_text() == "another's"
        file.write("all of it")
    assert (tmp_path / "file").read_text() == "this one's, all of it"


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_leaves_the_file_that_is_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    WRITERS[name](file)
    before = file.read_bytes()
    assert len(before) > _ROOM
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", _open_on_full_disk)
        patch.setattr(io, "open", _open_on_full_disk)
        with pytest.raises(OSError, match=re.escape(str(file))):
            WRITERS[name](file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_keeps_its_place_and_who_may_read_it(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("before")
    real.chmod(0o604)
    link.symlink_to(real)
    with interrupts.replacing(link) as file:
        file.write("after")
    assert link.is_symlink()
    assert real.read_text() == "after"
    assert stat.S_IMODE(real.stat().st_mode) == 0o604
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with interrupts.replacing(pipe) as file:
            file.write("through it")
        assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
    reader, writer = os.pipe()  # as /dev/stdout is one: a link that leads to no name
    (tmp_path / "output").symlink_to(f"/dev/fd/{writer}")
    try:
        for name in (f"/dev/fd/{writer}", tmp_path / "output"):
            with interrupts.replacing(name) as file:
                file.write("through it")
            assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
        os.close(writer)
    with (tmp_path / "redirected").open("wb", buffering=0) as output:  # as /dev/stdout may be one, of what goes on
        with interrupts.replacing(f"/dev/fd/{output.fileno()}") as file:
            file.write("through it")
        output.seek(0, os.SEEK_END)
        output.write(b", and on")
    assert (tmp_path / "redirected").read_text() == "through it, and on"
    with (
        pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none" / "x"))),
        interrupts.replacing(tmp_path / "none" / "x"),
    ):
        pytest.fail("there is no such folder")
