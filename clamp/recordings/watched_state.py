"""State that is watched on the host: a place where values are kept, whether they are what they were, and what random
generators and iterators have come to, on which all that is drawn from them later depends."""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import itertools
import random
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from mmap import mmap
from operator import is_, length_hint
from types import GeneratorType, MappingProxyType, MethodType
from typing import Any, TypeAlias

import numpy as np

from clamp.bridge import Node, Tensor
from clamp.recordings.code_names import is_library

Values: TypeAlias = tuple[Any, ...]

PLAIN = (bool, int, float, complex, str, bytes, np.generic)


@dataclass(slots=True)
class WatchedPart:
    """One place where values are kept."""

    read: Callable[[], Values]  # the values there now
    label: Callable[[Values, int], str]  # how a user would write the value with this number, among these values
    seen: Values  # the values that were there
    is_library: bool = False  # whether a library's code keeps them for itself: netcl's layers, in their attributes
    is_random: bool = False  # whether it is a generator's state: who draws from it changes it

    def agrees(self) -> bool:
        now, seen = self.read(), self.seen
        return len(now) == len(seen) and (all(map(is_, now, seen)) or all(map(is_same, now, seen)))

    def flags(self) -> list[bool] | None:
        """Value by value, whether it is as it was; None if there are more or fewer."""
        now = self.read()
        return list(map(is_same, now, self.seen)) if len(now) == len(self.seen) else None

    def first_change(self) -> str:
        flags = self.flags()
        if flags is None:
            return self.label((), 0)
        return self.label(self.seen, flags.index(False))

    def follow(self, flags: list[bool] | None) -> Iterator[str]:
        """Takes over the values that agreed before, as ``flags`` says, and do not any more; returns their labels."""
        now, before = self.read(), self.seen
        if flags is not None and len(now) == len(before) == len(flags):
            self.seen = tuple(new if agreed else old for new, old, agreed in zip(now, before, flags, strict=True))
        elif flags is not None and all(flags):
            self.seen = now
        if len(before) != len(self.seen):
            yield self.label((), 0)
        else:
            moved = (index for index, pair in enumerate(zip(self.seen, before, strict=True)) if not is_same(*pair))
            yield from (self.label(before, index) for index in moved)


def is_same(now: Any, seen: Any) -> bool:
    """Returns whether a value is what it was: the same object, or an equal number or text of the same type, nan
    included."""
    if now is seen:
        return True
    if type(now) is not type(seen):
        return False
    if isinstance(now, tuple):
        return len(now) == len(seen) and all(map(is_same, now, seen))
    if isinstance(now, MethodType):  # made anew whenever it is asked for
        return bool(now == seen)
    if not (isinstance(now, PLAIN) and is_library(type(now))):
        return False
    return (bool(now == seen) or now != now) and repr(now) == repr(seen)  # -0.0, nan


def behind(weak: Any) -> Any:
    """What a weak reference leads to, or a weak proxy itself; None when that is gone."""
    if issubclass(type(weak), weakref.ReferenceType):
        return weak()
    try:
        return weak if weak.__class__ else None
    except ReferenceError:
        return None


BUFFERS = (bytearray, memoryview, array, mmap, ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
#: What shows another object's content as its own, and what computes by another: ``np.frompyfunc(f, 1, 1)``.
VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()), np.ufunc, super)


def bytes_of(buffer: Any, most: int) -> Any:
    """The bytes of a buffer, or how many there are if that is more than ``most``; None where it is closed."""
    try:
        with memoryview(buffer) as view:
            return view.tobytes() if view.nbytes <= most else view.nbytes
    except (ValueError, BufferError):
        return None


_DATA = (Tensor, Node, np.ndarray, *PLAIN, type(None))


def objects_among(items: Iterable[Any], most: int) -> list[Any]:
    """Returns the items that are no numbers, texts, arrays or tensors, each once; none if they are more than
    ``most``."""
    content = list(items)
    kinds = {kind for kind in set(map(type, content)) if not issubclass(kind, _DATA)}
    found: dict[int, Any] = {}
    for x in content if kinds else ():
        if type(x) in kinds:
            found[id(x)] = x
            if len(found) > most:
                return []
    return [*found.values()]


CACHED = type(functools.lru_cache(is_same))


# ---------------------------------------------------------------------------------------------- generators, iterators

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def drawn(generator: Any) -> str:
    """The state of a random generator, told apart from others by its text."""
    if isinstance(generator, random.SystemRandom):
        return ""  # it has none, and asks the system each time
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return repr(_without_arrays(generator.get_state(legacy=False)))
    return repr(_without_arrays(getattr(generator, "bit_generator", generator).state))


def _without_arrays(state: Any) -> Any:
    """A state with the bytes of its arrays, whose text is long in the making, and is cut short if they are long."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


#: These stand where what they go through stands; a file's place does not show once it is iterated.
_LEAN = (
    zip, map, filter, enumerate, itertools.islice, itertools.chain, itertools.starmap, itertools.repeat,
    itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.compress, itertools.zip_longest,
    type(iter(int, 1)), io.IOBase,
)  # fmt: skip


def position(iterator: Any) -> Values:
    """Returns what an iterator of Python's own has come to; where that does not show, another place each time."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        return frame.f_lasti, *gc.get_referents(iterator)  # f_locals would stay, and hold what was there
    if isinstance(iterator, itertools.count):
        return (repr(iterator),)
    left = length_hint(iterator, -1)
    if left < 0 and not isinstance(iterator, (GeneratorType, *_LEAN)):
        return (object(),)
    return left, isinstance(iterator, GeneratorType)
