"""Decorators that give a user's own function a policy. They work before ``init`` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import wrapt

from clamp.casting.policy import CastPolicy
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


def require_function(function: Any, decorator: str) -> None:
    """Raises TypeError for what a decorator cannot decorate.

    Args:
        function: what it was put on.
        decorator: its name, for the message.
    """
    if not callable(function) and not isinstance(function, classmethod | staticmethod):
        raise TypeError(f"{decorator} decorates a function, got {function!r}: put it above a def, or pass a function")
