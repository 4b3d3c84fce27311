"""What made a result not finite, and one cure, as code."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.regions import InitCall, casting_in, init_call
from clamp.debug.callsite import INSERTED
from clamp.debug.float32_reference import is_finite_in_float32, largest_in_float32, rounded_to_zero
from clamp.debug.ranges import FLOAT16
from clamp.debug.step_graph import BACKWARD, FORWARD, Frame, StepGraph, Value, are_finite
from clamp.debug.words import bad_counts
from clamp.opencl.host_steps import unrecorded
from clamp.ops.cast import cast
from clamp.params import masters
from clamp.scaling.dynamic_scale import DEFAULT_RULE, DynamicLossScale
from clamp.scaling.step_guard import StepGuard

_ROUNDS_TO_INF = 65520.0  # and what is larger

_AT_ANY = "the loss is not finite at any loss scale."


class Cause(NamedTuple):
    """Cause of a result that is not finite, as an ``Explanation`` has it."""

    kind: str
    why: str
    cure: str


def cause_of(frame: Frame, leaf: Value | None, trace: StepGraph) -> Cause:
    """The cause, from what first was not finite (`find_origin`).

    Args:
        trace: whose tensors are held: a backward may be computed again, at other loss scales.
    """
    if leaf is not None:
        return _of_leaf(leaf)
    return (_of_backward if frame.direction == BACKWARD else _of_forward)(frame, trace)


def _of_leaf(leaf: Value) -> Cause:
    what = count_of(leaf)
    if leaf.name:
        why = f"The model's {leaf.name} itself holds {what}: no loss scale helps, and no step will mend it."
        return Cause("parameter", why, 'amp.load_checkpoint("...", model)  # of before it happened; or set it anew')
    why = f"What the model is given holds {what} before any op has touched it: no loss scale helps."
    return Cause("input", why, "assert np.isfinite(x).all(), np.argwhere(~np.isfinite(x))  # x: the batch")


def _of_forward(frame: Frame, trace: StepGraph) -> Cause:
    out = _first_bad(frame)
    large = next((x for x in frame.inputs if x.largest >= _ROUNDS_TO_INF), None)
    if large is not None and large.dtype == "float32" and out.dtype == "float16" and frame.place.policy == "half":
        why = (
            f"{large.source} holds numbers up to {large.largest:.3g}, and {frame.function} reads it in float16, whose "
            f"largest number is {FLOAT16.largest:.0f}: {_AT_ANY}"
        )
        return Cause("cast", why, _in_float32(frame, trace))
    makes = f"{frame.function} makes {count_of(out)} of finite numbers"
    in_float32 = is_finite_in_float32(frame)
    if in_float32 is False:
        return _without_value(frame, makes, trace)
    why = f"{makes} in {out.dtype}: {_AT_ANY}"
    infs, nans = out.bad
    if out.dtype == "float16" and infs:
        known = "In float32 they are finite." if in_float32 else "(Or they have no value, as x / 0.)"
        more = f" ({nans} more are nan)" if nans else ""
        why = (
            f"What {frame.function} reads is finite, and {infs} of its results are beyond {FLOAT16.largest:.0f}, the "
            f"largest number of float16, and so inf{more}: {_AT_ANY} {known}"
        )
    return Cause(FORWARD, why, _in_float32(frame, trace))


def _of_backward(frame: Frame, trace: StepGraph) -> Cause:
    scaler = trace.scaler
    floor = scaler.floor if isinstance(scaler, DynamicLossScale) else DEFAULT_RULE.min
    lower = finite_from(frame, trace.scale, floor)
    if lower is None:
        out = _first_bad(frame)
        what = f"The gradient of {frame.function} has {count_of(out)}"
        if is_finite_in_float32(frame) is False:
            return _without_value(frame, what, trace)
        why = f"{what}, in {out.dtype}, at loss scales down to {floor:.8g}."
        return Cause(BACKWARD, why, f"{_in_bfloat16()}  # as wide as float32")
    why = (
        f"The loss scale of {trace.scale:.8g} was too high: the model is sound, forward is finite, and so is this "
        f"gradient at {lower:.8g}."
    )
    if scaler is None:
        cure = "with handle.scale_loss(loss, optimizer) as scaled_loss:  # by a scale that comes down"
    elif scaler.comes_down:
        why, cure = f"{why} A dynamic scale comes down by itself, by half in each skipped step.", ""
    else:
        cure = scaler.cure or (init_call() or InitCall()).changed(loss_scale="dynamic")
    return Cause("scale", why, cure)


def divided_away(made: Frame, divides: Frame, trace: StepGraph) -> Cause:
    """The cause of an inf that nobody met, as a division made 0 of it."""
    why = (
        f"What {made.function} reads is finite, and {count_of(made.outputs[0])} of its results are beyond "
        f"{FLOAT16.largest:.0f}, the largest number of float16. {divides.function}{divides.place.at} divides by them, "
        "which gives 0 in place of a number: all is finite after it, no step is skipped, and what is trained is wrong "
        "at any loss scale."
    )
    return Cause(FORWARD, why, _in_float32(made, trace))


def _in_float32(frame: Frame, trace: StepGraph) -> str:
    """Returns the cure that computes the op in float32: wherever it is called, or where others like it do well, here.

    Where its results are too large for what reads them in float16 next, all is computed in bfloat16.
    """
    largest = largest_in_float32(frame)
    if largest is not None and largest >= _ROUNDS_TO_INF and _is_read_in_half(frame, trace):
        return f"{_in_bfloat16()}  # what reads its results, of up to {largest:.3g}, needs the range of float32, too"
    if not frame.place.function.startswith("netcl."):
        return f"@amp.float_function  # above the function that computes {frame.function}"
    alike = [other for other in trace.frames if other.direction == FORWARD and other.function == frame.function]
    if len(alike) > 1 and frame.place.file:
        return f'with amp.autocast(dtype="float32"):  # around {frame.place.short_line}'
    init = init_call()
    if init is None:
        return f'with amp.autocast(dtype="float32"):  # around the call of {frame.function}'
    if init.takes_lists:
        return f'{init.in_float32([frame.function])}  # or dtype="bfloat16"'
    module, _, name = frame.place.function.rpartition(".")
    return f'amp.register_float_function({module}, "{name}")  # before {init.call.rpartition(" ")[2]}(...)'


def _is_read_in_half(frame: Frame, trace: StepGraph) -> bool:
    """Returns whether a result goes into a function in half, as it is, or through ones that keep its magnitude."""
    given = {id(value) for value in frame.outputs}
    for other in trace.frames[trace.frames.index(frame) + 1 :]:
        if other.direction == FORWARD and any(id(value) in given for value in other.inputs):
            if other.place.policy == "half" and other.op not in INSERTED:
                return True
            if other.place.policy != "float":
                given.update(id(value) for value in other.outputs)
    return False


def _in_bfloat16() -> str:
    init = init_call()
    return 'with amp.autocast(dtype="bfloat16"):' if init is None else init.changed(dtype="bfloat16")


def _first_bad(frame: Frame) -> Value:
    return next(value for value in frame.outputs if not value.is_finite)


def count_of(value: Value) -> str:
    """``"3 inf and 1 nan"``."""
    return " and ".join(bad_counts(*value.bad))


# ---------------------------------------------------------------------------------------------- where there is no value

#: what keeps numbers from where a function has no value, by their dtype: ``small``, whose reciprocal, and the square of
#: that, leave float16's gradients room for a loss scale; ``power``, which e is raised to, likewise
_NUMBERS = {"float16": {"small": 1e-3, "large": 65504.0, "power": 8.0}}
_NUMBERS_OF_OTHERS = {"small": 1e-6, "large": 3e38, "power": 80.0}


class _Domain(NamedTuple):
    """Numbers for which a function, or its gradient, has no value.

    Attributes:
        direction, function: of what.
        words: what the numbers are.
        cure: what to write, with names of ``_NUMBERS`` in it; x and y are what the function is called with.
        holds: whether an op has read such numbers, as far as statistics tell; labels and indices are not among them.
    """

    direction: str
    function: str
    words: str
    cure: str
    holds: Callable[[Sequence[Value]], bool] = lambda read: True


def _has_zeros(read: Sequence[Value]) -> bool:
    statistics = read[-1].statistics
    return statistics is not None and statistics.zeros > 0


_FILLED = "it writes the inf that it was given, and of a row of nothing else softmax makes nan"
_NO_CLASS, _SHOWN = "a label is no class, of 0 to their number - 1, nor ignore_index", "print(np.unique(y))"
_NO_INDEX = "an index does not exist, and selects nan"
_DOMAINS = (
    _Domain(FORWARD, "div", "it divides by 0", "ag.div(x, ag.add(y, {small}))", _has_zeros),
    _Domain(FORWARD, "div", "it divides by 0, or by next to nothing", "ag.div(x, ag.add(y, {small}))"),
    _Domain(FORWARD, "sqrt", "negative numbers have no root", "ag.sqrt(ag.clamp(x, {small}, {large}))"),
    _Domain(BACKWARD, "sqrt", "the slope of a root is infinite at 0", "ag.sqrt(ag.add(x, {small}))", _has_zeros),
    _Domain(FORWARD, "rsqrt", "numbers up to 0 have none", "ag.rsqrt(ag.clamp(x, {small}, {large}))"),
    _Domain(FORWARD, "log", "numbers up to 0 have no logarithm", "ag.log(ag.clamp(x, {small}, {large}))"),
    _Domain(FORWARD, "log1p", "numbers up to -1 have none", "ag.log1p(ag.clamp(x, -0.999, {large}))"),
    _Domain(FORWARD, "pow", "some of what it reads has no such power", "ag.pow(ag.clamp(x, {small}, 1000.0), y)"),
    _Domain(BACKWARD, "pow", "its slope is infinite at 0", "ag.pow(ag.add(x, {small}), y)", _has_zeros),
    _Domain(
        FORWARD, "exp", "of numbers above 88 it is beyond 3.4e38", "ag.exp(ag.clamp(x, -80.0, {power}))",
        lambda read: read[-1].largest > 88,
    ),
    _Domain(FORWARD, "cross_entropy_indices", _NO_CLASS, _SHOWN),
    _Domain(FORWARD, "cross_entropy", _NO_CLASS, _SHOWN, lambda read: len(read) == 1),
    *(_Domain(FORWARD, name, _NO_INDEX, "print(y.min(), y.max())") for name in ("index_select", "embedding", "gather")),
    _Domain(FORWARD, "masked_fill", _FILLED, "ag.masked_fill(x, y, -1e9)"),
    _Domain(FORWARD, "where", _FILLED, "ag.where(x, y, -1e9)"),
)  # fmt: skip


def _without_value(frame: Frame, what: str, trace: StepGraph) -> Cause:
    """The cause where a result or gradient has no finite value in float32 either, of the numbers that the op read."""
    read = frame.parents if frame.direction == BACKWARD else frame.inputs
    known = [one for one in _DOMAINS if (one.direction, one.function) == (frame.direction, frame.function)]
    domain = next((one for one in known if read and one.holds(read)), None)
    if domain is not None:
        numbers = _NUMBERS.get(read[-1].dtype, _NUMBERS_OF_OTHERS)
        what += f": {domain.words}"
        cure = domain.cure.format(**numbers) + (f"  #{frame.place.at}" if frame.place.at else "")
    else:
        where = f",{frame.place.at}," if frame.place.at else ""
        cure = f"# keep what {frame.function} reads{where} from where it has no value"
    rounded = rounded_to_zero(frame)
    if rounded is None:
        either = "It has no finite value in float32 either, so that no loss scale and no dtype helps."
        return Cause(frame.direction, f"{what}. {either}", cure)
    why = (
        f"{what}. What it reads became 0 in {rounded.outputs[0].dtype}: {rounded.function}{rounded.place.at} made it, "
        "and in float32 it is not 0, and both are finite."
    )
    return Cause(frame.direction, why, _in_float32(rounded, trace))


# ---------------------------------------------------------------------------------------------- at other loss scales


def finite_from(frame: Frame, scale: float, floor: float) -> float | None:
    """The largest power-of-two fraction of the loss scale at which a backward gives finite gradients: it is linear in
    what it is given.

    Args:
        frame: a backward, whose tensors are held.
        scale: the loss scale at which it gave inf or nan.
        floor: the lowest one that is tried.

    Returns:
        None if it is not finite at any, or cannot be computed again.
    """
    grad = frame.inputs[0].tensor
    if frame.again is None or grad is None:
        return None
    wide, most = cast(grad, "float32").to_host(), max(0, int(log2(scale / floor)))
    given, again = grad, frame.again

    def is_finite(halvings: int) -> bool:
        lower = Tensor.from_host(given.queue, wide * np.float32(2.0**-halvings))
        with casting_in(None), unrecorded():
            grads = again(cast(lower, bridge.canonical_dtype(given.dtype)))
            return are_finite([x for x in grads if x is not None and x.dtype in bridge.STORAGE])

    if not is_finite(most):
        return None
    return scale / 2.0 ** (bisect_left(range(1, most), True, key=is_finite) + 1) if most else scale


# ---------------------------------------------------------------------------------------------- divergence


_LOSS, _USUAL = 100.0, 4.0  # times its least, and times its median: losses of few easy batches are far below others
_MOVED = 1.5  # times what the weights were at first: a loss that has grown without them is that of its batch
_WEIGHTS, _LOSS_WITH_THEM = 8.0, 2.0  # times what the weights were at first, where the loss has grown, too
_LOSSES = 3  # and more show whether it has
_LARGE = 100.0  # a weight of which nobody knows what it was at first

_ADAMS = 1e-3  # the rate that is usual where each number moves by it


def _known_optimizers() -> list[object]:
    found = (guard.optimizer for guard in bridge.living(StepGuard))
    return list({id(x): x for x in found if x is not None}.values())


@dataclass(frozen=True)
class Past:
    """Losses and weights of the steps before one that is explained.

    Attributes:
        losses: by steps, where they were noted.
        largest: the largest magnitude of each weight at its first step, by the id of its tensor.
        optimizers: those that are known.
        steps: how many were done; None if that is not known.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    largest: Mapping[int, float] = field(default_factory=dict)
    optimizers: Sequence[object] = field(default_factory=_known_optimizers)
    steps: int | None = None


