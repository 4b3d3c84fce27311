"""Loss scaling step by step: scale, unscale, step, update. After PyTorch's ``GradScaler``.

``handle.scale_loss`` does all of this at the end of its ``with``. Here the user says when, and may look at the
gradients, or clip them, between unscaling and the step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.interrupts import uninterrupted
from clamp.opencl.host_steps import host_step, recorder
from clamp.ops.loss_scale import scale_lock
from clamp.params import gradient_marks, masters
from clamp.scaling.backward_pass import restoring, unscale_gradients
from clamp.scaling.dynamic_scale import DynamicLossScale, ScaleRule
from clamp.scaling.loss_scale import LARGEST, SMALLEST, LossScale, parse_state, positive
from clamp.scaling.scaled_loss import scaled_node
from clamp.scaling.step_guard import StepGuard, StepGuards, are_steps_withheld, give_up_passes
from clamp.scaling.step_report import History, Reports, StepReport


class Stage(enum.Enum):
    """An optimizer's stage between two updates of the scale."""

    READY = enum.auto()
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


@dataclass
class _Round:
    optimizer: Any  # held, so that its id stays its own
    guard: StepGuard
    stage: Stage = Stage.READY
    checked: int = 0  # gradients
    scalers: list[LossScale] = field(default_factory=list)


def stages() -> Hashable:
    """The stages of optimizers that some scaler has unscaled or stepped since its last update: what the next call does
    depends on them."""
    rounds = [(id(one), key, each) for one in bridge.living(ManualScaling) for key, each in list(one._rounds.items())]
    return frozenset([(scaling, key, each.stage, each.checked) for scaling, key, each in rounds])


def begin_anew(optimizer: Any) -> None:
    """An optimizer's gradients have been cleared: what passes have met since its last step is no step's, and if they
    were unscaled, the next ones are new."""
    give_up_passes(optimizer)
    for scaling in bridge.living(ManualScaling):
        scaling.give_up(optimizer)


