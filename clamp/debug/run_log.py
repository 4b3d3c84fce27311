"""What a handle remembers of its run, and what it can measure of it; as JSON, and as the page of that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyopencl as cl

import clamp
from clamp.casting.regions import InitCall, Region, init_call
from clamp.casting.results import RESULTS
from clamp.debug.explain import Explanation, in_words, look
from clamp.debug.gain import try_step
from clamp.debug.layer_ranges import observe_lost_updates, observe_ranges
from clamp.debug.memory_report import memory_of_step
from clamp.debug.op_counter import OpCounter, Point
from clamp.debug.page.schema import VERSION, Kind, Run, Verdict, checked
from clamp.debug.step_graph import Value
from clamp.debug.summary import Summary, notes, with_times
from clamp.interrupts import contextmanager, undoing
from clamp.opencl.progress import PROGRESS
from clamp.scaling.passes import PassScaling
from clamp.scaling.step_report import StepReport


class RunLog:
    """The run of a handle from its beginning.

    Args:
        region: how its ops run.
        scaling: its loss scales, and the reports of its steps.

    Attributes:
        began: when, in UTC.
        counter: of its ops, casts, losses and gradients.
        counts: whether it counts, or did: from ``arm`` on.
    """

    def __init__(self, region: Region, scaling: PassScaling) -> None:
        self._region, self._scaling = region, scaling
        self.began = datetime.now(UTC)
        self.counter = OpCounter(self._is_own)
        self.counts = False
        self._measured: tuple[object, int, dict[str, Any]] = None, 0, {}  # a step, after how many, and what it gave
        self._built = PROGRESS.programs, PROGRESS.seconds

    def arm(self) -> None:
        """Starts counting ops and casts, and noting losses and gradients."""
        self.counts = True
        self.counter.start()

    def _is_own(self, report: StepReport) -> bool:
        history = self._scaling.history
        return bool(history) and history[-1] is report

    def losses(self) -> dict[int, float]:
        """Those that were noted, by steps. Waits for the device."""
        return {step: point.loss for step, point in self.counter.curves.read().items() if point.loss is not None}

    def summary(self, step: Callable[[], Any] | None) -> Summary:
        """Returns what is known, and with a step, what can be measured of it; see ``AmpHandle.summary``."""
        programs, seconds = PROGRESS.programs - self._built[0], PROGRESS.seconds - self._built[1]
        scaling, reports, modules = self._scaling, self._scaling.guards.reports, self._region.modules
        measured = self._tried(step, reports.steps)
        side = measured["trial"].amp if measured else None
        seen = self.counter if self.counts else side
        rows = () if seen is None else seen.rows
        return Summary(
            self._region.dtype, reports.steps, reports.skips, list(scaling.history),
            scaling.scale if scaling.first.scales else None, programs, seconds,
            rows=with_times(rows, side) if self.counts and side is not None else rows,
            casts=() if seen is None else seen.casts,
            weight_copies=None if seen is None else seen.weight_copies,
            counted=self.counts,
            rules={} if modules is None else {str(rule): paths for rule, paths in modules.decided().items()},
            repeated=reports.repeated,
            **measured,
        )  # fmt: skip

    def run(self, summary: Summary, explanation: Explanation | None, losses: Sequence[float] | None) -> Run:
        """All of it as JSON has it.

        Args:
            summary: with or without a step that was measured.
            explanation: of what is wrong with its steps, where somebody has looked.
            losses: the user's own, of the last steps, in place of those that were noted.
        """
        now, ranges, updates = datetime.now(UTC), summary.ranges, summary.updates
        modules = () if summary.trial is None else summary.trial.modules
        modules = self.counter.modules if self.counts else modules
        return checked({
            "version": VERSION,
            "clamp": clamp.__version__,
            "device": _device(self._scaling.guards.device),
            "dtype": summary.dtype,
            "level": "; ".join([self._region.level, *summary.rules]),
            "date": now.isoformat(timespec="seconds"),
            "seconds": (now - self.began).total_seconds(),
            "verdict": verdict_of(summary, explanation),
            "steps": _steps(summary.history, self.counter.curves.read(), losses),
            "ops": _ops(summary),
            "ranges": [] if ranges is None else ranges.as_json(),
            "suggested_scale": None if ranges is None or ranges.gain is None else ranges.gain[0],
            "updates": {
                "layers": [row._asdict() for row in (updates.layers if updates else ())],
                "notes": updates.notes if updates else (),
            },
            "memory": _memory(summary),
            "modules": [{"path": path, "class": name, "parameters": count} for path, name, count in modules],
            "first_bad": None if explanation is None else _first_bad(explanation),
        })  # fmt: skip

    def _tried(self, step: Callable[[], Any] | None, steps: int) -> dict[str, Any]:
        """Returns the measurements of a step, as a `Summary` has it: not again where none was done since; without a
        step, what was measured last."""
        if step is not None and self._measured[:2] != (step, steps):
            with self.unwatched(), PROGRESS.busy("measuring a step in both precisions"):
                self._measured = step, steps, {
                    "trial": try_step(step),
                    "ranges": observe_ranges(step, self._scaling.first),
                    "updates": observe_lost_updates(step),
                    "memory": memory_of_step(step),
                }  # fmt: skip
        return self._measured[2]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside the ``with`` nothing is counted: what is only looked at is not a part of the run."""
        with undoing() as undo:
            if self.counter in RESULTS.observers:
                undo.callback(self.counter.start)
            self.counter.stop()
            yield