def divergence(trace: StepGraph, past: Past) -> Cause | None:
    """Returns the cause if losses and weights have grown from step to step; None if nothing did.

    Args:
        trace: with its tensors held.
    """
    grown, now, then = _most_grown(trace, past.largest)
    if grown is None:
        return None
    losses = [(step, loss) for step, loss in past.losses.items() if math.isfinite(loss)]
    positive = bool(losses) and all(loss > 0 for _, loss in losses)
    least, last = (min(losses, key=itemgetter(1)), losses[-1]) if positive else ((0, 1.0), (0, 1.0))
    times = last[1] / least[1]
    optimizer = _optimizer_of(grown, past.optimizers)
    rate = float(getattr(optimizer, "lr", None) or 0.0)
    is_large = not losses and then is None and now >= _LARGE and now <= 2 * _farthest(trace, optimizer, rate, past)
    if is_large and len(trained := _trained(trace)) > 1:  # a rate moves more than one layer
        is_large = median(largest for _, largest in trained) >= _LARGE / 10
    loss_is_known = positive and len(losses) >= _LOSSES
    grew = then is not None and now >= _WEIGHTS * then and (not loss_is_known or times >= _LOSS_WITH_THEM)
    loss_grew = times >= _LOSS and last[1] >= _USUAL * median(loss for _, loss in losses)
    if not (grew or is_large or (loss_grew and (then is None or now >= _MOVED * then))):
        return None
    parts = []
    if times >= _LOSS_WITH_THEM:
        parts.append(f"the loss grew from {least[1]:.3g} (step {least[0]}) to {last[1]:.3g} (step {last[0]})")
    if then is not None:
        parts.append(f"the numbers of {grown.name or 'a weight'} from up to {then:.3g} to up to {now:.3g}")
    elif is_large:
        parts.append(f"the numbers of {grown.name or 'a weight'} are up to {now:.3g}")
    named = f"the learning rate, {rate:.6g}, is too high" if rate else "the learning rate is too high"
    why = f"The run diverges, in float32 as well, because {named}: {' and '.join(parts)}."
    if not rate:
        return Cause(
            "diverged", why, "optimizer.lr /= 100  # a lower learning rate, from weights of before it diverged"
        )
    if _is_adam(optimizer):  # a hundredth of a number's size is a step
        lower = min(rate / 10, 0.01 * then if then else _ADAMS)
    else:
        factors = [math.sqrt(b / a) for a, b in pairwise(loss for _, loss in losses)] if positive else []
        factors += [(now / then) ** (1 / max(past.steps or 0, 1))] if then else []
        lower = rate / max(10.0, 1 + max(factors, default=0.0))
    cure = f"optimizer.lr = {_rounded(lower):.6g}  # it is {rate:.6g}; from weights of before it diverged"
    return Cause("diverged", why, cure)


