"""Changes of patches in netcl, noted, and undone in reverse: functions redirected, names given other objects."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import wrapt
from netcl.autograd import bf16_ops, ops, shape_ops

from clamp.bridge.netcl_functions import is_netcls, own_copy
from clamp.patching import tensors
from clamp.patching.redirect import Redirected
from clamp.patching.wrap import Wrapper, passes_of

_MISSING = object()

#: The names of netcl's modules of differentiable functions, and those that these functions see while they run under
#: their wrappers. What reaches their inside has passed a wrapper: what they have imported from other modules is netcl's
#: own there, so that nothing is cast twice, and no call pays twice.
_INSIDE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (vars(module), dict(vars(module))) for module in (ops, shape_ops, bf16_ops)
]

#: redirections of netcl's functions, by function and wrapper: both live as long as the process
_made: dict[tuple[FunctionType, Any], Redirected] = {}


class Bindings:
    """Bindings that are in place while patches are."""

    def __init__(self) -> None:
        self._redirected: dict[int, Redirected] = {}  # by id of the function
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stood there, what we put there

    def redirect(
        self, function: FunctionType, wrapper: Callable[..., Any], passes: bool = False, how: str = ""
    ) -> None:
        """Lets a function run a wrapper, whoever holds it; under a second name, or a second time, nothing is done.

        Args:
            passes: whether the wrapper just calls the function where casts are off, no argument is 16-bit, none is
                written and nobody is told of results.
            how: as for `Redirected`; by default ``"wrapped"`` for netcl's functions, and ``"open"`` for a user's, whose
                policy may go by what was passed.
        """
        if id(function) in self._redirected:
            return
        how = how or ("wrapped" if is_netcls(function) else "open")
        made = _made.get((function, wrapper))
        if made is None or made.code is not function.__code__:
            noting = tensors.noting_writes(function, wrapper) if how in ("wrapped", "more", "open") else wrapper
            scope = next((seen for names, seen in _INSIDE if names is function.__globals__), None)
            made = Redirected(function, noting, how, passes=passes_of(function) if passes else None, scope=scope)
            if how in ("wrapped", "more", "plain"):  # a guard goes with its handle, a user's function when it likes
                _made[function, wrapper] = made
        self._redirected[id(function)] = made  # first: an interrupt after it is undone
        made.put()

    def show_inside(self) -> None:
        """Fills in what netcl's recorded functions see: as their modules stand now, after all is redirected."""
        for names, seen in _INSIDE:
            for name, x in list(names.items()):
                made = self._redirected.get(id(x))
                is_defined_here = type(x) is FunctionType and x.__globals__ is names
                if made is None and is_defined_here:  # a helper, which calls what it calls from inside
                    known: Any = seen.get(name)
                    is_copy = getattr(known, "__globals__", None) is seen and known.__code__ is x.__code__
                    x = known if is_copy else own_copy(x, seen)
                elif made is not None and not is_defined_here:
                    x = made.runs
                seen[name] = x

    def wrap(self, owner: Any, name: str, wrapper: Wrapper, passes: bool = False, how: str = "") -> None:
        """Wraps what has a name: a plain function of a module for whoever holds it, anything else under this name."""
        function = wrapt.resolve_path(owner, name)[2]
        if isinstance(owner, ModuleType) and type(function) is FunctionType:
            self.redirect(function, wrapper, passes, how)
        else:
            self.set(owner, name, wrapt.FunctionWrapper(function, wrapper))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets one attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Gives every function its code and every name its object; what a user replaced meanwhile is left alone."""
        for redirected in reversed(self._redirected.values()):
            redirected.undo()
        self._redirected.clear()
        for owner, name, original, ours in reversed(self._undo):
            if vars(owner).get(name, _MISSING) is not ours:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()
