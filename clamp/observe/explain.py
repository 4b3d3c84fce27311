"""Why a step was skipped: the first op whose result stopped being finite, what it read, and one cure, as code."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field

from clamp.bridge import HALF_DTYPES
from clamp.observe.frames import BACKWARD, Frame, Trace, Value
from clamp.observe.origin import Origin, find_origin, frames_before
from clamp.observe.rescaled import finite_from
from clamp.scaling.step_report import StepReport

LARGEST_FLOAT16, SMALLEST_FLOAT16 = 65504.0, 2.0**-24
_BEFORE = 21  # frames shown, as many as Hugging Face's DebugUnderflowOverflow


@dataclass(frozen=True)
class Explanation:
    """Why a step was skipped.

    ``print`` it: it is one screen.

    Attributes:
        report: of the step; None where it was run only to be looked at.
        kind: ``"parameter"``, ``"input"`` (not finite before any op), ``"cast"`` (it is beyond float16),
            ``"forward"``, ``"backward"`` (an op's result, or gradient, is not finite at any loss scale),
            ``"scale"`` (the loss scale was too high, nothing else), ``"finite"`` (nothing is inf or nan) or
            ``"unseen"`` (no op was looked at).
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
    trace: Trace, report: StepReport | None, *, is_dynamic: bool = True, floor: float = 2.0**-14
) -> Explanation:
    """Why a step whose ops are known was skipped.

    Args:
        is_dynamic: whether the loss scale finds its value by itself.
        floor: below which it does not go.
    """
    origin = find_origin(trace)
    if origin is None:
        return Explanation(report, "finite", "Every result and every gradient of the step is finite.", "")
    kind, why, cure = _verdict(origin, trace, is_dynamic, floor)
    before = frames_before(trace, origin.frame, _BEFORE)
    return Explanation(report, kind, why, cure, origin.frame, origin.leaf, before)


def not_seen(report: StepReport | None) -> Explanation:
    """What is known of a step whose ops nobody has looked at."""
    if report is None:
        return Explanation(None, "unseen", "No step has been skipped.", "")
    why = (
        "The ops of this step were not looked at. handle.explain(step) runs one more, only to look at it, where step() "
        "is a function that does what one step of the loop does."
    )
    return Explanation(report, "unseen", why, 'handle = amp.init(debug="attribution")  # or handle.explain(step)')


# ---------------------------------------------------------------------------------------------- verdict and cure


def _verdict(origin: Origin, trace: Trace, is_dynamic: bool, floor: float) -> tuple[str, str, str]:
    frame, leaf = origin.frame, origin.leaf
    if leaf is not None:
        return _of_leaf(leaf)
    if frame.direction == BACKWARD:
        return _of_backward(frame, trace.scale, is_dynamic, floor)
    too_large = [value for value in frame.inputs if value.dtype == "float32" and _largest(value) >= 65520.0]
    if too_large and frame.place.policy == "half" and frame.outputs[0].dtype == "float16":
        weight = too_large[0]
        why = (
            f"{weight.source} holds numbers up to {_largest(weight):.3g}, and {frame.function} reads it in float16, "
            f"whose largest number is 65504: the loss is not finite at any loss scale."
        )
        return "cast", why, _in_float32(frame)
    return "forward", _why_forward(frame), _in_float32(frame)


def _of_leaf(leaf: Value) -> tuple[str, str, str]:
    what = _count(leaf)
    if leaf.name:
        why = f"The parameter {leaf.name} itself holds {what}: no loss scale helps, and no step will mend it."
        return "parameter", why, 'amp.load_checkpoint("...")  # from before it happened; or set the parameter anew'
    why = f"What the model is given holds {what} before any op has touched it: no loss scale helps."
    return (
        "input",
        why,
        "assert np.isfinite(x).all(), np.argwhere(~np.isfinite(x))  # before Tensor.from_host(queue, x)",
    )


def _why_forward(frame: Frame) -> str:
    out = next(value for value in frame.outputs if not value.is_finite)
    at_any = "the loss is not finite at any loss scale."
    if out.dtype == "float16" and out.statistics is not None and out.statistics.infs:
        return (
            f"What {frame.function} reads is finite, and {_count(out)} of its results are beyond 65504, the largest "
            f"number of float16: {at_any}"
        )
    return f"{frame.function} makes {_count(out)} of finite numbers in {out.dtype}: {at_any}"


def _of_backward(frame: Frame, scale: float, is_dynamic: bool, floor: float) -> tuple[str, str, str]:
    lower = finite_from(frame, scale, floor)
    if lower is None:
        out = next(value for value in frame.outputs if not value.is_finite)
        why = f"The gradient of {frame.function} has {_count(out)}, in {out.dtype}, at loss scales down to {floor:.8g}."
        wider = 'handle = amp.init(dtype="bfloat16")  # as wide as float32'
        return "backward", why, wider if out.dtype == "float16" else _in_float32(frame)
    why = (
        f"The model is sound: forward is finite, and so is this gradient at a loss scale of {lower:.8g}. "
        f"{scale:.8g} was too high."
    )
    if is_dynamic:
        why += " A dynamic scale comes down by itself, by half in each skipped step."
        return (
            "scale",
            why,
            f'amp.load_state_dict({{"loss_scaler0": {{"loss_scale": {lower:.8g}, "unskipped": 0}}}})  # at once',
        )
    return "scale", why, 'handle = amp.init(loss_scale="dynamic")'


def _in_float32(frame: Frame) -> str:
    """How the op is computed in float32 from now on."""
    out = next((value for value in frame.outputs if not value.is_finite), None)
    if out is not None and out.dtype not in HALF_DTYPES and all(x.dtype not in HALF_DTYPES for x in frame.inputs):
        return f"# {frame.function} is computed in float32 already: keep what it reads away from where it has no value"
    if frame.place.function.startswith("netcl."):
        return f'handle = amp.init(custom_black_list=["{frame.function}"])  # or dtype="bfloat16"'
    return f"@amp.float_function  # above the function that computes {frame.function}"


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
    rows += [("read", value) for value in (*frame.inputs, *frame.parents)]
    return [*lines, *_table(rows)]


def _table(rows: Iterable[tuple[str, Value]]) -> list[str]:
    cells = [(verb, value.source if verb == "read" else "", f"{value.dtype} {value.shape}", _range(value))
             for verb, value in rows]  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        "  " + "  ".join(x.ljust(width) for x, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in cells
    ]


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
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join(x.ljust(width) for x, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows]


def _block(title: str, text: str) -> list[str]:
    return ["", f"{title}: {text}"] if text else []


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


def _count(value: Value) -> str:
    """``"3 inf and 1 nan"``."""
    found = value.statistics
    kinds = [] if found is None else [(found.infs, "inf"), (found.nans, "nan")]
    return " and ".join(f"{count} {kind}" for count, kind in kinds if count)


def _largest(value: Value) -> float:
    return 0.0 if value.statistics is None else value.statistics.largest
