"""What a handle remembers of its run, and what it can measure of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyopencl as cl

from clamp.casting.results import RESULTS
from clamp.debug.explain import Explanation
from clamp.debug.gain import Trial, try_step
from clamp.debug.layer_ranges import LayerRanges, observe_ranges
from clamp.debug.op_counter import Tally
from clamp.debug.page.schema import Run
from clamp.debug.run_json import run_of
from clamp.debug.summary import Summary, with_times
from clamp.opencl.progress import PROGRESS
from clamp.scaling.step_report import StepReport


class Record:
    """The run of a handle from its beginning.

    Args:
        history: gives the reports of its steps, the newest last.

    Attributes:
        began: when, in UTC.
        tally: what is counted; None until ``arm``.
    """

    def __init__(self, history: Callable[[], Sequence[StepReport]]) -> None:
        self._history = history
        self.began = datetime.now(UTC)
        self.tally: Tally | None = None
        self._measured: tuple[Callable[[], Any], int, Trial, LayerRanges] | None = None  # of a step, after so many
        self._built = PROGRESS.programs, PROGRESS.seconds

    def arm(self) -> None:
        """From now on ops, casts, losses and gradients are counted and noted."""
        self.tally = Tally(self._is_own)
        self.tally.start()
        RESULTS.attach(self.tally)

    def _is_own(self, report: StepReport) -> bool:
        history = self._history()
        return bool(history) and history[-1] is report

    def disarm(self) -> None:
        """They are not; what was counted stays."""
        if self.tally is not None:
            RESULTS.detach(self.tally)
            self.tally.stop()

    def losses(self) -> dict[int, float]:
        """Those that were noted, by steps. Waits for the device."""
        points = {} if self.tally is None else self.tally.curves.read()
        return {step: point.loss for step, point in points.items() if point.loss is not None}

    def summary(
        self, dtype: str, steps: int, history: Sequence[StepReport], skips: int, loss_scale: float | None,
        step: Callable[[], Any] | None, live_scale: Callable[[], float],
    ) -> Summary:  # fmt: skip
        """What is known, and with a step, what can be measured of it; see ``AmpHandle.summary``."""
        programs, seconds = PROGRESS.programs - self._built[0], PROGRESS.seconds - self._built[1]
        known = Summary(dtype, steps, skips, history, loss_scale, programs, seconds)
        trial, ranges = self._tried(step, steps, live_scale)
        if self.tally is not None:
            rows, copies = self.tally.rows, self.tally.weight_copies
            rows = rows if trial is None else with_times(rows, trial.amp)
            known = replace(known, rows=rows, casts=self.tally.casts, weight_copies=copies, counted=True)
        elif trial is not None:
            known = replace(known, rows=trial.amp.rows, casts=trial.amp.casts, weight_copies=trial.amp.weight_copies)
        return replace(known, trial=trial, ranges=ranges)

    def run(
        self, summary: Summary, explanation: Explanation | None, device: cl.Device | None, level: str,
        losses: Sequence[float] | None,
    ) -> Run:  # fmt: skip
        """All of it as JSON has it; see `run_of`."""
        of_trial = () if summary.trial is None else summary.trial.modules
        return run_of(
            summary,
            explanation,
            device=device,
            level=level,
            began=self.began,
            points={} if self.tally is None else self.tally.curves.read(),
            losses=losses,
            modules=of_trial if self.tally is None else self.tally.modules,
            ranges=[] if summary.ranges is None else summary.ranges.as_json(),
            suggested_scale=None if summary.ranges is None or summary.ranges.gain is None else summary.ranges.gain[0],
        )

    def _tried(
        self, step: Callable[[], Any] | None, steps: int, live_scale: Callable[[], float]
    ) -> tuple[Trial | None, LayerRanges | None]:
        """What was measured of a step: not again where none was done since; without a step, what was measured last."""
        if step is not None and (self._measured is None or self._measured[:2] != (step, steps)):
            with self.unwatched(), PROGRESS.busy("measuring a step in both precisions"):
                self._measured = step, steps, try_step(step), observe_ranges(step, live_scale)
        return (None, None) if self._measured is None else self._measured[2:]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside the ``with`` nothing is counted: what is only looked at is not a part of the run."""
        is_armed = self.tally is not None and RESULTS.has(self.tally)
        if is_armed:
            self.disarm()
        try:
            yield
        finally:
            if is_armed and self.tally is not None:
                self.tally.start()
                RESULTS.attach(self.tally)
