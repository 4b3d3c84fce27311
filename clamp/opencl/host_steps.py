"""The recorder of this thread's launches, if there is one, and what of a step a replay must run on the host.

netcl records launches (``netcl.runtime.capture``), and a replay repeats them with the arguments they had. What a
step decides on the host, whether an optimizer steps, say, is none of a launch's arguments: it is recorded as a host
step, which runs among the launches, in its place, when it is recorded and again in every replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from clamp.interrupts import contextmanager, holding, of_threads

#: Stands in a recorded list where a kernel stands: called with queue, global size, local size and arguments.
Launch = Callable[..., Any]


class Recorder(Protocol):
    """Takes launches and host steps in the order in which they run."""

    def add(self, launch: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
        """Appends a launch that has run just now."""

    def refuse(self, why: str) -> None:
        """A replay could not do what comes next: raises RuntimeError, or ends the recording here, so that the rest of
        what was to be recorded just runs."""

    def host_step(self) -> AbstractContextManager[None]:
        """Around the run of a host step."""

    def position(self) -> int:
        """Returns how many launches and host steps there are so far."""

    def repeat(self, begin: int, end: int) -> None:
        """Runs those from one position to another once more."""


class _Replay(NamedTuple):
    """The replay that is under way; netcl's own, of a bare capture, says nothing of itself.

    Attributes:
        recorded, now, repeat: see ``replaying``.
        undo: what an error in it calls.
    """

    recorded: Sequence[Any]
    now: Sequence[Any]
    repeat: Callable[[int, int], None] | None
    undo: list[Callable[[], Any]]


class _Replays:
    count = 0


class _RecordingState(threading.local):
    recorder: Recorder | None = None
    suspended: bool = False

    def __init__(self) -> None:
        self.replay = _Replay((), (), None, [])


_thread = of_threads(_RecordingState())


def recorder() -> Recorder | None:
    """Returns who records this thread's launches here; None where nobody does."""
    return None if _thread.suspended else _thread.recorder


def set_recorder(recorder: Recorder | None) -> None:
    """Makes ``recorder`` record this thread's launches; None ends it."""
    _thread.recorder = recorder


def unrecorded() -> AbstractContextManager[None]:
    """Inside the ``with``, this thread's launches run without being recorded."""
    return holding(_thread, "suspended", True)


def refuse(what: str, instead: str) -> None:
    """Raises RuntimeError while a recording is on, or ends that: a replay could not do ``what``."""
    recording = recorder()
    if recording is not None:
        recording.refuse(
            f"{what} while launches are being recorded: a replay repeats launches only, and would go on with what "
            f"was there when they were recorded. {instead}"
        )


def host_step(run: Callable[[], Any]) -> Any:
    """Runs ``run()``, and if a recording is on, again at this place of every replay; returns its result now.

    What it launches is not recorded: it is launched anew, with the arguments current at replay.
    """
    recording = recorder()
    if recording is None:
        return run()
    with unrecorded(), recording.host_step():
        result = run()
    recording.add(lambda *_: run(), None, (), None)
    return result


def _over(recording: Recorder | None) -> None:
    """In a replay, no error after this one undoes what has been."""
    if recording is not None and recorder() is recording:
        recording.add(lambda *_: _thread.replay.undo.pop(), None, (), None)


@contextmanager
def undone_by_error(undo: Callable[[], Any]) -> Iterator[None]:
    """Inside the ``with``, an error calls ``undo()`` on its way: here, and in a replay, where a host step raised it."""
    recording = recorder()
    if recording is not None:
        recording.add(lambda *_: _thread.replay.undo.append(undo), None, (), None)
    try:
        yield
    except BaseException:
        undo()
        _over(recording)  # who catches the error goes on
        raise
    _over(recording)


def noting_launches(run: Callable[[], object]) -> list[Callable[[], object]]:
    """Runs ``run()``. Where that is recorded, returns the one call that repeats what it launched: in the replay that is
    under way then, or where it is being recorded."""
    recording = recorder()
    if recording is None:
        run()
        return []
    begin = recording.position()
    run()
    end = recording.position()
    return [lambda: (_thread.replay.repeat or recording.repeat)(begin, end)]


