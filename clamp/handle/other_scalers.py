"""What a handle hears of steps that other scalers decide about: netcl's, a ``GradScaler``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from clamp.bridge import Tensor
from clamp.handle.optim_wrapper import OptimWrapper
from clamp.interrupts import holding
from clamp.patching.patch import Patches
from clamp.scaling.history import History
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.manual import ManualScaling
from clamp.scaling.step_guard import StepGuard, StepGuards, are_steps_withheld


class OtherScalers:
    """What a handle hears of steps that other scalers decide about."""

    _guards: StepGuards
    _scaler: LossScale
    _patches: Patches
    _shown: weakref.ref[Any] | None = None  # another scaler, which rules in place of the handle's

    def guard(self, optimizer: Any) -> StepGuard:
        """The guard over this optimizer's ``step``."""
        guard = self._guards.of(optimizer)
        self._patches.wrap_step(type(optimizer))
        self._patches.wrap_own_step(optimizer)
        return guard

    @property
    def loss_scale(self) -> float:
        """The current loss scale; waits for the device and reads a few bytes from it.

        After a step by another scaler, a Trainer's or an ``amp.GradScaler``, that one's, until the handle scales a loss
        again.
        """
        shown = self._shown() if self._shown is not None else None
        return self._scaler.scale if shown is None else _scale_of(shown)

    def _steps(self) -> History:
        shown = self._shown() if self._shown is not None else None
        if isinstance(shown, ManualScaling):
            shown.settle()
        return self._guards.history

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
        guard.decided_elsewhere(before, _scale_of(scaler), stepped=guard.last is not last)
        self._shown = weakref.ref(scaler)

    @contextmanager
    def stepped_with(self, scaling: ManualScaling, optimizer: Any) -> Iterator[None]:
        """Around one step that a ``GradScaler`` decides about: ``history`` and ``loss_scale`` tell of it."""
        guard = self.guard(optimizer.__wrapped__ if isinstance(optimizer, OptimWrapper) else optimizer)
        last, steps = guard.last, scaling.guards.steps
        try:
            with holding(scaling.guards, "tells", False):
                yield
        finally:
            if scaling.guards.steps > steps:
                guard.decided_by(scaling.guards.history[-1], stepped=guard.last is not last)
                scaling.late_scales.stepped(self._guards)
                self._shown = weakref.ref(scaling)

    def met_non_finite(self, params: Sequence[Tensor]) -> None:
        """A scaler of netcl's has found inf or nan among these parameters' gradients, and will let no step be."""
        guard = self._guards.stepping(params)
        if guard is not None:
            guard.met_non_finite()


def _scale_of(scaler: Any) -> float:
    """The scale of a scaler that is not the handle's."""
    if isinstance(scaler, ManualScaling):
        return float(scaler.state_dict()["loss_scale"])
    return float(scaler.scale) if scaler.enabled else 1.0
