"""The scale after a step where the user moves it later, by ``scaler.update()``."""

from __future__ import annotations

from clamp.scaling.step_guard import StepGuards


class LateScales:
    """Reports of steps that have to hear what becomes of the scale, which is read when it is read anyway."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepGuards, int]] = []
        self.is_due = False  # whether the scale has been updated since them

    def stepped(self, guards: StepGuards) -> None:
        """The last report of these guards is of a step whose scale may move yet."""
        self._steps.append((guards, guards.steps))

    def updated(self) -> None:
        """The scale after the steps so far is what it is now."""
        self.is_due = bool(self._steps)

    def came(self, scale: float) -> None:
        """The scale has been read: tells it to those steps."""
        for guards, step in self._steps if self.is_due else ():
            guards.scale_came(step, scale)
        self.forget()

    def forget(self) -> None:
        """The scale of the steps so far stays."""
        self._steps, self.is_due = [], False
