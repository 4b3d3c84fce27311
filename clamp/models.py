"""Whole models in 16 bits: which of their parameters, what their calls cast, what their ``state_dict`` saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Tensor
from clamp.casting.arguments import casts_to
from clamp.casting.module_rules import ModuleRules
from clamp.params.masters import narrow, showing_masters

SAVE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def as_list(x: Any, what: str, method: str) -> list[Any]:
    """One model or optimizer, or a list of them, as a list.

    Raises:
        TypeError: one of them has no method of that name.
    """
    items = list(x) if isinstance(x, list | tuple) else [x]
    for item in items:
        if isinstance(item, type):
            raise TypeError(f"expected {what} or a list of them, got the class {item.__name__}: make one of it")
        if not callable(getattr(item, method, None)):
            raise TypeError(f"expected {what} or a list of them, got {type(item).__name__}, which has no {method}()")
    return items


def modules(model: Any) -> Iterator[Any]:
    """The model and every layer in it, in attributes and containers, each once."""
    seen: set[int] = set()
    stack = [model]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, Tensor):
            continue
        seen.add(id(item))
        if isinstance(item, list | tuple | set):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif callable(getattr(item, "parameters", None)) and hasattr(item, "__dict__"):
            yield item
            stack += vars(item).values()


def to_16_bit(
    model: Any,
    dtype: str,
    optimizers: Sequence[Any] = (),
    *,
    keep_batch_norm: bool = True,
    excluded: Sequence[Any] = (),
    keep_master: bool | str = True,
    gradient_dtype: str | None = None,
    seed: int = 0,
    rules: ModuleRules | None = None,
    saves: str = "float32",
) -> None:
    """Makes a model's parameters 16-bit, with fp32 masters.

    Those of the other 16-bit dtype are made anew from their masters.

    Args:
        model: anything with ``parameters()``.
        dtype: ``"float16"`` or ``"bfloat16"``; ``"float32"`` where only modules with rules become 16-bit.
        optimizers: those that step some of the parameters; updated in place.
        keep_batch_norm: whether batch norms keep theirs in fp32. (Their statistics always stay.)
        excluded: layers, or classes of layers, whose parameters stay fp32.
        keep_master, gradient_dtype, seed: see :func:`clamp.params.masters.narrow`.
        rules: of modules, whose parameters get their rule's dtype; a batch norm's only if its name ends the pattern.
        saves: the dtype in which ``state_dict`` of the model and of its layers saves the masters.
    """
    dtypes = dtypes_of(model, dtype, keep_batch_norm=keep_batch_norm, excluded=excluded, rules=rules)
    params = [(param, found) for _, param, found in dtypes if found in HALF_DTYPES]
    narrow(
        [param for param, _ in params], [found for _, found in params], optimizers, keep_master=keep_master,
        gradient_dtype=gradient_dtype, seed=seed,
    )  # fmt: skip
    bridge.invalidate_derived(model)
    for layer in modules(model):
        if callable(getattr(layer, "state_dict", None)):
            layer.state_dict = _with_masters(layer, layer.state_dict, saves)
        if callable(getattr(layer, "load_state_dict", None)):
            layer.load_state_dict = _with_masters(layer, layer.load_state_dict, None)


def dtypes_of(
    model: Any, dtype: str, *, keep_batch_norm: bool = True, excluded: Sequence[Any] = (),
    rules: ModuleRules | None = None,
) -> list[tuple[Any, Tensor, str]]:  # fmt: skip
    """The dtype that ``to_16_bit`` gives to each parameter of a model, after what says so, the model or a layer.

    Args:
        model, dtype, keep_batch_norm, excluded, rules: as for ``to_16_bit``.
    """
    found: dict[int, tuple[Any, str]] = {}
    layers = [layer for layer in modules(model) if isinstance(layer, bridge.Module)] if rules is not None else []
    for layer in layers:
        if rules is not None and (rule := rules.rule_of(layer)) is not None:
            found.update((id(param), (layer, rule.dtype)) for param in bridge.own_parameters(layer))
    named = [layer for layer in layers if rules is not None and rules.names(layer)]
    found.update((id(param), (owner, "float32")) for owner, param in _kept(model, keep_batch_norm, excluded, named))
    return [(owner, param, of) for param in model.parameters() for owner, of in [found.get(id(param), (model, dtype))]]


def require_convertible(model: Any, dtype: str, excluded: Sequence[Any] = (), rules: ModuleRules | None = None) -> None:
    """Raises ValueError for a model that ``to_16_bit`` made 16-bit earlier, where this dtype or list cannot be had.

    Args:
        model: anything with ``parameters()``.
        dtype: the dtype to come, ``"float32"`` too.
        excluded, rules: as for ``to_16_bit``.
    """
    remedy = "Build the model anew, load its state_dict(), which is float32, and convert it once."
    for owner, param, wanted in dtypes_of(model, dtype, excluded=excluded, rules=rules):
        if wanted == "float32" and bridge.master_of(param) is not None and param.dtype in HALF_DTYPES:
            raise ValueError(
                f"a parameter of {type(owner).__name__}, of shape {tuple(param.shape)}, was made {param.dtype} earlier "
                f"and cannot become float32 again. {remedy}"
            )
    calls = getattr(type(model), "_input_dtype", None)
    if calls in HALF_DTYPES and dtype != calls:
        raise ValueError(
            f"{type(model).__name__} casts its inputs to {calls} since amp.initialize: {dtype!r} is another "
            f"dtype. {remedy}"
        )


def _kept(
    model: Any, keep_batch_norm: bool, excluded: Sequence[Any], named: Sequence[Any]
) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of a model that stay fp32, each with the layer that says so.

    Args:
        named: layers that do not although they are batch norms.
    """
    for layer in modules(model):
        if any(isinstance(layer, item) if isinstance(item, type) else layer is item for item in excluded):
            yield from ((layer, param) for param in layer.parameters())
    for owner, tensors in _batch_norms(model):
        is_kept = keep_batch_norm and all(owner is not layer for layer in named)
        yield from ((model, tensor) for tensor in (tensors if is_kept else tensors[2:]))


