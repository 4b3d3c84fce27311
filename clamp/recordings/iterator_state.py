"""What random generators and iterators have come to: all that is drawn from them later depends on it."""

from __future__ import annotations

import gc
import io
import itertools
import random
from operator import length_hint
from types import GeneratorType
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = tuple[Any, ...]

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def drawn(generator: Any) -> str:
    """The state of a random generator, told apart from others by its text."""
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    is_old = isinstance(generator, np.random.RandomState)
    return repr(_without_arrays(generator.get_state(legacy=False) if is_old else generator.bit_generator.state))


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
    """What an iterator of Python's own has come to; where that does not show, another place each time."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        return frame.f_lasti, *gc.get_referents(iterator)  # f_locals would stay, and hold what was there
    if isinstance(iterator, itertools.count):
        return (repr(iterator),)
    left = length_hint(iterator, -1)
    if left < 0 and not isinstance(iterator, (GeneratorType, *_LEAN)):
        return (object(),)
    return left, isinstance(iterator, GeneratorType)
