"""Which op of one run is which of another run of the same step: by function, layer, line, and the how-manieth call.

Neither run needs to know the other, nor need they share their layers: a layer is the third ``Linear`` that is called.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from clamp import bridge
from clamp.bridge import TensorLike
from clamp.debug.callsite import Place, here

#: names of nodes that clamp inserts: casts, and the one that gathers the gradients of slices
INSERTED = frozenset({"cast", "slices"})


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a step; the same op of another run is equal to it.

    Attributes:
        function: netcl's name of it, ``"matmul_op"``; that of its node, where no list has it.
        layer: the innermost layer around it, by class and the order of first calls, ``"Linear 2"``; empty if none is.
        line: the nearest line of the user's, ``"train.py:31"``.
        call: the number of the call, among those alike.
    """

    function: str
    layer: str
    line: str
    call: int


class Ops:
    """Names the ops of one run, in their order."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Any, str]] = {}  # the layers are held, or another one could get a number
        self._of_class = Counter[str]()
        self._calls = Counter[tuple[str, str, str]]()

    def of(self, made: TensorLike) -> tuple[Op, Place] | None:
        """The op that has made this just now; None of what clamp has inserted, which other runs need not have."""
        name = getattr(made, "op_name", None) or "op"
        if name in INSERTED:
            return None
        place = here()
        kind = place.function.rpartition(".")[2] or name, self.layer(place.modules), place.short_line
        self._calls[kind] += 1
        return Op(*kind, self._calls[kind]), place

    def layer(self, modules: tuple[Any, ...]) -> str:
        """The name, in every run, of the first of some modules; empty without any."""
        if not modules:
            return ""
        module = modules[0]
        if id(module) not in self._layers:
            kind = type(module).__name__
            self._of_class[kind] += 1
            self._layers[id(module)] = module, f"{kind} {self._of_class[kind]}"
        return self._layers[id(module)][1]

    def paths(self) -> dict[str, str]:
        """Where each layer is in its model, ``{"Linear 2": "layers.2"}``; its name here, where it is in none."""
        modules = [module for module, _ in self._layers.values()]
        found = dict(zip((name for _, name in self._layers.values()), bridge.module_names(modules), strict=True))
        twice = {path for path, count in Counter(found.values()).items() if count > 1}  # in two models
        return {name: f"{path} ({name})" if path in twice and path else path or name for name, path in found.items()}
