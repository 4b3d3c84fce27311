"""What device memory is held for, now and at the peak of a step, and who held it there."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import FrameType
from typing import Any, NamedTuple

from clamp import bridge
from clamp.bridge import Address, Tape, Tensor, TensorLike
from clamp.casting.results import GradFn, Gradients
from clamp.debug.callsite import place_of, trail
from clamp.debug.dry_run import NothingSeenError, check_step, dry_run
from clamp.debug.memory_meter import KINDS, Piece, by_kind, gradients_now, pieces_now
from clamp.debug.op_counter import OpCounter, OpRow
from clamp.debug.words import aligned, mib, size
from clamp.interrupts import undoing
from clamp.opencl.shortage import SAYS_WHAT_HOLDS_MEMORY
from clamp.params.weight_cache import weight_cache

_SHOWN = 12  # holders
_BEFORE = "before the step"


@dataclass(frozen=True)
class Holder:
    """Memory held at the peak, of one kind and by one op.

    Attributes:
        kind: of `KINDS`.
        op: ``"conv2d"``, ``"conv2d backward"``; ``"before the step"`` of what was there when it began.
        module: path of the innermost layer, empty without one.
        line: ``"train.py:31"``, the nearest line of the user's.
        bytes, count: in so many pieces.
    """

    kind: str
    op: str
    module: str
    line: str
    bytes: int
    count: int


class Moment(NamedTuple):
    """Memory held when an op took most; bytes by kind."""

    op: str
    module: str
    line: str
    bytes: dict[str, int]

    @property
    def held(self) -> int:
        """All but what is free."""
        return _held(self.bytes)

    @property
    def where(self) -> str:
        """``"conv2d backward, layers.3, train.py:31"``."""
        return ", ".join(filter(None, (self.op, self.module, self.line)))


@dataclass(frozen=True)
class MemoryReport:
    """Device memory by what it is held for. ``print`` it.

    Attributes:
        now: bytes by kind; all of them together are what pyopencl holds. The kinds: ``"activations"``, ``"weights"``,
            ``"masters"``, ``"copies"``, ``"gradients"``, ``"optimizer state"``, ``"workspaces"``, ``"other tensors"``,
            ``"recordings"``, ``"rounding"`` (a pool hands out memory in sizes of its own), ``"free"`` (in a pool).
        peak: the moment of a step when most was held; None without a step.
        holders: who held it, those of most bytes first.
        timeline: of each op of the step, in order, the moment when most was held.
        is_short: whether it is of an error, for want of memory.
    """

    now: Mapping[str, int]
    peak: Moment | None = None
    holders: Sequence[Holder] = ()
    timeline: Sequence[Moment] = field(default=(), repr=False)
    is_short: bool = False

    @property
    def held(self) -> int:
        """Bytes held now, without what is free in netcl's pools."""
        return _held(self.now)

    def __str__(self) -> str:
        sides = [("now", self.now)] if self.peak is None else [("now", self.now), ("at the peak", self.peak.bytes)]
        table = [("MiB", *(name for name, _ in sides))]
        table += [
            (words, *(mib(found[kind]) for _, found in sides))
            for kind, words in KINDS.items()
            if kind != "free" and any(found[kind] for _, found in sides)
        ]
        table.append(("held", *(mib(_held(found)) for _, found in sides)))
        table.append((KINDS["free"], *(mib(found["free"]) for _, found in sides)))
        saving = [f"  {size(saved)}: {what}" for what, saved in cures(sides[-1][1])]
        saving = ["", "what would save memory", *saving] if saving else []
        return "\n".join([*aligned(table, numbers=range(1, 3), indent=""), *self._at_the_peak(), *saving])

    __repr__ = __str__

    def _at_the_peak(self) -> list[str]:
        if self.peak is None and self.is_short:
            return []
        if self.peak is None:
            return ["", "handle.memory(step), of a function that does what one step of the loop does, finds the peak."]
        table = [("what", "of which op", "layer", "line", "pieces", "MiB")]
        table += [(x.kind, x.op, x.module, x.line, str(x.count), mib(x.bytes)) for x in self.holders]
        rest = f", of {size(sum(x.bytes for x in self.holders[_SHOWN:]))}"
        lines = aligned(table, range(4, 6), most=_SHOWN, rest=rest)
        return ["", f"the peak is in {self.peak.where}; there it is held by", *lines]


