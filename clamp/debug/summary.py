"""What a run did, on one screen: steps, kernels, ops, casts, memory, and what AMP gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clamp.debug.gain import Side, Trial
from clamp.debug.layer_ranges import LayerRanges
from clamp.debug.op_counter import Casts, Row
from clamp.debug.text_table import aligned
from clamp.debug.verdict import Verdict, judge, notes
from clamp.scaling.step_report import StepReport

_SHOWN = 20  # rows of ops
_REASONS = 3


@dataclass(frozen=True)
class Summary:
    """What is known of a run. ``print`` it.

    Attributes:
        dtype: that of AMP.
        steps, skips: how many steps there were, and how many of them were skipped.
        history: reports of the last 1000.
        loss_scale: as it is now; None without loss scaling.
        programs, compile_seconds: kernels compiled since the handle was made, and how long compilers took.
        rows: the ops of the run; without ``debug="summary"`` those of one step that was tried; empty if neither.
        casts: the same.
        weight_copies: bytes of 16-bit copies of weights; None if not known.
        trial: what was measured; None without a step to measure.
        counted: whether ``rows`` and ``casts`` are those of the run.
        ranges: magnitudes of that step, layer by layer; None without one.
    """

    dtype: str
    steps: int
    skips: int
    history: Sequence[StepReport]
    loss_scale: float | None
    programs: int
    compile_seconds: float
    rows: Sequence[Row] = ()
    casts: Sequence[Casts] = ()
    weight_copies: int | None = None
    trial: Trial | None = None
    counted: bool = False
    ranges: LayerRanges | None = None

    @property
    def verdict(self) -> Verdict | None:
        """What AMP gains; None if nothing was measured."""
        return None if self.trial is None else judge(self.trial)

    def __str__(self) -> str:
        blocks = [self._head(), self._ops(), self._of_casts(), self._memory(), self._of_ranges(), self._of_verdict()]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    __repr__ = __str__

    # ------------------------------------------------------------------------------------------ in words

    def _head(self) -> list[str]:
        scale = "no loss scaling" if self.loss_scale is None else f"loss scale {self.loss_scale:.8g}"
        lines = [f"AMP {self.dtype}: {self.steps} steps, {self.skips} skipped, {scale}"]
        skipped = [report for report in self.history if not report.stepped]
        kinds = Counter(_kind(report) for report in skipped)
        for kind, count in kinds.most_common(_REASONS):
            last = next(report for report in reversed(skipped) if _kind(report) == kind)
            lines.append(f"  {count} skipped for {kind}; the last was step {last.step}: {last.reason}")
        lines.append(f"kernels: {self.programs} compiled in {self.compile_seconds:.1f} s since AMP is on")
        return lines

    def _ops(self) -> list[str]:
        if not self.rows:
            return []
        of = "of the run" if self.counted else "of one step"
        how = ""
        if self.trial is not None:
            alone = "wall time of each launch by itself, queue without profiling"
            how = f"; ms a step by {alone if self.trial.alone else 'profiling events'}"
        rows = sorted(self.rows, key=lambda row: -(row.seconds or 0.0)) if self.trial else list(self.rows)
        table = [("op", "layer, line", "policy", "dtypes", "calls", "MiB", *self._heads())]
        table += [self._cells(row) for row in rows[:_SHOWN]]
        left = [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        return [f"ops {of}, {len(rows)}{how}", *aligned(table, numbers=range(4, 8)), *left]

    def _heads(self) -> tuple[str, ...]:
        return () if self.trial is None else (self.dtype, "float32", "")

    def _cells(self, row: Row) -> tuple[str, ...]:
        dtypes = f"{', '.join(dict.fromkeys(row.inputs))} -> {row.dtype}"
        name = f"{row.name} {row.direction}" if row.name == row.op or row.function else f"{row.op} {row.direction}"
        place = " ".join(filter(None, (row.module, row.line)))
        cells = (name, place, row.policy or "-", dtypes, str(row.calls), f"{row.bytes / 2**20:.2f}")
        if self.trial is None:
            return cells
        plain = {other.key: other.seconds for other in self.trial.plain.rows}.get(row.key)
        note = "" if row.seconds is None else notes(self.trial).get(row.key, "")
        return (*cells, _ms(row.seconds), _ms(plain), note)

    def _of_casts(self) -> list[str]:
        if not self.casts and not self.rows:
            return []
        kinds = ", ".join(
            f"{one.source} -> {one.target} {one.calls} ({one.bytes / 2**20:.2f} MiB read and written)"
            for one in self.casts
        )
        share = ""
        if self.trial is not None and self.trial.amp.op_seconds:
            share = f"; {self.trial.amp.cast_seconds / self.trial.amp.op_seconds:.0%} of a step's time on the device"
        return [f"casts: {kinds or 'none'}{share}"]

    def _memory(self) -> list[str]:
        if self.trial is None:
            known = self.weight_copies
            return [] if known is None else [f"16-bit copies of weights: {known / 2**20:.2f} MiB"]
        amp, plain = self.trial.amp, self.trial.plain
        sizes = [
            ("activations kept when forward is over", amp.activations, plain.activations),
            ("copies of weights, and what is derived from them", amp.weight_copies, plain.weight_copies),
            ("peak, beside parameters", amp.peak, plain.peak),
        ]
        table = [("MiB of one step", self.dtype, "float32")]
        table += [(name, f"{ours / 2**20:.2f}", f"{theirs / 2**20:.2f}") for name, ours, theirs in sizes]
        return aligned(table, numbers=range(1, 3), indent="")

    def _of_ranges(self) -> list[str]:
        if self.ranges is None:
            return []
        worst = max(self.ranges.rows, key=lambda row: max(row.lost), default=None)
        loses = f"{self.dtype} loses nothing of this step"
        if worst is not None and max(worst.lost) > 0:
            zero, inf, subnormal = (f"{100 * part:.3g} %" for part in worst.lost)
            where = f" in {worst.module}" if worst.module and not worst.name.startswith(worst.module) else ""
            of = "" if worst.kind.startswith("parameter") else " of"
            loses = (
                f"{worst.kind}{of} {worst.name}{where} loses most: {zero} become 0, {inf} inf, {subnormal} subnormal"
            )
        gain, suggested = self.ranges.gain, ""
        if gain is not None:
            suggested = f" The loss scale is {self.ranges.scale:.8g}; at {gain[0]:.8g}, {gain[1]}."
        return [f"ranges: {loses}.{suggested}", "  print(handle.ranges(step)) has every layer, .draw(path) a picture"]

    def _of_verdict(self) -> list[str]:
        verdict = self.verdict
        if verdict is None:
            counted = "" if self.counted else ' amp.init(debug="summary") counts ops, casts and bytes as the run goes.'
            return [
                f"not measured: handle.summary(step) takes the times of step() in {self.dtype} and in float32, where "
                f"step is a function that does what one step of the loop does.{counted}"
            ]
        cure = [f"cure: {verdict.cure}"] if verdict.cure else []
        return [*verdict.details, *cure, verdict.sentence]


def with_times(rows: Sequence[Row], side: Side) -> list[Row]:
    """Rows of a run with the seconds that one step's calls of them took in a trial; None where it had none of them."""
    seconds = {row.identity: row.seconds for row in side.rows}
    return [replace(row, seconds=seconds.get(row.identity)) for row in rows]


def _kind(report: StepReport) -> str:
    kinds = [kind for kind, count in (("inf", report.infs), ("nan", report.nans)) if count]
    return " and ".join(kinds) or ("no gradients" if "no parameter" in report.reason else "inf or nan")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
