"""One backward pass from a scaled loss: its gradients, and how they are divided by the scale that they are multiplied
by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Node, Parameter, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.interrupts import uninterrupted
from clamp.ops.loss_scale import AppliedScale, scale_lock
from clamp.params import delivery, gradient_marks, masters
from clamp.params.gradient_marks import Mark, mark_of
from clamp.params.masters import Pair
from clamp.params.writes import writes
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard
from clamp.scaling.step_report import warn_user

Repeat: TypeAlias = Callable[[], object]  # does once more what was done


class Averaging(Protocol):
    """Processes that train together (``clamp.ranks.mpi.Ranks``)."""

    def one_pass(self) -> AbstractContextManager[None]:
        """Around a pass: an error inside ends in one on all of them."""

    def checks(self) -> AbstractContextManager[None]:
        """Around what is checked before a pass."""

    def average(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], scaler: LossScale
    ) -> list[Tensor | None]:
        """The mean over all of them of each gradient, still multiplied by the loss scale."""

    def leave(self) -> None:
        """This one has ended its training."""


@dataclass(slots=True)
class _Slot:
    """A parameter, or an input whose gradient the user wants.

    Attributes:
        master: what the optimizer steps.
        model: what backward gives a gradient to.
        before: the gradient when the pass began.
        earlier: what a backward of this pass found there, to be added to this pass's at the end.
    """

    master: Tensor
    model: Tensor
    before: Tensor | None
    earlier: Tensor | None = None

    @property
    def reached(self) -> Tensor | None:
        """The gradient that has come meanwhile."""
        return self.model.grad if self.model.grad is not self.before else None


class _Run(NamedTuple):
    """A backward of the pass: see :class:`clamp.params.delivery.Waiting`.

    Attributes:
        gave: the gradients that it has left to what it reached.
        since: when that was, on the clock of ``clamp.params.writes``.
    """

    reached: Sequence[Tensor]
    before: Mapping[int, Tensor]
    root: Node | None
    again: Repeat | None
    launches: Sequence[Repeat]
    gave: Sequence[Tensor]
    since: int


def _is_input(leaf: Tensor) -> bool:
    """Returns whether a leaf is no parameter, as far as is known, and wants a gradient all the same: for the user's
    eyes."""
    return not isinstance(leaf, Parameter) and leaf.requires_grad and not bridge.is_linked(leaf)


class BackwardPass:
    """One backward pass from a scaled loss, and the gradients that it delivers to some optimizers' parameters.

    What is there when a backward of the pass begins waits until the pass ends, so that no gradient is ever divided by
    a scale twice. What a user clears before (``zero_grad`` inside the ``with``) is gone.

    Args:
        loss: its value.
        scaler: the scale on its queue.
        optimizers: those whose parameters the pass is to reach.
        guards: theirs, which hear of an inf or nan in it.
        ranks: those that average its gradients.
        of_all: whether the gradients of all else that it has reached are divided, too.
        can_be_repeated: whether a backward that overflows may be run again, at lower scales.
    """

    def __init__(
        self, loss: Tensor, scaler: LossScale, optimizers: Sequence[object], guards: Sequence[StepGuard],
        ranks: Averaging | None = None, of_all: bool = False, can_be_repeated: bool = False,
    ) -> None:  # fmt: skip
        self.loss = loss
        self.scaler, self.guards, self.ranks = scaler, guards, ranks
        self._optimizers, self._of_all, self._can_be_repeated = optimizers, of_all, can_be_repeated
        slots: dict[int, _Slot] = {}
        for optimizer in optimizers:
            for master, model in masters.pairs(optimizer):
                if id(master) not in slots:
                    if model is not master:
                        masters.gather(master, model)
                    slots[id(master)] = _Slot(master, model, master.grad)
        self._slots = list(slots.values())
        gradient_marks.note_restorable(slot.before for slot in self._slots)
        self._stepped = len(self._slots)  # those of optimizers, which come first
        self._by_model = {id(slot.model): slot for slot in self._slots}
        self._ran: list[_Run] = []
        self.refused: Node | None = None
        self._came: Sequence[Tensor | None] | None = None  # all that was there at its end
        self._is_alone = True  # no pass is inside of another
        for outer in delivery.running.waiting.values():
            self._is_alone = False
            if isinstance(outer, BackwardPass):
                outer._is_alone = False

    @property
    def mask(self) -> int:
        """The bits of its optimizers."""
        return sum(guard.mask for guard in self.guards)

    @property
    def fresh(self) -> int:
        """The bits of those whose first pass by this scale since their last step it is."""
        return sum(guard.mask for guard in self.guards if self.scaler not in guard.pending)

    @property
    def can_be_repeated(self) -> bool:
        """Returns whether there are lower scales at which an overflow is none. Not of replicas on several queues, whose
        copies of the scale move alike, and of which none waits for its device before the next one's pass."""
        return self._can_be_repeated and self.scaler.is_dynamic and not self.scaler.copies

    def may_overflow(self) -> bool:
        """See :class:`clamp.params.delivery.Waiting`."""
        is_above = self.can_be_repeated and self.scaler.verdict().scale > self.scaler.floor
        return is_above and bool(np.isfinite(self.loss.to_host()).all())

    def keep(self, leaf: Tensor, grad: Tensor) -> bool:
        """See :class:`clamp.params.delivery.Waiting`."""
        slot = self._slot_of(leaf, grad)
        if slot is None:
            return False
        slot.earlier = grad if slot.earlier is None else gradient_marks.added(slot.earlier, grad)
        return True

    def ran(
        self, reached: Sequence[Tensor], before: Mapping[int, Tensor], root: Node, again: Repeat,
        launches: Sequence[Repeat],
    ) -> None:  # fmt: skip
        """See :class:`clamp.params.delivery.Waiting`."""
        gave = [leaf.grad for leaf in reached]
        self._ran.append(_Run(reached, before, root, again, launches, gave, writes.now))

    def again(self) -> Repeat | None:
        """Returns what runs its backwards once more, from the gradients of before, and divides what comes; None where
        nothing does, see ``_backwards``."""
        backwards = self._backwards([run.again for run in self._ran])

        def again() -> None:
            self.put_back()
            with nullcontext() if self.ranks is None else self.ranks.one_pass():
                given = self.loss, self.scaler, self._optimizers, self.guards, self.ranks
                anew = BackwardPass(*given, self._of_all, self._can_be_repeated)
                with delivery.waiting_in(anew):
                    in_turn(backwards)
                anew.average()
                with scale_lock, uninterrupted():
                    anew.unscale()

        return again if backwards else None

    def again_in_replays(self, divide: Sequence[Repeat]) -> Repeat | None:
        """Returns what does as ``again`` where the recording in which the pass began, and now ends, is replayed.

        It lets go of the graphs, which the replays would hold.

        Args:
            divide: does ``unscale`` once more.
        """
        backwards = self._backwards([run.launches[0] if run.launches else run.again for run in self._ran])
        self._ran = [run._replace(root=None, again=None, launches=(), gave=()) for run in self._ran]
        return partial(in_turn, [*backwards, *divide]) if backwards else None

    def _backwards(self, calls: Iterable[Repeat | None]) -> list[Repeat]:
        """Returns the calls that run its backwards once more, after ``put_back``; none where gradients are not those
        that they gave (the user has cleared or changed some, or passes are inside of each other) or a graph is gone."""
        expected = {id(slot.model): slot.before for slot in self._slots}
        for run in self._ran:
            if any(id(x) in expected and expected[id(x)] is not run.before.get(id(x)) for x in run.reached):
                return []
            expected.update((id(x), grad) for x, grad in zip(run.reached, run.gave, strict=True))
        came = zip(self._slots, self._came or (), strict=True)
        as_given = self._is_alone and all(expected[id(slot.model)] is grad for slot, grad in came)
        written = any(writes.since(grad.buffer, run.since) for run in self._ran for grad in run.gave)
        nodes = (node for run in self._ran if run.root is not None for node in bridge.graph(run.root))
        gone = any(node.requires_grad and bridge.is_cut(node) for node in nodes)
        return [] if not as_given or written or gone else [call for call in calls if call is not None]

    @property
    def others(self) -> list[Tensor]:
        """Tensors that are trained, and have got a gradient that stays multiplied: no optimizer named has them."""
        if self._of_all:
            return []
        known = self._by_model
        found = [leaf for run in self._ran for leaf in run.reached if id(leaf) not in known]
        return [leaf for leaf in found if bridge.is_trained(leaf) and not bridge.is_frozen(leaf)]

    def _note_came(self) -> None:
        for run in self._ran:
            for leaf in run.reached:
                if id(leaf) not in self._by_model:
                    self._slot_of(leaf, run.before.get(id(leaf)))
        self._came = [slot.model.grad for slot in self._slots]

    def _slot_of(self, leaf: Tensor, before: Tensor | None) -> _Slot | None:
        """An input is divided like a parameter from the first time on, and so is, in a pass that divides all, what no
        optimizer of it has. What another optimizer has stays as it is, for a pass that names that one."""
        slot = self._by_model.get(id(leaf))
        if slot is None and (self._of_all or _is_input(leaf)):
            slot = self._by_model[id(leaf)] = _Slot(leaf, leaf, before)
            self._slots.append(slot)
        return slot

    def average(self) -> None:
        """Replaces this pass's gradients, still multiplied by the scale, by their means over the ranks, if any."""
        if self.ranks is None:
            return
        self._note_came()
        scale, slots = self.scaler.applied(), [slot for slot in self._slots if not _is_input(slot.model)]
        grads = [None if slot.reached is None else gradient_marks.at_scale(slot.reached, scale) for slot in slots]
        averages = self.ranks.average([slot.model for slot in slots], grads, self.scaler)
        mark = Mark(scale)
        for slot, average in zip(slots, averages, strict=True):
            if average is not None:
                if slot.reached is None:  # on other ranks only
                    slot.earlier = slot.model.grad
                gradient_marks.set_mark(average, mark)
                slot.model.grad = average

    def put_back(self) -> None:
        """Gives all that this pass has reached, and the parameters, the gradients they had before it."""
        for run in reversed(self._ran):
            for leaf in run.reached:
                leaf.grad = run.before.get(id(leaf))
        for slot in self._slots:
            masters.share_gradient(slot.master, slot.model, slot.before)

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, and masters."""
        return [tensor for slot in self._slots for tensor in (slot.master, slot.model)]

    def require_any(self, ran: bool) -> None:
        """Raises RuntimeError where no parameter has got a gradient from the scaled loss: the step would do nothing.

        Args:
            ran: whether a backward has run from the scaled loss on this rank.
        """
        ran = ran or self.ranks is not None
        # netcl's own functions give gradients to what is frozen by requires_grad as well, and no step reads them.
        trained = [slot.reached for slot in self._slots[: self._stepped] if not bridge.is_frozen(slot.model)]
        came = [grad for grad in trained if grad is not None]
        if not came:
            run = "" if ran else "run scaled_loss.backward() or tape.backward(scaled_loss) there, and "
            cleared = ", and that they were not cleared after backward" if ran else ""
            raise RuntimeError(
                "no gradient has reached a parameter of the optimizer inside `with handle.scale_loss(loss, optimizer) "
                f"as scaled_loss`: {run}check that the loss depends on this optimizer's parameters, and that some are "
                f"not frozen{cleared}"
            )
        marks = {id(mark): mark for mark in map(mark_of, came)}.values()  # most have one in common
        if not self.scaler.scales or any(mark is None for mark in marks):  # a user's own gradient
            return
        if not ran or not any(mark.scale is not None or mark.is_checked for mark in marks if mark is not None):
            raise RuntimeError(
                "the gradients that arrived inside `with handle.scale_loss(loss, optimizer) as scaled_loss` come from "
                "another loss, one that was not scaled here: run scaled_loss.backward() or tape.backward(scaled_loss)"
            )

    def unscale(self) -> None:
        """Divides this pass's gradients by the scale, in fp32, and adds the earlier ones. Hold ``scale_lock``."""
        if self._came is None:
            self._note_came()
        reached = [slot.reached for slot in self._slots]
        # What no backward has come to is as it was, unless the user has cleared it meanwhile.
        others = [x.model.grad if grad is None else x.earlier for x, grad in zip(self._slots, reached, strict=True)]
        waiting = [grad for grad in others if grad is not None and gradient_marks.scale_of(grad) is not None]
        came = [grad for grad in reached if grad is not None]
        true = unscale_all([*came, *waiting], self.scaler, frozenset(x.token for x in self.guards), elsewhere=waiting)
        for slot, grad, other in zip(self._slots, reached, others, strict=True):
            now = None if grad is None else true[id(grad)]
            other = None if other is None else true.get(id(other), other)
            slot.master.grad = now if other is None else other if now is None else gradient_marks.added(other, now)
            if slot.model is not slot.master:
                masters.share_gradient(slot.master, slot.model, slot.master.grad)

    def end(self) -> None:
        """Moves the scale, and tells the guards of the optimizers that the pass has reached."""
        self.scaler.update(self.mask, self.fresh)
        for guard in self.guards:
            guard.passed(self.scaler)


