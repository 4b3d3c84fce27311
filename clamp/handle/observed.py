"""What a handle says of the steps that it has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clamp.casting.results import RESULTS
from clamp.observe.explain import Explanation, explain, not_seen
from clamp.observe.frames import Trace
from clamp.observe.journal import Journal
from clamp.observe.rehearsal import rehearsal
from clamp.scaling.loss_scale import DynamicLossScale, LossScale
from clamp.scaling.scale_rule import DEFAULT_RULE
from clamp.scaling.step_report import StepReport


class Explanations:
    """Why steps were skipped, of a handle or a graph.

    Args:
        scale: the loss scale.
        history: the reports of steps.
    """

    def __init__(self, scale: Callable[[], LossScale], history: Callable[[], Sequence[StepReport]]) -> None:
        self._scale, self._history = scale, history
        self._journal: Journal | None = None
        self._last: Explanation | None = None

    def arm(self) -> None:
        """From now on the ops of each step are kept until it is done."""
        self._journal = Journal(self._skipped)
        RESULTS.attach(self._journal)

    def disarm(self) -> None:
        """They are not."""
        if self._journal is not None:
            RESULTS.detach(self._journal)
            self._journal = None

    def _skipped(self, trace: Trace, report: StepReport) -> None:
        self._last = self._explain(trace, report)

    def _explain(self, trace: Trace, report: StepReport | None) -> Explanation:
        trace.name()
        scale = self._scale()
        dynamic = isinstance(scale, DynamicLossScale)
        return explain(trace, report, is_dynamic=dynamic, floor=scale.floor if dynamic else DEFAULT_RULE.min_scale)

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """See ``AmpHandle.explain``."""
        skipped = next((report for report in reversed(self._history()) if not report.stepped), None)
        if step is None:
            return self._last or not_seen(skipped)
        journal = Journal(lambda trace, report: None, only_training=False)
        was = skipped or StepReport(False, "", self._scale().scale)
        RESULTS.attach(journal)
        try:
            with rehearsal(was.scale, was.scale_before if skipped else None):
                step()
                trace = journal.trace()
                trace.scale = self._scale().scale
                return self._explain(trace, skipped)
        finally:
            RESULTS.detach(journal)
