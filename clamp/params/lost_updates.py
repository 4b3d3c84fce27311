"""Updates that rounding loses: of 16-bit weights that no float32 master keeps more of than they hold themselves.

A step computes in float32, and what it made is rounded to the weight's 16 bits. What is less than half a unit in the
last place of the weight is lost then: the weight is as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Steps:
    """The steps of a master of a 16-bit weight that keeps no more than this."""

    made: int = 0  # as far as the first master of an optimizer counts them
    is_next: bool = True  # to be measured
    counts: Counts | None = None  # of one that was, and of which nothing was said yet
    said: float = 0.0  # the part lost that was


#: such masters, by id
_rounded: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def watch(master: Tensor, is_rounded: bool) -> None:
    """The steps of a master are to be measured if its weight is rounded: the 1st, the 2nd, the 4th, the 8th, ..."""
    _rounded.pop(id(master), None)
    if is_rounded:
        master._steps = _Steps()
        _rounded[id(master)] = master


def is_expected(master: Tensor) -> bool:
    """Returns whether the next step of a master is to be measured."""
    return id(master) in _rounded and master._steps.is_next


def expected(masters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of these masters whose next step is to be measured."""
    return [*filter(is_expected, masters)] if _rounded else ()


def measure(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Measures a step that has written these masters, and not yet their 16-bit weights."""
    for master, model in pairs:
        counts = count(model, master)
        if counts is not None and counts.updates:
            master._steps.counts, master._steps.is_next = counts, False


def take(params: Sequence[Tensor]) -> list[LayerUpdates]:
    """Returns the measurement of the step that an optimizer of these parameters has made, if that is worth a word: a
    part was lost, or four times what was when it was said last."""
    found = [param for param in params if id(param) in _rounded] if _rounded else []
    if not found:
        return []
    counts = {id(param): param._steps.counts for param in found if param._steps.counts is not None}
    first = found[0]._steps
    first.made += 1
    for param in found if counts else ():
        param._steps.counts, param._steps.is_next = None, False
    for param in found if first.made & (first.made + 1) == 0 else ():
        param._steps.is_next = True
    rows = by_layer(params, counts)
    if not rows or rows[0].share < LEAST or part_lost(rows) < 4 * first.said:
        return []
    first.said = part_lost(rows)
    return rows


def part_lost(rows: Sequence[LayerUpdates]) -> float:
    """The part of all updates that is lost, 0 to 1."""
    return sum(row.lost for row in rows) / sum(row.updates for row in rows)


# ---------------------------------------------------------------------------------------------- a step to come


def of_next_step(optimizer: Any, master: Tensor) -> Counts | None:
    """Counts what the next step of an optimizer would lose of one parameter; no number is changed.

    Args:
        optimizer: one that ``bridge.has_rule``.
        master: float32, of a 16-bit weight, with a float32 gradient.

    Returns:
        None if the step makes inf or nan of it, or computes in another way than ``bridge.next_update`` knows.
    """
    update = bridge.next_update(optimizer, [master])
    if update is None:
        return None
    twin = bridge.empty(master.queue, master.shape, "float32")
    transfer.copy(master.queue, twin.buffer, master.buffer, bridge.nbytes(twin))
    states = [[bridge.copied(master, state) for state in kind] for kind in update.states]
    launches = MultiUpdate(update.rule, len(update.numbers), [twin], states, [None])
    in_turn(launches.pieces(update.numbers, [master.grad]))
    return count(bridge.model_parameter(master), twin)