def in_turn(calls: Iterable[Repeat]) -> None:
    """Makes these calls."""
    for call in calls:
        call()


def unscale_all(
    grads: Sequence[Tensor], scaler: LossScale, heard: frozenset[object], elsewhere: Sequence[Tensor] = ()
) -> dict[int, Tensor]:
    """Divides gradients, each by what it is multiplied by, and lets the scaler note what is inf or nan. Marks them.

    One that no backward has marked is taken for multiplied by the scaler's scale. One that is true already is only
    checked. A gradient that several parameters have is divided once (netcl's add hands one to both of its parents).

    Args:
        grads: float32, divided in place, or 16-bit, widened.
        heard: tokens of the guards that will hear what the scaler notes.
        elsewhere: those among them that keep what they hold.

    Returns:
        The float32 gradient for the id of each given one.
    """
    kept = {id(grad) for grad in elsewhere}
    live = scaler.applied()
    targets: dict[int, Tensor] = {}
    by_scale: dict[int, tuple[AppliedScale, list[Tensor]]] = {}
    true: list[Tensor] = []
    widened: list[Tensor] = []
    for grad in {id(grad): grad for grad in grads}.values():
        mark = mark_of(grad)
        if mark is not None and mark.scale is None:
            targets[id(grad)] = masters.widened(grad) if grad.dtype in HALF_DTYPES else grad
            true.append(targets[id(grad)])
            continue
        scale = live if mark is None or mark.scale is None else mark.scale
        by_scale.setdefault(id(scale), (scale, []))[1].append(grad)
        if id(grad) in kept:
            targets[id(grad)] = bridge.empty(grad.queue, grad.shape, "float32")
        elif grad.dtype in HALF_DTYPES:
            targets[id(grad)] = bridge.empty(grad.queue, grad.shape, "float32")
            widened.append(grad)
        else:
            targets[id(grad)] = grad
    for scale, sources in by_scale.values():
        scaler.unscale_(sources, [targets[id(source)] for source in sources], None if scale is live else scale)
    scaler.check_(true)
    for grad in widened:
        gradient_marks.set_mark(grad, None)  # nobody needs it or its scale any more
    mark = gradient_marks.checked(heard) if scaler.scales else gradient_marks.PLAIN
    for target in targets.values():
        gradient_marks.set_mark(target, mark)
    return targets


