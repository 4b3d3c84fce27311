"""The arguments of a call: what in them another call may have another of, and what a recording is for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np

from clamp import bridge, session
from clamp.bridge import Node, Tensor
from clamp.casting.arguments import with_items
from clamp.casting.regions import current_region, process_region
from clamp.opencl.host_steps import HostValue
from clamp.recordings.replay import shared_memory

PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_BY_VALUE = (enum.Enum, type, FunctionType, np.dtype, range)
_ARRAYS_KNOWN = frozenset({"shape", "dtype", "ndim", "size", "nbytes", "itemsize"})

KeyPart: TypeAlias = tuple[str, Hashable]  # where in the arguments, and what a recording depends on there
Key: TypeAlias = tuple[Hashable, tuple[KeyPart, ...]]  # of a call: what is around it, and its arguments


def around() -> tuple[Hashable, ...]:
    """Returns what decides how the ops of a call cast: the region around it, and functions that a user registered."""
    region = current_region()
    how: tuple[Hashable, ...] | None = None
    if region is not None:
        how = (region.enabled, region.dtype, region.allow_banned, region.policies, region.rule)
    return how, id(process_region()), tuple([(id(x.owner), x.name, x.policy) for x in session.registrations])


class Arguments:
    """Those of one call.

    Args:
        name: what messages call its arguments by position.
        of_gradients: whether a recording is for arguments that are trained themselves, and not for others in their
            place, and depends on whether others have a gradient.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, of_gradients: bool) -> None:
        self._of_gradients = of_gradients
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []  # those of leaf nodes too, in their order
        self.passed: list[Node | Tensor] = []  # what each of them was passed as: itself, or its node
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.others: dict[str, Any] = {}  # what else there is, by place
        self.trouble = ""  # why no recording can be for it; empty if one can
        named = sorted(kwargs.items())
        parts = [part for index, x in enumerate(args) for part in self._parts(x, f"{name}[{index}]")]
        parts += [part for key, x in named for part in self._parts(x, key)]
        # What a recording for this call depends on in the arguments.
        self.key = (*parts, ("the memory of arguments", shared_memory(self.tensors)))

    def leaves(self) -> list[Any]:
        """Returns what nested arguments have in the end."""
        return [*leaves_of(self.args), *leaves_of(self.kwargs)]

    def for_recording(self) -> tuple[tuple[Any, ...], dict[str, Any], list[HostValue]]:
        """The arguments with values in place of the arrays, whose content nobody may look at, and these values."""
        values: list[HostValue] = []

        def stand_in(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            values.append(HostValue(x, "The content of an array among the arguments", _ARRAYS_KNOWN))
            return values[-1]

        if not self.arrays:
            return self.args, self.kwargs, values
        named = dict(sorted(self.kwargs.items()))
        return mapped(self.args, stand_in), mapped(named, stand_in), values

    def _parts(self, x: Any, where: str) -> Iterator[KeyPart]:
        if isinstance(x, Node) and isinstance(x.value, Tensor):
            if not bridge.is_leaf(x):
                self.trouble = f"{where} was computed outside by ops that backward would go through. {_GIVE_DATA}"
            yield f"{where}, a node", x.requires_grad
            yield self._tensor(x.value, where, x)
        elif isinstance(x, Tensor):
            yield self._tensor(x, where, x)
        elif isinstance(x, np.ndarray):
            self.arrays.append(x)
            yield where, (x.shape, x.dtype.str)
        elif isinstance(x, list | tuple):
            yield f"the length of {where}", (type(x), len(x))
            for index, item in enumerate(x):
                yield from self._parts(item, f"{where}[{index}]")
        elif isinstance(x, dict):
            items = dict(x).items()  # another thread may add to it meanwhile
            yield f"the keys of {where}", (type(x), tuple(_constant(key) for key, _ in items))
            for key, item in items:
                yield from self._parts(item, f"{where}[{key!r}]")
        else:
            self.others[where] = x
            yield where, _constant(x)

    def _tensor(self, x: Tensor, where: str, passed: Node | Tensor) -> KeyPart:
        if not bridge.on_device(x):
            self.trouble = f"{where} is on netcl's numpy backend, which launches nothing. Put it on an OpenCL device."
        is_trained = bridge.is_trained(x)
        has_gradient = self._of_gradients and not is_trained and x.grad is not None
        # One that is trained gets its own gradient.
        trained: Hashable = _Same(x) if is_trained and self._of_gradients else is_trained
        self.tensors.append(x)
        self.passed.append(passed)
        return where, (tuple(x.shape), x.dtype, x.queue, trained, has_gradient)


_GIVE_DATA = "Compute it inside, or pass its value: Node(value=x.value)."


class _Same:
    """An object, equal to itself alone."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)


def _constant(x: Any) -> Hashable:
    """Tells constants apart: ``1``, ``1.0`` and ``True`` are three, ``0.0`` and ``-0.0`` two, and nan is one. An object
    of a user's class is itself alone: its ``==`` may leave out what the function reads."""
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, slice):
        return slice, *map(_constant, (x.start, x.stop, x.step))
    if isinstance(x, frozenset):
        return frozenset, frozenset(map(_constant, x))
    if isinstance(x, tuple):  # a key of a dict
        return type(x), tuple(map(_constant, x))
    return x if isinstance(x, _BY_VALUE) else _Same(x)


def mapped(x: Any, convert: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with everything else in them converted."""
    if isinstance(x, list | tuple):
        return with_items(x, [mapped(item, convert) for item in x])
    if isinstance(x, dict):
        return {key: mapped(item, convert) for key, item in dict(x).items()}
    return convert(x)


def leaves_of(x: Any) -> Iterator[Any]:
    """Returns what nested lists, tuples and dicts have in the end."""
    if isinstance(x, list | tuple | dict):
        for item in dict(x).values() if isinstance(x, dict) else x:
            yield from leaves_of(item)
    else:
        yield x


def what_differs(last: Key, now: Key) -> str:
    """Returns what tells the keys of two calls apart, for a warning."""
    if last[0] != now[0]:
        return "the region around the call changes"
    changed = [new[0] for old, new in zip(last[1], now[1], strict=False) if old != new]
    return (
        f"{changed[0]} is another object, or has another shape or dtype"
        if changed
        else "there are more or fewer arguments"
    )
