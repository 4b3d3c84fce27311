"""What rounding loses of a step's updates, layer by layer, where weights are kept in 16 bits without fp32 masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clamp import bridge
from clamp.bridge import HALF_DTYPES
from clamp.debug.dry_run import dry_run
from clamp.debug.words import aligned
from clamp.params import masters
from clamp.params.lost_updates import Counts, LayerUpdates, by_layer, of_next_step, percent

_SHOWN = 12  # layers
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}


@dataclass(frozen=True)
class LostUpdates:
    """Updates of one step that rounding loses. ``print`` it.

    Attributes:
        layers: of each layer with 16-bit weights of which nothing more is kept; those that lose most first.
        notes: what could not be measured, and why; and where Adam's eps is below the smallest number of 16 bits.
    """

    layers: Sequence[LayerUpdates]
    notes: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.layers or self.notes)

    def __str__(self) -> str:
        head = [f"updates: {self.layers[0]}"] if self.layers else []
        table = [("layer", "dtype", "updates", "lost", "")] if self.layers else []
        table += [(x.module, x.dtype, f"{x.updates:,}", f"{x.lost:,}", percent(x.share)) for x in self.layers[:_SHOWN]]
        left = [f"  and {len(self.layers) - _SHOWN} more, that lose less"] if len(self.layers) > _SHOWN else []
        return "\n".join([*head, *(aligned(table, numbers=range(2, 5)) if table else ()), *left, *self.notes])

    __repr__ = __str__


def observe_lost_updates(step: Callable[[], Any]) -> LostUpdates:
    """Runs a step once, as a dry run, and counts which updates its optimizers would lose."""
    layers: list[LayerUpdates] = []
    notes: list[str] = []

    def look(optimizer: Any, is_plain: bool) -> None:
        pairs = masters.gathered(optimizer)
        rounded = [master for master, model in pairs if masters.is_rounded(master) and master.grad is not None]
        own = [x for x in optimizer.params if x.dtype in HALF_DTYPES]  # of a user's optimizer, which steps them itself
        if rounded or own:
            notes.extend(_of_eps(optimizer, [bridge.model_parameter(x).dtype for x in (*rounded, *own)], bool(own)))
            layers.extend(_of(optimizer, rounded, is_plain, notes))

    with dry_run(step, instead=look):
        step()
    return LostUpdates(sorted(layers, key=lambda row: -row.share), tuple(dict.fromkeys(notes)))


def _of(optimizer: Any, rounded: Sequence[bridge.Tensor], is_plain: bool, notes: list[str]) -> list[LayerUpdates]:
    """The updates of one optimizer's weights; notes why where they are not known."""
    name = type(optimizer).__name__
    if not bridge.has_rule(optimizer):
        notes.append(f"what rounding loses of {name}'s updates is not measured: its step is not one that clamp makes")
        return []
    if not is_plain:
        notes.append(f"what rounding loses of {name}'s updates is not measured: step() is called with arguments")
        return []
    stepped = [x for x in bridge.stepped(optimizer) if any(x is y for y in rounded) and x.size]
    counts: dict[int, Counts] = {}
    for master in stepped:
        found = of_next_step(optimizer, master)
        if found is not None:
            counts[id(master)] = found
    if len(counts) < len(stepped):
        notes.append(f"{len(stepped) - len(counts)} parameters of {name} are not measured: the step is not finite")
    return by_layer(optimizer.params, counts)


def _of_eps(optimizer: Any, dtypes: Sequence[str], steps_itself: bool) -> list[str]:
    """What there is to say of eps: netcl's Adam with weights in float16 has one that float16 has not."""
    eps, name = getattr(optimizer, "eps", None), type(optimizer).__name__
    if not isinstance(eps, float):
        return []
    what = "is 0 if its step computes in it" if steps_itself else "counts, for the step computes in float32"
    return [
        f"{name}'s eps, {eps:g}, is below {dtype}'s smallest number, {_SMALLEST[dtype]:.2g}: it {what}"
        for dtype in dict.fromkeys(map(bridge.canonical_dtype, dtypes))
        if 0 < eps < _SMALLEST[dtype]
    ]
