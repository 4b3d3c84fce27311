"""Functions that run something else for whoever holds them.

wrapt's wrappers stand where a function's name is looked up. Some are not looked up: ``step = optimizer.step``, bound
before AMP was there and called ever after, holds the function itself. So the function's code is exchanged, and the
function stays the object that it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from clamp.patching.wrap import Wrapper

_PLACE = "clamp puts what is to be called here"


def _calling(target: Callable[..., Any], free: tuple[str, ...]) -> Any:
    """Code that calls ``target`` with what it is given.

    Args:
        free: names of the closure of the function that gets the code; they are not used.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        found: Any = "clamp puts what is to be called here"  # _PLACE: a constant of the code
        return found(*args, **kwargs)

    code = call.__code__
    return code.replace(
        co_consts=tuple(target if constant == _PLACE else constant for constant in code.co_consts), co_freevars=free
    )


class Redirected:
    """A method's function that runs a wrapper in place of its own code, from ``put`` until ``undo``.

    Args:
        function: a plain Python function whose first argument is the instance.
        wrapper: in wrapt's form, called with a bound method that has the function's own code.
    """

    def __init__(self, function: FunctionType, wrapper: Wrapper) -> None:
        self._function = function
        self._code = function.__code__
        self._had_signature = "__signature__" in vars(function)
        own = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        own.__annotations__ = function.__annotations__
        own.__qualname__ = function.__qualname__

        def target(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(MethodType(own, instance), instance, args, kwargs)

        self._signature = inspect.signature(own)
        self._ours = _calling(target, function.__code__.co_freevars)

    def put(self) -> None:
        """Lets the function run the wrapper."""
        if not self._had_signature:
            self._function.__signature__ = self._signature  # type: ignore[attr-defined]
        self._function.__code__ = self._ours

    def undo(self) -> None:
        """Gives the function its own code back, unless somebody has given it another one meanwhile."""
        if self._function.__code__ is self._ours:
            self._function.__code__ = self._code
        if not self._had_signature:
            vars(self._function).pop("__signature__", None)
