"""clamp's functions, by the netcl functions whose place they take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from clamp.bridge.netcl_functions import function_of
from clamp.casting.operands import Casting, NotOwned

Function = Callable[..., Any]

#: netcl function, by full name -> the function of clamp that takes its place: ``f(casting, *args, **kwargs)``
OWNED: dict[str, Function] = {}

#: function of clamp -> what it computes with: modules of clamp.ops, functions in them, kernels
USES: dict[Function, tuple[object, ...]] = {}

# Parameters of netcl's that say how to compute, or where memory comes from: clamp's kernels have no use for them.
_HINTS = frozenset({"algo", "force_naive", "pool", "strategy", "tile", "use_im2col"})


def implements(
    *names: str, whole: str | None = None, uses: tuple[object, ...] | None = None
) -> Callable[[Function], Function]:
    """Registers a function as clamp's version of the netcl functions of these full names.

    Its parameters are named as netcl's. Where netcl's have another order, or more of them, as the functions of bare
    tensors beside those of nodes, arguments are passed by name. One that clamp's function does not know is ignored if
    it is a hint; with any other (``out``, a tensor to write to) the call is left to netcl.

    Args:
        whole: netcl's function that returns all that the function returns; those of ``names`` return the first of it
            then: a norm without its statistics.
        uses: modules of clamp.ops, functions in them or kernels that it computes with, for `python -m clamp lists`.
            None: everything of clamp.ops that its own module imports.
    """

    def register(function: Function) -> Function:
        if "<locals>" in function.__qualname__:  # one of a family that a factory makes
            function.__name__ = function.__qualname__ = names[0].rpartition(".")[2]
        USES[function] = tuple(vars(sys.modules[function.__module__]).values()) if uses is None else uses
        for name in names:
            OWNED[name] = _with_arguments_of(name, function if whole is None else _first_of(function))
        if whole is not None:
            OWNED[whole] = _with_arguments_of(whole, function)
        return function

    return register


def leave_to_netcl_if(*given: object) -> None:
    """Raises NotOwned where an argument was given that clamp's kernels have no place for: ``out``, for one."""
    if any(x is not None and x is not False for x in given):
        raise NotOwned


def _first_of(function: Function) -> Function:
    @wraps(function)
    def first(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[0]

    return first


def _with_arguments_of(name: str, function: Function) -> Function:
    """A function that is called as netcl's function of this full name is."""
    import_module(name.rpartition(".")[0])
    netcls = function_of(name)
    if netcls is None:  # no call comes here: what a user has put in netcl's place runs as it is
        return function
    theirs = inspect.signature(netcls).parameters
    casting, *ours = inspect.signature(function).parameters.values()
    known, places = [parameter.name for parameter in ours], list(theirs)
    if known[: len(places)] == places:
        return function
    hints = [place for place in places if place in _HINTS and place not in known]
    others = [place for place in places if place not in _HINTS and place not in known]

    @wraps(function)
    def adapted(casting: Casting, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args, strict=False))
        if len(args) > len(places) or not given.keys().isdisjoint(kwargs):
            raise NotOwned  # a TypeError of netcl's
        given.update(kwargs)
        leave_to_netcl_if(*(given.pop(other, None) for other in others))
        for hint in hints:
            given.pop(hint, None)
        return function(casting, **given)

    adapted.__signature__ = inspect.Signature([casting, *theirs.values()])  # type: ignore[attr-defined]
    return adapted
