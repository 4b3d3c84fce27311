"""From a step that was skipped, or is to be looked at, to its explanation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clamp import bridge
from clamp.casting.results import RESULTS
from clamp.debug.divergence import Past
from clamp.debug.dry_run import NothingSeenError, check_step, rehearsal
from clamp.debug.explain import Explanation, explain, not_seen
from clamp.debug.journal import Journal
from clamp.debug.overflow_recorder import Vigil
from clamp.debug.step_graph import Trace
from clamp.opencl.host_steps import unrecorded
from clamp.ops.statistics import is_measurable, statistics_of
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard
from clamp.scaling.step_report import StepReport, warn_user

#: skips in a row after which a step is looked at that can be run again: a search for the scale rarely takes as many
SKIPS_EXPLAINED = 10


class Attribution:
    """What becomes known of skipped steps.

    Args:
        history: gives the reports of steps, the newest last.
        losses: gives the losses that were noted, by steps.
    """

    def __init__(
        self, history: Callable[[], Sequence[StepReport]], losses: Callable[[], Mapping[int, float]] = dict
    ) -> None:
        self._history, self._losses = history, losses
        self._vigil: Vigil | None = None
        self.last: Explanation | None = None
        self._telling: Explanation | None = None  # the last that has a cure: not but a scale that comes down

    @property
    def is_armed(self) -> bool:
        """Whether the ops of each step are kept until it is done."""
        return self._vigil is not None

    def arm(self) -> None:
        """From now on they are."""
        self._vigil = Vigil(self._skipped)
        RESULTS.attach(self._vigil)

    def disarm(self) -> None:
        """They are no more."""
        if self._vigil is not None:
            RESULTS.detach(self._vigil)
            self._vigil = None

    def _skipped(self, trace: Trace, report: StepReport) -> None:
        self.last = _explained(trace, report, self._past())
        self._telling = self.last if self.last.cure else self._telling

    def _past(self) -> Past:
        largest = {} if self._vigil is None else self._vigil.first_magnitudes
        done = sum(report.stepped for report in self._history())
        with unrecorded():
            return Past(self._losses(), largest, _known_optimizers(), done)

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """What is known of the last skipped step, or of the last one if that was done with a loss of inf or nan; with
        ``step``, of that one, run once more."""
        skipped = next((report for report in reversed(self._history()) if not report.stepped), None)
        if step is not None:
            self.last = explain_step(step, skipped, self._past())
        elif (bad_loss := self._of_bad_loss()) is not None:
            return bad_loss
        elif self.last is None or (skipped and self._is_old(self.last, skipped)):
            return not_seen(skipped)
        return self._as_reported_now(self.last)

    def _of_bad_loss(self) -> Explanation | None:
        found: list[Explanation] = []
        if self._vigil is not None:
            past = self._past()
            self._vigil.look_at_loss(lambda trace, report: found.append(_explained(trace, report, past)))
        return found[0] if found else None

    def _is_old(self, known: Explanation, skipped: StepReport) -> bool:
        """Whether a step has been done between the one that is explained and the last skipped one: that one is another
        matter."""
        if self.is_armed or _is_same(known.report, skipped):
            return False
        since = itertools.takewhile(lambda report: not _is_same(report, known.report), reversed(self._history()))
        return known.report is None or any(report.stepped for report in since)

    def _as_reported_now(self, known: Explanation) -> Explanation:
        """With the report as it is now: what the step has made of the scale may have become known later."""
        now = next((report for report in reversed(self._history()) if _is_same(report, known.report)), known.report)
        return known if now is known.report else replace(known, report=now)

    def of_run(self, step: Callable[[], Any] | None, is_suspect: bool) -> Explanation | None:
        """Why steps of the run were skipped: of the last skip that has to be mended, or else of the last one. None if
        none was, or nobody has looked, and there is no ``step`` to look.

        Args:
            is_suspect: whether something is known to be wrong besides.
        """
        if self._telling is not None:
            return self._as_reported_now(self._telling)
        skipped = next((report for report in reversed(self._history()) if not report.stepped), None)
        known = self.last is not None and skipped is not None and not self._is_old(self.last, skipped)
        if step is not None and not known and (skipped is not None or is_suspect):
            return self.explain(step)
        return self._as_reported_now(self.last) if known and self.last is not None else None

    def look_after_skips(self, step: Callable[[], Any], call: str) -> None:
        """Looks at ``step`` when as many steps in a row as ``SKIPS_EXPLAINED`` have been skipped, once in a row, and
        warns of what it found, unless it is but the scale.

        Args:
            call: what gives the explanation, for the message.
        """
        latest = list(self._history())[-SKIPS_EXPLAINED - 1 :]
        skipped = [not report.stepped for report in latest]
        if self.is_armed or len(skipped) < SKIPS_EXPLAINED or not all(skipped[-SKIPS_EXPLAINED:]):
            return
        if len(skipped) > SKIPS_EXPLAINED and skipped[0]:  # this row has been looked at
            return
        try:
            found = self.explain(step)
        except NothingSeenError:  # of netcl's numpy backend
            return
        if found.kind not in ("scale", "finite"):
            warn_user(f"{SKIPS_EXPLAINED} steps in a row were skipped. {found.why} {call} has the rest.")


def _is_same(one: StepReport | None, other: StepReport | None) -> bool:
    """Whether two reports are of the same step."""
    return one is not None and other is not None and replace(one, scale=other.scale) == other


def explain_step(step: Callable[[], Any], skipped: StepReport | None = None, past: Past | None = None) -> Explanation:
    """Runs a training step only to look at it (`clamp.debug.dry_run`), and explains what is not finite in it.

    Args:
        step: does what one step of a loop does.
        skipped: of a step that was skipped, at whose loss scale it is run.
        past: what is known of the steps before.

    Raises:
        TypeError: ``step`` is no function.
        ValueError: no op of it can be seen.
    """
    check_step(step, "explain")
    journal = Journal(only_training=False, at_backward=True, calls=True)
    with rehearsal(step, *((skipped.scale, skipped.scale_before) if skipped else ())), RESULTS.attached(journal):
        scales = {id(one): one.scale for one in bridge.living(LossScale) if one.scales}  # the step may move them
        step()
        trace = journal.trace()
        if not trace.frames:
            raise NothingSeenError
        if trace.scaler is not None:
            trace.scale = scales.get(id(trace.scaler), trace.scaler.scale)
        past = past or Past(optimizers=_known_optimizers())
        return _explained(trace, skipped, past, leaves_finite=_left_finite_gradients(trace))


def _left_finite_gradients(trace: Trace) -> bool:
    trained = (value.tensor for value in trace.values if value.made_by is None and value.tensor is not None)
    gradients = [x.grad for x in trained if x.grad is not None and is_measurable(x.grad)]
    return all(one.is_finite for one in statistics_of(gradients, histogram=False))


def _explained(
    trace: Trace, report: StepReport | None, past: Past, *, leaves_finite: bool | None = None
) -> Explanation:
    trace.name()
    found = explain(trace, report, past, leaves_finite=leaves_finite)
    trace.let_go()
    return found


def _known_optimizers() -> list[Any]:
    found = (guard.optimizer for guard in bridge.living(StepGuard))
    return list({id(x): x for x in found if x is not None}.values())
