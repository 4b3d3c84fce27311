"""Guards against Ctrl-C: what it must not cut in two, files too, and what has to be as it was wherever it falls.

Python raises KeyboardInterrupt wherever the main thread is: in the first line of a function, after a call. What belongs
together, a step and the note that it was made, is done in ``uninterrupted``. What is changed for a while is one value,
replaced as a whole inside of the ``try`` whose ``finally`` puts it back (``holding``), which is in a ``contextmanager``
of this module's. What may be left of a thread's state all the same, ``from_nothing`` forgets, as ``init`` and
``shutdown`` do.
"""

from __future__ import annotations

# What is beneath signal, which looks every number and handler up in its enumerations.
import _signal  # type: ignore[import-not-found]
import contextlib
import errno
import inspect
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, ParamSpec, TypeVar

State = TypeVar("State", bound=threading.local)
P = ParamSpec("P")
T = TypeVar("T")
_OURS = str(Path(__file__).parent)


#: Ctrl-C, and the signals that a program has a handler for which raises: to save and leave, or where time is up
_SIGNALS = [
    getattr(_signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(_signal, name)
]


#: where paths name what is open already
_DESCRIPTORS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


class uninterrupted:
    """Inside the ``with``, Ctrl-C waits until its end, or until ``pass_on``, as do those of the other ``_SIGNALS`` that
    have a handler in Python; a second one does not. Only the main thread gets any. What waits for the end of a ``with``
    around this one waits for that end, and not for this one's."""

    def __enter__(self) -> uninterrupted:
        self._caught: dict[int, FrameType | None] = {}
        in_main = threading.get_ident() == threading.main_thread().ident
        handlers = {number: _signal.getsignal(number) for number in _SIGNALS} if in_main else {}
        # Not one that waits already: it would take the second one that comes here for its first.
        self._handlers: dict[int, Any] = {
            number: found
            for number, found in handlers.items()
            if callable(found) and not isinstance(getattr(found, "__self__", None), uninterrupted)
        }
        try:
            for number in self._handlers:
                _signal.signal(number, self._wait)
        except BaseException:  # raised by the handler of one that has not begun to wait
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._give_back()
        finally:
            self.pass_on()

    def pass_on(self) -> None:
        """Lets those that wait come."""
        try:
            for number in list(self._caught):
                self._handlers[number](number, self._caught.pop(number))
        finally:  # one that raises is not the last
            if self._caught:
                self.pass_on()

    def _give_back(self) -> None:
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        except BaseException:  # raised by one that does not wait any longer, before the others are back
            self._give_back()
            raise

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number not in self._caught:
            self._caught[number] = frame
            return
        del self._caught[number]
        self._handlers[number](number, frame)


_AGAIN = "this was in a `with` already: make another one for each"


class Managed(Generic[T]):
    """A generator for a ``with``, as contextlib's, which is closed wherever Ctrl-C comes.

    contextlib's ``__exit__`` is Python's, and may be interrupted before its first line. Its frame, which stays as long
    as the exception, in a notebook until the next one, holds the generator, which has not put anything back then. Here
    nobody holds the generator but the ``with``: where that is left, the generator is closed.
    """

    def __init__(self, generator: Iterator[T]) -> None:
        # A `with` asks for both, in this order; from Python 3.14 on in the other one.
        self._to_enter, self._generator = weakref.ref(generator), generator

    class _Enter:
        def __get__(self, managed: Any, kind: type) -> Any:
            if managed is None:  # an ExitStack asks the class
                return lambda managed: next(managed._generator)
            generator = vars(managed).pop("_to_enter", lambda: None)()
            if generator is None:
                raise RuntimeError(_AGAIN)
            return generator.__next__  # in C, where no interrupt comes between its end and the body

    class _Exit:
        def __get__(self, managed: Any, kind: type) -> Any:
            if managed is None:
                return lambda managed, *exception: _leave(lambda: managed._generator, *exception)
            if "_generator" not in vars(managed):
                raise RuntimeError(_AGAIN)
            generator = vars(managed).pop("_generator")
            leave = partial(_leave, weakref.ref(generator))
            vars(leave)["generator"] = generator  # held by what only the `with` holds, and not by the frame of _leave
            return leave

    __enter__, __exit__ = _Enter(), _Exit()


def _leave(generator: Callable[[], Any], kind: type[BaseException] | None, error: Any, trace: Any) -> bool:
    """Ends a generator, as contextlib does. No variable may hold it."""
    if generator() is None:  # the garbage collector ends a cycle in which it is, and closes it itself
        return False
    try:
        if kind is None:
            next(generator())
        else:
            generator().throw(error)
    except StopIteration as stop:
        return kind is not None and stop is not error
    except BaseException as raised:
        if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
            raise
        raised.__traceback__ = trace
    return False


def contextmanager(
    function: Callable[P, Iterator[T]], kind: type[Managed[Any]] = Managed
) -> Callable[P, AbstractContextManager[T]]:
    """As contextlib's: ``Managed``, or what is of that kind, of the function's generators."""

    @wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Any:
        return kind(function(*args, **kwargs))

    return begin


def _meanwhile(begin: Callable[[], T], end: Callable[[], object]) -> AbstractContextManager[T]:
    """Around a ``with``. ``end`` is called twice: an interrupt may be raised right before the first call."""

    def both() -> Iterator[T]:
        try:
            try:
                yield begin()
            finally:
                end()
        finally:
            end()

    return Managed(both())


def undoing() -> AbstractContextManager[ExitStack]:
    """Inside the ``with``, what is pushed on a stack is undone at its end; all of it, wherever Ctrl-C comes."""
    undo = ExitStack()

    def undo_all() -> None:
        with uninterrupted():
            undo.close()

    return _meanwhile(lambda: undo, undo_all)


def holding(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Inside the ``with``, an attribute has another value; after it the one that it has now."""
    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)  # a class binds what stands in it
    return _meanwhile(partial(setattr, owner, name, value), partial(setattr, owner, name, before))


def among(items: dict[object, Any], item: Any) -> AbstractContextManager[None]:
    """Inside the ``with``, a dict has one item more, the last, under a key of its own."""
    key = object()
    return _meanwhile(partial(items.__setitem__, key, item), partial(items.pop, key, None))


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write, which takes the place of the one at a path at the end of the ``with``, as a whole: an error, an
    interrupt or a full disk leave that one as it was. What is no file, ``/dev/stdout`` say, or cannot be replaced, as a
    file that is mounted, is written itself.

    Args:
        mode: ``"w"``, text in UTF-8 whose ends of lines stay as they are, or ``"wb"``.

    Raises:
        OSError: the file cannot be written.
    """
    place = Path(os.path.realpath(path))  # of a link, what it leads to
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    # A descriptor may be of a pipe, which has no name, or of a file that this process goes on to write to.
    is_descriptor = any(name.startswith(_DESCRIPTORS) for name in (os.path.abspath(path), str(place)))
    may_be_replaced = place.is_file() and os.access(place, os.W_OK) and os.access(place.parent, os.W_OK)
    if is_descriptor or (place.exists() and not may_be_replaced):
        with open(path, mode, **text) as file:
            yield file
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(beside, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, beside)
        try:
            os.replace(beside, place)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EPERM):
                raise
            shutil.copyfile(beside, place)  # it is mounted, or another user's in a folder of all
            os.unlink(beside)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.filename in (None, str(beside)):  # a full disk does not say whose
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


class With:
    """A ``with`` of a running function's: whether it was left is asked of the stack, as an interrupt may come between
    its last line and its ``__exit__``, where nothing can catch it."""

    def __init__(self, frame: FrameType) -> None:
        self._frame, self._code, self._at = id(frame), frame.f_code, frame.f_lasti
        self._thread = threading.get_ident()

    @classmethod
    def here(cls, *between: str) -> With | None:
        """The one whose ``__enter__`` is running; None where a generator has it, which need not be on the stack.

        Args:
            between: folders of code that may stand between.
        """
        between, frame = (_OURS, contextlib.__file__, *between), sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_name == "__enter__" or frame.f_code.co_filename.startswith(between)
        ):
            frame = frame.f_back
        return None if frame.f_code.co_flags & inspect.CO_GENERATOR else cls(frame)

    def is_left(self) -> bool:
        """Returns whether it is over: its function has ended, or stands before it."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and not (id(frame) == self._frame and frame.f_code is self._code):
            frame = frame.f_back
        return frame is None or frame.f_lasti <= self._at


_states: list[threading.local] = []
_of_tasks: list[tuple[ContextVar[Any], Any]] = []


class Flag(threading.local):
    """Something that is so in a thread, or not: ``holding(flag, "on", True)``."""

    on = False


def of_threads(state: State) -> State:
    """Lets ``from_nothing`` know of a state that each thread has one of. What a thread knows is declared in the room
    that asks for it, whose own classes are the fields' types, and all of it is listed here, to be forgotten at once."""
    _states.append(state)
    return state


def of_tasks(name: str, value: T) -> ContextVar[T]:
    """A value, this one at first, that each thread has one of, and in a thread each task of asyncio: for what stays
    over an ``await``. A task has what was there where it was made, and so has ``asyncio.to_thread``."""
    state = ContextVar(name, default=value)
    _of_tasks.append((state, value))
    return state


def from_nothing() -> None:
    """This thread's states are as in a new thread."""
    for variable, value in _of_tasks:
        variable.set(value)
    for state in _states:
        vars(state).clear()
        state.__init__()  # type: ignore[misc]  # what threading.local calls in each thread