def _batch_norms(model: Any) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """The layer, and scale, shift, mean and variance of every batch norm. netcl's ResNet keeps them as bare tuples."""
    for layer in modules(model):
        if isinstance(layer, bridge.BatchNorm2d):
            yield layer, (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
        for value in _tuples(vars(layer).values()):
            if len(value) == 4 and all(isinstance(x, Tensor) and x.shape == value[0].shape for x in value):
                yield layer, value


def _tuples(values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    for value in values:
        if isinstance(value, tuple):
            yield value
        if isinstance(value, list | tuple | dict):
            yield from _tuples(value.values() if isinstance(value, dict) else value)


# ---------------------------------------------------------------------------------------------- calls


def cast_calls(model: Any, input_dtype: str | None, output_dtype: str | None) -> None:
    """Lets a model cast the floating tensors among its arguments and in its result, when called and in ``forward``.

    The model becomes an instance of a class of the same name derived from its own: Python looks ``__call__`` up on
    the class.
    """
    base = getattr(type(model), "_before_casts", type(model))

    def casting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if input_dtype is None:
                result = method(self, *args, **kwargs)
            else:
                result = casts_to(input_dtype).call(partial(method, self), args, kwargs)
            return result if output_dtype is None else casts_to(output_dtype)(result)

        return call

    names: dict[str, Any] = {"_before_casts": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    names["_input_dtype"] = input_dtype
    for name in ("__call__", "forward"):
        if callable(getattr(base, name, None)):
            names[name] = casting(getattr(base, name))
    model.__class__ = type(base.__name__, (base,), names)


# ---------------------------------------------------------------------------------------------- saving


def _with_masters(layer: Any, method: Any, saves: str | None) -> Callable[..., Any]:
    """A layer's ``state_dict``, which saves in a dtype, or its ``load_state_dict``, of masters and parameters both."""
    original = getattr(method, "_original", method)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with showing_masters(layer.parameters(), load=saves is None):
            found = original(*args, **kwargs)
            return found if saves is None else _converted(found, saves)

    call._original = original  # type: ignore[attr-defined]
    return call


def _converted(state: Any, dtype: str) -> Any:
    """A state with its float32 arrays in another dtype. numpy has no bfloat16: rounded to it, in float32."""
    if isinstance(state, dict | bridge.DeviceArrays):
        return {key: _converted(value, dtype) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_converted(value, dtype) for value in state)
    if not isinstance(state, np.ndarray) or state.dtype != np.float32 or dtype == "float32":
        return state
    if dtype == "bfloat16":
        return bridge.from_words(bridge.to_words(state, dtype), dtype)
    with np.errstate(over="ignore"):
        return state.astype(dtype)
