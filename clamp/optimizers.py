"""What stands between ``optimizer.step()`` and an overflow: one guard per optimizer.

``step`` is wrapped on the optimizer's class, so an optimizer keeps its signature, its ``__self__`` and its
picklability, and a scheduler that holds the bound method sees the same guard.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cache import weights
from clamp.masters import pairs, stepping
from clamp.ops.multi_tensor import non_finite
from clamp.scaler import LossScale

MAX_OPTIMIZERS = 32  # one bit each in a scaler's overflow word


@dataclass(frozen=True)
class StepReport:
    """What one ``optimizer.step()`` did.

    Attributes:
        stepped: whether the parameters were updated.
        reason: why not; empty if they were.
        scale: the loss scale after this step.
    """

    stepped: bool
    reason: str
    scale: float


class StepGuard:
    """Remembers which scaled backward passes an optimizer's gradients come from, and skips its step on overflow.

    Args:
        optimizer: any object with ``params`` and ``step``.
        bit: this optimizer's bit in the overflow word of every scaler.
        max_skips_at_floor: consecutive skips at the smallest scale after which ``step`` raises.
    """

    def __init__(self, optimizer: Any, bit: int, max_skips_at_floor: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.mask = 1 << bit
        self._pending: list[LossScale] = []  # scalers with a pass since the last step
        self._max_skips_at_floor = max_skips_at_floor
        self._skips_at_floor = 0
        self.last: StepReport | None = None

    @property
    def optimizer(self) -> Any:
        """The guarded optimizer; None once it is gone."""
        return self._optimizer()

    def is_fresh(self, scaler: LossScale) -> bool:
        """Whether this scaler has had no pass for this optimizer since its last step."""
        return all(pending is not scaler for pending in self._pending)

    def passed(self, scaler: LossScale) -> None:
        """A scaled backward pass has reached this optimizer's parameters."""
        if self.is_fresh(scaler):
            self._pending.append(scaler)

    @property
    def pending(self) -> list[LossScale]:
        """The scalers that have had a pass for this optimizer since its last step, in order."""
        return list(self._pending)

    def step(self, run: Callable[[], Any]) -> Any:
        """Runs the optimizer's own step unless a pass since the last one overflowed; returns its result or None.

        Raises:
            FloatingPointError: every step for a while was skipped although the scale is at its floor.
        """
        pending, self._pending = self._pending, []
        states = [scaler.read() for scaler in pending]  # the one read of the device in a step
        overflowed = [index for index, state in enumerate(states) if state.overflow & self.mask]
        if not overflowed:
            self._skips_at_floor = 0
            with stepping(self.optimizer):
                result = run()
            self.written()
            self.last = StepReport(True, "", states[-1].scale if states else 1.0)
            return result
        index = overflowed[-1]
        scale = states[index].scale
        self.last = StepReport(False, "inf or nan in the gradients", scale)
        self._skips_at_floor = self._skips_at_floor + 1 if scale <= pending[index].floor else 0
        if self._skips_at_floor >= self._max_skips_at_floor:
            self._give_up(scale)
        return None

    def written(self) -> None:
        """The parameters have changed: what was derived from them, or from views of them, is stale."""
        weights.clear()

    def _give_up(self, scale: float) -> None:
        params = bridge.optimizer_parameters(self.optimizer)
        grads = [(index, param.grad) for index, param in enumerate(params) if param.grad is not None]
        bad = [grads[i][0] for i in non_finite([grad for _, grad in grads])]
        names = ", ".join(f"params[{index}] of shape {tuple(params[index].shape)}" for index in bad)
        raise FloatingPointError(
            f"{self._skips_at_floor} steps in a row were skipped with the loss scale at its floor ({scale:g}): "
            f"the gradients are not finite at any scale, so the model itself computes inf or nan. "
            f"Non-finite gradients: {names or 'none any more'}."
        )


