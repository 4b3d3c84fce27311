"""Layers and models, and the tensors in them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
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


def module_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a model, each once, with their names: ``("layers.0.weight", tensor)``.

    Buffers are the public tensors that netcl's ``state_dict`` saves, such as the statistics of a batch norm; the
    positions that its attention has met, and keeps in a private dict, are none.
    """
    layers = set[str]()
    for name, x in _below(module, "", set(), (Module, Tensor)):
        if isinstance(x, Module):
            layers.add(name)
        elif is_weight(x) or not _is_private(name, layers):
            yield name, x


def _is_private(name: str, layers: Container[str]) -> bool:
    """Returns whether a tensor is a private attribute of a layer, or in one; the layer itself may be."""
    attribute, _, last = name.rpartition(".")
    if last.startswith("_"):
        return True
    while attribute and attribute not in layers:
        attribute, _, last = attribute.rpartition(".")
    return last.startswith("_")


def own_parameters(module: Any) -> Iterator[Tensor]:
    """The tensors of a layer that are trained, without those of the layers in it."""
    seen = {id(part) for _, part in _modules_below(module) if part is not module}
    found = (x for _, x in _below(module, "", seen, (Module, Tensor)) if isinstance(x, Tensor))
    yield from filter(is_weight, found)


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


def module_names(modules: Sequence[Any]) -> list[str]:
    """The paths of layers in the model that holds them, ``"layers.2"``; ``""`` for a model, and for one in none.

    A layer that netcl's Sequential has made of others, to compute them at once, has the names of those: ``"layers.0"``.
    """
    roots = modules_met(*modules)
    made = {id(layer) for root in roots for key in MADE_FROM_LAYERS for layer in vars(root).get(key) or ()}
    names = _longest(pair for root in roots for pair in _modules_below(root))

    def of_parts(module: Any) -> str:
        parts = [part for part in vars(module).values() if isinstance(part, Module)] if id(module) in made else []
        return ", ".join(names.get(id(part), "") for part in parts)

    return [names[id(module)] or of_parts(module) for module in modules]


def module_tree(model: Any) -> list[tuple[str, str, int]]:
    """A model and all layers in it: the path of each, its class, and how many numbers are trained in it."""
    return [
        (name, type(module).__name__, sum(x.size for _, x in module_tensors(module) if is_weight(x)))
        for name, module in _modules_below(model)
    ]


def _longest(named: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """The names of objects, by id; of several the longest, which the model has that holds the others."""
    return {id(x): name for name, x in sorted(named, key=lambda pair: pair[0].count(".") + bool(pair[0]))}


def _modules_below(model: Any) -> Iterator[tuple[str, Any]]:
    """A model and all layers in it, without those that netcl has made of others."""
    return _below(model, "", set(), (Module,), MADE_FROM_LAYERS)


def _below(
    x: Any, name: str, seen: set[int], kinds: tuple[type, ...], left_out: Container[object] = ()
) -> Iterator[tuple[str, Any]]:
    """All objects of some kinds in x, itself first, each once, with their names."""
    if not isinstance(x, (*kinds, list, tuple, dict)) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, kinds):
        yield name, x
    if isinstance(x, Tensor):
        return
    parts: Any = vars(x) if isinstance(x, Module) else x
    hidden = getattr(x, "_non_persistent_buffers_set", None) or ()
    for key, part in list(parts.items()) if isinstance(parts, dict) else enumerate(parts):
        if key not in hidden and key not in left_out:
            yield from _below(part, f"{name}.{key}" if name else str(key), seen, kinds, left_out)


class ModulePaths:
    """The paths of modules, ``"layers.2"``: looked for once for each module."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}
        self._trees: dict[int, list[tuple[str, int]]] = {}  # of what was named with all that is in it

    def of(self, module: Any) -> tuple[str, ...]:
        """The path of a module; several of one that netcl's Sequential has made of several; ``("",)`` of a model."""
        if not self._is_known(module):
            self._name([module])
        return self._found[id(module)][1]

    def around(self, modules: Sequence[Any]) -> str:
        """The path of the first of some modules, each inside of the next; of several that are one, ``"layers.0,
        layers.1"``. Empty without any. All that is in the last, the model, is named at its first sight."""
        if not modules:
            return ""
        module = modules[0]
        if not self._is_known(module):
            self.follow(modules[-1])
            self.follow(module)  # if that has not named it: it is one that netcl's Sequential has made
        return ", ".join(self._found[id(module)][1])

    def follow(self, module: Any) -> None:
        """Names a module with all that is in it, at first sight, and again where other parts are in it than were."""
        is_known, tree = self._is_known(module), self._trees.get(id(module))
        if is_known and tree is None:  # in one that is followed
            return
        parts = list(_modules_below(module))
        if is_known and tree == [(name, id(part)) for name, part in parts]:
            return
        if _is_made(module) and len(parts) > 1 and all(self._is_known(part) for _, part in parts[1:]):
            paths = [path for _, part in parts[1:] for path in self.of(part)]
            self._found[id(module)] = weakref.ref(module), tuple(paths)
            return
        self._name([part for _, part in parts])
        self._trees[id(module)] = [(name, id(part)) for name, part in parts]

    @property
    def known(self) -> set[str]:
        """All that were asked for."""
        return {path for _, paths in self._found.values() for path in paths}

    def _is_known(self, module: Any) -> bool:
        found = self._found.get(id(module))
        return found is not None and found[0]() is module

    def _name(self, modules: Sequence[Any]) -> None:
        found = {key: one for key, one in self._found.copy().items() if one[0]() is not None}
        for module, name in zip(modules, module_names(modules), strict=True):
            found[id(module)] = weakref.ref(module), tuple(name.split(", "))
        self._found = found
        self._trees = {key: tree for key, tree in self._trees.copy().items() if key in found}


def _is_made(module: Any) -> bool:
    """Returns whether netcl's Sequential has made a layer of others."""
    return type(module).__module__ == Module.__module__ and type(module).__name__.startswith("_Fused")


_MOST_NAMED = 32  # lists of parameters whose names are kept
_named: dict[tuple[int, ...], tuple[list[weakref.ref[Tensor]], list[str]]] = {}


def parameter_names(params: Sequence[Tensor]) -> list[str]:
    """Names of tensors by their place in the model, ``"layers.2.weight"``; ``"params[2]"`` for one in no module."""
    models = [model_parameter(param) for param in params]
    key = tuple(map(id, models))
    known, names = _named.get(key, ([], []))
    if len(known) != len(models) or any(ref() is not model for ref, model in zip(known, models, strict=True)):
        found = _longest(pair for module in modules_met() for pair in module_tensors(module))
        names = [found.get(place, f"params[{index}]") for index, place in enumerate(key)]
        if found.keys() >= set(key):
            if len(_named) >= _MOST_NAMED:
                _named.clear()
            _named[key] = [weakref.ref(model) for model in models], names
    return names
