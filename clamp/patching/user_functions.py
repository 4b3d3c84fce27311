"""Functions of the user's with a say in how they are cast: decorators that give one a policy, before ``init`` too,
functions that are registered with one, and forward and backward functions for ``apply_op``.

The last are after PyTorch's ``custom_fwd`` and ``custom_bwd``, whose autograd functions hand the region from forward
to backward in their context. netcl's pairs of functions have no context: ``apply_op`` hands it over.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import accumulate
from operator import mul
from typing import Any, ParamSpec, TypeVar

import numpy as np
import wrapt

from clamp import bridge
from clamp.bridge import STORAGE, Node, Tensor
from clamp.casting.arguments import casts_in
from clamp.casting.policy_table import CastPolicy
from clamp.casting.regions import called_in, casting_region
from clamp.interrupts import Managed
from clamp.ops.arguments import shown
from clamp.ops.cast import cast
from clamp.params import delivery
from clamp.patching.wrap import user_wrapper

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


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
        late: when the body of a generator or coroutine runs, and what to do.
    """
    if not callable(function) and not isinstance(function, classmethod | staticmethod):
        raise TypeError(
            f"{decorator} decorates a function, got {shown(function)}: put it above a def, or pass a function"
        )
    if runs_later(function):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{decorator} cannot decorate {name}: the body of a generator or coroutine runs after its call has "
            f"returned, {late}"
        )


def runs_later(function: Any) -> bool:
    """Returns whether a call of a function only makes what runs its body: a generator or a coroutine."""
    bodies = getattr(function, "__func__", function), type(function).__call__
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_late(body) for is_late in kinds for body in bodies)


class _Decorating(Managed[None]):
    def __init__(self, begin: Callable[[], Iterator[None]], name: str) -> None:
        super().__init__(begin())
        self._begin, self._name = begin, name

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        late = "outside of the `with`. Write the `with` inside it, around what is meant."
        require_function(function, f"@{self._name}()", late)

        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with _Decorating(self._begin, self._name):
                return function(*args, **kwargs)

        return inside


