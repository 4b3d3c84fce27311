"""Why a step was skipped: the first op whose result stopped being finite, what it read, and one cure, as code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clamp import bridge
from clamp.casting.regions import InitCall, init_call
from clamp.casting.results import RESULTS
from clamp.debug.cause import Past, cause_of, divergence, divided_away
from clamp.debug.dry_run import NothingSeenError, check_step, dry_run
from clamp.debug.float32_reference import is_finite_in_float32
from clamp.debug.ranges import FLOAT16
from clamp.debug.step_graph import Frame, StepGraph, Value, are_finite, distinct, find_divided, find_origin
from clamp.debug.step_recorder import OverflowRecorder, StepRecorder
from clamp.debug.words import aligned, bad_counts
from clamp.opencl.host_steps import unrecorded
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_report import StepReport, warn_user

_BEFORE = 21  # frames shown, as many as Hugging Face's DebugUnderflowOverflow


@dataclass(frozen=True)
class Explanation:
    """Why a step was skipped.

    ``print`` it: it is one screen.

    Attributes:
        report: of the step; None where it was run only to be looked at.
        kind: ``"parameter"``, ``"input"`` (not finite before any op), ``"cast"`` (it is beyond float16),
            ``"forward"``, ``"backward"`` (an op's result, or gradient, is not finite at any loss scale),
            ``"scale"`` (the loss scale was too high, nothing else), ``"diverged"`` (loss and weights have grown from
            step to step), ``"finite"`` (nothing is inf or nan) or ``"unseen"`` (no op was looked at).
        why: in one or two sentences.
        cure: what to write, as code; empty if nothing has to be done.
        first: the op; None if none is known.
        leaf: the parameter or input that was not finite.
        before: the ops before it, the nearest last.
    """

    report: StepReport | None
    kind: str
    why: str
    cure: str
    first: Frame | None = None
    leaf: Value | None = None
    before: list[Frame] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = [f"\n{title}: {text}" for title, text in (("why", self.why), ("cure", self.cure)) if text]
        before = [f"\nthe {len(self.before)} before it, magnitudes of their results:"] if self.before else []
        rows = [f"  {line}" for line in in_words(self.before)]
        return "\n".join([*_head(self.report), *_of_first(self), *verdict, *before, *rows])

    __repr__ = __str__


def explain(
    trace: StepGraph, report: StepReport | None, past: Past, *, leaves_finite: bool | None = None
) -> Explanation:
    """Returns why a step whose ops are known was skipped.

    Args:
        trace: with its tensors held.
        report: of the step; None where none was skipped.
        past: what is known of the steps before.
        leaves_finite: of a step that was run only to be looked at, whether the gradients that it left are finite; None
            of the step that was skipped itself.
    """
    if not trace.frames:
        return not_seen(report)
    origin, leaf = find_origin(trace)
    if origin is not None and not (leaf is not None and leaf.is_cut_off):
        cause = cause_of(origin, leaf, trace)
        grown = None if cause.kind == "input" else divergence(trace, past)
        if grown is not None:
            cause = grown._replace(why=f"{grown.why} {cause.why}")
        return Explanation(report, *cause, origin, leaf, _before(trace, origin))
    if trace.is_cut:
        why = (
            "The ops of the last pass are finite; those of passes before it are gone: a replay writes where the one "
            "before it wrote, and no more is held than a quarter of the memory."
        )
        if origin is not None:
            why = (
                f"What {origin.function} reads is not finite already, and the ops before it are gone: no more is "
                "held than a quarter of the memory."
            )
        return Explanation(report, "unseen", why, "handle.explain(step)  # of the pass that went wrong")
    was_skipped = report is not None and not report.stepped
    divided = find_divided(trace)
    if divided is not None and is_finite_in_float32(divided[0]) is not False:
        cause = divided_away(*divided, trace)
        return Explanation(None if was_skipped else report, *cause, divided[0], None, _before(trace, divided[0]))
    why, cure = "Every result and every gradient of its ops is finite.", ""
    absorbed = next((frame for frame in trace.frames if not frame.is_finite), None)
    if absorbed is not None:  # tanh makes 1 of an inf, softmax 0 of a mask's
        why = (
            f"Its loss and the gradients of what is trained are finite. The {absorbed.direction} of "
            f"{absorbed.function}{absorbed.place.at} gives inf or nan, of which nothing has come to them."
        )
    if report is not None and was_skipped and leaves_finite:
        why = (
            "This step went well: its loss and its gradients are finite, which does not tell why step "
            f"{report.step} was skipped. Pass the step with the batch that failed, or have it explained as it happens."
        )
        cure = look(init_call(), again=False)
    elif was_skipped:
        why += " What is not has come into the gradients after backward, or into a parameter before the step."
    return Explanation(report, "finite", why, cure)


def _before(trace: StepGraph, frame: Frame) -> list[Frame]:
    index = trace.frames.index(frame)
    return trace.frames[max(0, index - _BEFORE) : index]


def not_seen(report: StepReport | None) -> Explanation:
    """Returns what is known of a step whose ops nobody has looked at."""
    if report is None:
        return Explanation(None, "unseen", "No step has been skipped.", "")
    why = (
        "The ops of this step were not looked at. handle.explain(step) runs one more, only to look at it, where step() "
        "is a function that does what one step of the loop does."
    )
    return Explanation(report, "unseen", why, look(init_call()))


def look(init: InitCall | None, *, again: bool = True) -> str:
    """Returns what to write to have skipped steps explained, as code.

    Args:
        init: the call that turned AMP on, if one did.
        again: whether a step that is run again may tell, too.
    """
    if init is None or not init.takes_lists:
        return f"print(amp.debugging.explain(step)){'' if again else '  # with the batch that failed'}"
    return f"{init.explaining()}{'  # or handle.explain(step)' if again else ''}"


# ---------------------------------------------------------------------------------------------- in words


def _head(report: StepReport | None) -> list[str]:
    if report is None:
        return []
    if report.stepped:
        return [f"step {report.step} was done, at a loss scale of {report.scale_before:.8g}"]
    scales = f"{report.scale_before:.8g} -> {report.scale:.8g}"
    return [f"step {report.step} was skipped: {report.reason}; loss scale {scales}"]


def _of_first(explanation: Explanation) -> list[str]:
    frame = explanation.first
    if frame is None:
        return []
    place, is_named = frame.place, frame.op in (frame.function, frame.function.removesuffix("_op"))
    name = frame.function if is_named else f"{frame.op}, for {frame.function}"
    where = (f" in {frame.module}" if frame.module else "") + place.layer_kind
    policy = f", policy {place.decided}" if place.policy else ""
    first = "it went into" if explanation.leaf is not None else "first not finite:"
    lines = ["", f"{first} {frame.direction} of {name}{where}{policy}"]
    if place.file:
        lines.append(f"  {place.short_line}: {place.source}")
    rows = [("gave", "", value) for value in frame.outputs]
    rows += [("read", value.source, value) for value in distinct((*frame.inputs, *frame.parents))]
    table = [
        (verb, source, f"{value.dtype} {value.shape}", f"{'magnitudes ' if value.largest else ''}{_range(value)}")
        for verb, source, value in rows
    ]
    return [*lines, *aligned(table)]


def in_words(frames: Iterable[Frame]) -> list[str]:
    """A line for each: what it is of, where, and what it gave."""
    rows = [
        (f"{frame.direction} {frame.function}", frame.module, ", ".join(value.dtype for value in frame.outputs),
         "; ".join(map(_range, frame.outputs)))
        for frame in frames
    ]  # fmt: skip
    return aligned(rows, indent="")


def _range(value: Value) -> str:
    """``"1.2e-05 to 812, 3 inf"``, and what of it float16 has no numbers for."""
    found = value.statistics
    if found is None:
        return "not measured"
    counts = bad_counts(found.infs, found.nans)
    if not found.largest:
        return ", ".join(counts) or ("all 0" if found.count else "empty")
    marks = [" (beyond 65504)"] if found.largest > FLOAT16.largest else []
    marks += [" (below 2^-24)"] if found.smallest < FLOAT16.smallest else []
    return ", ".join([f"{found.smallest:.3g} to {found.largest:.3g}{''.join(marks)}", *counts])


# ---------------------------------------------------------------------------------------------- skipped steps


#: skips in a row after which a step is looked at that can be run again: a search for the scale rarely takes as many
SKIPS_EXPLAINED = 10


class Attribution:
    """Explanations of skipped steps.

    Args:
        history: gives the reports of steps, the newest last.
        losses: gives the losses that were noted, by steps.
    """

    def __init__(
        self, history: Callable[[], Sequence[StepReport]], losses: Callable[[], Mapping[int, float]] = dict
    ) -> None:
        self._history, self._losses = history, losses
        self._recorder = OverflowRecorder(self._skipped)
        self.last: Explanation | None = None
        self._telling: Explanation | None = None  # the last that has a cure: not but a scale that comes down

    @property
    def is_armed(self) -> bool:
        """Returns whether the ops of each step are kept until it is done."""
        return self._recorder in RESULTS.observers

    def arm(self) -> None:
        """Turns it on."""
        RESULTS.attach(self._recorder)

    def disarm(self) -> None:
        """They are no more."""
        RESULTS.detach(self._recorder)
        self._recorder = OverflowRecorder(self._skipped)  # the other one holds ops

    def _skipped(self, trace: StepGraph, report: StepReport) -> None:
        self.last = self._explained(trace, report)
        self._telling = self.last if self.last.cure else self._telling

    def _explained(self, trace: StepGraph, report: StepReport | None) -> Explanation:
        return explain(trace, report, self._past())

    def _past(self) -> Past:
        done = sum(report.stepped for report in self._history())
        with unrecorded():
            return Past(self._losses(), self._recorder.first_magnitudes, steps=done)

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """Returns the explanation of the last skipped step, or of the last one if that was done with a loss of inf or
        nan; with ``step``, of that one, run once more."""
        skipped = self._last_skipped()
        if step is not None:
            self.last = explain_step(step, skipped, self._past())
            return self._as_reported_now(self.last)
        return self._recorder.with_bad_loss(self._explained) or self._known(skipped) or not_seen(skipped)

    def _last_skipped(self) -> StepReport | None:
        return next((report for report in reversed(self._history()) if not report.stepped), None)

    def _known(self, skipped: StepReport | None) -> Explanation | None:
        """What is known already of the last skipped step, if one was; None if nothing is."""
        if self.last is None or (skipped is not None and self._is_old(self.last, skipped)):
            return None
        return self._as_reported_now(self.last)

    def _is_old(self, known: Explanation, skipped: StepReport) -> bool:
        """Returns whether a step has been done between the one that is explained and the last skipped one: that one is
        another matter."""
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
        skipped = self._last_skipped()
        known = None if skipped is None else self._known(skipped)
        if step is not None and known is None and (skipped is not None or is_suspect):
            return self.explain(step)
        return known

    def look_after_skips(self, step: Callable[[], Any], call: str) -> None:
        """Looks at ``step`` when as many steps in a row as ``SKIPS_EXPLAINED`` have been skipped, once in a row, and
        warns of what it found, unless it is but the scale.

        Args:
            call: what gives the explanation, for the message.
        """
        in_a_row = list(itertools.takewhile(lambda report: not report.stepped, reversed(self._history())))
        if self.is_armed or len(in_a_row) != SKIPS_EXPLAINED:  # a longer row has been looked at
            return
        try:
            found = self.explain(step)
        except NothingSeenError:  # of netcl's numpy backend
            return
        if found.kind not in ("scale", "finite"):
            warn_user(f"{SKIPS_EXPLAINED} steps in a row were skipped. {found.why} {call} has the rest.")


def _is_same(one: StepReport | None, other: StepReport | None) -> bool:
    """Returns whether two reports are of the same step."""
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
    seen = StepRecorder(of_ranges=False)
    with dry_run(step, *((skipped.scale, skipped.scale_before) if skipped else ())), RESULTS.attached(seen):
        scales = {id(one): one.scale for one in bridge.living(LossScale) if one.scales}  # the step may move them
        step()
        trace = seen.trace()
        if not trace.frames:
            raise NothingSeenError
        if trace.scaler is not None:
            trace.scale = scales.get(id(trace.scaler), trace.scaler.scale)
        left = [x.grad for _, x in trace.leaves if x.grad is not None and bridge.is_floating(x.grad)]
        found = explain(trace, skipped, past or Past(), leaves_finite=are_finite(left))
        trace.release()
        return found