# ---------------------------------------------------------------------------------------------- the answer


_RECENT, _OFTEN = 100, 0.05  # steps, and the part of them that skips do not exceed where all is well


def verdict_of(summary: Summary, explanation: Explanation | None) -> Verdict:
    """Returns what is wrong, if something is; else what AMP gains, if that is known."""
    details, measured = _of_skips(summary), summary.verdict
    skipped = len(list(itertools.takewhile(lambda report: not report.stepped, reversed(summary.history))))  # last
    is_wrong = skipped > 1 or _share_skipped(summary.history) >= _OFTEN
    why = [] if explanation is None or not details else [explanation.why]
    if explanation is not None and explanation.first is not None:
        if explanation.cure or is_wrong or skipped:
            headline, _, rest = explanation.why.partition(": ")
            details = [*([rest[:1].upper() + rest[1:]] if rest else []), *details]
            return _verdict(headline, details, explanation.cure, _kind(explanation))
    elif is_wrong:
        many = f"The last {skipped}" if skipped > 1 else f"{summary.skips:,} of {summary.steps:,}"
        reason = next(report.reason for report in reversed(summary.history) if not report.stepped)
        cure = look(init_call() or InitCall()) if explanation is None or not explanation.cure else explanation.cure
        return _verdict(
            f"{many} steps were skipped: {reason}", [*why, *details], cure, "unknown" if skipped > 1 else "overflow"
        )
    if measured is not None:
        headline = measured.sentence
        kind: Kind = "slow" if measured.is_slower else "healthy"
        if not headline.startswith(summary.dtype):
            headline = headline[:1].upper() + headline[1:]
        return _verdict(headline, [*measured.details, *why, *details], measured.cure, kind)
    if not summary.steps:
        return _verdict("No step has been done", [], "", "unknown")
    headline = f"{summary.steps - summary.skips:,} of {summary.steps:,} steps were done, {summary.skips:,} skipped"
    return _verdict(headline, [*why, *details], "", "healthy")


def _verdict(headline: str, details: Sequence[str], cure: str, kind: Kind) -> Verdict:
    return {"headline": headline, "details": list(details), "cure": cure or None, "kind": kind}


def _kind(explanation: Explanation) -> Kind:
    bad = _bad_value(explanation)
    is_inf = bad is not None and bad.statistics is not None and bad.statistics.infs > 0
    return "overflow" if is_inf and explanation.leaf is None else "not finite"


