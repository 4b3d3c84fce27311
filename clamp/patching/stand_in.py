"""What stands for a function of netcl's while AMP is active: wrapt's wrapper, with a shorter way to be called.

wrapt finds out at each call what a function is bound to, and hands the arguments on packed, at half a microsecond: a
twentieth of what netcl's shorter functions take. What is called under the name of a module is bound to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from clamp.bridge import HALF_DTYPES, Node, Parameter, Tensor
from clamp.casting.regions import this_thread
from clamp.casting.results import RESULTS

_PLAIN = frozenset((int, float, bool, str, type(None)))


class StandIn(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper that is as fast as a function of Python's: one is where the interpreter looks for what to call.

    Args:
        original: a function.
        wrapper: in wrapt's form.
        passes: whether the wrapper just calls the function where casts are off, no argument is 16-bit and nobody is
            told of results.
    """

    __slots__ = ("__call__",)

    def __init__(self, original: Callable[..., Any], wrapper: Callable[..., Any], passes: bool = False) -> None:
        super().__init__(original, wrapper)
        self.__call__ = (_passing if passes else _calling)(original, wrapper)  # type: ignore[method-assign]


def _calling(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, None, args, kwargs)

    return call


def _passing(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not this_thread.casts_off or kwargs or RESULTS.watched:
            return wrapper(original, None, args, kwargs)
        for x in args:  # of every call inside disable_casts(): short
            kind = type(x)
            if kind is Node:
                x = x.value
                kind = type(x)
            if kind is Tensor or kind is Parameter:
                if x.dtype in HALF_DTYPES:
                    break
            elif kind is tuple:
                if not x or type(x[0]) is not int:
                    break
            elif kind not in _PLAIN:
                break
        else:
            return original(*args)
        return wrapper(original, None, args, kwargs)

    return call
