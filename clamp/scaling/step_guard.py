"""The guard between ``optimizer.step()`` and an overflow, one per optimizer.

The function ``step`` of an optimizer's class is redirected, so an optimizer keeps its signature, its ``__self__`` and
its picklability, and whoever holds the bound method, a scheduler, say, sees the same guard.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.results import RESULTS
from clamp.interrupts import among, contextmanager, holding, of_threads, uninterrupted
from clamp.ops.loss_scale import DeviceState, ScaleState
from clamp.ops.multi_tensor import check_
from clamp.params import gradient_marks, graphs, masters, updates
from clamp.params.masters import pairs
from clamp.scaling.dynamic_scale import Outcome, settle_late
from clamp.scaling.loss_scale import MAX_OPTIMIZERS, LossScale
from clamp.scaling.step_report import (
    NonFinite,
    Reports,
    StepReport,
    names_among,
    non_finite,
    skips_error,
    warn_of_lost_bits,
    warn_of_lost_updates,
)

#: ids of optimizers whose gradients an outer guard, a GradScaler's or a graph's, has found finite
_vouched: dict[object, int] = {}


class _Withheld(threading.local):
    """Whether optimizers do not step in this thread, and what is called with one that would."""

    on = False
    instead: Callable[[Any, bool], Any] | None = None


_withheld = of_threads(_Withheld())
_NOTHING_HEARD: Mapping[str, Any] = {"pending": {}, "passes": 0, "passes_before": 0, "repeats": 0}  # by a new guard


class StepGuard(bridge.Listed):
    """Remembers which scaled backward passes an optimizer's gradients come from, and skips its step on overflow.

    Args:
        optimizer: any object with ``params`` and ``step``.
        guards: those of the same handle or scaler, which keep the history.
    """

    def __init__(self, optimizer: Any, guards: StepGuards) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.mask = 0  # this optimizer's bit in the overflow word of every scaler, once it has scaled passes
        self._guards = guards
        # Scalers with a pass since the last step, in order, each with its scale at the first. Replaced, never changed.
        self.pending: Mapping[LossScale, float] = {}
        self.token = object()  # stands in the marks of gradients for this guard, as long as what it heard counts
        self.passes = self.passes_before = 0  # since the last step, and between the two before
        self.late: Outcome | None = None  # what has become of the last of them, if that is yet to be heard
        self.repeats = 0  # of backwards since the last step, at lower scales than they began with
        self._skips_in_vain = 0  # in a row, of which no lower scale would have kept any
        self._last_skip = object()
        self._absent: tuple[tuple[int, ...], tuple[str, ...]] = (), ()  # parameters without a gradient, their names
        self.last: StepReport | None = None
        # What was inf or nan and who had no gradient, at a step that is decided elsewhere.
        self.met: tuple[NonFinite, tuple[str, ...]] | None = None

    @property
    def optimizer(self) -> Any:
        """The guarded optimizer; None once it is gone."""
        return self._optimizer()

    def passed(self, scaler: LossScale) -> None:
        """A scaled backward pass has reached this optimizer's parameters."""
        if scaler not in self.pending:
            # The host's last word of the scale: another optimizer's step, which reads it, may come before this one's.
            self.pending = {**self.pending, scaler: scaler.last_seen}
        self.passes += 1
        _passed.add(id(self.optimizer))

    def step(
        self, run: Callable[[], Any], *, scale_stays: bool = False, prepare: Callable[[], Any] | None = None,
        is_plain: bool = True,
    ) -> Any:  # fmt: skip
        """Runs the optimizer's own step unless a gradient is inf or nan; returns its result or None.

        What is known of the passes since the last step is forgotten only when this one has ended: one that is
        interrupted can be called again.

        Args:
            run: the optimizer's own step.
            scale_stays: whether the scale has not moved since those passes, as it is updated after the step.
            prepare: what of ``run`` can be done before the device says whether a gradient is inf or nan.
            is_plain: whether ``run`` calls the optimizer's step without arguments.

        Raises:
            RuntimeError: a gradient is still multiplied by a loss scale.
            FloatingPointError: every step for a while was skipped although the scale is at its floor.
        """
        if are_steps_withheld():
            if _withheld.instead is not None:
                settle_late()
                _withheld.instead(self.optimizer, is_plain)
            return None
        optimizer = self.optimizer
        found = masters.split(optimizer)
        params = [param for param in getattr(optimizer, "params", ()) if isinstance(param, Tensor)]
        if prepare is not None and self.pending and not found:  # masters get their gradients only if the step is made
            prepare()
        settle_late(self.late)
        pending = list(self.pending)
        states = [scaler.verdict() for scaler in pending]  # the one read of the device in a step: waits for backward
        if scale_stays:
            self.pending = {scaler: state.scale for scaler, state in zip(pending, states, strict=True)}
        overflowed = [index for index, state in enumerate(states) if state.overflow & self.mask]
        if not overflowed:
            masters.gathered(optimizer, found)
        unchecked: list[Tensor] = []
        if not is_vouched(optimizer):  # else an outer guard has told already, and looked
            RESULTS.stepping(params)
            # Of which this guard has not heard: without a loss scale, made by the user, of another optimizer's pass, or
            # kept over a step.
            unchecked = [x.grad for x in params if not gradient_marks.is_known_to(self.token, x.grad)]
        if overflowed or self._guards.found_in(unchecked):
            index = overflowed[-1] if overflowed else len(states) - 1
            bad = self._skip(params, pending[index] if pending else None, states[index] if states else None)
            self._forget()
            graphs.stepped(params, optimizer)
            self._guards.reports.warn_of_kept(bad)
            return None
        absent = self._names_of_absent(params)
        moves = not params or any(
            x.grad is not None and not bridge.is_frozen(bridge.model_parameter(x)) for x in params
        )
        before = self.pending[pending[-1]] if pending else 1.0
        with uninterrupted():
            result = updates.make(optimizer, found, partial(self._vouching, run))
            self._forget()
            self._skips_in_vain = 0
            scale = states[-1].scale if states else 1.0
            reason = "" if moves else "no parameter had a gradient"
            self._report(moves, reason, scale, scale_before=before, absent=absent)
            graphs.stepped(params, optimizer)
        warn_of_lost_updates(params)
        return result

    def _vouching(self, run: Callable[[], Any]) -> Any:
        with among(_vouched, id(self.optimizer)):
            return run()

    def give_up(self) -> None:
        """The passes since the last step, and what they met, are no step's: their gradients go."""
        settle_late(self.late)  # another thread's repeat begins with what was heard before its pass
        if self.pending:
            self.pending, self.passes, self.repeats, self.token, self.late = {}, 0, 0, object(), None

    def heard(self) -> dict[str, Any]:
        """What is known of the passes since the last step, as ``hear_anew`` takes it."""
        return {name: getattr(self, name) for name in _NOTHING_HEARD}

    def hear_anew(self, heard: Mapping[str, Any] | None) -> None:
        """Knows of these passes since the last step, and of no others; None: of none, as a new guard."""
        vars(self).update(_NOTHING_HEARD if heard is None else heard)

    def _forget(self) -> None:
        self.pending, self.late = {}, None
        self.passes_before, self.passes = self.passes, 0
        _passed.discard(id(self.optimizer))
        self.token = object()

    def _skip(self, params: Sequence[Tensor], scaler: LossScale | None, state: ScaleState | None) -> NonFinite:
        before = 1.0 if scaler is None else self.pending[scaler]
        bad = self._non_finite(params)
        scale = 1.0 if state is None else state.scale
        kind = "nan" if state is not None and state.nans & self.mask else "inf"
        reason = str(bad) or f"{kind} in the gradients of a backward pass, which are gone"
        self._report_skip(reason, scale, before, bad, self._names_of_absent(params))
        stuck = scaler is None or scale <= scaler.floor or bool(bad.kept)
        self._skips_in_vain = self._skips_in_vain + 1 if stuck else 0
        if self._skips_in_vain >= self._guards.max_skips_at_floor:
            raise skips_error(self._skips_in_vain, scaler, scale, bad)
        return bad

    def _non_finite(self, params: Sequence[Tensor]) -> NonFinite:
        last, self._last_skip = self._last_skip, object()
        return non_finite(params, last, self._last_skip)

    def met_non_finite(self) -> None:
        """Notes what is inf and nan now, for ``decided_elsewhere``: a Trainer clears gradients before its step ends."""
        params = [param for param in self.optimizer.params if isinstance(param, Tensor)]
        self.met = self._non_finite(params), self._names_of_absent(params)

    def decided_elsewhere(
        self, last: StepReport | None, before: float, scale: float, report: StepReport | None = None
    ) -> None:
        """Another scaler than the handle's has let this optimizer step just now, or has not.

        Args:
            last: the guard's last report before: if there is another now, the optimizer's ``step`` has been called.
            before, scale: its scale before and after.
            report: in its history, if it keeps one of its own.
        """
        reports = self._guards.reports
        if self.last is not None and self.last is not last:
            self.last = reports.amend(self.last, scale_before=before, scale=scale)
        elif report is not None:
            self.last = reports.add(report)
        else:
            bad, absent = self.met or (NonFinite(0, 0, ()), ())
            self._report_skip(str(bad) or "inf or nan in the gradients, which are gone", scale, before, bad, absent)
            reports.warn_of_kept(bad)

    def _report(self, stepped: bool, reason: str, scale: float, **more: Any) -> None:
        self.last = self._guards.reports.add(StepReport(stepped, reason, scale, repeats=self.repeats, **more))
        self.repeats = 0

    def _report_skip(self, reason: str, scale: float, before: float, bad: NonFinite, absent: tuple[str, ...]) -> None:
        found = {"infs": bad.infs, "nans": bad.nans, "parameters": bad.names}
        self._report(False, reason, scale, scale_before=before, absent=absent, **found)

    def _names_of_absent(self, params: Sequence[Tensor]) -> tuple[str, ...]:
        absent = [
            param for param in params if param.grad is None and not bridge.is_frozen(bridge.model_parameter(param))
        ]
        ids = tuple([id(param) for param in absent])
        if ids != self._absent[0]:
            self._absent = ids, tuple(names_among(params, absent))
        return self._absent[1]