def _share_skipped(history: Sequence[StepReport]) -> float:
    """The part of the last steps that were skipped, since the first that was done: before it, a scale is looked for."""
    since = itertools.dropwhile(lambda report: not report.stepped, history)
    recent = [report.stepped for report in since][-_RECENT:]
    skipped = recent.count(False)
    return skipped / len(recent) if skipped > 1 else 0.0


def _of_skips(summary: Summary) -> list[str]:
    skipped = [report for report in summary.history if not report.stepped]
    if not skipped:
        return []
    scale = "" if summary.loss_scale is None else f" The loss scale is {summary.loss_scale:.8g} now."
    return [f"{summary.skips:,} of {summary.steps:,} steps were skipped, the last was step {skipped[-1].step}.{scale}"]


# ---------------------------------------------------------------------------------------------- the first bad op


def _bad_value(explanation: Explanation) -> Value | None:
    """Returns what first was not finite of what the op gave, or else of what it read."""
    outputs = [] if explanation.first is None else explanation.first.outputs
    return next((value for value in outputs if not value.is_finite), explanation.leaf)


def _first_bad(explanation: Explanation) -> dict[str, Any] | None:
    frame, bad = explanation.first, _bad_value(explanation)
    if frame is None or bad is None or bad.statistics is None:
        return None
    infs, nans = bad.statistics.infs, bad.statistics.nans
    return {
        "op": frame.function,
        "direction": frame.direction,
        "module": frame.module,
        "line": frame.place.short_line,
        "dtype": bad.dtype,
        "what": "inf" if infs else "nan",
        "count": infs or nans,
        "inputs": [
            {
                "name": value.source, "dtype": value.dtype, "smallest": found.smallest if found.largest else 0.0,
                "largest": found.largest, "infs": found.infs, "nans": found.nans,
            }
            for value in (*frame.inputs, *frame.parents)
            if (found := value.statistics) is not None
        ],
        "frames": in_words(explanation.before),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- what was gathered


def _device(device: cl.Device | None) -> dict[str, str]:
    if device is None:
        return {"name": "unknown", "driver": "unknown", "platform": "unknown"}
    return {
        "name": device.name.strip(), "driver": device.driver_version.strip(), "platform": device.platform.name.strip()
    }  # fmt: skip


def _steps(
    history: Sequence[StepReport], points: Mapping[int, Point], losses: Sequence[float] | None
) -> list[dict[str, Any]]:
    # The last losses are of the last steps.
    own = {
        report.step: float(loss)
        for report, loss in zip(reversed(history), reversed(() if losses is None else losses), strict=False)
    }
    pairs = [(report, points.get(report.step, Point(None, None))) for report in history]
    return [
        {**asdict(report), "loss": own.get(report.step, point.loss), "gradient_norm": point.gradient_norm}
        for report, point in pairs
    ]


def _ops(summary: Summary) -> list[dict[str, Any]]:
    trial = summary.trial
    marked = {} if trial is None else notes(trial)
    in_a_step = {} if trial is None else {row.identity: row.calls for row in trial.amp.rows}  # that was timed
    return [
        asdict(row) | {
            "op": row.name, "function": row.function or None, "policy": row.decided or "none",
            "inputs": list(dict.fromkeys(row.inputs)),
            "milliseconds": None if row.seconds is None else 1e3 * row.seconds * row.calls / in_a_step[row.identity],
            "note": marked.get(row.key, ""),
        }
        for row in summary.rows
    ]  # fmt: skip


def _memory(summary: Summary) -> dict[str, Any]:
    trial, found = summary.trial, summary.memory
    return {
        "activations": None if trial is None else trial.amp.activations,
        "weight_copies": summary.weight_copies,
        "peak": None if trial is None else trial.amp.peak,
        "float32_activations": None if trial is None else trial.plain.activations,
        "float32_peak": None if trial is None else trial.plain.peak,
        "timeline": [moment._asdict() for moment in (() if found is None else found.timeline)],
        "holders": [asdict(one) for one in (() if found is None else found.holders)],
    }