def _is_adam(optimizer: object) -> bool:
    """Returns whether an optimizer is Adam or its kin, which move each number by a few times the rate."""
    return hasattr(optimizer, "eps")


def _farthest(trace: StepGraph, optimizer: object | None, rate: float, past: Past) -> float:
    """How far the steps that were done can have moved a number at this rate; infinite where that is not known.

    Others than Adam move one by the rate times a gradient: that of a weight is a sum of products of two numbers of
    float16.
    """
    if not past.steps:
        return math.inf if past.steps is None else 0.0
    if _is_adam(optimizer):
        return 10.0 * rate * past.steps
    is_bounded = rate and any(value.dtype == "float16" for value in trace.values)
    return _NUMBERS["float16"]["large"] ** 2 * rate * past.steps if is_bounded else math.inf


def _most_grown(trace: StepGraph, largest: Mapping[int, float]) -> tuple[Value | None, float, float | None]:
    """The weight that has grown most since its first step, or where nobody knows the largest; what it is, and was."""

    def growth(one: tuple[Value | None, float, float | None]) -> float:
        _, now, then = one
        return now / then if then else 0.0 if largest else now

    nothing: tuple[Value | None, float, float | None] = None, 0.0, None
    trained = ((value, now, largest.get(id(value.tensor))) for value, now in _trained(trace))
    return max([nothing, *trained], key=growth)


def _trained(trace: StepGraph) -> list[tuple[Value, float]]:
    """What is trained, and the largest magnitude of each."""
    return [(value, value.largest) for value, tensor in trace.leaves if value.statistics and bridge.is_trained(tensor)]


def _optimizer_of(weight: Value, optimizers: Sequence[object]) -> object | None:
    """The optimizer that steps a weight; the only one that is known."""
    for optimizer in optimizers:
        if any(weight.tensor is one for one in masters.stepped(optimizer)):
            return optimizer
    return optimizers[0] if len(optimizers) == 1 else None


def _rounded(rate: float) -> float:
    """With one digit, not above."""
    step = 10.0 ** math.floor(math.log10(rate))
    return math.floor(rate / step * (1 + 1e-9)) * step