SAYS_WHAT_HOLDS_MEMORY.append(lambda: f"What held device memory then:\n{MemoryReport(memory_now().now, is_short=True)}")


def _held(found: Mapping[str, int]) -> int:
    return sum(count for kind, count in found.items() if kind != "free")


def cures(found: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns what to switch on where memory is short, and about how many bytes each would save; those of most bytes
    first."""
    passing, least = found["activations"] + found["workspaces"], _held(found) // 100
    halves = found["copies"] + found["weights"] // 2 + found["gradients"] // 2 if found["copies"] else 0
    every = [
        ("amp.checkpoint(block, x) in place of block(x), of each block: up to so much, for a second forward",
         found["activations"]),
        ("half the batch, and two backward passes a step", passing // 2),
        ('amp.decorate(model, optimizer, level="O2", master_weight="stochastic"): 16-bit weights without fp32 masters',
         halves),
        ('enable_caching="last_use": 16-bit copies of weights go when backward has read them', found["copies"]),
        ("amp.optim.Adam8bit or AdamW8bit, in place of netcl's Adam or AdamW", found["optimizer state"] * 3 // 4),
        ("netcl's pool keeps it for tensors of other sizes: get_persistent_pool(queue).clear()", found["free"]),
    ]  # fmt: skip
    return sorted(((what, saved) for what, saved in every if saved > least), key=lambda cure: -cure[1])


# ---------------------------------------------------------------------------------------------- now


def memory_now() -> MemoryReport:
    """Reports the memory held now."""
    return MemoryReport(by_kind(pieces_now().values()))


# ---------------------------------------------------------------------------------------------- at the peak


def memory_of_step(step: Callable[[], Any]) -> MemoryReport:
    """Reports the memory held now, and at the peak of a step, which is run twice and put back (see `dry_run`).

    Raises:
        TypeError: ``step`` is no function.
        ValueError: no op of the step can be seen.
    """
    check_step(step, "handle.memory")
    aside = gradients_now()
    with dry_run(step):
        step()  # builds its kernels
        weight_cache.clear()
        gc.collect()
        there = {where: piece for where, piece in pieces_now().items() if piece.kind != "free"}
        for where in aside.keys() - gradients_now().keys():  # the dry run holds them, to put them back
            there.pop(where, None)
        watch = _Watch(there)
        with bridge.listening_to_tensors(watch.made), undoing() as undo:
            undo.callback(bridge.stop_listening_to_pools, watch)
            undo.callback(watch.stop)
            bridge.listen_to_pools(watch)
            watch.start()
            step()
            watch.claim("gradients", [grad for _, grad in gradients_now().values()])
    gc.collect()
    peak, holders, timeline = watch.told()
    return MemoryReport(memory_now().now, peak, holders, timeline)


_ENGINE = Tape.backward.__code__.co_filename


def _is_in_backward() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename == _ENGINE:
            return True
        frame = frame.f_back
    return False


class _Event(NamedTuple):
    piece: Piece
    is_taken: bool
    free: int  # bytes, in netcl's pools


class _Watch(OpCounter):
    """Watches a step take and give back memory: an `OpCounter` that netcl's pools tell, too (`bridge.PoolListener`).

    Args:
        there: what is held when it begins.
    """

    def __init__(self, there: Mapping[Address, Piece]) -> None:
        super().__init__(of_dry_run=True)
        self._there, self._live = there, dict(there)
        self._events: list[_Event] = []
        self._ops: list[tuple[str, OpRow | None]] = []
        self._backwards: list[int] = []  # where one began
        self._is_in_backward = False

    # ------------------------------------------------------------------------------------------ what is told

    def taken(self, handle: Any, nbytes: int) -> None:
        self._allocated(bridge.address_of(handle.buffer), handle.bucket_size, nbytes)

    def given_back(self, handle: Any) -> None:
        self._freed(bridge.address_of(handle.buffer))

    def made(self, tensor: Tensor) -> None:
        """A tensor was made: one in memory of no pool's is new."""
        if tensor.buffer is None or tensor.pool_handle is not None:
            return
        where = bridge.address_of(tensor.buffer)
        if where in self._live or bridge.whole_of(tensor.buffer) is not tensor.buffer:
            return
        count = getattr(tensor.buffer, "size", 0)
        self._allocated(where, count, count)
        weakref.finalize(tensor, self._freed, where).atexit = False

    def _allocated(self, where: Address | None, count: int, used: int) -> None:
        if where is None:
            return
        in_backward = _is_in_backward()
        if in_backward and not self._is_in_backward:
            self._backwards.append(len(self._events))
        self._is_in_backward = in_backward
        seen = trail()  # it holds what ops were given: not for longer
        place = place_of(seen)._replace(modules=())
        piece = Piece(count, min(count, used), "", place, seen[0] is not None, in_backward, len(self._ops))
        self._live[where] = piece
        self._events.append(_Event(piece, True, bridge.free_bytes()))

    def _freed(self, where: Address | None) -> None:
        piece = None if where is None else self._live.pop(where, None)
        if piece is not None:
            piece.died = len(self._events)
            self._events.append(_Event(piece, False, bridge.free_bytes()))

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Any:
        piece = self._piece_of(made.value)
        if piece is not None and not piece.in_backward:
            piece.in_op = True
        return super().result(made, parents)

    def gradients(self, token: Any, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        self.claim("gradients", (grad, *grads))
        super().gradients(token, grad, grads, again)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        self.claim("gradients", (made,))
        super().added(made, first, second)

    def counted(self, row: OpRow) -> None:
        self._ops.append((row.op if row.direction == "forward" else f"{row.op} {row.direction}", row))
        self.claim("copies", bridge.memory_in(weight_cache.values))

    def claim(self, kind: str, held: Iterable[Any]) -> None:
        """The memory of tensors, or storages, that is held for nothing else yet is of a kind."""
        for piece in map(self._piece_of, held):
            if piece is not None and not piece.kind:
                piece.kind = kind

    def _piece_of(self, held: Any) -> Piece | None:
        where = bridge.address_of(held.buffer if isinstance(held, Tensor) else held)
        return None if where is None else self._live.get(where)

    # ------------------------------------------------------------------------------------------ what it was

    def told(self) -> tuple[Moment, list[Holder], list[Moment]]:
        """The peak, who held it, and the moments of all ops; after the step.

        Raises:
            ValueError: no op was seen, or none took memory.
        """
        if not (self._ops and any(event.is_taken for event in self._events)):
            raise NothingSeenError
        self._ops.append(("after backward", None))
        for number, (piece, is_taken, _) in enumerate(self._events):
            if is_taken and not piece.kind:
                piece.kind = self._kind(piece, number)
        now = by_kind(self._there.values())
        seen: list[tuple[int, int, Moment]] = []  # as pieces were taken: the op, the event
        for number, (piece, is_taken, free) in enumerate(self._events):
            sign = 1 if is_taken else -1
            now[piece.kind] += sign * piece.used
            now["rounding"] += sign * (piece.size - piece.used)
            now["free"] = free
            if is_taken:
                seen.append((piece.op, number, Moment(*self._owner(piece), dict(now))))
        most = [max(same, key=lambda one: one[-1].held) for _, same in groupby(seen, lambda one: one[0])]
        _, event, peak = max(most, key=lambda one: one[-1].held)
        return peak, self._holders(event), [moment for *_, moment in most]

    def _kind(self, piece: Piece, born: int) -> str:
        if piece.in_backward:
            return "workspaces"
        if not piece.in_op:
            return "other tensors"
        is_kept = any(born < began < piece.died for began in self._backwards)
        return "activations" if is_kept else "workspaces"

    def _owner(self, piece: Piece) -> tuple[str, str, str]:
        """The op that a piece was taken in, its layer, and the line."""
        place = piece.place
        if place is None:
            return _BEFORE, "", ""
        op, row = self._ops[min(piece.op, len(self._ops) - 1)]
        if piece.kind == "other tensors":
            return "the program", "", place.short_line
        if row is None:
            return op, "", place.short_line
        return op, row.module, row.line or place.short_line

    def _holders(self, moment: int) -> list[Holder]:
        alive = [piece for piece in self._there.values() if piece.died > moment]
        alive += [piece for piece, is_taken, _ in self._events[: moment + 1] if is_taken and piece.died > moment]
        sizes, counts = Counter[tuple[str, str, str, str]](), Counter[tuple[str, str, str, str]]()
        for piece in alive:
            owner = piece.kind, *self._owner(piece)
            sizes[owner] += piece.size
            counts[owner] += 1
        return [Holder(*owner, count, counts[owner]) for owner, count in sizes.most_common()]
