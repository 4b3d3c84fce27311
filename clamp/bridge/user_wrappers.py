"""A user's own wrappers over netcl's functions, put there before AMP: a counter, a logger, a timer.

::

    original = ag.matmul_op

    def counted(*args, **kwargs):
        calls.append("matmul_op")
        return original(*args, **kwargs)

    ag.matmul_op = counted

They keep running while AMP is active, and what they call inside is clamp's. A wrapper holds the original where no
search of modules finds it: in a closure, a default, an attribute, a partial, the names of a script that is no module.
Each such place is found here, so that it can be filled with clamp's function and, at the end, with netcl's again.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import wrapt

_DEPTH = 6  # wrappers over wrappers
_PROXIES = (wrapt.ObjectProxy, wrapt.FunctionWrapper)


@dataclass(frozen=True)
class Place:
    """A place inside a wrapper that holds a function of netcl's.

    Attributes:
        value: what stood there when it was found.
        get: what stands there now.
        put: puts something else there.
    """

    value: Any
    get: Callable[[], Any]
    put: Callable[[Any], object]


def is_netcls(function: object) -> bool:
    """Whether netcl itself defines a function. (``functools.wraps`` copies module and name, so they do not tell.)"""
    return _package(function) == "netcl"


def is_users(x: object) -> bool:
    """Whether something that stands under a name of netcl's may be a user's wrapper."""
    kind = type(x)
    if kind is types.FunctionType:  # most are, and AMP asks of thousands when it begins
        return _package(x) not in ("netcl", "clamp")
    return kind not in _NEVER_USERS and callable(x) and not inspect.isclass(x) and kind.__module__ != "typing"


_NEVER_USERS = frozenset({type, str, int, float, bool, dict, list, tuple, types.ModuleType, types.BuiltinFunctionType})


def _package(function: object) -> str:
    """The package whose code a plain function is; empty for anything else."""
    if type(function) is not types.FunctionType:
        return ""
    return str(function.__globals__.get("__name__")).partition(".")[0]


def original_in(wrapper: Any, name: str | None = None) -> Any:
    """The function of netcl's (of that name) that a wrapper holds; None if it holds none."""
    found = (place.value for place in places([wrapper]))
    return next((function for function in found if name in (None, function.__name__)), None)


def defined_behind(module_name: str, function_name: str) -> Any:
    """netcl's own function behind a name that a user has taken, in the module that defines it; or None."""
    for name, module in list(sys.modules.items()):
        function = vars(module).get(function_name) if name.startswith(module_name) else None
        if is_netcls(function):
            return function
    return None


def warn_of(function: Any, name: str) -> None:
    """Says that a user's function has the place of one of netcl's, and how it runs."""
    whose = getattr(function, "__module__", None) or type(function).__module__
    warnings.warn(
        f"{name} is a function of {whose}, in which clamp finds no call of netcl's: it runs as it is, and its 16-bit "
        f"inputs are widened to float32. To have another precision put it there after amp.init().",
        UserWarning,
        stacklevel=2,
    )


def places(wrappers: Iterable[Any]) -> list[Place]:
    """Every place inside wrappers, and inside the wrappers in them, that holds a function of netcl's."""
    found: list[Place] = []
    seen: set[int] = set()
    inside = [(wrapper, 0) for wrapper in wrappers]
    while inside:
        x, depth = inside.pop()
        if id(x) in seen or depth > _DEPTH:
            continue
        seen.add(id(x))
        for place in _direct(x):
            if is_netcls(place.value):
                found.append(place)
            elif is_users(place.value):
                inside.append((place.value, depth + 1))
    return found


def _direct(x: Any) -> Iterator[Place]:
    if issubclass(type(x), _PROXIES):  # forwards every other attribute to what it wraps, its class too
        yield _attribute(x, "__wrapped__")
        if hasattr(x, "_self_wrapper"):
            yield _attribute(x, "_self_wrapper")
    elif isinstance(x, types.FunctionType):
        yield from _of_function(x)
    elif isinstance(x, types.MethodType):
        yield from _of_function(x.__func__)
        yield from _items(getattr(x.__self__, "__dict__", {}))
    elif isinstance(x, functools.partial):
        yield Place(x.func, partial(getattr, x, "func"), partial(_put_partial, x))
    else:
        yield from _items(getattr(x, "__dict__", {}))
        if isinstance(call := type(x).__call__, types.FunctionType):
            yield from _of_function(call)


def _of_function(function: Any) -> Iterator[Place]:
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # an empty one has no contents
            yield _attribute(cell, "cell_contents")
    yield from _items(vars(function))  # functools.wraps leaves __wrapped__ there
    yield from _items(function.__kwdefaults__ or {})
    for index, value in enumerate(function.__defaults__ or ()):
        yield Place(value, partial(_default, function, index), partial(_put_default, function, index))
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield _item(function.__globals__, name)


def _default(function: Any, index: int) -> Any:
    return function.__defaults__[index]


def _put_default(function: Any, index: int, new: Any) -> None:
    defaults = list(function.__defaults__)
    defaults[index] = new
    function.__defaults__ = tuple(defaults)


def _put_partial(holder: Any, new: Any) -> None:
    holder.__setstate__((new, holder.args, holder.keywords, vars(holder)))


def _attribute(owner: Any, name: str) -> Place:
    return Place(getattr(owner, name), partial(getattr, owner, name), partial(setattr, owner, name))


def _items(names: Any) -> Iterator[Place]:
    for name in list(names):
        yield _item(names, name)


def _item(names: Any, name: str) -> Place:
    return Place(names[name], partial(names.get, name), partial(names.__setitem__, name))
