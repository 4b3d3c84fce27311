"""Losses of single elements with a weight each, and of boxes, under autograd.

Scalars are float32 of shape (1,), and are sums, as in netcl; the elementwise forms are float32 too. Every input may
be float32, float16 or bfloat16. Where a probability lies outside the range that netcl holds it in (1e-7 .. 1 - 1e-7),
the loss does not depend on it and its gradient is 0; netcl's own is that at the end of the range, up to 1e7, which
overflows in 16 bits.
"""

from __future__ import annotations

from typing import Any

from clamp.bridge import Tape
from clamp.casting.operands import Casting, Gradients, bound
from clamp.casting.registry import implements
from clamp.functions.loss import operands_alike, slope
from clamp.ops.loss_elementwise import LOSS_TERMS, bce_constants, detection_constants, loss_sum, loss_terms

_PROBABILITY_EPSILON = 1e-7
_BANNED_EPSILON = 1e-6  # binary_cross_entropy's
_SMALLEST_BETA = 1e-6


def _weighted_smooth_l1(
    casting: Casting, name: str, summed: bool, pred: Any, target: Any, weight: Any, beta: float, tape: Tape | None
) -> Any:
    x, t, w = operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
    constants = (max(float(beta), _SMALLEST_BETA),)
    values = (x.value, t.value, w.value)
    kind = "weighted_smooth_l1"
    loss = loss_sum(kind, values, constants) if summed else loss_terms(kind, values, "float32", constants)
    gradients: Gradients = {
        x: slope(kind, operands, x, constants),
        t: slope(kind, (t, x, w), t, constants),  # the loss is a function of |x - t|
        w: slope(f"{kind}_weight", operands, w, constants),
    }
    return bound(loss, gradients, name, tape)


@implements("netcl.autograd.weighted_smooth_l1_loss")
def weighted_smooth_l1_loss(
    casting: Casting, pred: Any, target: Any, weight: Any, beta: float = 1.0, tape: Tape | None = None
) -> Any:
    """Sum of ``weight * (d*d / (2*beta) if d < beta else d - beta/2)``, ``d = |pred - target|``: float32, (1,).

    Args:
        pred, target, weight: the same shape, in any mixture of float32, float16 and bfloat16. Any of them may need a
            gradient.
        beta: where the parabola ends; at least 1e-6 is used, as in netcl.
    """
    return _weighted_smooth_l1(casting, "weighted_smooth_l1_loss", True, pred, target, weight, beta, tape)


@implements("netcl.autograd.weighted_smooth_l1_elementwise")
def weighted_smooth_l1_elementwise(
    casting: Casting, pred: Any, target: Any, weight: Any, beta: float = 1.0, tape: Tape | None = None
) -> Any:
    """``weighted_smooth_l1_loss`` of each element: float32, pred's shape. Arguments as there."""
    return _weighted_smooth_l1(casting, "weighted_smooth_l1_elementwise", False, pred, target, weight, beta, tape)


def _weighted_bce(
    casting: Casting, name: str, summed: bool, pred: Any, target: Any, weight: Any, tape: Tape | None
) -> Any:
    x, t, w = operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
    constants = bce_constants(_PROBABILITY_EPSILON)
    values = (x.value, t.value, w.value)
    kind = "weighted_bce"
    loss = loss_sum(kind, values, constants) if summed else loss_terms(kind, values, "float32", constants)
    return bound(loss, {x: slope(kind, operands, x, constants), t: None, w: None}, name, tape)


@implements("netcl.autograd.weighted_bce")
def weighted_bce(casting: Casting, pred: Any, target: Any, weight: Any, tape: Tape | None = None) -> Any:
    """Sum of ``-weight * (t*log(p) + (1-t)*log(1-p))`` of probabilities p and targets t: float32, shape (1,).

    Args:
        pred: probabilities, held in 1e-7 .. 1 - 1e-7. Only they get a gradient, as in netcl.
        target, weight: the same shape; all three in any mixture of float32, float16 and bfloat16.
    """
    return _weighted_bce(casting, "weighted_bce", True, pred, target, weight, tape)


@implements("netcl.autograd.weighted_bce_elementwise")
def weighted_bce_elementwise(casting: Casting, pred: Any, target: Any, weight: Any, tape: Tape | None = None) -> Any:
    """``weighted_bce`` of each element: float32, pred's shape. Arguments as there."""
    return _weighted_bce(casting, "weighted_bce_elementwise", False, pred, target, weight, tape)


@implements("netcl.autograd.fused_weighted_bce_smooth_l1_loss")
def fused_weighted_bce_smooth_l1_loss(
    casting: Casting, pred: Any, target: Any, heat_weight: Any, reg_weight: Any, heat_scale: float, reg_scale: float,
    beta: float = 0.05, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """``heat_scale * weighted_bce(heat_weight) + reg_scale * weighted_smooth_l1(reg_weight)``: float32, shape (1,).

    Args:
        pred: predictions, which alone get a gradient.
        target, heat_weight, reg_weight: the same shape; all in any mixture of float32, float16 and bfloat16.
        beta: as for ``weighted_smooth_l1_loss``, and so are the errors.
    """
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
    """Weighted smooth l1 of boxes (x center, y center, width, height), all coordinates in 0 .. 1: float32, shape (1,).

    A coordinate's weight is ``(1 + area_gain * min(sqrt(area / area_ref), 6)) * (1 + miss_gain * (1 - iou)**2)``
    times center_gain or size_gain, with the target's area and the boxes' intersection over union. To the gradient
    the weights are constants, as in netcl.

    Args:
        pred, target: (N, 4), in any mixture of float32, float16 and bfloat16. Either may need a gradient.

    Raises:
        ValueError: the shapes differ, or are not (N, 4).
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
