"""Puts the wrappers over netcl, wherever its functions are bound, and takes them off again.

Which functions: those that wrappers meet (patch_registry.py), those on the lists, those on no list, and the user's.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import bridge
from clamp.bridge.netcl_functions import function_of, held_in, is_netcls, is_users, warn_of
from clamp.casting.policy_table import CastPolicy, Entry, PolicyTable
from clamp.casting.registry import Function
from clamp.functions import OWNED
from clamp.params.optim import Adam8bit, AdamW8bit
from clamp.patching import backward, collectives, netcl_fixes, tensors  # noqa: F401  (for what they meet)
from clamp.patching.optimizers import guarded
from clamp.patching.patch_registry import (
    BEFORE_REMOVAL,
    OPTIMIZER_METHODS,
    REPLACEMENTS,
    WRAPPERS,
    listen,
    module_of,
    netcl_modules,
    owner_of,
    when_imported,
)
from clamp.patching.redirect import Bindings
from clamp.patching.user_functions import Registration
from clamp.patching.wrap import (
    Installed,
    Wrapper,
    in_module,
    netcl_wrapper,
    owned_wrapper,
    passes_without_casts,
    user_wrapper,
    written_places,
)

#: classes of the user's optimizers that step masters
_OF_MASTERS = weakref.WeakSet[type]()


class Patches:
    """The wrappers of one ``init``, from ``install`` to ``remove``.

    Args:
        step: the guard over ``step`` of optimizers; it decides whether an optimizer's own step runs.
        by_module: whether modules have rules, so that their calls are wrapped.
    """

    def __init__(
        self, policies: PolicyTable, registrations: Iterable[Registration], step: Wrapper, *, by_module: bool = False
    ) -> None:
        self._policies = policies
        self._registrations = list(registrations)
        self._by_module = by_module
        self._bindings = Bindings()
        self._guarded = guarded(step)

    def guard_masters(self, optimizers: Iterable[Any]) -> None:
        """Guards optimizers that step masters, and those of their classes under all patches to come."""
        for optimizer in optimizers:
            self.guard(optimizer)
            _OF_MASTERS.add(type(optimizer))

    def guard(self, optimizer: Any) -> None:
        """Puts the guard over an optimizer's ``step``, and over one that stands on it and hides that of its class."""
        self._guard_class(type(optimizer))
        if getattr(optimizer, "__dict__", {}).get("step") is None:
            return
        guarded, reference = self._guarded, weakref.ref(optimizer)

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return guarded(wrapped, reference(), args, kwargs)

        self._bindings.wrap(optimizer, "step", call)

    def _guard_class(self, optimizer_class: type) -> None:
        """Puts the guard over ``step`` of the class that defines it for this optimizer class, and wrappers over others.

        ``zero_grad`` gets to know the gradients of 16-bit parameters, ``state_dict`` the parameters added meanwhile.
        """
        for name, wrapper in {**OPTIMIZER_METHODS, "step": self._guarded}.items():
            owner = next((base for base in optimizer_class.__mro__ if name in vars(base)), None)
            step = None if owner is None else vars(owner)[name]
            if name == "step" and type(step) is FunctionType:  # whatever it is called: schedulers hold it, bound
                self._bindings.redirect(step, wrapper, how="bound", lasts=False)
            elif owner is not None:
                self._bindings.wrap(owner, name, wrapper)

    def install(self) -> None:
        """Wraps everything; on an error nothing stays wrapped."""
        try:
            for optimizer_class in (SGD, Momentum, Adam, AdamW, RMSProp, Adam8bit, AdamW8bit, *_OF_MASTERS):
                self._guard_class(optimizer_class)
            self._wrap_in(sys.modules)
            for one in self._registrations:
                if one.full_name not in self._policies:
                    self._bindings.wrap(one.owner, one.name, _user_wrapper(one.name, one.policy))
            if self._by_module:
                self._wrap_modules()
            self._bindings.show_inside()
            for name in {*(entry.module for entry in self._policies), *netcl_modules()}:
                if name not in sys.modules:
                    when_imported(name)
            listen(lambda module: self._wrap_in({module.__name__: module}))
            Installed.now = True
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Gives functions their code back, and names their objects; what a user replaced meanwhile is left alone.

        A call that was interrupted can be made again.
        """
        for end in BEFORE_REMOVAL:
            end()
        Installed.now = False
        listen(None)
        self._bindings.restore()

    def _wrap_in(self, modules: Mapping[str, types.ModuleType]) -> None:
        """Wraps what modules have that is met, listed, or netcl's and on no list: of those that there are at ``init``,
        and of one that has just been imported."""
        for name, wrapper in WRAPPERS.items():
            if module_of(name) in modules:
                function = function_of(name)  # which a user's may hide
                if type(function) is types.FunctionType:
                    self._bindings.redirect(function, wrapper)
                else:
                    self._bindings.wrap(*owner_of(name), wrapper)
        for entry in self._policies:
            if entry.module in modules:
                self._wrap_entry(entry)
        self._wrap_unlisted(list(modules.values()))
        for name, new in REPLACEMENTS.items():
            if module_of(name) in modules:
                owner, attribute = owner_of(name)
                old = vars(owner).get(attribute)
                if is_netcls(old):
                    self._bindings.redirect(old, new, how="plain")
                else:
                    self._bindings.set(owner, attribute, new(old) if isinstance(new, type) else new)

    def _wrap_modules(self) -> None:
        """The calls of modules: of all classes that define one, and of those that are defined later."""
        for module_class in bridge.with_subclasses(bridge.Module):
            self._wrap_call(module_class)

        def defined(cls: Any, /, **options: Any) -> None:
            super(bridge.Module, cls).__init_subclass__(**options)
            self._wrap_call(cls)

        self._bindings.set(bridge.Module, "__init_subclass__", classmethod(defined))

    def _wrap_call(self, module_class: type) -> None:
        if "__call__" in vars(module_class):
            self._bindings.wrap(module_class, "__call__", in_module)

    def _wrap_unlisted(self, modules: Iterable[types.ModuleType]) -> None:
        """Functions that no list names, those of a newer netcl: 16-bit tensors among their inputs are widened.

        Not so in modules whose every function a list leaves as it is.
        """
        entries = [entry for entry in self._policies if entry.policy is CastPolicy.NONE]
        none, left = {id(_stands(entry)) for entry in entries}, {entry.name for entry in entries}
        for module in modules:
            name = getattr(module, "__name__", "")
            if not name.startswith("netcl.") or f"{name}.*" in left:
                continue
            for function_name, function in list(vars(module).items()):
                if type(function) is not types.FunctionType or function.__module__ != name:
                    continue
                if function.__name__[0] == "_" or function in self._bindings:
                    continue
                full_name = f"{name}.{function_name}"
                if id(function) in none or full_name in self._policies.calls:
                    continue  # what it hands over to is met, and must see the inputs as they are
                if is_users(function) and held_in(function) is not None:
                    continue  # a wrapper of the user's: what it calls inside is met
                self._bindings.redirect(function, _unlisted_wrapper(full_name), passes=True)

    def _wrap_entry(self, entry: Entry) -> None:
        stands, function = _stands(entry), None
        if stands is None or (entry.policy is CastPolicy.NONE and not written_places(stands)):
            return  # "*", or a function that this release of netcl does not have
        owner = sys.modules[entry.module]
        if is_users(stands) and entry.name.startswith("netcl.") and entry.policy is not CastPolicy.NONE:
            function = function_of(entry.name)
            if held_in(stands, entry.function) is None:
                warn_of(stands, entry.name)
                self._bindings.wrap(owner, entry.function, netcl_wrapper(entry))
            if function is None:
                return
        elif stands in self._bindings:
            return  # under another of its names
        ours = OWNED.get(entry.name)
        wrapper, passes = _wrapper_of(entry, ours)
        # By name only clamp's functions take what netcl's lack: netcl itself calls some with more than they take.
        how = "more" if getattr(ours, "__kwdefaults__", None) else ""
        if function is None:
            self._bindings.wrap(owner, entry.function, wrapper, how, passes)
        else:
            self._bindings.redirect(function, wrapper, how, passes)


_user_wrapper = cache(user_wrapper)


@cache
def _wrapper_of(entry: Entry, ours: Function | None) -> tuple[Wrapper, bool]:
    """Returns what a listed function runs, and whether calls pass on where casts are off: as at each ``init``."""
    if entry.policy is CastPolicy.NONE:
        return tensors.as_it_is, False
    if entry.in_place:
        return tensors.in_place, False
    if ours is not None:
        return owned_wrapper(entry, ours), passes_without_casts(entry)
    if entry.name.startswith("netcl."):
        return netcl_wrapper(entry), True
    return _user_wrapper(entry.function, entry.policy), False


@cache
def _unlisted_wrapper(name: str) -> Wrapper:
    return netcl_wrapper(Entry(name, CastPolicy.FLOAT, "on no list"), listed=False)


def _stands(entry: Entry) -> Any:
    """Returns what has the name of an entry now; None if there is nothing."""
    return getattr(sys.modules.get(entry.module), entry.function, None)
