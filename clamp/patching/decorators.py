"""Decorators that give a user's own function a policy. They work before ``init`` too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import wrapt

from clamp.casting.policy_table import CastPolicy
from clamp.patching.wrap import user_wrapper

F = TypeVar("F", bound=Callable[..., Any])


def half_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the AMP dtype, nested ones too."""
    return _decorated(function, "@half_function", CastPolicy.HALF)


def float_function(function: F) -> F:
    """Decorator: under AMP the function gets its 16-bit tensors in float32."""
    return _decorated(function, "@float_function", CastPolicy.FLOAT)


def promote_function(function: F) -> F:
    """Decorator: under AMP the function gets its floating tensors in the widest dtype among them."""
    return _decorated(function, "@promote_function", CastPolicy.PROMOTE)


def _decorated(function: F, decorator: str, policy: CastPolicy) -> F:
    require_function(function, decorator)
    name = getattr(function, "__name__", repr(function))
    return wrapt.FunctionWrapper(function, user_wrapper(name, policy))  # type: ignore[return-value]


def require_function(
    function: Any, decorator: str, late: str = "when the decorator is done. Decorate a function that it calls."
) -> None:
    """Raises TypeError for what a decorator cannot decorate: no function, or one whose body runs after its call.

    Args:
        function: what it was put on.
        decorator: its name, for the message.
        late: when the body of a generator or coroutine runs, and what to do.
    """
    if not callable(function) and not isinstance(function, classmethod | staticmethod):
        raise TypeError(f"{decorator} decorates a function, got {function!r}: put it above a def, or pass a function")
    if runs_later(function):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{decorator} cannot decorate {name}: the body of a generator or coroutine runs after its call has "
            f"returned, {late}"
        )


def runs_later(function: Any) -> bool:
    """Whether a call of a function only makes what runs its body: a generator or a coroutine."""
    function = getattr(function, "__func__", function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_late(function) for is_late in kinds)