@contextmanager
def steps_withheld(instead: Callable[[Any, bool], Any] | None = None) -> Iterator[None]:
    """Inside the ``with``, ``step()`` of every optimizer that is guarded does nothing in this thread, and reports
    nothing.

    Args:
        instead: called with the optimizer, and whether its ``step`` has no arguments, when the gradients are as that
            would find them.
    """
    with holding(_withheld, "on", True), holding(_withheld, "instead", instead):
        yield


def are_steps_withheld() -> bool:
    """Returns whether this point is inside of ``steps_withheld``."""
    return _withheld.on


def is_vouched(optimizer: Any) -> bool:
    """Returns whether an optimizer steps inside of a step that a GradScaler or a graph has decided about."""
    return id(optimizer) in _vouched.values()


#: ids of optimizers with a pass since the last step: zero_grad has mostly nothing to look for
_passed: set[int] = set()


def give_up_passes(optimizer: Any) -> None:
    """Forgets an optimizer's passes since its last step, whose gradients are gone; not in a dry run, which puts both
    back."""
    if id(optimizer) in _passed and not are_steps_withheld():
        _passed.discard(id(optimizer))
        for guard in bridge.living(StepGuard):
            if guard.optimizer is optimizer:
                guard.give_up()


def _mark_plain_tensors(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Makes sure that the tensors of an optimizer that is not netcl's get gradients from now on."""
    plain = [index for index, param in enumerate(params) if not (bridge.is_weight(param) or bridge.is_linked(param))]
    for index in plain:
        bridge.mark_trained(params[index])
    if plain and not bridge.has_frozen_mark(params[plain[0]]):
        warnings.warn(
            f"{type(optimizer).__name__}.params{plain} are plain tensors with requires_grad=False: what was computed "
            "before this call gives them no gradient. Set requires_grad=True on tensors that are to be trained.",
            UserWarning,
            stacklevel=4,
        )


class StepGuards(bridge.Listed):
    """The guards of a handle, by optimizer, and the reports of their steps.

    Args:
        check_finite: whether gradients are looked at that no scaled pass has looked at.
    """

    max_skips_at_floor = 25  # consecutive steps skipped at the smallest scale after which ``step`` raises

    def __init__(self, *, check_finite: bool = True) -> None:
        self._by_id: dict[int, StepGuard] = {}
        self._guards_lock = threading.RLock()  # optimizers of several threads may come at a time, and get a bit each
        self._check_finite = check_finite
        self.wants_scaling = False  # whether losses are meant to be scaled, so that a step without is worth a word
        self._checks: dict[tuple[cl.CommandQueue, int], DeviceState] = {}  # one a thread, which waits for its own
        self._running: dict[object, int] = {}  # ids of optimizers whose step is under way
        self.reports = Reports()
        self.require_scaled = False  # whether steps are refused that no scaled pass of the handle's precedes

    @property
    def optimizers(self) -> list[Any]:
        """Those that are known and alive."""
        guarded = (guard.optimizer for guard in self._by_id.values())
        return [optimizer for optimizer in guarded if optimizer is not None]

    @property
    def _scaled(self) -> list[StepGuard]:
        return [guard for guard in self._by_id.values() if guard.mask]

    @property
    def device(self) -> cl.Device | None:
        """The device of the first optimizer's parameters; None if none is known."""
        params = (param for optimizer in self.optimizers for param in getattr(optimizer, "params", ()))
        return next((x.queue.device for x in params if isinstance(x, Tensor) and bridge.on_device(x)), None)

    def of(self, optimizer: Any) -> StepGuard:
        """The guard of an optimizer that has scaled passes, with its bit.

        Raises:
            TypeError: the optimizer has no usable ``params`` or no ``step``.
            RuntimeError: more optimizers than a scaler has bits for.
        """
        guard = self._by_id.get(id(optimizer))
        if guard is None or guard.optimizer is not optimizer or not guard.mask:
            params = bridge.optimizer_parameters(optimizer)
            if not callable(getattr(optimizer, "step", None)):
                raise TypeError(f"{type(optimizer).__name__} has no method step(): pass an optimizer")
            with self._guards_lock:
                guard = self._guard(optimizer)
                used = {other.mask for other in self._scaled if other.optimizer is not None}
                free = [1 << bit for bit in range(MAX_OPTIMIZERS) if 1 << bit not in used]
                if not free:
                    raise RuntimeError(
                        f"more than {MAX_OPTIMIZERS} optimizers share one AMP handle, which has one overflow bit for "
                        "each: delete those that are not used any more (del optimizer), or give parameters that are "
                        "stepped together to one optimizer"
                    )
                guard.mask = guard.mask or free[0]
            _mark_plain_tensors(optimizer, params)
        return guard

    def _guard(self, optimizer: Any) -> StepGuard:
        guard = self._by_id.get(id(optimizer))
        if guard is None or guard.optimizer is not optimizer:
            with self._guards_lock:
                known = {key: other for key, other in self._by_id.items() if other.optimizer is not None}
                guard = known[id(optimizer)] = known.get(id(optimizer)) or StepGuard(optimizer, self)
                self._by_id = known
        return guard

    def stepping(self, params: Sequence[Tensor]) -> StepGuard | None:
        """The guard of an optimizer that steps one of these parameters, or masters of them."""
        wanted = {id(param) for param in params}
        for guard in self._scaled:
            if guard.optimizer is not None and any({id(x), id(y)} & wanted for x, y in pairs(guard.optimizer)):
                return guard
        return None

    def tokens(self) -> dict[object, int]:
        """The bits of the optimizers, by what marks of gradients call their guards until the next steps."""
        return {guard.token: guard.mask for guard in self._scaled}

    def forget_heard(self) -> None:
        """Forgets what scalers have noted for these guards: the next steps look at the gradients again."""
        for guard in self._by_id.values():
            guard.token = object()

    def found_in(self, grads: Iterable[Tensor]) -> bool:
        """Returns whether any of these gradients has an inf or nan; one launch and one read a queue."""
        by_queue: dict[cl.CommandQueue, list[Tensor]] = {}
        for grad in grads if self._check_finite else ():
            if bridge.is_floating(grad):
                by_queue.setdefault(grad.queue, []).append(grad)
        found = []
        for queue, of_queue in by_queue.items():
            state = self._checks.setdefault((queue, threading.get_ident()), DeviceState(1.0))
            try:
                check_(of_queue, state.buffer(queue))
                found.append(state.take_found())
            except BaseException:
                del self._checks[queue, threading.get_ident()]  # it may have noted what the next check must not find
                raise
            if not found[-1]:
                gradient_marks.mark_checked(of_queue)
        return any(found)

    # ------------------------------------------------------------------------------------------ step

    def step(self, wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of every optimizer's ``step`` (wrapt's form)."""
        if id(optimizer) in self._running.values():  # an overriding step that calls its base class's
            return wrapped(*args, **kwargs)
        if any(map(callable, (*args, *kwargs.values()))):
            raise RuntimeError(
                "optimizer.step(closure) cannot be used under AMP: a closure runs backward without loss scaling. "
                "Run backward inside `with handle.scale_loss(...)` and call step() without arguments."
            )
        guard = self._guard(optimizer)
        if self.require_scaled and not guard.pending and any(x.grad is not None for x in optimizer.params):
            raise RuntimeError(
                "optimizer.step() would use the gradients of this rank alone: under handle.distribute they are "
                "averaged at the end of `with handle.scale_loss(loss, optimizer)`, which names all optimizers that "
                "step by them, so run every backward of a step in one. A GradScaler, a Graph with an optimizer and "
                "netcl's Trainer(mixed_precision=True) do not average"
            )
        if self.wants_scaling and gradient_marks.lost_bits(getattr(optimizer, "params", ())):
            self.wants_scaling = False  # one warning will do
            warn_of_lost_bits()
        with among(self._running, id(optimizer)):
            is_plain = not (args or kwargs)
            prepare = getattr(wrapped, "prepare", None) if is_plain else None
            return guard.step(lambda: wrapped(*args, **kwargs), prepare=prepare, is_plain=is_plain)