class ManualScaling(bridge.Listed):
    """A dynamic loss scale, and where each optimizer is.

    Args:
        init_scale: finite and positive.
        rule: how the scale moves.
        around_step: a context around each step, given this and the optimizer: for who tells of steps besides.

    Raises:
        ValueError: init_scale is not finite and positive.
    """

    _scale_class, _floor = DynamicLossScale, SMALLEST
    moves = True  # whether it is ever updated
    _rounds: dict[int, _Round] = {}  # noqa: RUF012  (of one that is being made, and listed already)

    def __init__(
        self, init_scale: float, rule: ScaleRule,
        around_step: Callable[[ManualScaling, Any], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._around_step = around_step
        # Reports that have to hear what becomes of the scale, which is read when it is read anyway: of steps since the
        # last update, and before it.
        self._late: list[tuple[Reports, StepReport]] = []
        self._due: list[tuple[Reports, StepReport]] = []
        self.guards = StepGuards()  # with the optimizers' bits of the scales' overflow words
        self._rounds = {}
        self._scaled_any = False  # whether anything was multiplied by the scale
        # Whether a batch that was given up, or a state that was loaded, has moved the scale before its update().
        self._is_moved = False
        self._scaler = self._scale_class(rule=replace(rule, min=self._floor, max=LARGEST))
        self.load_state_dict({"loss_scale": init_scale, "unskipped": 0})

    @property
    def history(self) -> History:
        """Reports of the last steps, the newest last. Reads the device after an update."""
        self.settle()
        return self.guards.reports.history

    def settle(self, scale: float | None = None) -> None:
        """Tells the reports of steps before the last update what has become of the scale; reads the device if it is not
        given."""
        if self._due and (scale is not None or recorder() is None):
            scale = self._scaler.scale if scale is None else scale
            for reports, report in self._due:
                reports.amend(report, scale=scale)
            self._due = []

    def tell_later(self, reports: Reports, report: StepReport) -> None:
        """This one of these reports is of a step whose scale may move yet."""
        self._late.append((reports, report))

    def scale_on(self, queue: cl.CommandQueue) -> LossScale:
        """The scale on a queue."""
        return self._scaler.on(queue)

    # ------------------------------------------------------------------------------------------ a step

    def scale(self, x: Node | Tensor) -> Any:
        """``x * scale``, float32; on netcl's numpy backend x itself.

        Raises:
            TypeError: x is not float32, float16 or bfloat16.
        """
        self._scaled_any = True
        if not isinstance(x.value, Tensor) or not bridge.on_device(x.value):
            note_numpy_backend()
            return x
        return scaled_node(x, self.scale_on(x.value.queue))

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of an optimizer's parameters by the scale and looks for inf and nan.

        Raises:
            RuntimeError: twice since the last update, after step, or before any loss was scaled.
            ValueError: 16-bit parameters without masters.
        """
        self._require_scaled("unscale_()")
        round_ = self._round(optimizer)
        if round_.stage is Stage.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call update() after "
                "each iteration, also where you leave step() out. While gradients add up, leave unscale_() out"
            )
        if round_.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step(): call update() before it.")
        found = masters.pairs(optimizer)
        with scale_lock, uninterrupted():
            scalers, checked = unscale_gradients(found, self.scale_on, frozenset((round_.guard.token,)))
            divided = [x for pair in found for x in pair] if recorder() is not None else []
            host_step(partial(self._unscaled, optimizer, scalers, checked, restoring(divided, [round_.guard])))

    def _unscaled(self, optimizer: Any, scalers: list[LossScale], checked: int, restore: Callable[[], None]) -> None:
        """Notes that an optimizer's gradients have been divided, in each replay of a recording as well.

        Args:
            restore: gives its parameters these gradients.
        """
        restore()
        round_ = self._round(optimizer)
        guard = round_.guard
        for scaler in scalers:
            scaler.assign(guard.mask, fresh=guard.mask)
            guard.passed(scaler)
        round_.stage, round_.checked, round_.scalers = Stage.UNSCALED, checked, scalers
        self._is_moved = False

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` unless its gradients are inf or nan; unscales them if that is not done.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            RuntimeError: twice since the last update, a closure, no gradients, or before any loss was scaled.
            FloatingPointError: every step for a while was skipped although the scale is at its floor.
        """
        if any(callable(x) for x in (*args, *kwargs.values())) or "closure" in kwargs:
            raise RuntimeError(
                "closures cannot be used with a GradScaler: a closure would run backward without loss scaling. "
                "Run backward from scaler.scale(loss) and call scaler.step(optimizer) without one."
            )
        self._require_scaled("step()")
        round_ = self._round(optimizer)
        if round_.stage is Stage.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(): call update() after all optimizers."
            )
        if round_.stage is Stage.READY:
            self.unscale_(optimizer)
        else:
            self._check_again(round_)
        if not round_.checked:
            raise RuntimeError(
                "no inf checks were recorded for this optimizer: none of its parameters has a gradient. Run backward "
                "before step(), and zero_grad() after it or before backward."
            )
        return masters.step_anew(optimizer, lambda: self._step(optimizer, lambda: optimizer.step(*args, **kwargs)))

    def _step(self, optimizer: Any, run: Callable[[], Any]) -> Any:
        """Lets the optimizer step, and notes that it has, as a whole."""
        with uninterrupted():
            return self._stepped(optimizer, run)

    def _stepped(self, optimizer: Any, run: Callable[[], Any]) -> Any:
        round_ = self._round(optimizer)
        guard, last = round_.guard, round_.guard.last
        with self._around_step(self, optimizer):
            try:
                result = guard.step(run, scale_stays=True)
            finally:
                if guard.last is not None and guard.last is not last:
                    self.settle(guard.last.scale_before)
                    self.tell_later(self.guards.reports, guard.last)
        round_.stage = Stage.STEPPED
        return result

    def _check_again(self, round_: _Round) -> None:
        """Gradients that were unscaled earlier: the user may have put inf or nan into them meanwhile."""
        params = bridge.optimizer_parameters(round_.optimizer)
        gradient_marks.require_ready(
            params, "step()", "a backward has added to them since unscale_(); run every backward before it."
        )
        for master, model in masters.split(round_.optimizer):
            masters.gather(master, model)
        grads = [param.grad for param in params if param.grad is not None and bridge.on_device(param.grad)]
        with scale_lock:
            for scaler in round_.scalers:
                scaler.check_([grad for grad in grads if self.scale_on(grad.queue) is scaler])
                scaler.assign(round_.guard.mask, fresh=0)

    def update(self) -> None:
        """Moves the scale by what the steps since the last update met, and makes every optimizer ready again.

        Raises:
            RuntimeError: no gradient was checked since the last update.
        """
        host_step(self._update)

    def _update(self) -> None:
        rounds = [round_ for round_ in list(self._rounds.values()) if round_.checked]
        if not rounds and self._is_moved:
            self._is_moved = False
            return
        if not rounds:
            raise RuntimeError("no inf checks were recorded prior to update(): call step(optimizer) before it.")
        with uninterrupted():
            if self._scaler.copies:
                self._agree(rounds)
            else:
                self._scaler.adjust()
            self._begin_anew()

    def _agree(self, rounds: Iterable[_Round]) -> None:
        """One scale on all queues: an overflow on any lowers it on all."""
        first = self._scaler
        if any(scaler.overflowed(round_.guard.mask) for round_ in rounds for scaler in round_.scalers):
            first.note_overflow()
        first.update(1, fresh=1)  # any bit: an optimizer's own is set anew when its gradients are looked at next
        state = first.read()
        for scaler in first.copies:
            scaler.follow(state, 0)

    def give_up(self, optimizer: Any) -> None:
        """Makes an optimizer ready again whose gradients were unscaled, and cleared before a step.

        An inf or nan in them, or in those of others that were given up before, lowers the scale now, unless another
        optimizer is on its way to an update: a loop that leaves such batches out, with their update, would meet the
        same scale for ever. An update that comes after all has nothing more to do. Reads the device then.
        """
        round_ = self._rounds.get(id(optimizer))
        if round_ is None or round_.stage is not Stage.UNSCALED:
            return
        round_.stage = Stage.READY
        rounds = list(self._rounds.values())
        if are_steps_withheld() or any(other.stage is not Stage.READY for other in rounds):
            return
        if self.moves and any(scaler.overflowed(one.guard.mask) for one in rounds for scaler in one.scalers):
            self._update()
            self._is_moved = True

    def set_scale(self, scale: float) -> None:
        """Sets the scale and makes every optimizer ready again; the growth tracker stays.

        Raises:
            ValueError: the scale is not finite and positive.
        """
        self._allow(scale)
        self._scaler.set_scale(scale)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._due, self._late = [*self._due, *self._late], []
        self._rounds.clear()

    def make_ready(self) -> None:
        """Makes every optimizer ready again, without a move of the scale: for one that stays."""
        host_step(self._rounds.clear)
        host_step(lambda: self._late.clear())  # the list of the day

    def _require_scaled(self, call: str) -> None:
        if not self._scaled_any:
            raise RuntimeError(
                f"{call} was called before any loss was scaled: run backward from scaler.scale(loss), not from the loss"
            )

    def _round(self, optimizer: Any) -> _Round:
        round_ = self._rounds.get(id(optimizer))
        if round_ is None:
            round_ = self._rounds[id(optimizer)] = _Round(optimizer, self.guards.of(optimizer))
        return round_  # another thread's update may end it

    # ------------------------------------------------------------------------------------------ state

    @property
    def between_updates(self) -> bool:
        """Returns whether an optimizer is unscaled or stepped and the scale not updated yet."""
        return bool(self._rounds)

    @property
    def rule(self) -> ScaleRule:
        """The rule by which the scale moves; may be replaced at any time."""
        return self._scaler.rule

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self._scaler.rule = replace(rule, min=self._scaler.rule.min, max=LARGEST)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth tracker as apex names them; reads the device."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; optimizers are ready again.

        Raises:
            ValueError: the state is malformed. Nothing was changed.
        """
        parse_state(state, self.rule.called)
        self._allow(state["loss_scale"])
        self._scaler.load_state_dict(state)
        self._is_moved = self._is_moved or bool(self._rounds)  # an update that comes after all has nothing to do
        self._rounds.clear()

    def _allow(self, scale: Any) -> None:
        """Lets a scale below the floor, if somebody wants one, be: overflows lower no further."""
        if isinstance(scale, bool | np.bool_):
            raise ValueError(f"the loss scale must be a finite positive number, not {scale!r}")
        rule, least = self._scaler.rule, positive("the loss scale", scale)
        if least < rule.min and not self._scaler.lifts:
            self._scaler.rule = replace(rule, min=least)
