"""Layers and models, and the tensors in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import netcl
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Module as Module
from netcl.nn.state import invalidate_derived as invalidate_derived

from clamp.bridge.masters import model_parameter
from clamp.bridge.objects import in_reach
from clamp.bridge.tensors import Tensor, is_weight

BatchNorm2d = BatchNorm2dModule

#: the folder of netcl's modules
NETCLS_FOLDER = str(Path(str(netcl.__file__)).parent)

#: what netcl's Sequential makes of its layers and their modes, and makes again after a change of mode
MADE_FROM_LAYERS = frozenset({"_fused_layers", "_fused_train_layers"})


def is_module(x: Any) -> bool:
    """Returns whether x is a netcl layer or model."""
    return isinstance(x, Module)


def module_classes() -> Iterator[type]:
    """The classes of all layers and models that are defined, netcl's and the user's."""
    stack, seen = [Module], set()
    while stack:
        cls = stack.pop()
        if cls not in seen:
            seen.add(cls)
            stack += cls.__subclasses__()
            yield cls


def module_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a model, each once, with their names: ``("layers.0.weight", tensor)``.

    Buffers are the public tensors that netcl's ``state_dict`` saves, such as the statistics of a batch norm.
    """
    return _tensors_below(module, "", set())


def _tensors_below(x: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(x, Tensor | Module | list | tuple | dict) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        *_, last = name.split(".")
        if is_weight(x) or not last.startswith("_"):
            yield name, x
        return
    parts: Any = vars(x) if isinstance(x, Module) else x
    hidden = getattr(x, "_non_persistent_buffers_set", None) or ()
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if key not in hidden:
            yield from _tensors_below(part, f"{name}.{key}" if name else str(key), seen)


_met: dict[int, weakref.ref[Any]] = {}  # layers and models, by id


def modules_met(*roots: Any) -> list[Any]:
    """The layers and models that there are, as far as a program's variables lead to them (see ``in_reach``), or have
    led to them before.

    Args:
        roots: more to begin with.
    """
    for module in in_reach(*roots):
        if issubclass(type(module), Module):
            _met[id(module)] = weakref.ref(module)
    found = {key: module for key, ref in _met.items() if (module := ref()) is not None}
    for key in _met.keys() - found.keys():
        del _met[key]
    return list(found.values())


def module_names(modules: Sequence[Any], around: Iterable[Any] = ()) -> list[str]:
    """The paths of layers in the model that holds them, ``"layers.2"``; ``""`` for a model, and for one in none.

    A layer that netcl's Sequential has made of others, to compute them at once, has the names of those: ``"layers.0"``.

    Args:
        around: models, if some are known that may hold them.
    """
    names: dict[int, str] = {}
    made = set[int]()
    for root in modules_met(*modules, *around):
        made.update(id(layer) for key in MADE_FROM_LAYERS for layer in vars(root).get(key) or ())
        for name, module in _modules_below(root, "", set()):
            # The model that holds the others has the longest names.
            if _parts_of(name) >= _parts_of(names.get(id(module), "")):
                names[id(module)] = name

    def of_parts(module: Any) -> str:
        parts = [part for part in vars(module).values() if is_module(part)] if id(module) in made else []
        return ", ".join(names.get(id(part), "") for part in parts)

    return [names[id(module)] or of_parts(module) for module in modules]


def module_tree(model: Any) -> list[tuple[str, str, int]]:
    """A model and all layers in it: the path of each, its class, and how many numbers are trained in it."""
    return [
        (name, type(module).__name__, sum(x.size for _, x in module_tensors(module) if is_weight(x)))
        for name, module in _modules_below(model, "", set())
    ]


def _parts_of(name: str) -> int:
    return len(name.split(".")) if name else 0


def _modules_below(x: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(x, Module | list | tuple | dict) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Module):
        yield name, x
    parts: Any = vars(x) if isinstance(x, Module) else x
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if key not in MADE_FROM_LAYERS:
            yield from _modules_below(part, f"{name}.{key}" if name else str(key), seen)


_MOST_NAMED = 32  # lists of parameters whose names are kept
_named: dict[tuple[int, ...], tuple[list[weakref.ref[Tensor]], list[str]]] = {}


def parameter_names(params: Sequence[Tensor]) -> list[str]:
    """Names of tensors by their place in the model, ``"layers.2.weight"``; ``"params[2]"`` for one in no module."""
    models = [model_parameter(param) for param in params]
    key = tuple(map(id, models))
    known, names = _named.get(key, ([], []))
    if len(known) != len(models) or any(ref() is not model for ref, model in zip(known, models, strict=True)):
        found = _names_in_modules(set(key))
        names = [found.get(place, f"params[{index}]") for index, place in enumerate(key)]
        if len(found) == len(set(key)):
            if len(_named) >= _MOST_NAMED:
                _named.clear()
            _named[key] = [weakref.ref(model) for model in models], names
    return names


def _names_in_modules(wanted: set[int]) -> dict[int, str]:
    """Names of tensors, by id, from all layers and models that are met."""
    names: dict[int, str] = {}
    for module in modules_met():
        for name, tensor in module_tensors(module):
            # The module that holds the others has the longest names.
            if id(tensor) in wanted and name.count(".") >= names.get(id(tensor), "").count("."):
                names[id(tensor)] = name
    return names