def unscale_gradients(
    found: Iterable[Pair], scaler_of: Callable[[cl.CommandQueue], LossScale], heard: frozenset[object] = frozenset()
) -> tuple[list[LossScale], int]:
    """Divides each gradient by the scale that it was multiplied by, in place; a true one is checked only, and of one
    from a loss that was not scaled a warning says so, once for a scaler.

    All are written, non-finite ones too; each scaler remembers whether there was one. The scale may have moved since
    backward: a gradient knows its own. One that no backward made, a user's, is taken for multiplied by the scale.

    Args:
        found: fp32 parameters, twice; 16-bit ones as (master, parameter), whose gradient goes to both, widened.
        scaler_of: the loss scale of a queue.
        heard: tokens of the guards that will hear what the scalers note.

    Returns:
        The scalers of the queues where there were gradients, and how many gradients there were on any backend.

    Raises:
        ValueError, RuntimeError: a 16-bit parameter has no master; a gradient is multiplied by another scaler's scale.
            Nothing was changed.
    """
    count = 0
    by_queue: dict[cl.CommandQueue, list[tuple[Tensor, Tensor, Tensor]]] = {}  # master, model, gradient
    for index, (master, model) in enumerate(found):
        grad = model.grad  # what backward left
        if model is not master and (master.grad is not None or grad is None):
            masters.gather(master, model)
            grad = master.grad
        if grad is None:
            continue
        count += 1
        if not bridge.on_device(grad):
            note_numpy_backend()
        elif master.dtype in HALF_DTYPES:
            raise ValueError(
                f"parameter {index} of the optimizer is {master.dtype} (shape {tuple(master.shape)}): 16-bit gradients "
                "cannot be unscaled in place. Keep float32 parameters, which autocast casts, or give the 16-bit ones "
                'float32 master weights: amp.decorate(model, optimizer, level="O2").'
            )
        else:
            by_queue.setdefault(grad.queue, []).append((master, model, grad))
    scalers = [scaler_of(queue) for queue in by_queue]
    for scaler, entries in zip(scalers, by_queue.values(), strict=True):
        for master, _, grad in entries:
            scale = gradient_marks.scale_of(grad)
            if scale is not None and not scaler.made(scale):  # which would not hear of an overflow
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(master.shape)} is multiplied by the scale of another "
                    "scaler than this one: unscale and step with the scaler whose scale(loss) backward ran from, or "
                    "leave `with handle.scale_loss(...)` first"
                )
        if not scaler.told_of_plain and any(map(gradient_marks.is_plain, (grad for _, _, grad in entries))):
            scaler.told_of_plain = True
            warn_user(
                "gradients of a loss that was not scaled are used as they are, not divided by the loss scale: run "
                "backward from the scaled loss, since gradients below 6e-8 become zero in float16. If that loss was "
                "made of gradients of a scaled one, these are still multiplied: divide them by the scale"
            )
    for scaler, entries in zip(scalers, by_queue.values(), strict=True):
        true = unscale_all([grad for _, _, grad in entries], scaler, heard)
        for master, model, grad in entries:
            masters.share_gradient(master, model, true[id(grad)])
    return scalers, count
