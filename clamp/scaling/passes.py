"""Scaled backward passes: the loss times its scale, backward, the gradients divided by the scale.

``scaled_pass`` conducts one, for a handle (``PassScaling``) and for a graph's ``backward``. Where the user says when to
unscale, step and update, it is ``clamp.scaling.manual``.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.interrupts import contextmanager, holding, uninterrupted
from clamp.opencl.host_steps import host_step, noting_launches, recorder, undone_by_error, unrecorded
from clamp.ops.loss_scale import scale_lock
from clamp.params import delivery
from clamp.params.delivery import Repeat
from clamp.params.weight_cache import weight_cache
from clamp.ranks.mpi import Ranks
from clamp.scaling.backward_pass import BackwardPass, restoring
from clamp.scaling.dynamic_scale import settle_late
from clamp.scaling.loss_scale import LossScale, require_state
from clamp.scaling.manual import ManualScaling
from clamp.scaling.repeats import Repeats
from clamp.scaling.scaled_loss import OptimWrapper, as_pass, check_loss, require_graph, scaled_node
from clamp.scaling.step_guard import StepGuard, StepGuards, are_steps_withheld
from clamp.scaling.step_report import History, listed, warn_user


def scaled_pass(
    loss: Node, scaler: LossScale, optimizers: Sequence[Any], guards: Sequence[StepGuard],
    scaling: PassScaling | None = None,
) -> Generator[Node, None, None]:  # fmt: skip
    """One scaled backward pass, for ``as_pass``, whose ``with`` runs it from what this yields.

    At the end of the ``with`` gradients are divided by the scale, the scale moves, and the optimizers know which scale
    their steps depend on. An error leaves gradients, scale and counters as they were.

    Args:
        loss: one element, on an OpenCL device, with a graph.
        scaler: the scale on its queue.
        optimizers: those whose parameters it is to reach.
        guards: theirs.
        scaling: of the handle whose pass this is.

    Raises:
        RuntimeError: at the end: the handle is shut down, or no gradient has come.
    """
    has_run: list[None] = []
    if scaling is None:
        one = BackwardPass(loss.value, scaler, optimizers, guards)
    else:
        one = BackwardPass(
            loss.value, scaler, optimizers, guards, scaling.ranks, scaling.divides_all, scaling.repeats_overflows
        )
    repeats: Repeats | None = None
    has_ended = False

    def undo() -> None:
        if repeats is not None:
            repeats.undo()
        if repeats is not None or not has_ended:  # else the scale has moved, from where nobody knows: the pass counts
            one.put_back()

    with undone_by_error(undo):
        one.refused = loss if scaler.scales else None
        with delivery.waiting_in(one):
            yield scaled_node(loss, scaler, partial(has_run.append, None))  # held by nobody here: it is freed at once
        one.refused = None
        if scaling is not None and not scaling.is_active:
            raise RuntimeError(
                "the AMP handle was shut down inside `with handle.scale_loss(...)`, whose end divides gradients: "
                "call shutdown() after it. Gradients are as they were before the with"
            )
        one.average()
        one.require_any(bool(has_run))
        if scaling is not None and (others := one.others):
            scaling.warn_of_unnamed(others)
        with scale_lock, uninterrupted() as held:
            try:
                launches = noting_launches(one.unscale)
                if recorder() is None:
                    repeats = Repeats(one, one.end, one.again) if one.can_be_repeated else None
                    held.pass_on()  # before its end, which only repeats can undo
                    one.end()
                    has_ended = True
                else:
                    again = one.again_in_replays(launches)
                    host_step(partial(_end_again, one, restoring(one.tensors, guards), again, scaling))
            except BaseException:
                with unrecorded():
                    scaler.forget_found()
                raise
        if repeats is not None:
            repeats.settle(one.tensors)
    weight_cache.clear()


def _end_again(
    one: BackwardPass, restore: Callable[[], None], again: Repeat | None, scaling: PassScaling | None
) -> None:
    """Ends a scaled pass while it is recorded, and each replay of it."""

    def end() -> None:
        restore()
        one.end()

    if scaling is not None:
        scaling.require_active("the replay of a scaled backward pass")
        scaling._shown = None
    repeats = Repeats(one, end, lambda: again, in_replay=True) if one.can_be_repeated else None
    try:
        end()
        if repeats is not None:
            repeats.settle()
    except BaseException:  # an interrupt, too
        if repeats is not None:
            repeats.undo()
        raise


class PassScaling:
    """The loss scales of a handle, and the passes by them.

    Args:
        make_scaler: makes a loss scale; one is made for each of ``num_losses``, more for wrapped optimizers.
        guards: of the optimizers.
        wrap_step: puts the guards over an optimizer's ``step``.
        on_overflow: ``"repeat"`` or ``"skip"``, as in ``amp.init``.

    Attributes:
        own: the handle's own loss scales, of which ``first`` is that of the first loss.
        wrapped: those of wrapped optimizers, in the order in which they were wrapped.
        ranks: processes that train together, after ``handle.distribute``.
        is_active: whether the handle is.
        divides_all: whether passes divide all gradients that they give, also those of what no optimizer that they are
            told of has: for a loop that does not know of scales.
    """

    def __init__(
        self, make_scaler: Callable[[], LossScale], num_losses: int, guards: StepGuards,
        wrap_step: Callable[[Any], None], on_overflow: str = "skip",
    ) -> None:  # fmt: skip
        self._make_scaler = make_scaler
        self._wrap_step = wrap_step
        self.repeats_overflows = on_overflow == "repeat"
        self.own = [make_scaler() for _ in range(num_losses)]
        self.first = self.own[0]
        self.wrapped: list[LossScale] = []
        self.guards = guards
        self.ranks: Ranks | None = None
        self.is_active = self.divides_all = False
        self._unnamed: dict[int, weakref.ref[Tensor]] = {}  # what passes have reached that did not name its optimizer
        self._warns_of_unnamed = True
        self._shown: weakref.ref[Any] | None = None  # another scaler, which rules in place of the handle's

    def guard(self, optimizer: Any) -> StepGuard:
        """The guard over this optimizer's ``step``."""
        guard = self.guards.of(optimizer)
        self._wrap_step(optimizer)
        return guard

    def require_active(self, what: str) -> None:
        """Raises RuntimeError where the handle is shut down."""
        if not self.is_active:
            raise RuntimeError(f"{what} was called on an AMP handle that is shut down: call amp.init() again")

    # ------------------------------------------------------------------------------------------ passes

    def pass_of(self, loss: Node, optimizer: Any, loss_id: int) -> AbstractContextManager[Node]:
        """See ``AmpHandle.scale_loss``."""
        with self._checks():
            self.require_active("scale_loss")
            if self.wrapped:
                raise RuntimeError(
                    "handle.scale_loss cannot be used after handle.wrap_optimizer: call optimizer.scale_loss(loss) "
                    "on the wrapped optimizer, for every loss"
                )
            optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
            if not optimizers:
                raise ValueError("scale_loss got an empty list of optimizers: pass the optimizers that will step")
            if loss_id not in range(len(self.own)):
                raise ValueError(
                    f"loss_id must be from 0 to {len(self.own) - 1}, got {loss_id!r}: "
                    "pass the number of losses to amp.initialize(num_losses=...)"
                )
        return self._pass(loss, optimizers, self.own[loss_id])

    def _checks(self) -> AbstractContextManager[None]:
        """Around checks before a pass: after ``distribute`` the other ranks wait in theirs, and hear of an error."""
        return nullcontext() if self.ranks is None else self.ranks.checks()

    @as_pass
    def _pass(self, loss: Node, optimizers: Sequence[Any], scaler: LossScale) -> Generator[Node, None, None]:
        with nullcontext() if self.ranks is None else self.ranks.one_pass():
            self.require_active("scale_loss")
            check_loss(loss)
            if bridge.on_device(loss.value):
                guards = [self.guard(optimizer) for optimizer in optimizers]
                require_graph(loss)
                self._shown = None
                host_step(settle_late)
                yield from scaled_pass(loss, scaler.on(loss.value.queue), optimizers, guards, self)
                return
            if self.ranks is not None:
                raise ValueError("handle.distribute averages gradients of OpenCL devices, not of netcl's numpy backend")
            note_numpy_backend()
            yield loss

    def warn_of_unnamed(self, tensors: Sequence[Tensor]) -> None:
        """Says once if some of these, which are trained, belong to no optimizer of the handle's or the program's."""
        new = [x for x in tensors if id(x) not in self._unnamed or self._unnamed[id(x)]() is not x]
        if not new or not self._warns_of_unnamed:
            return
        self._unnamed.update((id(x), weakref.ref(x)) for x in new)
        optimizers = (*self.guards.optimizers, *bridge.optimizers_in_reach())
        params = [param for optimizer in optimizers for param in optimizer.params]
        held = {id(x) for param in params for x in (param, bridge.model_parameter(param))}
        alone = [x for x in new if id(x) not in held]
        if alone:
            self._warns_of_unnamed = False
            names = [  # in no model, and with no place in an optimizer either: an input, as attacks read its gradient
                f"a tensor of shape {tuple(x.shape)}" if name.startswith("params[") else name
                for x, name in zip(alone, bridge.parameter_names(alone), strict=True)
            ]
            warn_user(
                f"the loss given to scale_loss(loss, optimizer) reaches tensors that require a gradient and that no "
                f"optimizer steps: {listed(names)}. Give them to an optimizer and pass that "
                "one as well, or set requires_grad = False. If you only want their gradients: those of Parameters stay "
                "multiplied by the loss scale, those of other tensors are divided by it"
            )

    def wrap(self, optimizer: Any, num_loss: int) -> OptimWrapper:
        """See ``AmpHandle.wrap_optimizer``."""
        self.require_active("wrap_optimizer")
        if not isinstance(num_loss, int) or isinstance(num_loss, bool) or num_loss < 1:
            raise ValueError(f"num_loss must be a positive integer, got {num_loss!r}")
        self.guard(optimizer)
        scalers = [self._make_scaler() for _ in range(num_loss)]
        self.wrapped += scalers
        return OptimWrapper(optimizer, scalers, partial(self._next_pass, scalers))

    def _next_pass(
        self, scalers: Sequence[LossScale], loss: Node, optimizer: Any, done: int
    ) -> AbstractContextManager[Node]:
        with self._checks():
            self.require_active("scale_loss")
            if done >= len(scalers):
                raise RuntimeError(
                    f"scale_loss was called more than num_loss={len(scalers)} times since the last step(): pass the "
                    "number of backward passes per step to handle.wrap_optimizer(optimizer, num_loss=...), or call "
                    "the wrapper's zero_grad() where a step is given up and begun anew"
                )
        return self._pass(loss, [optimizer], scalers[done])

    def pass_for(self, optimizer: Any, loss: Node) -> AbstractContextManager[Node]:
        """A pass of a loop that is not the user's: by the wrapper if the optimizer is a wrapped one."""
        if isinstance(optimizer, OptimWrapper):
            return optimizer.scale_loss(loss)
        return self._pass(loss, [optimizer], self.first)

    # ------------------------------------------------------------------------------------------ state

    def _by_name(self) -> dict[str, LossScale]:
        return {f"loss_scaler{index}": scaler for index, scaler in enumerate((*self.own, *self.wrapped))}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """See ``amp.state_dict``."""
        return {name: scaler.state_dict() for name, scaler in self._by_name().items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See ``amp.load_state_dict``."""
        scalers = self._by_name()
        require_state(state, "amp.state_dict()")
        if not state:
            raise RuntimeError("the state is empty: it was saved without AMP, or with amp disabled")
        if unknown := [name for name in state if not re.fullmatch(r"loss_scaler\d+", str(name))]:
            raise ValueError(f"the state has {unknown}; a state of amp has loss_scaler0, loss_scaler1, ...")
        if not state.keys() & scalers.keys():
            names = ", ".join(state), ", ".join(scalers)
            raise ValueError(
                f"the state has {names[0]}, this handle has {names[1]}: load it after the same calls of init and "
                "wrap_optimizer"
            )
        self.restore({name: saved for name, saved in state.items() if name in scalers})
        if state.keys() != scalers.keys():
            kept = [name for name in scalers if name not in state]
            left = [name for name in state if name not in scalers]
            warn_user(
                f"the state has {len(state)} loss scalers and this handle {len(scalers)}. "
                f"Unchanged here: {', '.join(kept) or 'none'}; not loaded: {', '.join(left) or 'none'}. For a run to "
                "continue identically, pass the same num_losses and wrap the same optimizers before loading."
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Gives loss scales these states, by name; on an error all keep theirs.

        Raises:
            ValueError: a state is malformed.
        """
        scalers, before = self._by_name(), self.state_dict()
        try:
            for name, saved in state.items():
                if not isinstance(saved, Mapping):
                    raise ValueError(f"{name} must be a dict with loss_scale and unskipped, got {saved!r}")
                scalers[name].load_state_dict(saved)
            self.guards.forget_heard()
        except BaseException:  # an interrupt, too
            for name, scaler in scalers.items():
                scaler.load_state_dict(before[name])
            raise

    # ------------------------------------------------------------------------------------------ other scalers

    @property
    def scale(self) -> float:
        """See ``AmpHandle.loss_scale``."""
        shown = self._shown() if self._shown is not None else None
        return self.first.scale if shown is None else _scale_of(shown)

    @property
    def history(self) -> History:
        """The steps of the handle, those by other scalers as well."""
        shown = self._shown() if self._shown is not None else None
        if isinstance(shown, ManualScaling):
            shown.settle()
        return self.guards.reports.history

    @contextmanager
    def stepped_by(self, scaler: Any, optimizer: Any) -> Iterator[None]:
        """Around one step that a scaler of netcl's decides about: ``last_step`` and ``loss_scale`` tell of it.

        Args:
            scaler: netcl's ``GradScaler``; its ``scale`` is read after the step.
            optimizer: whose ``step`` the scaler calls, or not.
        """
        if are_steps_withheld():
            yield
            return
        guard = self.guard(optimizer.__wrapped__ if isinstance(optimizer, OptimWrapper) else optimizer)
        before, last, guard.met = _scale_of(scaler), guard.last, None
        yield
        guard.decided_elsewhere(last, before, _scale_of(scaler))
        self._shown = weakref.ref(scaler)

    @contextmanager
    def stepped_with(self, scaling: ManualScaling, optimizer: Any) -> Iterator[None]:
        """Around one step that a ``GradScaler`` decides about: ``history`` and ``loss_scale`` tell of it."""
        guard = self.guard(optimizer.__wrapped__ if isinstance(optimizer, OptimWrapper) else optimizer)
        scalers = scaling.guards.of(optimizer)
        last, before = guard.last, scalers.last
        try:
            with holding(scaling.guards.reports, "tells", False):
                yield
        finally:
            report = scalers.last
            if report is not None and report is not before:
                guard.decided_elsewhere(last, report.scale_before, report.scale, report)
                if guard.last is not None:
                    scaling.tell_later(self.guards.reports, guard.last)
                self._shown = weakref.ref(scaling)


def _scale_of(scaler: Any) -> float:
    """The scale of a scaler that is not the handle's."""
    if isinstance(scaler, ManualScaling):
        return float(scaler.state_dict()["loss_scale"])
    return float(scaler.scale) if scaler.enabled else 1.0
