"""What of netcl's each wrapper of clamp's stands over, said above the wrapper.

::

    @meets("netcl.nn.containers.GELU.forward")
    def gelu(wrapped, instance, x): ...

The wrapper gets what it stands over (a method bound to its object), the object or None, and the arguments of the call,
whose names are netcl's. ``patch.py`` installs what is registered here as soon as its module of netcl is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from clamp.patching.wrap import Wrapper

F = TypeVar("F", bound=Callable[..., Any])

#: wrappers of netcl's functions and methods, by full name
WRAPPERS: dict[str, Wrapper] = {}
#: wrappers of methods that any optimizer may have, the user's too, by the method's name
OPTIMIZER_METHODS: dict[str, Wrapper] = {}
#: what stands for something of netcl's, by full name; a class is called with what stood there
REPLACEMENTS: dict[str, Any] = {}
#: called before what is installed goes
BEFORE_REMOVAL: list[Callable[[], None]] = []


def meets(*names: str) -> Callable[[F], F]:
    """Registers a wrapper for functions and methods of netcl's, by full name, while patches are installed."""
    return _registered(WRAPPERS, names)


def meets_in_optimizers(*names: str) -> Callable[[F], F]:
    """Registers a wrapper for methods of every optimizer that AMP gets to know, while patches are installed."""
    return _registered(OPTIMIZER_METHODS, names)


def replaces(name: str) -> Callable[[F], F]:
    """Registers what stands, unwrapped, where netcl has something else or nothing; of a class, its instance does.

    A function that stands for one of netcl's is given netcl's own first: ``f(own, ...)``.
    """

    def register(replacement: F) -> F:
        REPLACEMENTS[name] = replacement
        return replacement

    return register


def before_removal(run: Callable[[], None]) -> Callable[[], None]:
    """Registers what is to end before patches go."""
    BEFORE_REMOVAL.append(run)
    return run


def _registered(wrappers: dict[str, Wrapper], names: tuple[str, ...]) -> Callable[[F], F]:
    def register(function: F) -> F:
        def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return function(wrapped, instance, *args, **kwargs)

        wrappers.update(dict.fromkeys(names, wrapper))
        return function

    return register
