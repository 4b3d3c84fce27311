"""Whether a run has diverged: loss and weights grow from step to step where the learning rate is too high.

Plain descent on a bowl of curvature c multiplies its distance by |1 - rate c| a step, and the loss by the square of
that: so weights, or a loss, that grow by so much a step tell c, and 1 / c is the rate that is best there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from clamp import bridge
from clamp.debug.step_graph import Trace, Value
from clamp.params import masters

_LOSS = 100.0  # times its least: so much more is no noise of a batch
_WEIGHTS, _LOSS_WITH_THEM = 8.0, 2.0  # times what the weights were at first, where the loss has grown, too
_LOSSES = 3  # and more show whether it has
_LARGE = 100.0  # a weight of which nobody knows what it was at first

_ADAMS = 1e-3  # the rate that is usual where each number moves by it


@dataclass(frozen=True)
class Past:
    """What is known of the steps before one that is explained.

    Attributes:
        losses: by steps, where they were noted.
        largest: the largest magnitude of each weight at its first step, by the id of its tensor.
        optimizers: those that are known.
        steps: how many were done.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    largest: Mapping[int, float] = field(default_factory=dict)
    optimizers: Sequence[object] = ()
    steps: int = 0


def divergence(trace: Trace, past: Past) -> tuple[str, str] | None:
    """What grew, in a sentence, and the cure; None if nothing did.

    Args:
        trace: named, with its tensors held.
    """
    losses = [(step, loss) for step, loss in past.losses.items() if math.isfinite(loss)]
    positive = bool(losses) and all(loss > 0 for _, loss in losses)
    least = min(losses, key=lambda one: one[1], default=(0, 0.0))
    times = losses[-1][1] / least[1] if positive else 1.0
    grown, now, then = _most_grown(trace, past.largest)
    is_large = not losses and then is None and now >= _LARGE
    loss_is_known = positive and len(losses) >= _LOSSES
    grew = then is not None and now >= _WEIGHTS * then and (not loss_is_known or times >= _LOSS_WITH_THEM)
    if not (times >= _LOSS or grew or is_large) or grown is None:
        return None
    parts = []
    if times >= _LOSS_WITH_THEM:
        parts.append(
            f"the loss grew from {least[1]:.3g} (step {least[0]}) to {losses[-1][1]:.3g} (step {losses[-1][0]})"
        )
    if then is not None:
        parts.append(f"the numbers of {grown.name or 'a weight'} from up to {then:.3g} to up to {now:.3g}")
    elif is_large:
        parts.append(f"the numbers of {grown.name or 'a weight'} are up to {now:.3g}")
    optimizer = _optimizer_of(grown, past.optimizers)
    rate = float(getattr(optimizer, "lr", None) or 0.0)
    named = f"the learning rate, {rate:.6g}, is too high" if rate else "the learning rate is too high"
    why = f"The run diverges, in float32 as well, because {named}: {' and '.join(parts)}."
    if not rate:
        return why, "optimizer.lr /= 100  # a lower learning rate, from weights of before it diverged"
    if hasattr(optimizer, "eps"):  # Adam and its kin move each number by the rate: a hundredth of its size is a step
        lower = min(rate / 10, 0.01 * then if then else _ADAMS)
    else:
        of_losses = [math.sqrt(b / a) for a, b in pairwise(loss for _, loss in losses)] if positive else []
        of_weights = [(now / then) ** (1 / max(past.steps, 1))] if then else []
        lower = rate / max(10.0, 1 + max([*of_losses, *of_weights]) if of_losses or of_weights else 10.0)
    lower = _rounded(lower)
    return why, f"optimizer.lr = {lower:.6g}  # it is {rate:.6g}; from weights of before it diverged"


def _most_grown(trace: Trace, largest: Mapping[int, float]) -> tuple[Value | None, float, float | None]:
    """The weight that has grown most since its first step, or where nobody knows the largest; what it is, and was."""
    found: tuple[Value | None, float, float | None] = None, 0.0, None
    ratio = 0.0
    for value in trace.values:
        if value.made_by is not None or value.tensor is None or value.statistics is None:
            continue
        if not bridge.is_trained(value.tensor):
            continue
        then, now = largest.get(id(value.tensor)), value.statistics.largest
        own = now / then if then else now if not largest else 0.0
        if own > ratio:
            found, ratio = (value, now, then), own
    return found


def _optimizer_of(weight: Value, optimizers: Sequence[object]) -> object | None:
    """The optimizer that steps a weight; the only one that is known."""
    for optimizer in optimizers:
        if any(weight.tensor is one for pair in masters.pairs(optimizer) for one in pair):
            return optimizer
    return optimizers[0] if len(optimizers) == 1 else None


def _rounded(rate: float) -> float:
    """With one digit, not above."""
    step = 10.0 ** math.floor(math.log10(rate))
    return math.floor(rate / step * (1 + 1e-9)) * step
