"""Why a step was skipped: the first op whose result stopped being finite, what it read, and one cure, as code."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field

from clamp.casting.init_call import InitCall
from clamp.casting.regions import init_call
from clamp.debug.cause import LARGEST_FLOAT16, Cause, cause_of, divided_away
from clamp.debug.divergence import Past, divergence
from clamp.debug.in_float32 import SMALLEST_FLOAT16, is_finite_in_float32
from clamp.debug.origin import find_divided, find_origin, frames_before
from clamp.debug.step_graph import Frame, Trace, Value, distinct
from clamp.debug.text_table import aligned
from clamp.scaling.step_report import StepReport

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
        return "\n".join([*_head(self.report), *_of_first(self), *_block("why", self.why), *_block("cure", self.cure),
                          *_of_before(self.before)])  # fmt: skip

    __repr__ = __str__


def explain(
    trace: Trace, report: StepReport | None, past: Past | None = None, *, leaves_finite: bool | None = None
) -> Explanation:
    """Why a step whose ops are known was skipped.

    Args:
        trace: named, with its tensors held.
        report: of the step; None where none was skipped.
        past: what is known of the steps before.
        leaves_finite: of a step that was run only to be looked at, whether the gradients that it left are finite; None
            of the step that was skipped itself.
    """
    if not trace.frames:
        return not_seen(report)
    origin = find_origin(trace)
    if origin is not None:
        cause = cause_of(origin, trace)
        grown = None if cause.kind == "input" else divergence(trace, past or Past())
        if grown is not None:
            why, cure = grown
            cause = Cause("diverged", f"{why} {cause.why}", cure)
        before = frames_before(trace, origin.frame, _BEFORE)
        return Explanation(report, cause.kind, cause.why, cause.cure, origin.frame, origin.leaf, before)
    if trace.is_cut:
        why = (
            "The ops of the last pass are finite; those of passes before it are gone: a replay writes where the one "
            "before it wrote, and no more is held than a quarter of the memory."
        )
        return Explanation(report, "unseen", why, "handle.explain(step)  # of the pass that went wrong")
    divided = find_divided(trace)
    if divided is not None and is_finite_in_float32(divided[0]) is not False:
        cause = divided_away(*divided, trace)
        before = frames_before(trace, divided[0], _BEFORE)
        skipped_for_it = report if report is not None and report.stepped else None
        return Explanation(skipped_for_it, cause.kind, cause.why, cause.cure, divided[0], None, before)
    why, cure = "Every result and every gradient of its ops is finite.", ""
    if report is None or report.stepped:
        return Explanation(report, "finite", why, cure)
    if leaves_finite:
        why = (
            "This step went well: every result and every gradient is finite, which does not tell why step "
            f"{report.step} was skipped. Pass the step with the batch that failed, or have it explained as it happens."
        )
        return Explanation(report, "finite", why, look(init_call(), again=False))
    why += " What is not has come into the gradients after backward, or into a parameter before the step."
    return Explanation(report, "finite", why, cure)


def not_seen(report: StepReport | None) -> Explanation:
    """What is known of a step whose ops nobody has looked at."""
    if report is None:
        return Explanation(None, "unseen", "No step has been skipped.", "")
    why = (
        "The ops of this step were not looked at. handle.explain(step) runs one more, only to look at it, where step() "
        "is a function that does what one step of the loop does."
    )
    return Explanation(report, "unseen", why, look(init_call()))


def look(init: InitCall | None, *, again: bool = True) -> str:
    """What to write to have skipped steps explained, as code.

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
    where = f" in {frame.module}" if frame.module else ""
    if frame.place.modules:
        where += f" ({type(frame.place.modules[0]).__name__})"
    source = linecache.getline(frame.place.file, frame.place.line).strip()
    op = frame.op if frame.op in (frame.function, frame.function.removesuffix("_op")) else f"{frame.op}, for"
    name = frame.function if not op.endswith("for") else f"{op} {frame.function}"
    policy = f", policy {frame.place.policy}" if frame.place.policy else ""
    first = "it went into" if explanation.leaf is not None else "first not finite:"
    lines = ["", f"{first} {frame.direction} of {name}{where}{policy}"]
    if frame.place.file:
        lines.append(f"  {frame.place.short_line}: {source}")
    rows = [("gave", value) for value in frame.outputs]
    rows += [("read", value) for value in distinct((*frame.inputs, *frame.parents))]
    return [*lines, *_table(rows)]


def _table(rows: Iterable[tuple[str, Value]]) -> list[str]:
    return aligned(
        [(verb, value.source if verb == "read" else "", f"{value.dtype} {value.shape}", _magnitudes(value))
         for verb, value in rows]
    )  # fmt: skip


def _of_before(frames: list[Frame]) -> list[str]:
    if not frames:
        return []
    lines = [f"  {line}" for line in in_words(frames)]
    return ["", f"the {len(frames)} before it, magnitudes of their results:", *lines]


def in_words(frames: Iterable[Frame]) -> list[str]:
    """A line for each: what it is of, where, and what it gave."""
    rows = [
        (f"{frame.direction} {frame.function}", frame.module, ", ".join(value.dtype for value in frame.outputs),
         "; ".join(map(_range, frame.outputs)))
        for frame in frames
    ]  # fmt: skip
    return aligned(rows, indent="")


def _block(title: str, text: str) -> list[str]:
    return ["", f"{title}: {text}"] if text else []


def _magnitudes(value: Value) -> str:
    has_some = value.statistics is not None and value.statistics.largest > 0
    return f"{'magnitudes ' if has_some else ''}{_range(value)}"


def _range(value: Value) -> str:
    """``"1.2e-05 to 812, 3 inf"``, and what of it float16 has no numbers for."""
    found = value.statistics
    if found is None:
        return "not measured"
    counts = [f"{count} {kind}" for count, kind in ((found.infs, "inf"), (found.nans, "nan")) if count]
    if not found.largest:
        return ", ".join(counts) or ("all 0" if found.count else "empty")
    marks = [" (beyond 65504)"] if found.largest > LARGEST_FLOAT16 else []
    marks += [" (below 2^-24)"] if found.smallest < SMALLEST_FLOAT16 else []
    return ", ".join([f"{found.smallest:.3g} to {found.largest:.3g}{''.join(marks)}", *counts])
