"""What a run did, on one screen: steps, kernels, ops, casts, memory; what AMP gains, in one plain sentence, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from clamp.bridge import HALF_DTYPES
from clamp.debug.gain import NO_DIFFERENCE, Side, Trial, in_half
from clamp.debug.layer_ranges import LayerRanges, LostUpdates
from clamp.debug.memory_report import MemoryReport
from clamp.debug.op_counter import Casts, OpRow
from clamp.debug.words import aligned, duration, mib
from clamp.scaling.step_report import StepReport

_SMALL = 100e-6  # seconds a launch, of which most is the launching
_IDLE = 0.5  # of a step's time, in which the device does not compute


@dataclass(frozen=True)
class Gain:
    """What AMP gains in a step, for people.

    Attributes:
        sentence: the answer.
        details: what it rests on.
        cure: what to write, as code; empty if there is nothing to change.
        is_slower: whether the step takes longer than in float32.
    """

    sentence: str
    details: tuple[str, ...] = ()
    cure: str = ""
    is_slower: bool = False


def judge(trial: Trial) -> Gain:
    """The verdict of a trial."""
    if trial.dtype == "float32":
        nothing = "AMP computes in float32 here, so that there is nothing to gain, and nothing to lose."
        return Gain(nothing)
    times_as_fast, keeps = trial.plain.seconds / trial.amp.seconds, _kept(trial)
    is_smaller = keeps < 1 - NO_DIFFERENCE
    memory = f"; {trial.dtype} keeps {keeps:.2f} of float32's activation memory" if is_smaller else ""
    because = f", because {' and '.join(reasons)}" if (reasons := _reasons(trial)) else ""
    if times_as_fast >= 1 + NO_DIFFERENCE:
        memory = f" and keeps {keeps:.2f} of its activation memory" if is_smaller else ""
        sentence = f"{trial.dtype} is {times_as_fast:.2f}x as fast as float32 here{memory}."
    elif times_as_fast > 1 - NO_DIFFERENCE:
        sentence = f"no gain in time here: as fast as float32{because}{memory}."
    else:
        gain = "no gain in time here" if is_smaller else "no gain here"
        sentence = f"{gain}: {1 / times_as_fast:.2f}x slower than float32{because}{memory}."
    return Gain(sentence, tuple(_details(trial)), _cure(trial), times_as_fast <= 1 - NO_DIFFERENCE)


def notes(trial: Trial) -> dict[tuple[str, ...], str]:
    """Returns remarks about ops that are not worth their 16 bits, by the keys of their rows: of those that were slower
    in each pass than in float32 in any."""
    return {
        row.key: f"{row.seconds / other.seconds:.2f}x slower than in float32"
        for row, other in in_half(trial.amp, trial.plain)
        if row.seconds and other.seconds and row.seconds > 1.1 * other.slowest
        and row.seconds - other.slowest > 0.01 * trial.amp.op_seconds
    }  # fmt: skip


def _kept(trial: Trial) -> float:
    return trial.amp.activations / trial.plain.activations if trial.plain.activations else 1.0


def _reasons(trial: Trial) -> list[str]:
    """Returns why 16 bits do not make the step faster."""
    reasons = []
    total = trial.amp.op_seconds
    if total and trial.amp.cast_seconds >= 0.05 * total:
        reasons.append(f"casts take {trial.amp.cast_seconds / total:.0%} of the step")
    ratio = _half_ratio(trial)
    if ratio is not None and ratio <= 1 - NO_DIFFERENCE:
        reasons.append(f"the functions in half take {1 / ratio:.2f}x as long in {trial.dtype} on this device")
    elif ratio is not None and ratio < 1 + NO_DIFFERENCE:
        reasons.append("the functions in half are as fast in float32 on this device")
    if _is_small(trial):
        each = trial.amp.seconds / trial.amp.launches * 1e6
        reasons.append(f"a step is bound by its {trial.amp.launches} launches, of {each:.0f} us each")
    return reasons


def _half_ratio(trial: Trial) -> float | None:
    """Returns how much faster the functions in half are in 16 bits, without their casts; None if there are none."""
    pairs = in_half(trial.amp, trial.plain)
    took = sum(row.seconds or 0.0 for row, _ in pairs) - (trial.amp.cast_seconds - trial.amp.shared_cast_seconds)
    return sum(other.seconds or 0.0 for _, other in pairs) / took if took > 0 else None


def _is_small(trial: Trial) -> bool:
    """Returns whether launches, and Python between them, bound a step: the device waits for most of it."""
    if not trial.amp.launches:
        return False
    waits = not trial.alone and trial.amp.op_seconds < _IDLE * trial.amp.seconds
    return waits or trial.amp.seconds / trial.amp.launches < _SMALL


def _details(trial: Trial) -> list[str]:
    of = "The least (the machine has other things to do, too)" if trial.busy else "Medians"
    details = [
        f"{of} of {trial.rounds} rounds, turn about: {duration(trial.amp.seconds)} in {trial.dtype}, "
        f"{duration(trial.plain.seconds)} in clamp's float32, for forward, backward and division by the loss scale. "
        "The optimizer's step comes to both, and takes the same in both."
    ]
    if _is_small(trial):
        each = 1e6 * trial.amp.seconds / trial.amp.launches
        details.append(
            f"Bound by launches: {trial.amp.launches} of {each:.0f} us each, most of which is Python and the driver. "
            + (
                "What was timed are replays of its recording already."
                if trial.is_recorded
                else "@amp.record above the function that makes a step replays them without."
            )
        )
    if any(row.dtype in HALF_DTYPES for row in trial.plain.rows):
        details.append(
            "In the float32 rounds, too, a part is computed in 16 bits: of parameters or inputs that are so."
        )
    if trial.with_black_list is not None:
        pays = "pays" if trial.black_list_pays else "does not pay"
        details.append(
            f"In float32 these take less time, by themselves: {', '.join(trial.black_list)}. To put them on the black "
            f"list {pays}: then a step takes {duration(trial.with_black_list)}."
        )
    return details


def _cure(trial: Trial) -> str:
    if trial.black_list_pays:
        return trial.init_call.in_float32(trial.black_list)
    if _is_small(trial) and not trial.is_recorded:
        return "@amp.record  # above the function that makes a step: one launch after the other, without Python between"
    if trial.plain.seconds > (1 + NO_DIFFERENCE) * trial.amp.seconds:
        return ""
    if trial.plain.seconds < (1 - NO_DIFFERENCE) * trial.amp.seconds and _kept(trial) > 1 - NO_DIFFERENCE:
        return f"{trial.init_call.changed(dtype='float32')}  # clamp's kernels, and nothing is cast"
    return ""


# ---------------------------------------------------------------------------------------------- the screen


_SHOWN = 20  # rows of ops
_REASONS = 3
_PATHS = 5  # of modules that a rule is for


@dataclass(frozen=True)
class Summary:
    """Summary of a run. ``print`` it.

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
        rules: those for modules, in words, with the paths of the modules that each has decided about.
        updates: which of its updates rounding loses, of weights in 16 bits without fp32 masters; None without one.
        memory: what device memory was held for in it; None without one.
        repeated: of how many steps backward was run again.
    """

    dtype: str
    steps: int
    skips: int
    history: Sequence[StepReport]
    loss_scale: float | None
    programs: int
    compile_seconds: float
    rows: Sequence[OpRow] = ()
    casts: Sequence[Casts] = ()
    weight_copies: int | None = None
    trial: Trial | None = None
    counted: bool = False
    ranges: LayerRanges | None = None
    rules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    updates: LostUpdates | None = None
    memory: MemoryReport | None = None
    repeated: int = 0

    @property
    def verdict(self) -> Gain | None:
        """Returns what AMP gains; None if nothing was measured."""
        return None if self.trial is None else judge(self.trial)

    def __str__(self) -> str:
        return "\n\n".join([self.of_run, "\n".join(self._of_verdict())])

    @property
    def of_run(self) -> str:
        """All but what AMP gains, or how to measure that, in words."""
        updates = [str(self.updates)] if self.updates else []
        blocks = self._head(), self._ops(), self._of_casts(), self._memory(), self._of_ranges(), updates
        return "\n\n".join("\n".join(block) for block in blocks if block)

    __repr__ = __str__

    # ------------------------------------------------------------------------------------------ in words

    def _head(self) -> list[str]:
        scale = "no loss scaling" if self.loss_scale is None else f"loss scale {self.loss_scale:.8g}"
        repeated = f", {self.repeated} repeated" if self.repeated else ""
        steps = f"{self.steps} step{'s' * (self.steps != 1)}, {self.skips} skipped{repeated}"
        lines = [f"AMP {self.dtype}: {steps}, {scale}"]
        for rule, paths in self.rules.items():
            shown = ", ".join(path or "the model" for path in paths[:_PATHS])
            more = f" and {len(paths) - _PATHS} more" if len(paths) > _PATHS else ""
            lines.append(f"  by module, {rule}: {shown or 'none'}{more}")
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
        head, how, rows = ["op", "layer, line", "policy", "dtypes", "calls", "MiB"], "", list(self.rows)
        if self.trial is not None:
            rows.sort(key=lambda row: -(row.seconds or 0.0))
            head += [self.dtype, "float32", ""]
            alone = "wall time of each launch by itself, queue without profiling"
            how = f"; ms a step by {alone if self.trial.alone else 'profiling events'}"
        table = [cells + times for cells, times in zip(map(_cells, rows), self._times(rows), strict=True)]
        return [f"ops {of}, {len(rows)}{how}", *aligned([head, *table], numbers=range(4, 8), most=_SHOWN)]

    def _times(self, rows: Sequence[OpRow]) -> list[tuple[str, ...]]:
        if self.trial is None:
            return [()] * len(rows)
        plain, marked = {row.key: row.seconds for row in self.trial.plain.rows}, notes(self.trial)
        return [
            (_ms(row.seconds), _ms(plain.get(row.key)), "" if row.seconds is None else marked.get(row.key, ""))
            for row in rows
        ]

    def _of_casts(self) -> list[str]:
        if not self.casts and not self.rows:
            return []
        kinds = ", ".join(
            f"{one.source} -> {one.target} {one.calls} ({mib(one.bytes)} MiB read and written)" for one in self.casts
        )
        share = ""
        if self.trial is not None and self.trial.amp.op_seconds:
            share = f"; {self.trial.amp.cast_seconds / self.trial.amp.op_seconds:.0%} of a step's time on the device"
        return [f"casts: {kinds or 'none'}{share}"]

    def _memory(self) -> list[str]:
        if self.trial is None:
            known = self.weight_copies
            return [] if known is None else [f"16-bit copies of weights: {mib(known)} MiB"]
        amp, plain = self.trial.amp, self.trial.plain
        sizes = [
            ("activations kept when forward is over", amp.activations, plain.activations),
            ("copies of weights, and what is derived from them", amp.weight_copies, plain.weight_copies),
            ("peak, beside parameters", amp.peak, plain.peak),
        ]
        table = [("MiB of one step", self.dtype, "float32")]
        table += [(name, mib(ours), mib(theirs)) for name, ours, theirs in sizes]
        peak = None if self.memory is None else self.memory.peak
        where = [f"the peak is in {peak.where}; print(handle.memory(step)) has who held it"] if peak else []
        return [*aligned(table, numbers=range(1, 3), indent=""), *where]

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
        found = self.verdict
        if found is None:
            counted = "" if self.counted else ' amp.init(debug="summary") counts ops, casts and bytes as the run goes.'
            return [
                f"not measured: handle.summary(step) takes the times of step() in {self.dtype} and in float32, where "
                f"step is a function that does what one step of the loop does.{counted}"
            ]
        return [*found.details, *([f"cure: {found.cure}"] if found.cure else []), found.sentence]


def with_times(rows: Sequence[OpRow], side: Side) -> list[OpRow]:
    """Rows of a run with the seconds that one step's calls of them took in a trial; None where it had none of them."""
    seconds = {row.identity: row.seconds for row in side.rows}
    return [replace(row, seconds=seconds.get(row.identity)) for row in rows]


def _kind(report: StepReport) -> str:
    kinds = [kind for kind, count in (("inf", report.infs), ("nan", report.nans)) if count]
    return " and ".join(kinds) or ("no gradients" if "no parameter" in report.reason else "inf or nan")


def _cells(row: OpRow) -> tuple[str, ...]:
    dtypes = f"{', '.join(dict.fromkeys(row.inputs))} -> {row.dtype}"
    place = " ".join(filter(None, (row.module, row.line)))
    return f"{row.name} {row.direction}", place, row.decided or "-", dtypes, str(row.calls), mib(row.bytes)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