def _mark_plain_tensors(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Makes sure that the tensors of an optimizer that is not netcl's get gradients from now on."""
    plain = [index for index, param in enumerate(params) if not bridge.is_weight(param)]
    for index in plain:
        bridge.mark_trained(params[index])
    if plain and not getattr(params[plain[0]], "_frozen", False):
        warnings.warn(
            f"{type(optimizer).__name__}.params{plain} are plain tensors with requires_grad=False: what was computed "
            "before this call gives them no gradient. Set requires_grad=True on tensors that are to be trained.",
            UserWarning,
            stacklevel=4,
        )


def share_overflow(guards: Sequence[StepGuard]) -> None:
    """An overflow of one replica becomes that of all, so that they skip the same step and go on with one scale.

    Args:
        guards: of the optimizers of one model's replicas, each on its own queue, after as many passes.
    """
    for scalers in zip(*(guard.pending for guard in guards), strict=False):
        states = [scaler.read() for scaler in scalers]
        bad = [state for guard, state in zip(guards, states, strict=True) if state.overflow & guard.mask]
        for guard, scaler in zip(guards, scalers, strict=True) if bad else ():
            scaler.load_state_dict(
                {
                    "loss_scale": bad[0].scale,
                    "unskipped": bad[0].growth_tracker,
                    "overflow": scaler.read().overflow | guard.mask,
                    "bad_steps": bad[0].bad_steps,
                }
            )


class StepGuards:
    """The guards of a handle, by optimizer."""

    def __init__(self, max_skips_at_floor: int) -> None:
        self._by_id: dict[int, StepGuard] = {}
        self._max_skips_at_floor = max_skips_at_floor
        self._running: set[int] = set()
        self.require_scaled = False  # whether steps are refused whose gradients came by no scaled backward pass

    def of(self, optimizer: Any) -> StepGuard:
        """The guard of an optimizer, made at its first use.

        Raises:
            TypeError: the optimizer has no usable ``params`` or no ``step``.
            RuntimeError: more optimizers than a scaler has bits for.
        """
        guard = self._by_id.get(id(optimizer))
        if guard is not None and guard.optimizer is optimizer:
            return guard
        params = bridge.optimizer_parameters(optimizer)
        if not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"{type(optimizer).__name__} has no method step(): pass an optimizer")
        guard = self._by_id[id(optimizer)] = StepGuard(optimizer, self._free_bit(), self._max_skips_at_floor)
        _mark_plain_tensors(optimizer, params)
        return guard

    def stepping(self, params: Sequence[Tensor]) -> StepGuard | None:
        """The guard of an optimizer that steps one of these parameters, or masters of them."""
        wanted = {id(param) for param in params}
        for guard in self._by_id.values():
            if guard.optimizer is not None and any({id(x), id(y)} & wanted for x, y in pairs(guard.optimizer)):
                return guard
        return None

    def sharing(self, guards: Sequence[StepGuard]) -> list[StepGuard]:
        """These guards and those of other optimizers that step one of the same parameters."""
        if len(self._by_id) == len(guards):
            return list(guards)
        reached = {id(param) for guard in guards for param, _ in pairs(guard.optimizer)}
        others = [guard for guard in self._by_id.values() if guard not in guards and guard.optimizer is not None]
        return [*guards, *(guard for guard in others if any(id(p) in reached for p in guard.optimizer.params))]

    def _free_bit(self) -> int:
        self._by_id = {key: guard for key, guard in self._by_id.items() if guard.optimizer is not None}
        used = {guard.mask for guard in self._by_id.values()}
        for bit in range(MAX_OPTIMIZERS):
            if 1 << bit not in used:
                return bit
        raise RuntimeError(f"more than {MAX_OPTIMIZERS} optimizers share one AMP handle")

    def step(self, wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of every optimizer's ``step`` (wrapt's form)."""
        if id(optimizer) in self._running:  # an overriding step that calls its base class's
            return wrapped(*args, **kwargs)
        closure = next((x for x in (*args, *kwargs.values()) if callable(x)), None)
        if closure is not None:
            raise RuntimeError(
                "optimizer.step(closure) cannot be used under AMP: a closure runs backward without loss scaling. "
                "Run backward inside `with handle.scale_loss(...)` and call step() without arguments."
            )
        guard = self._by_id.get(id(optimizer))
        if self.require_scaled and not (guard and guard.pending) and any(p.grad is not None for p in optimizer.params):
            raise RuntimeError(
                "optimizer.step() would use the gradients of this rank alone: under handle.distribute they are "
                "averaged at the end of `with handle.scale_loss(loss, optimizer)`, so run every backward in one"
            )
        if guard is None or guard.optimizer is not optimizer:
            guard = StepGuard(optimizer, 0, self._max_skips_at_floor)  # never scaled: only the cache must hear of it
        self._running.add(id(optimizer))
        try:
            return guard.step(lambda: wrapped(*args, **kwargs))
        finally:
            self._running.discard(id(optimizer))