@contextmanager
def replaying(
    recorded: Sequence[Any], now: Sequence[Any], repeat: Callable[[int, int], None] | None = None
) -> Iterator[None]:
    """Around a replay.

    Args:
        recorded, now: tensors that it was recorded with, and those whose memory it uses in place of theirs.
        repeat: runs its launches and host steps from one position to another once more.
    """
    replay = _Replay(recorded, now, repeat, [])
    _Replays.count += 1
    with holding(_thread, "replay", replay):
        try:
            yield
        except BaseException:
            for undo in reversed(replay.undo):
                undo()
            raise


def replays() -> int:
    """Returns how many replays have begun."""
    return _Replays.count


def moved() -> list[tuple[Any, Any]]:
    """In a replay, the tensors that it was recorded with, each with the one whose memory it uses in place of theirs."""
    return list(zip(_thread.replay.recorded, _thread.replay.now, strict=True))


class HostValue:
    """A value on the host that is another one in every replay, while what computes it or with it is being recorded.

    Whoever asks for more than the names in ``known`` is refused; where that ends the recording, the value answers.
    It passes for an object of the value's class.

    Args:
        value: an array, a number.
        what: what it is, for the message.
        known: names of attributes that are the same in every replay.
    """

    def __init__(self, value: Any, what: str, known: frozenset[str] = frozenset()) -> None:
        self.__dict__.update(_now=value, _what=what, _known=known)

    # isinstance asks the value's class, and so does numpy: code that would take another way for what is no number of
    # theirs must be recorded on the way that it takes without us. type(x) still tells (is_host_value).
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._now)

    def __getattr__(self, name: str) -> Any:
        if name not in self._known:
            self._refuse()
        return getattr(self._now, name)

    def _refuse(self) -> None:
        refuse(f"{self._what} was used", "Return it and use it after the recorded part, or compute with it there.")


def _operator(name: str) -> Callable[..., Any]:
    def call(self: HostValue, *args: Any) -> Any:
        self._refuse()
        return getattr(self._now, name)(*map(value_now, args))

    return call


#: What Python and numpy look up on the class of an operand.
_OPERATORS = """
    add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod
    radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor rdivmod iadd isub imul itruediv
    neg pos abs invert round trunc floor ceil lt le eq ne gt ge hash bool int float complex index str repr format
    len iter getitem setitem contains array"""
for _name in _OPERATORS.split():
    setattr(HostValue, f"__{_name}__", _operator(f"__{_name}__"))


def is_host_value(x: Any) -> bool:
    """Returns whether x stands for a value on the host that is another one in every replay."""
    return type(x) is HostValue


def value_now(x: Any) -> Any:
    """Returns the value that a HostValue stands for; anything else is itself."""
    return x._now if type(x) is HostValue else x


def host_value(run: Callable[[], Any], what: str) -> Any:
    """Like ``host_step``, for a number that differs in every replay."""
    if recorder() is None:
        return run()

    def again() -> None:
        result.__dict__["_now"] = run()

    result = HostValue(None, what)
    host_step(again)
    return result


def launch_with(number: int, kernel: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
    """Launches a kernel with ``args``, in which functions stand for what depends on the number."""
    kernel(queue, global_size, local_size, *[arg(number) if callable(arg) else arg for arg in args])


class Drawn:
    """A random number that every replay draws anew.

    Args:
        draw: draws it; called now, and at this place of every replay.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        def again() -> None:
            self.value = draw()

        self.value = 0
        host_step(again)

    def launch(self, kernel: Launch, queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
        """Launches a kernel with ``args``, in which functions stand for what depends on the number: they are called
        with it, now and in every replay."""

        def with_number(queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
            launch_with(self.value, kernel, queue, global_size, local_size, *args)

        recording = recorder()
        with unrecorded():
            with_number(queue, global_size, local_size, *args)
        if recording is not None:
            recording.add(with_number, queue, global_size, local_size, *args)
