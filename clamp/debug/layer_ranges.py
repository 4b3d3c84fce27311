"""What 16 bits lose of a step, layer by layer: of its magnitudes, at which loss scale, with the picture; and of its
updates, by rounding, where weights are kept in 16 bits without fp32 masters.

The step whose magnitudes are looked at computes in clamp's float32, where nothing is lost: what has become zero or inf
in 16 bits already could not be told from what was so before. Its losses are multiplied by the live loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clamp import bridge
from clamp.bridge import HALF_DTYPES, DTypeLike
from clamp.casting.regions import in_region, region_here
from clamp.casting.results import RESULTS
from clamp.debug import ranges
from clamp.debug.dry_run import NothingSeenError, check_step, dry_run
from clamp.debug.op_counter import OpCounter
from clamp.debug.page.ranges import save_ranges
from clamp.debug.page.schema import Range, TensorKind
from clamp.debug.ranges import Lost
from clamp.debug.step_graph import FORWARD, Frame, StepGraph, Value
from clamp.debug.step_recorder import StepRecorder
from clamp.debug.words import aligned, bad_counts
from clamp.ops.statistics import Statistics
from clamp.params import masters
from clamp.params.gradient_marks import mark_of
from clamp.params.lost_updates import LayerUpdates, by_layer, of_next_step, percent
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import SCALE_OP

_SHOWN, _LAYERS = 30, 12  # rows, and layers of updates
_GAIN, _GAIN_OF = 1e-3, 0.1  # what another loss scale must save, of all gradients and of those that are lost


@dataclass(frozen=True)
class LayerRange:
    """The magnitudes of one tensor.

    Attributes:
        name: of the op that gave it, or of the parameter.
        module: path of the layer; empty if there is none.
        kind: ``"activation"``, ``"gradient"``, ``"parameter"`` or ``"parameter gradient"``.
        dtype: which AMP stores it in, or reads it in where it is a parameter.
        scale: what it is multiplied by: the loss scale, of a gradient.
        statistics: with a histogram, of the float32 numbers.
    """

    name: str
    module: str
    kind: TensorKind
    dtype: str
    scale: float
    statistics: Statistics

    @property
    def lost(self) -> Lost:
        """Returns what of it is lost in the dtype that AMP stores it in; nothing in float32."""
        return ranges.lost(self.statistics, self.dtype) if self.dtype in HALF_DTYPES else Lost(0.0, 0.0, 0.0)

    def lost_in(self, dtype: DTypeLike, scale: float | None = None) -> Lost:
        """Returns what of it a cast would lose; see `clamp.debug.ranges.lost`.

        Args:
            dtype: float16 or bfloat16.
            scale: a loss scale, of a gradient; the live one if not given.
        """
        factor = scale / self.scale if scale is not None and "gradient" in self.kind else 1.0
        return ranges.lost(self.statistics, dtype, factor)

    def as_json(self) -> Range:
        """The row as `clamp.report` has it."""
        found, lost = self.statistics, self.lost
        return {
            "name": self.name, "module": self.module, "kind": self.kind, "dtype": self.dtype,
            "scale": self.scale, "count": found.count, "zeros": found.zeros, "infs": found.infs, "nans": found.nans,
            "smallest": found.smallest if found.largest else 0.0, "largest": found.largest,
            "octaves": found.octaves.tolist(), "underflow": lost.underflow, "overflow": lost.overflow,
        }  # fmt: skip


@dataclass(frozen=True)
class LayerRanges:
    """The magnitudes of one step. ``print`` it.

    Attributes:
        rows: a row for each tensor, forward's before backward's.
        scale: the loss scale that the step had.
        dtype: that of AMP.
    """

    rows: Sequence[LayerRange]
    scale: float
    dtype: str

    @property
    def suggested_scale(self) -> float | None:
        """The loss scale for the AMP dtype (of float32: for float16), with headroom; see
        `clamp.debug.ranges.suggested_scale`. 1.0, which is none, where bfloat16 loses nothing without; None if the
        step had no gradient."""
        gradients = self._gradients
        if not gradients.count:
            return None
        if self.dtype == "bfloat16" and not max(self._lost_at([1.0], "bfloat16")[0][:2]):
            return 1.0
        return ranges.suggested_scale(gradients, self.scale, self._narrow)

    @property
    def gain(self) -> tuple[float, str] | None:
        """A loss scale that is better than the live one, and what it gains, in words; None if none is by much."""
        suggested = self.suggested_scale
        if suggested is None or self.dtype == "float32":
            return None
        now, then = self._lost_at((self.scale, suggested), self.dtype)
        for verb, before, after, other in (
            ("inf", now.overflow, then.overflow, True), ("0", now.underflow, then.underflow, not then.overflow)
        ):  # fmt: skip
            if other and before - after >= max(_GAIN, _GAIN_OF * before):
                parts = f"{100 * after:.3g} % in place of {100 * before:.3g} %"
                return suggested, f"{parts} of the gradients become {verb}"
        return None

    @property
    def _narrow(self) -> str:
        return "float16" if self.dtype == "float32" else self.dtype

    def table(self, dtype: DTypeLike = "float16") -> dict[float, Lost]:
        """Returns what all gradients together lose at each loss scale that is a power of two, 2^-14 to 2^24."""
        return dict(zip(ranges.SCALES, self._lost_at(ranges.SCALES, dtype), strict=True))

    def _lost_at(self, scales: Sequence[float], dtype: DTypeLike) -> list[Lost]:
        gradients = self._gradients
        return [ranges.lost(gradients, dtype, scale / self.scale) for scale in scales]

    @property
    def _gradients(self) -> Statistics:
        """Those that AMP stores in 16 bits, together; where it has none of them, those of all activations."""
        gradients = [row for row in self.rows if row.kind == "gradient" and row.statistics.count]
        narrow = [row for row in gradients if row.dtype in HALF_DTYPES]
        return ranges.pooled(row.statistics for row in narrow or gradients)

    def draw(self, path: str | Path) -> None:
        """Draws the magnitudes of each layer's activations, parameters and gradients beside float16's range, as the
        page of a run does.

        Args:
            path: its suffix says of which kind the file is: ``.svg``, ``.png``, ``.pdf``.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: there are no activations and no gradients.
            OSError: the file cannot be written.
        """
        if not any(row.kind in ("activation", "gradient") and row.statistics.count for row in self.rows):
            raise ValueError("draw: there are no rows; each is a layer's statistics")
        save_ranges(path, self.as_json(), self.suggested_scale)

    def as_json(self) -> list[Range]:
        """The rows as `clamp.report` has them."""
        return [row.as_json() for row in self.rows if row.statistics.count]

    def __str__(self) -> str:
        head = ("layer", "tensor", "kind", "dtype", "magnitudes", "to 0 %", "to inf %", "subnormal %")
        # What loses most is first, and of what loses nothing, what comes first.
        rows = sorted(self.rows, key=lambda row: -max(row.lost.underflow, row.lost.overflow))
        table = aligned([head, *map(_cells, rows)], numbers=range(5, 8), most=_SHOWN, rest=", that lose less")
        scale, suggested = self.suggested_scale, ""
        if self.gain is not None:
            suggested = f"; better for {self._narrow}: {scale:.8g}, at which {self.gain[1]}"
        elif self.dtype == "float32" and scale is not None:
            suggested = f"; suggested for {self._narrow}: {scale:.8g}"
        elif scale == 1 and self.dtype == "bfloat16":
            suggested = "; bfloat16 needs none, it loses nothing of the gradients"
        title = f"ranges of one step, computed in float32, and what {self.dtype} loses of them"
        return "\n".join([title, *table, f"loss scale: {self.scale:.8g}{suggested}"])

    __repr__ = __str__


def observe_ranges(step: Callable[[], Any], scaler: LossScale) -> LayerRanges:
    """Runs a step twice, as a dry run: in float32, to see its magnitudes, and under AMP, to see its dtypes.

    Args:
        scaler: whose scale the losses are multiplied by.

    Raises:
        ValueError: no op of the step was seen.
    """
    check_step(step, "handle.ranges")
    around = region_here(enabled=True)
    with dry_run(step):
        scale = scaler.scale
        seen, counter = StepRecorder(of_ranges=True), OpCounter(of_dry_run=True)
        with in_region(replace(around, dtype="float32")), RESULTS.attached(seen):
            step()
            trace = seen.trace()
        with in_region(around), RESULTS.attached(counter):
            step()
        dtypes = {row.key: row.dtype for row in counter.rows}  # of results, and of first gradients, under AMP
    if not trace.frames:
        raise NothingSeenError
    return LayerRanges(list(_rows(trace, scale, dtypes, around.dtype)), scale, around.dtype)


def _rows(
    trace: StepGraph, scale: float, dtypes: Mapping[tuple[str, ...], str], amp_dtype: str
) -> Iterator[LayerRange]:
    seen = set[int]()
    for frame in trace.frames:
        stored = dtypes.get((frame.op, frame.direction, frame.place.function, frame.module, frame.place.short_line))
        for name, kind, value in _tensors(frame):
            if id(value) in seen or value.statistics is None:
                continue
            seen.add(id(value))
            dtype = stored or value.dtype
            if kind == "parameter":
                dtype = frame.place.dtype(amp_dtype) if frame.place.policy == "half" else value.dtype
            elif kind == "parameter gradient":
                dtype = value.dtype
            # The end of a scaled pass has divided gradients of parameters by the scale, where they lie.
            mark = mark_of(value.tensor)
            is_true = mark is not None and mark.scale is None
            is_scaled = "gradient" in kind and not is_true
            yield LayerRange(name, frame.module, kind, dtype, scale if is_scaled else 1.0, value.statistics)


def _tensors(frame: Frame) -> Iterator[tuple[str, TensorKind, Value]]:
    """Returns what an op gave, and the parameters that it read: name, kind, value."""
    if frame.op == SCALE_OP:
        return
    if frame.direction == FORWARD:
        yield from ((value.name, "parameter", value) for value in frame.inputs if _is_trained(value))
    if not frame.outputs or frame.is_view:
        return
    if frame.direction == FORWARD:
        yield frame.function, "activation", frame.outputs[0]
        return
    # Parents that want no gradient have none among the outputs.
    parents = iter([value for value in frame.parents if value.made_by is not None or _is_trained(value)])
    for value in frame.outputs:
        parent = next((parent for parent in parents if parent.shape == value.shape), None)
        if parent is not None and parent.made_by is None:
            yield parent.name, "parameter gradient", value
        else:
            yield frame.function, "gradient", value


def _is_trained(value: Value) -> bool:
    return value.made_by is None and value.tensor is not None and bridge.is_trained(value.tensor)


# ---------------------------------------------------------------------------------------------- in words


def _cells(row: LayerRange) -> tuple[str, ...]:
    found, lost = row.statistics, row.lost
    span = f"{found.smallest:.3g} to {found.largest:.3g}" if found.largest else "all 0"
    magnitudes = ", ".join([span, *bad_counts(found.infs, found.nans)])
    return (row.module or "-", row.name, row.kind, row.dtype, magnitudes, *(f"{100 * part:.2f}" for part in lost))


# ---------------------------------------------------------------------------------------------- updates


@dataclass(frozen=True)
class LostUpdates:
    """Updates of one step that rounding loses. ``print`` it.

    Attributes:
        layers: of each layer with 16-bit weights of which nothing more is kept; those that lose most first.
        notes: what could not be measured, and why; and where Adam's eps is below the smallest number of 16 bits.
    """

    layers: Sequence[LayerUpdates]
    notes: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.layers or self.notes)

    def __str__(self) -> str:
        if not self.layers:
            return "\n".join(self.notes)
        table = [("layer", "dtype", "updates", "lost", "")]
        table += [(x.module, x.dtype, f"{x.updates:,}", f"{x.lost:,}", percent(x.share)) for x in self.layers]
        lines = aligned(table, numbers=range(2, 5), most=_LAYERS, rest=", that lose less")
        return "\n".join([f"updates: {self.layers[0]}", *lines, *self.notes])

    __repr__ = __str__


def observe_lost_updates(step: Callable[[], Any]) -> LostUpdates:
    """Runs a step once, as a dry run, and counts which updates its optimizers would lose."""
    layers: list[LayerUpdates] = []
    notes: list[str] = []

    def look(optimizer: Any, is_plain: bool) -> None:
        pairs = masters.gathered(optimizer)
        rounded = [master for master, model in pairs if masters.is_rounded(master) and master.grad is not None]
        own = [x for x in optimizer.params if x.dtype in HALF_DTYPES]  # of a user's optimizer, which steps them itself
        if rounded or own:
            notes.extend(_of_eps(optimizer, [bridge.model_parameter(x).dtype for x in (*rounded, *own)], bool(own)))
            layers.extend(_of(optimizer, rounded, is_plain, notes))

    with dry_run(step, instead=look):
        step()
    return LostUpdates(sorted(layers, key=lambda row: -row.share), tuple(dict.fromkeys(notes)))


def _of(optimizer: Any, rounded: Sequence[bridge.Tensor], is_plain: bool, notes: list[str]) -> list[LayerUpdates]:
    """The updates of one optimizer's weights; notes why where they are not known."""
    name = type(optimizer).__name__
    if not (has_rule := bridge.has_rule(optimizer)) or not is_plain:
        why = "step() is called with arguments" if has_rule else "its step is not one that clamp makes"
        notes.append(f"what rounding loses of {name}'s updates is not measured: {why}")
        return []
    stepped = [x for x in bridge.stepped(optimizer) if any(x is y for y in rounded) and x.size]
    counts = {id(x): found for x in stepped if (found := of_next_step(optimizer, x)) is not None}
    if len(counts) < len(stepped):
        notes.append(f"{len(stepped) - len(counts)} parameters of {name} are not measured: the step is not finite")
    return by_layer(optimizer.params, counts)


def _of_eps(optimizer: Any, dtypes: Sequence[str], steps_itself: bool) -> list[str]:
    """Returns a remark about eps: netcl's Adam with weights in float16 has one that float16 has not."""
    eps, name = getattr(optimizer, "eps", None), type(optimizer).__name__
    if not isinstance(eps, float):
        return []
    what = "is 0 if its step computes in it" if steps_itself else "counts, for the step computes in float32"
    return [
        f"{name}'s eps, {eps:g}, is below {dtype}'s smallest number, {ranges.FORMATS[dtype].smallest:.2g}: it {what}"
        for dtype in dict.fromkeys(map(bridge.canonical_dtype, dtypes))
        if 0 < eps < ranges.FORMATS[dtype].smallest
    ]
