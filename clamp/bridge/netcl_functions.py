"""netcl's functions: which are its own, copies of them, and what users have put in their place before AMP.

::

    original = ag.matmul_op

    def counted(*args, **kwargs):
        calls.append("matmul_op")
        return original(*args, **kwargs)

    ag.matmul_op = counted

Such a wrapper needs nothing: what it calls inside is netcl's function, which AMP redirects for whoever holds it. But
that function has to be found, where the wrapper has taken its name.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

_MOST = 10_000  # objects among which a function is looked for

#: the last constant of code that AMP has given to a function, which looks like that function's own
REDIRECTED = "clamp runs something else here"


def is_redirecting(code: types.CodeType) -> bool:
    """Returns whether code was given to a function by AMP."""
    return code.co_consts[-1:] == (REDIRECTED,)


def own_copy(function: FunctionType, scope: dict[str, Any] | None = None) -> FunctionType:
    """A function of its own, with the code that another has now, and that one's global names or others."""
    scope = function.__globals__ if scope is None else scope
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


def is_netcls(function: object) -> bool:
    """Returns whether netcl itself defines a function. (``functools.wraps`` copies module and name, so they do not
    tell.)"""
    return _package(function) == "netcl"


def is_users(x: object) -> bool:
    """Returns whether something that stands under a name of netcl's may be a user's wrapper."""
    if type(x) is FunctionType:  # most are, and AMP asks of hundreds when it begins
        return _package(x) not in ("netcl", "clamp")
    return callable(x) and not inspect.isclass(x) and not isinstance(x, types.BuiltinFunctionType)


def _package(function: object) -> str:
    """The package whose code a plain function is; empty for anything else."""
    if type(function) is not FunctionType:
        return ""
    return _package_of(str(function.__globals__.get("__name__")))


@cache
def _package_of(module: str) -> str:
    return module.partition(".")[0]


def function_of(full_name: str) -> Any:
    """netcl's own function of a full name, which a user's may hide there; None if it is not there, or not found."""
    module, _, name = full_name.rpartition(".")
    stands = getattr(sys.modules[module], name, None) if module in sys.modules else None
    if not is_users(stands):
        return stands
    return held_in(stands, name) or _defined_behind(module, name)


def held_in(wrapper: Any, name: str | None = None) -> Any:
    """The function of netcl's (of that name) that a wrapper, or a wrapper in it, holds; None if it holds none."""
    seen, inside = {id(wrapper)}, [wrapper]
    for x in inside:
        for part in _parts(x):
            if is_netcls(part) and name in (None, part.__name__):
                return part
            if id(part) not in seen and len(seen) < _MOST and _may_hold(part):
                seen.add(id(part))
                inside.append(part)
    return None


def _parts(x: Any) -> Iterator[Any]:
    """Returns what an object refers to; of a function's global names those that it uses."""
    scope = x.__globals__ if isinstance(x, FunctionType) else None
    yield from (part for part in gc.get_referents(x) if part is not scope)
    if scope is not None:
        yield from (scope[name] for name in x.__code__.co_names if name in scope)
    elif isinstance(call := type(x).__call__ if callable(x) else None, FunctionType):
        yield call


def _may_hold(x: Any) -> bool:
    kind = type(x)  # not isinstance: a proxy may answer for something that it would have to import first
    if issubclass(kind, types.ModuleType | type | types.CodeType | types.FrameType):
        return False
    return _package(x) not in ("netcl", "clamp") and kind.__module__.partition(".")[0] not in ("netcl", "clamp")


def _defined_behind(module_name: str, function_name: str) -> Any:
    """netcl's own function behind a name that a user has taken, in the module that defines it; or None."""
    for name, module in list(sys.modules.items()):
        function = vars(module).get(function_name) if name.startswith(module_name) else None
        if is_netcls(function):
            return function
    return None


def warn_of(function: Callable[..., Any], name: str) -> None:
    """Says that a user's function has the place of one of netcl's, and how it runs."""
    whose = getattr(function, "__module__", None) or type(function).__module__
    warnings.warn(
        f"{name} is a function of {whose}, in which clamp finds no call of netcl's: it runs as it is, and its 16-bit "
        f"inputs are widened to float32. To have another precision put it there after amp.init().",
        UserWarning,
        stacklevel=2,
    )
