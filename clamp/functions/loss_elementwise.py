"""Losses of single elements with a weight each, and of boxes, under autograd.

Scalars are float32 of shape (1,), and are sums, as in netcl; the elementwise forms are float32, too. Where a
probability lies outside the range that netcl holds it in (1e-7 .. 1 - 1e-7), the loss does not depend on it and its
gradient is 0; netcl's own is that at the end of the range, up to 1e7, which overflows in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Gradients, Operand, bound
from clamp.casting.registry import Function, implements
from clamp.functions.loss import operands_alike, slope
from clamp.ops.loss_elementwise import LOSS_TERMS, bce_constants, detection_constants, loss_sum, loss_terms

_PROBABILITY_EPSILON = 1e-7
_BANNED_EPSILON = 1e-6  # binary_cross_entropy's
_SMALLEST_BETA = 1e-6


def _reduced(kind: str, operands: Sequence[Operand], constants: Sequence[float], summed: bool) -> Tensor:
    values = [operand.value for operand in operands]
    return loss_sum(kind, values, constants) if summed else loss_terms(kind, values, "float32", constants)


def _weighted_smooth_l1(name: str, summed: bool) -> Function:
    """``weight * (d*d / (2*beta) if d < beta else d - beta/2)`` of ``d = |pred - target|``, or the sum of that.

    Of beta at least 1e-6 is used, as in netcl.
    """
    kind = "weighted_smooth_l1"

    @implements(f"netcl.autograd.{name}")
    def function(
        casting: Casting, pred: Any, target: Any, weight: Any, beta: float = 1.0, tape: Tape | None = None
    ) -> Any:
        x, t, w = operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
        constants = (max(float(beta), _SMALLEST_BETA),)
        gradients: Gradients = {
            x: slope(kind, operands, x, constants),
            t: slope(kind, (t, x, w), t, constants),  # the loss is a function of |x - t|
            w: slope(f"{kind}_weight", operands, w, constants),
        }
        return bound(_reduced(kind, operands, constants, summed), gradients, name, tape)

    function.__name__ = name
    return function


def _weighted_bce(name: str, summed: bool) -> Function:
    """``-weight * (t*log(p) + (1-t)*log(1-p))`` of probabilities p and targets t, or the sum of that.

    Probabilities are held in 1e-7 .. 1 - 1e-7. Only they get a gradient, as in netcl.
    """
    kind = "weighted_bce"

    @implements(f"netcl.autograd.{name}")
    def function(casting: Casting, pred: Any, target: Any, weight: Any, tape: Tape | None = None) -> Any:
        x, t, w = operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
        constants = bce_constants(_PROBABILITY_EPSILON)
        gradients: Gradients = {x: slope(kind, operands, x, constants), t: None, w: None}
        return bound(_reduced(kind, operands, constants, summed), gradients, name, tape)

    function.__name__ = name
    return function


weighted_smooth_l1_loss = _weighted_smooth_l1("weighted_smooth_l1_loss", summed=True)
weighted_smooth_l1_elementwise = _weighted_smooth_l1("weighted_smooth_l1_elementwise", summed=False)
weighted_bce = _weighted_bce("weighted_bce", summed=True)
weighted_bce_elementwise = _weighted_bce("weighted_bce_elementwise", summed=False)


@implements("netcl.autograd.fused_weighted_bce_smooth_l1_loss")
def fused_weighted_bce_smooth_l1_loss(
    casting: Casting, pred: Any, target: Any, heat_weight: Any, reg_weight: Any, heat_scale: float, reg_scale: float,
    beta: float = 0.05, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """``heat_scale * weighted_bce(heat_weight) + reg_scale * weighted_smooth_l1(reg_weight)``. Only predictions get a
    gradient."""
    name, kind = "fused_weighted_bce_smooth_l1_loss", "detection"
    operands = operands_alike(casting, name, pred=pred, target=target, heat_weight=heat_weight, reg_weight=reg_weight)
    constants = detection_constants(
        max(float(beta), _SMALLEST_BETA), _PROBABILITY_EPSILON, float(heat_scale), float(reg_scale)
    )
    loss = loss_sum(kind, [operand.value for operand in operands], constants)
    x, *others = operands
    return bound(loss, {x: slope(kind, operands, x, constants), **dict.fromkeys(others)}, name, tape)


@implements("netcl.nn.loss.weighted_box_smooth_l1_loss")
def weighted_box_smooth_l1_loss(
    casting: Casting, pred: Any, target: Any, beta: float = 0.05, area_ref: float = 0.01, area_gain: float = 1.5,
    miss_gain: float = 2.0, center_gain: float = 3.0, size_gain: float = 1.0, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Weighted smooth l1 of boxes (N, 4): x center, y center, width and height, all in 0 .. 1.

    A coordinate's weight is ``(1 + area_gain * min(sqrt(area / area_ref), 6)) * (1 + miss_gain * (1 - iou)**2)``
    times center_gain or size_gain, with the target's area and the boxes' intersection over union. To the gradient
    the weights are constants, as in netcl.
    """
    name = "weighted_box_smooth_l1_loss"
    x, t = operands = operands_alike(casting, name, pred=pred, target=target)
    if len(x.shape) != 2 or x.shape[1] != 4:
        raise ValueError(f"{name}: pred and target have shape {x.shape}, and must be (N, 4): one box a row")
    sizes = (max(float(beta), _SMALLEST_BETA), max(float(area_ref), 1e-6))
    constants = (*sizes, float(area_gain), float(miss_gain), float(center_gain), float(size_gain))
    loss = loss_sum("box", (x.value, t.value), constants)
    gradients: Gradients = {x: slope("box", operands, x, constants), t: slope("box_target", operands, t, constants)}
    return bound(loss, gradients, name, tape)


@implements("netcl.autograd.binary_cross_entropy", uses=(LOSS_TERMS,))
def binary_cross_entropy(casting: Casting, pred: Any, target: Any, tape: Tape | None = None) -> Any:
    """``-(t*log(p) + (1-t)*log(1-p))`` of each probability p and target t: not reduced, float32, pred's shape.

    Banned unless ``allow_banned``. Probabilities are held in 1e-6 .. 1 - 1e-6; outside, their gradient is 0.
    """
    x, t = operands = operands_alike(casting, "binary_cross_entropy", pred=pred, target=target)
    constants, kind = bce_constants(_BANNED_EPSILON), "probability_bce"
    loss = loss_terms(kind, (x.value, t.value), casting.result_dtype(*operands), constants)
    gradients: Gradients = {x: slope(kind, operands, x, constants), t: slope(f"{kind}_target", operands, t, constants)}
    return bound(loss, gradients, "binary_cross_entropy", tape)
