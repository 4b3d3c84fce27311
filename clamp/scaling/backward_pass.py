"""One backward pass from a scaled loss: its gradients, and how they are divided by the scale that they are multiplied
by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.interrupts import uninterrupted
from clamp.ops.loss_scale import AppliedScale, scale_lock
from clamp.params import delivery, gradient_marks, masters
from clamp.params.delivery import Repeat
from clamp.params.gradient_marks import Mark, mark_of
from clamp.params.masters import Pair
from clamp.ranks.mpi import Ranks
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard
from clamp.scaling.step_report import warn_user


class BackwardPass(delivery.PassGradients):
    """One backward pass from a scaled loss.

    Args:
        loss: its value.
        scaler: the scale on its queue.
        optimizers: those whose parameters the pass is to reach.
        guards: theirs, which hear of an inf or nan in it.
        ranks: those that average its gradients.
        of_all: as of ``PassGradients``.
        can_be_repeated: whether a backward that overflows may be run again, at lower scales.
    """

    def __init__(
        self, loss: Tensor, scaler: LossScale, optimizers: Sequence[object], guards: Sequence[StepGuard],
        ranks: Ranks | None = None, of_all: bool = False, can_be_repeated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(optimizers, of_all)
        self.loss = loss
        self.scaler, self.guards, self.ranks = scaler, guards, ranks
        self._can_be_repeated = can_be_repeated
        self.earlier: AppliedScale | None = None  # its scale, if another thread's pass moved that before its end

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
        """Returns whether a backward that overflows is run again, at lower scales. Not that of replicas on several
        queues, whose copies of the scale move alike, and of which none waits for its device before the next one's pass.
        """
        return self._can_be_repeated and self.scaler.is_dynamic and not self.scaler.copies

    def may_overflow(self) -> bool:
        is_above = self.can_be_repeated and self.scaler.verdict().scale > self.scaler.floor
        return is_above and bool(np.isfinite(self.loss.to_host()).all())

    def again(self) -> Repeat | None:
        """Returns what runs its backwards once more, from the gradients of before, and divides what comes; None where
        nothing does, see ``backwards``."""
        backwards = self.backwards(recorded=False)

        def again() -> None:
            self.put_back()
            with nullcontext() if self.ranks is None else self.ranks.one_pass():
                given = self.loss, self.scaler, self.optimizers, self.guards, self.ranks
                anew = BackwardPass(*given, self.of_all, self._can_be_repeated)
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
        backwards = self.backwards(recorded=True)
        self.forget_graphs()
        return partial(in_turn, [*backwards, *divide]) if backwards else None

    def average(self) -> None:
        """Replaces this pass's gradients, still multiplied by the scale, by their means over the ranks, if any."""
        if self.ranks is None:
            return
        self.note_came()
        scale, slots = self.scaler.applied(), [slot for slot in self.slots if not delivery.is_input(slot.model)]
        grads = [None if slot.reached is None else gradient_marks.at_scale(slot.reached, scale) for slot in slots]
        value = self.scaler.scale if self.scaler.scales else None
        averages = self.ranks.average([slot.model for slot in slots], grads, value)
        mark = Mark(scale)
        for slot, average in zip(slots, averages, strict=True):
            if average is not None:
                if slot.reached is None:  # on other ranks only
                    slot.earlier = slot.model.grad
                gradient_marks.set_mark(average, mark)
                slot.model.grad = average

    def require_any(self, ran: bool) -> None:
        """Raises RuntimeError where no parameter has got a gradient from the scaled loss: the step would do nothing.

        Args:
            ran: whether a backward has run from the scaled loss on this rank.
        """
        ran = ran or self.ranks is not None
        # netcl's own functions give gradients to what is frozen by requires_grad as well, and no step reads them.
        trained = [slot.reached for slot in self.slots[: self.stepped] if not bridge.is_frozen(slot.model)]
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
        if self.came is None:
            self.note_came()
        reached = [slot.reached for slot in self.slots]
        # What no backward has come to is as it was, unless the user has cleared it meanwhile.
        others = [x.model.grad if grad is None else x.earlier for x, grad in zip(self.slots, reached, strict=True)]
        waiting = [grad for grad in others if grad is not None and gradient_marks.scale_of(grad) is not None]
        came = [grad for grad in reached if grad is not None]
        live, scales = self.scaler.applied(), map(gradient_marks.scale_of, came)
        self.earlier = next((x for x in scales if x is not None and x is not live and self.scaler.made(x)), None)
        true = unscale_all([*came, *waiting], self.scaler, frozenset(x.token for x in self.guards), elsewhere=waiting)
        for slot, grad, other in zip(self.slots, reached, others, strict=True):
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


def restoring(tensors: Iterable[Tensor], guards: Sequence[StepGuard]) -> Callable[[], None]:
    """Returns what gives tensors, in each replay, the gradients that they have here, of which these guards have heard
    what they have heard here."""
    held, then = gradient_marks.snapshot(tensors), [guard.token for guard in guards]

    def restore() -> None:
        gradient_marks.restore(held, dict(zip(then, [guard.token for guard in guards], strict=True)))

    return restore


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
