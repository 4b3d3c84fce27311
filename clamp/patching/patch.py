"""Puts the wrappers over netcl, wherever its functions are bound, and takes them off again.

Which functions: those that wrappers say they meet (meets.py), those on the lists, those on no list, and the user's.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import wrapt
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp.bridge import user_wrappers
from clamp.bridge.user_wrappers import is_users
from clamp.casting.policy import CastPolicy, Entry, PolicyTable
from clamp.functions import OWNED
from clamp.patching import collectives, engine, layers, pools, probes  # noqa: F401  (for what they meet)
from clamp.patching.bindings import Bindings
from clamp.patching.meets import REPLACEMENTS, WRAPPERS
from clamp.patching.netcl_names import listen, module_of, netcl_modules, owner_of, when_imported
from clamp.patching.optimizers import Steps
from clamp.patching.recordings import capture, compiled, replay  # noqa: F401  (for what they meet)
from clamp.patching.wrap import (
    Installed,
    Wrapper,
    netcl_wrapper,
    owned_wrapper,
    passes_without_casts,
    user_wrapper,
    writes,
)


@dataclass(frozen=True)
class Registration:
    """A user's function to be cast: ``name`` in ``owner`` (a module or class)."""

    owner: Any
    name: str
    policy: CastPolicy

    @property
    def full_name(self) -> str:
        """``module.name`` or ``module.Class.name``."""
        owner = self.owner
        prefix = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{prefix}.{self.name}"


class Patches:
    """The wrappers of one ``init``, from ``install`` to ``remove``.

    Args:
        policies: which function runs in which precision.
        registrations: the user's functions to cast.
        step: wrapper of every optimizer's ``step``.

    Attributes:
        installed: whether all of it is in place.
    """

    def __init__(self, policies: PolicyTable, registrations: Iterable[Registration], step: Wrapper) -> None:
        self._policies = policies
        self._registrations = list(registrations)
        self._bindings = Bindings()
        self._steps = Steps(self._bindings, step)
        self.wrap_step, self.wrap_own_step = self._steps.wrap, self._steps.wrap_own
        self.installed = False

    def install(self) -> None:
        """Wraps everything; on an error nothing stays wrapped."""
        try:
            self._wrap_met(sys.modules)
            for optimizer_class in (SGD, Momentum, Adam, AdamW, RMSProp):
                self.wrap_step(optimizer_class)
            for entry in self._policies:
                if entry.module in sys.modules:
                    self._wrap_entry(entry)
            self._wrap_unlisted(list(sys.modules.values()))
            for registration in self._registrations:
                if registration.full_name not in self._policies:
                    self._wrap_registered(registration)
            self._bindings.fill_users_wrappers()
            self._bindings.rebind()
            self._replace(sys.modules)
            for name in {*(entry.module for entry in self._policies), *netcl_modules()}:
                if name not in sys.modules:
                    when_imported(name)
            listen(self._module_imported)
            Installed.now = self.installed = True
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restores every name to the identical object it had; what a user replaced meanwhile is left alone.

        A call that was interrupted can be made again.
        """
        self.installed = False
        capture.abandon()
        Installed.now = False
        listen(None)
        self._steps.undo()
        self._bindings.restore()

    def _module_imported(self, module: types.ModuleType) -> None:
        """A module of netcl's, or one named in a list, has just been imported: wrap what is listed of it."""
        self._wrap_met([module.__name__])
        for entry in self._policies:
            if entry.module == module.__name__:
                self._wrap_entry(entry)
        self._wrap_unlisted([module])
        self._bindings.rebind()
        self._replace([module.__name__])

    def _wrap_met(self, modules: Container[str]) -> None:
        for name, wrapper in WRAPPERS.items():
            if module_of(name) in modules:
                self._bindings.wrap(*owner_of(name), wrapper)

    def _replace(self, modules: Container[str]) -> None:
        for name, new in REPLACEMENTS.items():
            if module_of(name) in modules:
                owner, attribute = owner_of(name)
                self._bindings.set(owner, attribute, new(vars(owner)[attribute]) if isinstance(new, type) else new)

    def _wrap_unlisted(self, modules: Iterable[types.ModuleType]) -> None:
        """Functions that no list names, those of a newer netcl: 16-bit tensors among their inputs are widened."""
        none = {id(_function_of(entry)) for entry in self._policies if entry.policy is CastPolicy.NONE}
        for module in modules:
            name = getattr(module, "__name__", "")
            if not name.startswith("netcl.") or f"{name}.*" in self._policies:
                continue
            for function_name, function in _own_functions(module):
                if id(function) in none:
                    continue
                entry = Entry(f"{name}.{function_name}", CastPolicy.FLOAT, "on no list")
                if entry.name in self._policies.calls:
                    continue  # what it hands over to is wrapped, and must see the inputs as they are
                if is_users(function) and user_wrappers.original_in(function) is not None:
                    continue  # a wrapper of the user's: what it calls inside is met
                self._bindings.wrapper_of(function, netcl_wrapper(entry, listed=False), passes=True)

    def _wrap_entry(self, entry: Entry) -> None:
        original = _function_of(entry)
        if original is None or (entry.policy is CastPolicy.NONE and not writes(original)):
            return  # "*", or a function that this release of netcl does not have
        if is_users(original) and entry.name.startswith("netcl.") and entry.policy is not CastPolicy.NONE:
            inside = user_wrappers.original_in(original, entry.function)
            if inside is None:
                user_wrappers.warn_of(original, entry.name)
                self._bindings.wrapper_of(original, netcl_wrapper(entry))
            original = inside or user_wrappers.defined_behind(entry.module, entry.function)
            if original is None:
                return
        wrapper: Wrapper
        passes = False
        if entry.policy is CastPolicy.NONE:
            wrapper = engine.as_it_is
        elif entry.in_place:
            wrapper = engine.in_place
        elif entry.name in OWNED:
            wrapper, passes = owned_wrapper(entry, OWNED[entry.name]), passes_without_casts(entry)
        elif entry.name.startswith("netcl."):
            wrapper, passes = netcl_wrapper(entry), True
        else:
            wrapper = user_wrapper(entry.function, entry.policy)
        self._bindings.wrapper_of(original, wrapper, passes)

    def _wrap_registered(self, registration: Registration) -> None:
        owner, name = registration.owner, registration.name
        wrapper = user_wrapper(name, registration.policy)
        if isinstance(owner, types.ModuleType):
            # Set here, not only by rebind: a module need not be in sys.modules.
            self._bindings.set(owner, name, self._bindings.wrapper_of(getattr(owner, name), wrapper))
        else:
            self._bindings.wrap(*wrapt.resolve_path(owner, name)[:2], wrapper)


def _function_of(entry: Entry) -> Any:
    """The function an entry names, as it stands now; None if it is not there."""
    return getattr(sys.modules.get(entry.module), entry.function, None)


def _own_functions(module: types.ModuleType) -> list[tuple[str, types.FunctionType]]:
    """The public functions that a module itself defines, with their names there."""
    module_name = module.__name__
    return [
        (name, x)
        for name, x in list(vars(module).items())
        if isinstance(x, types.FunctionType) and x.__module__ == module_name and x.__name__[0] != "_"
    ]
