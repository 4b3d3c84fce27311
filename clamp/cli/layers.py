"""Which functions a layer of netcl calls, read from its source: netcl keeps no table of that.

netcl's layers call ``netcl.autograd`` by the name ``ag``, ``netcl.nn.functional`` by ``F``, and layers that they are
made of by their classes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache

import netcl.nn
from netcl.nn.layers import Module

_MODULES = {"ag": "netcl.autograd", "F": "netcl.nn.functional"}


@cache
def layers() -> dict[str, type]:
    """The public layers of netcl.nn by their own names."""
    modules = [importlib.import_module(f"netcl.nn.{found.name}") for found in pkgutil.iter_modules(netcl.nn.__path__)]
    return {
        name: member
        for module in modules
        for name, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Module) and member is not Module and not name.startswith("_")
    }


def functions_of(layer: type) -> list[str]:
    """Full names of the functions that a layer calls, and the layers in it, in their order in the source."""
    return list(dict.fromkeys(_calls(layer, {layer})))


def _calls(layer: type, seen: set[type]) -> Iterator[str]:
    if name := vars(layer).get("_AG_NAME"):  # netcl's activations without a forward of their own
        yield f"{_MODULES['ag']}.{name}"
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(layer)))):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id=alias), attr=name) if alias in _MODULES:
                yield f"{_MODULES[alias]}.{name}"
            case ast.Name(id=name) if (part := layers().get(name)) and part not in seen:
                seen.add(part)
                yield from _calls(part, seen)