def decorating(function: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """``contextmanager`` for what users may write above a function, each call of which is then inside a
    ``with`` of its own; a function whose body runs after its call is refused."""

    @wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _Decorating(partial(function, *args, **kwargs), function.__name__)

    return begin


Backward = Callable[[Tensor], Sequence[Tensor | None]]


class CustomForward(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A function whose floating inputs are cast to one dtype, and inside which nothing is cast.

    With ``cast_inputs=None`` it runs as what is around it does.
    """

    def __init__(self, function: Callable[..., Any], cast_inputs: str | None) -> None:
        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            region = casting_region()
            if region is None or cast_inputs is None:
                return wrapped(*args, **kwargs)
            name = getattr(function, "__name__", "custom_fwd")
            return casts_in(region, cast_inputs, name).call(
                partial(called_in, replace(region, enabled=False), wrapped), args, kwargs
            )

        super().__init__(function, call)
        self._self_cast_inputs = cast_inputs


class CustomBackward(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A backward function that runs in the region of its forward: where it was defined, if nothing else is known."""

    def __init__(self, function: Backward) -> None:
        region = casting_region()

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return called_in(region, wrapped, *args, **kwargs)

        super().__init__(function, call)


def input_dtype(forward: Any) -> str | None:
    """The dtype that a function given to ``apply_op`` wants its inputs in here; None if it does not say."""
    if not isinstance(forward, CustomForward) or casting_region() is None:
        return None
    dtype: str | None = forward._self_cast_inputs
    return dtype


def bound(backward: Any, forward: Any, nodes: Sequence[Any], name: str) -> Any:
    """A backward as it runs for this call of ``apply_op``, of an op of that name.

    A user's raises TypeError or ValueError where it returns no gradients of these nodes; netcl would leave some without
    theirs, or read beyond the ends of others. The gradients of a ``CustomBackward`` are returned in the dtypes of the
    nodes they go to, whatever its functions computed in.
    """
    if backward is None or str(getattr(backward, "__module__", "")).partition(".")[0] == "netcl":
        return backward
    recorded = [node for node in nodes if isinstance(node, Node)]
    if not isinstance(backward, CustomBackward):
        return partial(_gradients_of, backward, name, recorded)
    run = partial(_gradients_of, backward.__wrapped__, name, recorded)
    region = casting_region()
    if region is not None and input_dtype(forward) is not None:
        region = replace(region, enabled=False)
    dtypes = [node.value.dtype for node in recorded]

    def in_region_of_forward(grad: Tensor) -> list[Tensor | None]:
        grads = called_in(region, run, grad)
        return [g if g is None else cast(g, dtype) for g, dtype in zip(grads, dtypes, strict=True)]

    return in_region_of_forward


def _gradients_of(backward: Backward, name: str, nodes: Sequence[Node], grad: Tensor) -> list[Tensor | None]:
    with delivery.giving(grad):
        found: Any = backward(grad)
    if isinstance(found, Tensor | Node | np.ndarray) or not isinstance(found, Iterable):
        raise TypeError(
            f"the backward of {name} returned one of type {type(found).__name__}: return a list, with a gradient (or "
            f"None) for each of the {len(nodes)} nodes that apply_op was given"
        )
    grads = list(found)
    while len(grads) > len(nodes) and grads[-1] is None:  # of what is no node, a bare Tensor or a number
        grads.pop()
    if len(grads) != len(nodes):
        raise ValueError(
            f"the backward of {name} returned {len(grads)} gradients for the {len(nodes)} nodes that apply_op was "
            "given: return one for each, in their order, None for one that gets none, and nothing for a bare Tensor"
        )
    for number, (node, made) in enumerate(zip(nodes, grads, strict=True)):
        if made is None or not isinstance(node.value, Tensor):
            continue
        where = f"the backward of {name} returned as gradient {number}"
        if not isinstance(made, Tensor):
            cure = "its .value" if isinstance(made, Node) else "by Tensor.from_host(queue, ...)"
            raise TypeError(f"{where} one of type {type(made).__name__}: return a Tensor, {cure}")
        shape, wanted = tuple(made.shape), tuple(node.value.shape)
        # As it came, it is that of a user's own reshape, whose memory is the same.
        is_laid_out_so = shape == tuple(grad.shape) or _is_joined(shape, wanted) or _is_joined(wanted, shape)
        if made.size != node.value.size or not is_laid_out_so:
            raise ValueError(f"{where} one of shape {shape}, of a node of shape {wanted}")
        if node.value.dtype in STORAGE and made.dtype not in STORAGE:
            raise TypeError(f"{where} one of {made.dtype}, of a {node.value.dtype} node: compute it in float32")
        if shape != wanted:  # with which the ops before would compute, or broadcast it
            grads[number] = bridge.view(made, wanted)
    return grads


def _is_joined(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether a shape joins neighbouring dimensions of another one, which leaves each element where it lies."""
    return {1, *accumulate(shape, mul)} <= {1, *accumulate(other, mul)}


# ---------------------------------------------------------------------------------------------- registered

_CAST_NOTHING = frozenset({CastPolicy.BANNED, CastPolicy.VIEW, CastPolicy.NONE})


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


def registration_of(module: Any, name: str, policy: CastPolicy | str) -> Registration:
    """Returns what `amp.register` is given, and raises what it raises where that is no function with a policy."""
    policy = CastPolicy.named(policy)
    if isinstance(module, str):
        raise ValueError(f"pass the module itself, not its name {module!r}")
    if not isinstance(module, types.ModuleType | type):
        raise TypeError(f"pass the module or class that has the function, and the function's name, not {shown(module)}")
    if not isinstance(name, str):
        raise TypeError(f"pass the name of a function of {module.__name__}, a text, not {shown(name)}")
    if not callable(vars(module).get(name)) and not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(f"No function named {name} in module {where}")
    if runs_later(getattr(module, name)) and policy not in _CAST_NOTHING:
        raise TypeError(
            f"{name} cannot be registered: the body of a generator or coroutine runs after its call has returned, when "
            "nothing is cast for it any more. Register a function that it calls."
        )
    return Registration(module, name, policy)
