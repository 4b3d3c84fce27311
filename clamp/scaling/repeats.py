"""A backward that has overflowed is run again, from the graph that it ran from, at a scale that its gradients bear."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops import transfer
from clamp.ops.loss_scale import ScaleState
from clamp.params import gradient_marks
from clamp.params.delivery import Repeat
from clamp.scaling.backward_pass import BackwardPass
from clamp.scaling.dynamic_scale import DynamicLossScale, Outcome, settle_later
from clamp.scaling.step_guard import are_steps_withheld


class Repeats:
    """The repeats of one pass, made before it ends, when its gradients have been divided.

    Args:
        one: the pass; one that ``can_be_repeated``.
        end: ends it, now and once more.
        find: finds what runs backward again, from the gradients of before the pass, and divides what comes; None where
            nothing does.
        in_replay: whether that are launches of a replay.
    """

    def __init__(
        self, one: BackwardPass, end: Repeat, find: Callable[[], Repeat | None], *, in_replay: bool = False
    ) -> None:
        assert isinstance(one.scaler, DynamicLossScale)
        self._apart = one.scaler.held if in_replay else one.scaler.apart
        self._scaler, self._guards, self._mask = one.scaler, one.guards, one.mask
        self._loss = one.loss if one.ranks is None else None  # which other ranks, who must decide the same, do not know
        self._end, self._find = end, find
        self._before, self._earlier = one.scaler.verdict(), one.earlier
        self._heard = [guard.heard() for guard in one.guards]
        self._is_skipped = bool(self._before.overflow & one.mask & ~one.fresh)  # the step, whatever this pass finds
        self._tried = 0
        self._reached: Sequence[Tensor] = ()
        self._left: list[tuple[Tensor, Tensor | None]] | None = None
        self._is_undone = False

    def undo(self) -> None:
        """Makes the scale, and what the guards have heard, what they were before the end of the pass, which is given
        up."""
        self._is_undone = True
        self._rewind(self._before)

    def settle(self, left: Sequence[Tensor] | None = None) -> None:
        """Repeats, after the end of the pass, its backward if it has overflowed, now, or when its gradients are used.

        Later is as before there were repeats: the host goes on, and waits with the step. So it is where the scale has
        let a step pass since it last moved, in loops with one pass a step: a graph cannot be kept while the next pass's
        is made. Where the user has changed gradients meanwhile, the step is skipped.

        Args:
            left: tensors that it has left gradients to. None in a recording, where nothing waits: what is launched
                after the pass has its memory, in which its launches could not be repeated later.
        """
        if self._is_skipped or are_steps_withheld():
            return
        if left is None:
            self._settle()
            return
        self._reached, grads = left, [x.grad for x in left if x.grad is not None]
        one_by_one = all(guard.passes == guard.passes_before == 1 for guard in self._guards)
        if self._loss is None or not (one_by_one and self._before.growth_tracker):
            outcome = Outcome(self._settle, grads)
            self._tell_guards(outcome)  # another thread's step waits for it, too
            outcome.hear()
            self._tell_guards(None)
            return
        self._left, heard = [(x, x.grad) for x in left], [guard.token for guard in self._guards]
        changes = self._scaler.changes

        def late() -> None:
            if self._is_undone or changes != self._scaler.changes:
                return
            if heard == [guard.token for guard in self._guards]:
                self._settle()

        self._tell_guards(settle_later(late, grads))

    def _tell_guards(self, outcome: Outcome | None) -> None:
        for guard in self._guards:
            guard.late = outcome

    def _settle(self) -> None:
        """Reads what has become of the pass, and repeats its backward if it has overflowed.

        It is repeated at the largest scale that lets it pass, of those that so many overflows would lead to: the next
        one is tried, then those twice as far down until one does, and back up by halves. Where none does, not the
        smallest either, all is as it is without repeats: the scale goes down once, and the step will be skipped.

        From a scale that has let passes be since it last moved, one such batch is no reason to go as far down for all
        that follow: it goes down once. One that has let none be stays where it was found. Nor is it repeated where
        what its backward reads was written to after it, which is no mistake.
        """
        if not (first := self._overflow()):
            return
        if self._loss is not None and not np.isfinite(self._loss.to_host()).all():  # nor will it be at any scale
            return
        found, changes, scale = [(x, x.grad) for x in self._reached], self._scaler.changes, None
        with self._apart(self._before):
            try:
                scale = self._repeat(first)
            except BaseException as error:
                for tensor, grad in found:  # as they were, with the inf
                    tensor.grad = grad
                self._rewind(self._before, first)
                self._end()
                if not isinstance(error, bridge.WrittenTo):
                    raise
        for tensor, grad in found:
            if grad is None:  # never there, or cleared meanwhile by a user who may have it
                tensor.grad = None
        if scale is not None:
            self._scaler.mend(self._mask, scale if changes == self._scaler.changes else np.inf)

    def _repeat(self, first: int) -> float | None:
        """Returns at most which scale the next passes are to have; None where no repeat lets this one be."""
        rule = self._scaler.rule
        scales = [self._before.scale if self._earlier is None else self._earlier.read()]
        while scales[-1] > rule.min:
            scales.append(max(scales[-1] * rule.backoff, rule.min))
        again = None if len(scales) < 2 else self._find()
        if again is None:
            return None
        found = self._found(scales, again) if self._is_as_left(scales[0], again) else None
        if found is None:
            self._rewind(self._before, first)
            self._end()
            return None
        for guard in self._guards:
            guard.repeats += self._tried
        for tensor, grad in self._left or ():  # whoever holds one by now
            if grad is not None and tensor.grad is not grad:
                transfer.copy(grad.queue, grad.buffer, tensor.grad.buffer, bridge.nbytes(grad))
                gradient_marks.set_mark(grad, gradient_marks.mark_of(tensor.grad))
                tensor.grad = grad
        if self._before.bad_steps + 1 < rule.hysteresis:
            return self._before.scale
        return scales[1] if self._before.growth_tracker else scales[found]

    def _found(self, scales: Sequence[float], again: Repeat) -> int | None:
        """Returns which of these falling scales is the largest that lets the pass be, as it then is."""

        def passes(number: int) -> bool:
            self._tried += 1
            self._run(scales[number], again)
            return not self._overflow()

        bad, good, step = 0, 1, 1
        while not passes(good):
            if good == len(scales) - 1:
                return None
            step *= 2
            bad, good = good, min(good + step, len(scales) - 1)
        last = good
        while good - bad > 1:
            last = (good + bad) // 2
            bad, good = (bad, last) if passes(last) else (last, good)
        if last != good:
            passes(good)
        return good

    def _is_as_left(self, scale: float, again: Repeat) -> bool:
        """Returns whether the gradients are still those of the pass, to the bit; others stay as they are.

        Only another backward at the same scale tells: what kernels of a user's write goes unnoticed.
        """
        if self._left is None:
            return True
        if any(tensor.grad is not grad and tensor.grad is not None for tensor, grad in self._left):
            return False
        grads = [(tensor, grad) for tensor, grad in self._left if grad is not None]
        then = [bridge.read_bytes(grad) for _, grad in grads]
        self._run(scale, again)
        if all(np.array_equal(bridge.read_bytes(x.grad), host) for (x, _), host in zip(grads, then, strict=True)):
            return True
        for (tensor, grad), host in zip(grads, then, strict=True):
            tensor.grad = grad
            bridge.write_bytes(grad, host)
        return False

    def _run(self, scale: float, again: Repeat) -> None:
        self._rewind(self._before._replace(scale=scale, growth_tracker=0))
        again()
        self._end()

    def _overflow(self) -> int:
        """Returns what the pass has met: 0 nothing, 1 an inf, 2 a nan."""
        state = self._scaler.verdict()
        return 0 if not state.overflow & self._mask else 2 if state.nans & self._mask else 1

    def _rewind(self, state: ScaleState, found: int = 0) -> None:
        self._scaler.rewind(state, self._mask, found)
        for guard, heard in zip(self._guards, self._heard, strict=True):
            guard.hear_anew(heard)
