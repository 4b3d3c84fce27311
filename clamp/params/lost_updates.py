"""Updates that rounding loses: of 16-bit weights that no float32 master keeps more of than they hold themselves.

A step computes in float32, and what it made is rounded to the weight's 16 bits. What is less than half a unit in the
last place of the weight is lost then: the weight is as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops import transfer
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from clamp.ops.optimizer_step import MultiUpdate
from clamp.ops.slots import in_turn
from clamp.ops.statistics import statistics_of

#: about which part of a weight half a unit in its last place is
HALF_AN_ULP = {"float16": "1/2048", "bfloat16": "1/256"}
#: the smallest part of a layer's updates that is shown as a number, and that is worth a warning if it is lost
LEAST = 1e-4


class Counts(NamedTuple):
    """Counts of a weight's elements.

    Attributes:
        updates: how many of them the step changes, in float32.
        lost: how many of these are as before when they are rounded.
    """

    updates: int
    lost: int


class LayerUpdates(NamedTuple):
    """Updates of one layer's 16-bit weights, and how many of them rounding loses.

    Attributes:
        module: path of the layer, ``"layers.3"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        updates: elements that a step changes, in float32.
        lost: those of them that are as before when they are rounded.
    """

    module: str
    dtype: str
    updates: int
    lost: int

    @property
    def share(self) -> float:
        """The part of the updates that is lost, 0 to 1."""
        return self.lost / self.updates if self.updates else 0.0

    def __str__(self) -> str:
        return f"{self.dtype} loses {percent(self.share)} of the updates of {self.module}"


def percent(share: float) -> str:
    """``"41 %"``; what is more than nothing does not look like nothing."""
    return f"{100 * share:.3g} %" if share >= LEAST or share <= 0 else "less than 0.01 %"


def by_layer(params: Sequence[Tensor], counts: Mapping[int, Counts]) -> list[LayerUpdates]:
    """The counts of an optimizer's parameters, by their ids, layer by layer: those that lose the greatest part come
    first."""
    found: dict[tuple[str, str], list[Counts]] = {}
    for param, name in zip(params, bridge.parameter_names(params), strict=True):
        if id(param) in counts:
            key = name.rpartition(".")[0] or name, bridge.canonical_dtype(bridge.model_parameter(param).dtype)
            found.setdefault(key, []).append(counts[id(param)])
    rows = [LayerUpdates(*key, sum(x.updates for x in of), sum(x.lost for x in of)) for key, of in found.items()]
    return sorted(rows, key=lambda row: -row.share)


def count(before: Tensor, after: Tensor) -> Counts | None:
    """Counts the updates of a step, and those that rounding loses. Waits for the device.

    Args:
        before: a 16-bit weight.
        after: float32, as many elements: what the step has made of it, not rounded yet.

    Returns:
        None where something of it is inf or nan.
    """
    now = bridge.view(after, before.shape)
    changes = [elementwise("sub", "float32", x, before) for x in (now, cast(now, before.dtype))]
    moved, kept = statistics_of(changes, histogram=False)
    if not moved.is_finite:
        return None
    updates = moved.count - moved.zeros
    return Counts(updates, updates - (kept.count - kept.zeros))


# ---------------------------------------------------------------------------------------------- steps that are made

#: masters of 16-bit weights of which no step has been measured, by id
_unmeasured: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
#: those of which one was, and nothing said yet
_measured: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def expect(master: Tensor) -> None:
    """The first step that updates a weight of which nothing more is kept is to be measured."""
    _unmeasured[id(master)] = master


def is_expected(master: Tensor) -> bool:
    """Returns whether the next step of a master is to be measured."""
    return id(master) in _unmeasured


def expected(masters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of these masters whose next step is to be measured."""
    return [*filter(is_expected, masters)] if _unmeasured else ()


def measure(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Measures a step that has written these masters, and not yet their 16-bit weights."""
    for master, model in pairs:
        counts = count(model, master)
        if counts is not None and counts.updates:
            master._lost_updates = counts
            _measured[id(master)] = master
            _unmeasured.pop(id(master), None)


def take(params: Sequence[Tensor]) -> list[LayerUpdates]:
    """What has been measured of the step of an optimizer's parameters, once: no later one is measured."""
    if not _measured:
        return []
    counts = {id(param): param._lost_updates for param in params if _measured.pop(id(param), None) is not None}
    for param in params if counts else ():
        _unmeasured.pop(id(param), None)
    return by_layer(params, counts)


# ---------------------------------------------------------------------------------------------- a step to come


def of_next_step(optimizer: Any, master: Tensor) -> Counts | None:
    """Counts what the next step of an optimizer would lose of one parameter; nothing is changed.

    Args:
        optimizer: one that ``bridge.has_rule``.
        master: float32, of a 16-bit weight, with a float32 gradient.

    Returns:
        None if the step makes inf or nan of it, or computes in another way than ``bridge.next_update`` knows.
    """
    twin = bridge.empty(master.queue, master.shape, "float32")
    transfer.copy(master.queue, twin.buffer, master.buffer, bridge.nbytes(twin))
    twin.grad = master.grad
    update = bridge.next_update(bridge.optimizer_of_one(optimizer, master, twin), [twin])
    if update is None:
        return None
    launches = MultiUpdate(update.rule, len(update.numbers), [twin], update.states(), [None])
    in_turn(launches.pieces(update.numbers, [twin.grad]))
    return count(bridge.model_parameter(master), twin)
