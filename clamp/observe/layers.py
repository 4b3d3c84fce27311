"""Ops in float32 by the layer that calls them, where no code of the model is to be changed."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import wrapt

from clamp.bridge import Module
from clamp.casting.regions import Region, casting_region, in_region
from clamp.observe.identity import Ops


class LayerRegions:
    """Inside the ``with``, each call of a layer opens a region: in float32 for some layers, as around for the others.

    So an op is in the region of the innermost layer around it; layers in a layer have their own.

    Args:
        in_float32: names of layers, as ``Ops.layer`` gives them.

    Attributes:
        ops: has named the layers that were called.
    """

    def __init__(self, in_float32: Container[str] = ()) -> None:
        self.ops = Ops()
        self._in_float32 = in_float32
        self._regions: dict[tuple[str, int], Region] = {}  # by the name of a layer, and the region outside of layers
        self._around: dict[int, Region] = {}  # by the id of a region of a layer, that one
        self._original: Any = None

    def __enter__(self) -> LayerRegions:
        self._original = vars(Module)["__call__"]
        Module.__call__ = wrapt.FunctionWrapper(self._original, self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        Module.__call__ = self._original

    def regions(self) -> Iterator[tuple[str, Region]]:
        """The names of layers, and a region that was opened for their calls."""
        return ((name, region) for (name, _), region in self._regions.items())

    def _called(self, wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = casting_region()
        if outer is None:
            return wrapped(*args, **kwargs)
        with in_region(self._region(self.ops.layer((module,)), self._around.get(id(outer), outer))):
            return wrapped(*args, **kwargs)

    def _region(self, name: str, around: Region) -> Region:
        key = name, id(around)
        if key not in self._regions:
            changes: dict[str, Any] = {"dtype": "float32", "allow_banned": True} if name in self._in_float32 else {}
            self._regions[key] = replace(around, **changes)
            self._around[id(self._regions[key])] = around
        return self._regions[key]
