"""Names that are given other objects, and get their own back: in modules, classes, and wrappers of the user's.

netcl's modules bind each other's functions at import (``from netcl.ops.matmul import matmul``), and so do
users' scripts. A function is therefore replaced under every name that any loaded module has for it. Closures,
partials and containers are not searched, but for those of a wrapper that a user has put over one of netcl's functions
(user_wrappers.py). Everything done is recorded and undone in reverse.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Mapping
from typing import Any

import wrapt

from clamp.bridge import user_wrappers
from clamp.bridge.user_wrappers import Place, is_users
from clamp.patching import engine
from clamp.patching.stand_in import StandIn
from clamp.patching.wrap import Wrapper

_MISSING = object()

#: where netcl keeps its differentiable functions
_RECORDED_MODULES = ("netcl.autograd.ops", "netcl.autograd.shape_ops", "netcl.autograd.bf16_ops")


class Bindings:
    """What is bound where while patches are in place."""

    def __init__(self) -> None:
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # id of the original -> (original, wrapper)
        self._unbound: dict[int, Any] = {}  # those that still stand nowhere
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stood there, what we put there
        self._filled: list[tuple[Place, Any]] = []  # inside wrappers of the user's, and what we put there

    def wrapper_of(self, original: Any, wrapper: Wrapper, passes: bool = False) -> Any:
        """The wrapper object of a function; a function with two names keeps the first entry's.

        Args:
            passes: as for `StandIn`.
        """
        if id(original) not in self._wrappers:
            noting = engine.noting_writes(original, wrapper)
            self._wrappers[id(original)] = (original, StandIn(original, noting, passes))
            self._unbound[id(original)] = self._wrappers[id(original)][1]
        return self._wrappers[id(original)][1]

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Wraps a function of a module, under all names that ``rebind`` will find, or a method of a class."""
        _, _, original = wrapt.resolve_path(owner, name)
        if isinstance(owner, types.ModuleType):
            self.wrapper_of(original, wrapper)
        else:
            self.set(owner, name, wrapt.FunctionWrapper(original, wrapper))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets one attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def rebind(self) -> None:
        """Puts the wrappers made since the last time under every name that a loaded module has for their functions.

        The modules that define netcl's recorded functions keep what they imported themselves: whatever reaches
        the inside of one of these functions has passed its wrapper, and need not pay for a second one.
        """
        for module in _modules_with(self._unbound):
            only_own = module.__name__ in _RECORDED_MODULES
            for name, value in list(vars(module).items()):
                replacement = self._unbound.get(id(value))
                if replacement is not None and not (only_own and value.__module__ != module.__name__):
                    self.set(module, name, replacement)
        self._unbound.clear()

    def fill_users_wrappers(self) -> None:
        """Puts clamp's functions into the wrappers of the user's that stand under names of netcl's."""
        ours = {id(wrapper) for _, wrapper in self._wrappers.values()}  # a registered function's stands there already
        for place in user_wrappers.places(_users_in_netcl(but=ours)):
            if id(place.value) in self._wrappers:
                wrapper = self._wrappers[id(place.value)][1]
                self._filled.append((place, wrapper))
                place.put(wrapper)

    def restore(self) -> None:
        """Gives every name the identical object that it had; what a user replaced meanwhile is left alone."""
        for owner, name, original, ours in reversed(self._undo):
            if vars(owner).get(name, _MISSING) is not ours:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()
        for place, ours in reversed(self._filled):
            if place.get() is ours:
                place.put(place.value)
        self._filled.clear()
        # Modules imported since have bound the wrappers themselves.
        originals = {id(wrapper): original for original, wrapper in self._wrappers.values()}
        for module in _modules_with(originals):
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    setattr(module, name, originals[id(value)])
        self._wrappers.clear()
        self._unbound.clear()


def _users_in_netcl(but: Container[int]) -> list[Any]:
    """What stands in netcl's modules and is not netcl's, but for objects of some ids."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "netcl"]
    found = [value for module in modules for value in list(vars(module).values()) if is_users(value)]
    return [value for value in found if id(value) not in but]


def _modules_with(ids: Mapping[int, Any]) -> list[types.ModuleType]:
    """Loaded modules with a name for an object of these ids: not clamp's own, which must keep netcl's originals."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and not name.startswith("clamp.")
        and name != "clamp"
        # A process has a hundred thousand names: no loop of Python's over all of them.
        and not ids.keys().isdisjoint(map(id, list(vars(module).values())))
    ]
