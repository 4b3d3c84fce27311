"""Wrappers of clamp's, registered by what of netcl's they stand over, and what netcl's names mean.

::

    @meets("netcl.nn.containers.GELU.forward")
    def gelu(wrapped, instance, x): ...

The wrapper gets what it stands over (a method bound to its object), the object or None, and the arguments of the call,
whose names are netcl's. ``patch.py`` installs what is registered here as soon as its module of netcl is loaded.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import netcl
import wrapt

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


def _registered(wrappers: dict[str, Wrapper], names: tuple[str, ...]) -> Callable[[F], F]:
    def register(function: F) -> F:
        def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return function(wrapped, instance, *args, **kwargs)
            except TypeError as error:
                is_of_arguments = error.__traceback__ is None or error.__traceback__.tb_next is None
                if not is_of_arguments or _takes(wrapped, args, kwargs):
                    raise
            return wrapped(*args, **kwargs)  # whose error has the name that was called

        wrappers.update(dict.fromkeys(names, wrapper))
        return function

    return register


def _takes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # one of C has no signature
        pass
    return True


@cache
def netcl_modules() -> tuple[str, ...]:
    """Names of all modules of the installed netcl, loaded or not."""
    folder = Path(netcl.__file__).parent
    paths = (path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py"))
    return tuple(".".join(path.parts).removesuffix(".__init__") for path in paths)


@cache
def module_of(full_name: str) -> str:
    """``package.module`` of ``package.module.function`` or ``package.module.Class.method``."""
    return max((name for name in netcl_modules() if full_name.startswith(f"{name}.")), key=len)


def owner_of(full_name: str) -> tuple[Any, str]:
    """The loaded module or class that has what a full name means, and the last part of the name."""
    module = module_of(full_name)
    # sys.modules: netcl.ops.matmul, the module, is hidden behind netcl.ops.matmul, the function.
    *classes, name = full_name.removeprefix(f"{module}.").split(".")
    owner = sys.modules[module]
    return (wrapt.resolve_path(owner, ".".join(classes))[2] if classes else owner), name


# modules that are imported later

_listener: list[Callable[[types.ModuleType], None]] = []  # at most one: the patches that are in place
_hooked: set[str] = set()


def listen(listener: Callable[[types.ModuleType], None] | None) -> None:
    """Names who hears of modules that are imported from now on; None: nobody."""
    _listener[:] = [] if listener is None else [listener]


def when_imported(module: str) -> None:
    """Meets a module when it is imported. wrapt's hooks cannot be taken off, so there is one for each name."""
    if module not in _hooked:
        _hooked.add(module)
        wrapt.register_post_import_hook(_imported, module)


def _imported(module: types.ModuleType) -> None:
    _hooked.discard(module.__name__)  # wrapt drops a hook that it has called
    for listener in _listener:
        listener(module)
