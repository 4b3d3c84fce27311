"""Compares what a pass that is run once more launches with what its recording holds.

What Python read when it was recorded is watched (watch.py), as far as it can be named. This is the net below: now and
then a call is not replayed but run, and what it launches is compared with what the replay would have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pyopencl as cl
from netcl.runtime.capture import CapturedKernelLaunch, KernelCapture

from clamp import bridge
from clamp.bridge import Node, Tensor, address_of
from clamp.recordings.capture import recording_of
from clamp.recordings.code_names import is_library
from clamp.recordings.replay import ReplayPlan
from clamp.recordings.watched_state import is_same


def difference(plan: ReplayPlan, other: KernelCapture, given: Sequence[Tensor], brought: Sequence[Tensor]) -> str:
    """Returns what a pass launches otherwise than its recording, in words; empty if it launches the same.

    Args:
        given: the inputs of a replay now, as many as were recorded.
        brought: the tensors that arrays have become now.
    """
    then, now = _Sides(plan.capture), _Sides(other)
    known = [address_of(x.buffer) for x in (*given, *brought)]
    residents, pairs = plan.dependencies.now, dict[Any, Any]()
    for number, (one, launch, places) in enumerate(zip_longest(then, now, plan.places), start=1):
        if launch is None or one is None:
            which = "ends" if launch is None else f"launches {_name_of(launch)}"
            return f"it {which} after {number - 1} launches, and the recording has {len(plan.capture._launches)}"
        what = _differs(one, launch)
        if what:
            return f"launch {number} is {what}"
        for place, (old, new) in enumerate(zip(one.args, launch.args, strict=True)):
            index, where = places.get(place), address_of(new)
            if index is not None and index < len(known):
                same = where == known[index]
            elif address_of(old) is not None:
                same = _is_same_place(then.place_of(old), now.place_of(new), residents, pairs)
            else:
                same = _alike(old, new)
            if not same:
                shown = " in other memory" if where else f" of {_shown(new)}, where it was recorded with {_shown(old)}"
                return f"launch {number}, {_name_of(launch)}, has argument {place}{shown}"
    return ""


def allocation_of(capture: KernelCapture) -> Callable[[Any], int | None]:
    """Returns a function that says of memory, when a recording has ended, which of its allocations gave it; None of
    others' memory."""
    recording = recording_of(capture)
    assert recording is not None
    last: dict[Any, int] = {where: number for number, (_, where) in enumerate(recording.allocations)}
    return lambda storage: last.get(address_of(storage))


class _Sides:
    """One recording's launches, and at each the names of its memory: which allocation gave it. Others than addresses,
    these are the same whenever the same pass is recorded."""

    def __init__(self, capture: KernelCapture) -> None:
        recording = recording_of(capture)
        assert recording is not None
        self._launches = capture._launches
        self._log = recording.allocations
        self._names: dict[Any, int] = {}

    def __iter__(self) -> Iterator[CapturedKernelLaunch]:
        known = 0
        for number, launch in enumerate(self._launches):
            while known < len(self._log) and self._log[known][0] <= number:
                self._names[self._log[known][1]] = known
                known += 1
            yield launch

    def place_of(self, storage: Any) -> Any:
        where = address_of(storage)
        return self._names.get(where, where)


def _is_same_place(then: Any, now: Any, residents: Collection[Any], pairs: dict[Any, Any]) -> bool:
    """Returns whether memory that is no input's is what a replay would use.

    Args:
        then, now: the numbers of the allocations that gave it, or addresses of what no recording has given.
        residents: addresses of the tensors that the recording knows: it is these or others. What else the pass makes
            past the pool lies elsewhere each time.
        pairs: what of that stood for what so far, both ways.
    """
    if then == now or isinstance(then, int) or isinstance(now, int) or then in residents or now in residents:
        return bool(then == now)
    return pairs.setdefault(("then", then), now) == now and pairs.setdefault(("now", now), then) == then


def _differs(one: CapturedKernelLaunch, other: CapturedKernelLaunch) -> str:
    if _name_of(one) != _name_of(other) or not _is_same_code(one.kernel, other.kernel):
        return f"{_name_of(other)}, where {_name_of(one)} was recorded"
    if len(one.args) != len(other.args):
        return f"{_name_of(other)} with {len(other.args)} arguments, where {len(one.args)} were recorded"
    if one.queue != other.queue:
        return f"{_name_of(other)} on another queue than it was recorded on"
    if one.global_size != other.global_size:
        return f"{_name_of(other)} of size {other.global_size}, where {one.global_size} was recorded"
    if one.local_size != other.local_size:
        return f"{_name_of(other)} in groups of {other.local_size}, where {one.local_size} was recorded"
    return ""


def _is_same_code(one: Any, other: Any) -> bool:
    if not (isinstance(one, cl.Kernel) and isinstance(other, cl.Kernel)):
        return _alike(one, other)
    try:
        return one is other or bool(one.program == other.program)
    except cl.LogicError:  # Intel's runtime: nobody holds the program any more, which the kernel should
        return False


def _name_of(launch: CapturedKernelLaunch) -> str:
    kernel = launch.kernel
    return kernel.function_name if isinstance(kernel, cl.Kernel) else "a decision of the host"


def _shown(x: Any) -> str:
    return f"{x}" if isinstance(x, int | float | np.generic) else f"another {type(x).__name__}"


#: What decides in a value of a kind. A dict's keys are compared where they are names: others may be addresses.
_PARTS: dict[type, Callable[[Any], Any]] = {
    MethodType: lambda x: (x.__func__, x.__self__),
    partial: lambda x: (x.func, x.args, x.keywords),
    dict: lambda x: ([key for key in x if isinstance(key, str)], [*x.values()]),
    Node: lambda x: x.value,
}


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two values that launches or the host's decisions were made with decide the same. What a pass
    makes for itself is another object each time; weights and optimizers are not. What only observes may have seen
    others."""
    kind: Any = type(one)
    if one is other:
        return True
    if kind is not type(other):
        return False
    if kind in (FunctionType, MethodType, partial) and _observes(one):
        return _observes(other)
    if kind is FunctionType:
        return _is_same_function(one, other) and _alike(_cells(one), _cells(other))
    if kind in _PARTS:
        return _alike(_PARTS[kind](one), _PARTS[kind](other))
    if issubclass(kind, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if issubclass(kind, Tensor):
        return not bridge.is_weight(one) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if issubclass(kind, bool | int | float | str | np.generic):
        return is_same(one, other)
    if issubclass(kind, ModuleType | Enum):  # there is one of each
        return False
    if callable(one) and is_library(kind):  # functions of C, classes
        return _named(one) == _named(other) and _alike(*(getattr(x, "__self__", None) for x in (one, other)))
    return not bridge.is_optimizer(one)


def _named(x: Any) -> tuple[str, str]:
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None) or repr(x)
    return str(getattr(x, "__module__", "")), str(name)


def _observes(x: Any) -> bool:
    function = x.func if isinstance(x, partial) else x
    return str(getattr(function, "__module__", "")).startswith("clamp.debug.")


def _is_same_function(one: FunctionType, other: FunctionType) -> bool:
    """Returns whether two functions run the same; those of libraries whose code clamp redirects are others under each
    init."""
    names = [(x.__module__, x.__qualname__) for x in (one, other)]
    return one.__code__ is other.__code__ or (names[0] == names[1] and is_library(one))


def _cells(function: FunctionType) -> list[Any]:
    return [*map(bridge.content_of, function.__closure__ or ()), *(function.__defaults__ or ())]
