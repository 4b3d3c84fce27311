"""Objects that nobody handed to clamp: models, tensors, optimizers and scalers that a program's variables lead to.

They are looked for where a program keeps them, in the variables of the functions that are running and of the function
that it is asked about, and in the objects there; not among all that the process has.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, ClassVar, TypeVar

import wrapt

T = TypeVar("T")

_MOST = 50_000  # objects that are looked at
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OURS = str(Path(__file__).parents[1])


class Listed:
    """Base of classes that know their instances, without holding them: each all those of classes derived from it."""

    _living: ClassVar[weakref.WeakSet[Any]]
    _lock: ClassVar[Any] = threading.RLock()

    def __init_subclass__(cls) -> None:
        if Listed in cls.__bases__:
            cls._living = weakref.WeakSet()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004  (they are __init__'s)
        made = super().__new__(cls)
        with Listed._lock:
            cls._living.add(made)
        return made


def living(kind: type[T]) -> list[T]:
    """All instances of a class that is ``Listed``."""
    among: weakref.WeakSet[Any] = kind._living  # type: ignore[attr-defined]
    if not among:  # as a rule, of what every zero_grad asks for: a fifth of the time
        return []
    with Listed._lock:
        return [x for x in among if isinstance(x, kind)]


def with_subclasses(*classes: type) -> Iterator[type]:
    """Classes, and all that are derived from them: of `Module`, netcl's and the user's layers and models."""
    stack, seen = [*classes], set[type]()
    while stack:
        cls = stack.pop()
        if cls not in seen:
            seen.add(cls)
            stack += type.__subclasses__(cls)
            yield cls


def in_reach(*roots: Any) -> Iterator[Any]:
    """The objects that some roots lead to, and the variables of the functions that are running here: through
    attributes, containers, closures, and the globals that functions name. Runs no code of theirs.

    They come by how many there are to choose from on the way to each. So what a program keeps under names comes first,
    and what lies among much data last: no amount of data beside a model hides it.
    """
    seen: dict[int, Any] = {}  # held, so that ids stay unique
    waiting = [(1, 0, iter([*roots, *_variables()]))]
    for number in range(1, _MOST):
        if not waiting:
            return
        choices, _, parts = waiting[0]
        x = next(parts, waiting)
        if x is waiting:
            heappop(waiting)
        elif x is not None and not issubclass(type(x), _PLAIN) and id(x) not in seen:
            seen[id(x)] = x
            yield x
            if inner := _parts(x):
                heappush(waiting, (choices * (len(inner) + 1), number, iter(inner)))


def _variables() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    scopes = set[int]()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield from frame.f_locals.values()
            if id(frame.f_globals) not in scopes and _is_users(frame.f_globals.get("__name__", "")):
                scopes.add(id(frame.f_globals))
                yield from list(frame.f_globals.values())
        frame = frame.f_back


def _parts(x: Any) -> Sequence[Any]:
    kind = type(x)
    if issubclass(kind, _CONTAINERS):
        return list(islice(x, _MOST))
    if issubclass(kind, dict):
        return list(islice(x.values(), _MOST))
    if issubclass(kind, MethodType):
        return x.__self__, x.__func__
    if issubclass(kind, partial):
        return x.func, x.args, x.keywords
    if issubclass(kind, FunctionType):
        return _variables_of(x)
    if issubclass(kind, wrapt.ObjectProxy):  # a function under a policy
        return (x.__wrapped__,)
    own = own_attributes(x)
    return list(own.values()) if _is_users(kind.__module__) else (own.get("__wrapped__"),)


def own_attributes(x: Any) -> dict[str, Any]:
    """Returns the dict of an object; an empty one of one without. Runs no code of the object's."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Returns what objects of a class keep attributes in without a dict, by name."""
    slots = (slot for cls in kind.__mro__ for slot in vars(cls).copy().values())
    return {slot.__name__: slot for slot in slots if isinstance(slot, MemberDescriptorType)}


def values_in(x: Any, slots: Mapping[str, MemberDescriptorType]) -> dict[str, Any]:
    """Returns what an object has in slots. No property is asked: some compute what they are asked for."""
    found = {}
    for name, slot in slots.items():
        with suppress(AttributeError):  # not assigned yet
            found[name] = slot.__get__(x)
    return found


def _variables_of(function: FunctionType) -> list[Any]:
    """Returns what a function's code may name: the variables around it, globals, and its defaults."""
    cells = map(content_of, function.__closure__ or ())
    named = _names_in(function.__code__) if _is_users(function.__module__ or "") else ()
    scope = function.__globals__
    return [*cells, *(scope[name] for name in named if name in scope), function.__defaults__, vars(function)]


def content_of(cell: Any) -> Any:
    """Returns what a closure's cell holds; None if nothing has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inside))


@cache
def _is_users(module: str) -> bool:
    """Returns whether a module is none of a library's, but for those whose objects hold a user's: netcl's layers and
    trainers, namespaces."""
    package = module.partition(".")[0]
    if package in ("netcl", "types", "argparse"):
        return True
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(_OURS) and "site-packages" not in file and "dist-packages" not in file
