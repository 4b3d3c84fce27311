"""Losses under autograd: of pairs, of rows, of weighted elements and boxes.

A scalar loss is float32 of shape (1,), under every policy.
Reductions are netcl's: mse, l1, l2 and smooth_l1 are sums, the cross entropies and hinge means over the batch, and
binary cross entropy is not reduced. Where netcl's gradient contradicts its value (mse ignores the incoming
gradient; l2 has the gradient of half its value), the value rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting, Gradients, NotOwned, Operand, as_is, bound, require_floats
from clamp.casting.registry import Function, implements
from clamp.functions.indexing import host_integers, int32_on_device
from clamp.ops import loss as ops
from clamp.ops.arguments import number, whole_number
from clamp.ops.elementwise import elementwise
from clamp.ops.loss_elementwise import (
    LOSS_TERMS,
    bce_constants,
    detection_constants,
    loss_gradient,
    loss_sum,
    loss_terms,
)
from clamp.ops.softmax import softmax_backward as softmax_gradient

IGNORE_INDEX = -100
_RESHAPE = "reshape one of them to the other's shape"


def require_same_shape(name: str, first: str, x: Operand, second: str, t: Operand, advice: str = _RESHAPE) -> None:
    """Raises ValueError where two operands differ in shape, naming the loss and the arguments."""
    if x.shape != t.shape:
        raise ValueError(
            f"{name}: {first} has shape {x.shape}, {second} has shape {t.shape}; losses do not broadcast: {advice}"
        )


def operands_alike(casting: Casting, name: str, **arguments: Any) -> tuple[Operand, ...]:
    """A loss's arguments as operands: floating, and all of one shape, or an error is raised."""
    operands = casting.operands(*arguments.values())
    named = dict(zip(arguments, operands, strict=True))
    require_floats(name, **named)
    (first, x), *rest = named.items()
    for other, operand in rest:
        require_same_shape(name, first, x, other, operand)
    return operands


# ------------------------------------------------------------------------------------------------ of each element

# Scalars are sums, as in netcl; the elementwise forms are float32, too. Where a probability lies outside the range that
# netcl holds it in, the loss does not depend on it and its gradient is 0; netcl's own is that at the end of the range,
# up to 1e7, which overflows in 16 bits.

_PROBABILITY_EPSILON = 1e-7
_BANNED_EPSILON = 1e-6  # binary_cross_entropy's
_SMALLEST_BETA = 1e-6

_SWAPPED = "swapped"  # of |x - t|: the gradient for t is that for x with the two in each other's place
#: Kind of a loss -> the kind of each operand's gradient; None: it gets none, as in netcl.
_SLOPES: dict[str, Sequence[str | None]] = {
    "mse": ("mse", _SWAPPED),
    "l1": ("l1", _SWAPPED),
    "smooth_l1": ("smooth_l1", _SWAPPED),
    "logit_bce": ("logit_bce", "logit_bce_target"),
    "probability_bce": ("probability_bce", "probability_bce_target"),
    "weighted_smooth_l1": ("weighted_smooth_l1", _SWAPPED, "weighted_smooth_l1_weight"),
    "weighted_bce": ("weighted_bce", None, None),
    "detection": ("detection", None, None, None),
    "box": ("box", "box_target"),
}


def _of_elements(
    name: str, kind: str, operands: Sequence[Operand], tape: Tape | None, constants: Sequence[float] = (),
    dtype: str | None = None,
) -> Any:  # fmt: skip
    """Records the loss of each element, stored in a dtype; without one their sum."""
    values = [operand.value for operand in operands]
    loss = loss_sum(kind, values, constants) if dtype is None else loss_terms(kind, values, dtype, constants)
    x, t, *weights = operands
    gradients: Gradients = {}
    for receiver, slope in zip(operands, _SLOPES[kind], strict=True):
        is_swapped = slope == _SWAPPED
        read = (t, x, *weights) if is_swapped else operands
        gradients[receiver] = None if slope is None else partial(_slope, kind if is_swapped else slope, read, constants)
    return bound(loss, gradients, name, tape)


def _slope(kind: str, read: Sequence[Operand], constants: Sequence[float], grad: Tensor, dtype: str) -> Tensor:
    return loss_gradient(kind, [operand.value for operand in read], grad, dtype, constants)


def _sum_of_pairs(kind: str, name: str, *more: str) -> Function:
    @implements(f"netcl.autograd.{name}", *more, uses=(loss_sum,))
    def function(casting: Casting, pred: Any, target: Any, tape: Tape | None = None) -> Any:
        return _of_elements(name, kind, operands_alike(casting, name, pred=pred, target=target), tape)

    return function


# Sum of ``(pred - target)**2``, of one shape, under two names of netcl's. The gradient is that of this sum.
mse_loss = _sum_of_pairs("mse", "mse_loss", "netcl.nn.loss.mse_loss")
l2_loss = _sum_of_pairs("mse", "l2_loss")
# Sum of ``|pred - target|``. The gradient where they are equal is 0.
l1_loss = _sum_of_pairs("l1", "l1_loss")


@implements("netcl.autograd.smooth_l1_loss", uses=(loss_sum,))
def smooth_l1_loss(casting: Casting, pred: Any, target: Any, beta: float = 1.0, tape: Tape | None = None) -> Any:
    """Sum of ``d*d / (2*beta)`` where ``d = |pred - target|`` is below beta, else ``d - beta/2``; float32, (1,).

    Raises:
        ValueError: beta is negative or NaN.
    """
    beta = number("smooth_l1_loss", "beta", beta)
    if not beta >= 0:
        raise ValueError(f"smooth_l1_loss: beta is {beta}, and must not be negative or NaN")
    operands = operands_alike(casting, "smooth_l1_loss", pred=pred, target=target)
    return _of_elements("smooth_l1_loss", "smooth_l1", operands, tape, (beta,))


@implements("netcl.autograd.binary_cross_entropy_with_logits", uses=(LOSS_TERMS,))
def binary_cross_entropy_with_logits(casting: Casting, logits: Any, target: Any, tape: Tape | None = None) -> Any:
    """``max(x, 0) - x*t + log(1 + exp(-|x|))`` of each logit x and target t: no reduction, the logits' shape."""
    name = "binary_cross_entropy_with_logits"
    operands = operands_alike(casting, name, logits=logits, target=target)
    return _of_elements(name, "logit_bce", operands, tape, dtype=casting.result_dtype(*operands))


@implements("netcl.autograd.binary_cross_entropy", uses=(LOSS_TERMS,))
def binary_cross_entropy(casting: Casting, pred: Any, target: Any, tape: Tape | None = None) -> Any:
    """``-(t*log(p) + (1-t)*log(1-p))`` of each probability p and target t: not reduced, float32, pred's shape.

    Banned unless ``allow_banned``. Probabilities are held in 1e-6 .. 1 - 1e-6; outside, their gradient is 0.
    """
    operands = operands_alike(casting, "binary_cross_entropy", pred=pred, target=target)
    constants, dtype = bce_constants(_BANNED_EPSILON), casting.result_dtype(*operands)
    return _of_elements("binary_cross_entropy", "probability_bce", operands, tape, constants, dtype)


def _beta(name: str, beta: float) -> float:
    return max(number(name, "beta", beta), _SMALLEST_BETA)


def _weighted_smooth_l1(name: str, dtype: str | None) -> Function:
    """``weight * (d*d / (2*beta) if d < beta else d - beta/2)`` of ``d = |pred - target|``, or the sum of that.

    Of beta at least 1e-6 is used, as in netcl.
    """

    @implements(f"netcl.autograd.{name}", uses=(loss_sum,))
    def function(
        casting: Casting, pred: Any, target: Any, weight: Any, beta: float = 1.0, tape: Tape | None = None
    ) -> Any:
        operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
        return _of_elements(name, "weighted_smooth_l1", operands, tape, (_beta(name, beta),), dtype)

    return function


def _weighted_bce(name: str, dtype: str | None) -> Function:
    """``-weight * (t*log(p) + (1-t)*log(1-p))`` of probabilities p and targets t, or the sum of that.

    Probabilities are held in 1e-7 .. 1 - 1e-7. Only they get a gradient, as in netcl.
    """

    @implements(f"netcl.autograd.{name}", uses=(loss_sum,))
    def function(casting: Casting, pred: Any, target: Any, weight: Any, tape: Tape | None = None) -> Any:
        operands = operands_alike(casting, name, pred=pred, target=target, weight=weight)
        return _of_elements(name, "weighted_bce", operands, tape, bce_constants(_PROBABILITY_EPSILON), dtype)

    return function


weighted_smooth_l1_loss = _weighted_smooth_l1("weighted_smooth_l1_loss", None)
weighted_smooth_l1_elementwise = _weighted_smooth_l1("weighted_smooth_l1_elementwise", "float32")
weighted_bce = _weighted_bce("weighted_bce", None)
weighted_bce_elementwise = _weighted_bce("weighted_bce_elementwise", "float32")


@implements("netcl.autograd.fused_weighted_bce_smooth_l1_loss", uses=(loss_sum,))
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
    name = "fused_weighted_bce_smooth_l1_loss"
    operands = operands_alike(casting, name, pred=pred, target=target, heat_weight=heat_weight, reg_weight=reg_weight)
    constants = detection_constants(
        _beta(name, beta), _PROBABILITY_EPSILON, number(name, "heat_scale", heat_scale),
        number(name, "reg_scale", reg_scale),
    )  # fmt: skip
    return _of_elements(name, "detection", operands, tape, constants)


@implements("netcl.nn.loss.weighted_box_smooth_l1_loss", uses=(loss_sum,))
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
    operands = operands_alike(casting, name, pred=pred, target=target)
    shape = operands[0].shape
    if len(shape) != 2 or shape[1] != 4:
        raise ValueError(f"{name}: pred and target have shape {shape}, and must be (N, 4): one box a row")
    gains = {"area_gain": area_gain, "miss_gain": miss_gain, "center_gain": center_gain, "size_gain": size_gain}
    sizes = (_beta(name, beta), max(number(name, "area_ref", area_ref), 1e-6))
    constants = (*sizes, *(number(name, gain, value) for gain, value in gains.items()))
    return _of_elements(name, "box", operands, tape, constants)


# ---------------------------------------------------------------------------------------------------- rows


def _require_rows(name: str, x: Operand) -> tuple[int, int]:
    require_floats(name, logits=x)
    if len(x.shape) != 2:
        raise ValueError(f"{name}: logits have shape {x.shape}, and must be (N, C); reshape them to two dimensions")
    return x.shape[0], x.shape[1]


@implements(
    "netcl.autograd.cross_entropy", "netcl.nn.functional.cross_entropy", "netcl.nn.loss.cross_entropy", uses=(ops,)
)
def cross_entropy(casting: Casting, logits: Any, targets: Any, tape: Tape | None = None) -> Any:
    """Mean over the batch of the cross entropy of ``softmax(logits)``: float32, shape (1,).

    Args:
        logits: (N, C), float32, float16 or bfloat16.
        targets: probabilities or one-hot rows (N, C), in any of these dtypes; they get no gradient, as in netcl.
            Or N class numbers (rank 1: a tensor of integers or whole floats, a host array, a list), which are read
            on the device without a one-hot copy, and of which -100 is ignored (see ``cross_entropy_indices``).

    Raises:
        TypeError: the logits are not floating, or the targets neither floating nor labels.
    """
    if _rank(targets) == 1:
        return _label_loss(casting, "cross_entropy", logits, targets, IGNORE_INDEX, tape)
    x, t = casting.operands(logits, targets)
    rows, _ = _require_rows("cross_entropy", x)
    require_floats("cross_entropy", targets=t)
    require_same_shape("cross_entropy", "logits", x, "targets", t, f"pass targets of that shape, or {rows} labels")
    forward = ops.probability_loss(x.value, t.value)
    gradients: Gradients = {
        x: lambda grad, dtype: ops.probability_gradient(x.value, t.value, forward, grad, dtype),
        t: None,
    }
    return bound(forward.loss, gradients, "cross_entropy", tape)


@implements("netcl.autograd.cross_entropy_indices", uses=(ops.LABEL_LOSS,))
def cross_entropy_indices(
    casting: Casting, logits: Any, targets: Any, ignore_index: int = IGNORE_INDEX, tape: Tape | None = None
) -> Any:
    """Mean cross entropy of logits (N, C) against class numbers, over the rows that are not ignored; float32, (1,).

    Args:
        logits: (N, C), float32, float16 or bfloat16.
        targets: N class numbers: an integer tensor, a floating one of whole numbers, a host array or a list, of any
            shape. What is none of 0 .. C-1 makes the loss, and the gradient of its row, NaN: on the device it
            cannot raise. Host labels are checked before they are sent there.
        ignore_index: rows with this target take no part. If all do, loss and gradient are 0.

    Raises:
        ValueError: the number of targets is not N, the logits are not (N, C), or a label given on the host is no whole
            number.
        IndexError: a label given on the host is no class.
    """
    return _label_loss(casting, "cross_entropy_indices", logits, targets, ignore_index, tape)


def _label_loss(casting: Casting, name: str, logits: Any, targets: Any, ignore_index: int, tape: Tape | None) -> Any:
    (x,) = casting.operands(logits)
    rows, classes = _require_rows(name, x)
    ignore_index = min(max(whole_number(name, "ignore_index", ignore_index), -(2**63)), 2**63 - 1)
    labels = _labels(name, targets, x.value, classes, ignore_index)
    if labels.size != rows:
        raise ValueError(
            f"{name}: logits have shape {x.shape}, targets have shape {labels.shape}; "
            f"pass {rows} labels, one for each row"
        )
    forward, given = ops.label_loss(x.value, labels, ignore_index), Operand(labels, labels)
    gradients: Gradients = {x: lambda grad, dtype: ops.label_gradient(x.value, given.value, forward, grad, dtype)}
    return bound(forward.loss, gradients, name, tape, besides=(given,))


def _rank(targets: Any) -> int:
    value = targets.value if isinstance(targets, Node) else targets
    return len(value.shape) if hasattr(value, "shape") else np.ndim(value)


def labels_given(name: str, labels: Any, x: Tensor) -> Any:
    """Labels as they are given: a tensor, which must be on x's queue, or something on the host, where float64 ones are
    read, too."""
    value = labels.value if isinstance(labels, Node) else labels
    if isinstance(value, Tensor):
        if not bridge.on_device(value):
            raise NotOwned
        if value.dtype not in ops.LABEL_STORAGE:
            return value.to_host()
        bridge.require_same_queue(name, x, value)
    return value


def _labels(name: str, targets: Any, logits: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Labels as a device tensor; those given on the host are checked and sent to the logits' queue."""
    value = labels_given(name, targets, logits)
    if isinstance(value, Tensor):
        return value
    host = host_integers(name, value)
    wrong = host[((host < 0) | (host >= classes)) & (host != ignore_index)]
    if wrong.size:
        raise IndexError(f"{name}: label {wrong[0]} is no class of logits of shape {logits.shape}")
    if not -(2**31) <= ignore_index < 2**31 and ignore_index in host:
        return Tensor.from_host(logits.queue, host, dtype="int64")
    return int32_on_device(host, logits.queue)


@implements("netcl.autograd.hinge_loss", uses=(ops,))
def hinge_loss(casting: Casting, logits: Any, targets: Any, margin: float = 1.0, tape: Tape | None = None) -> Any:
    """Multi-class hinge: mean over the batch of ``sum(max(0, margin + x[c] - x[true]))``, c not true; float32, (1,).

    Args:
        logits: (N, C), float32, float16 or bfloat16.
        targets: one-hot rows (N, C), in any of these dtypes; they get no gradient.
    """
    x, t = casting.operands(logits, targets)
    _require_rows("hinge_loss", x)
    require_floats("hinge_loss", targets=t)
    require_same_shape("hinge_loss", "logits", x, "targets", t, "pass one-hot targets of the logits' shape")
    margin = number("hinge_loss", "margin", margin)
    forward = ops.hinge_loss(x.value, t.value, margin)
    gradients: Gradients = {x: lambda grad, dtype: ops.hinge_gradient(x.value, forward, grad, margin, dtype), t: None}
    return bound(forward.loss, gradients, "hinge_loss", tape)


def _logits_and_targets(casting: Casting, name: str, logits: Any, targets: Any) -> tuple[Tensor, Tensor]:
    (x,) = casting.operands(logits)
    rows, _ = _require_rows(name, x)
    labels = labels_given(name, targets, x.value)
    if not isinstance(targets, Tensor) or labels is not targets:
        raise NotOwned
    if labels.size != rows:
        raise ValueError(f"{name}: expected {rows} targets, got {labels.size}")
    return x.value, labels


@implements("netcl.ops.lm_ops.cross_entropy_indices", uses=(ops.LABEL_LOSS, elementwise))
def tensor_cross_entropy_indices(
    casting: Casting, logits: Any, targets: Any, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of logits (N, C) against N class numbers, and one over the number of rows that count.

    Args:
        logits: float32, float16 or bfloat16.
        targets: a device tensor. A class outside 0 .. C-1 makes the loss NaN.
        ignore_index: rows with this target do not count.

    Returns:
        Two float32 tensors of shape (1,).
    """
    x, labels = _logits_and_targets(casting, "cross_entropy_indices", logits, targets)
    forward = ops.label_loss(x, labels, ignore_index)
    assert forward.count is not None
    return forward.loss, elementwise("div", "float32", 1.0, forward.count)


@implements("netcl.ops.lm_ops.cross_entropy_indices_backward", uses=(ops.LABEL_LOSS,))
def cross_entropy_indices_backward(
    casting: Casting, logits: Any, targets: Any, scale: Any, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """``(softmax(logits) - onehot(targets)) * scale``, 0 in ignored rows: the logits' shape.

    Args:
        scale: one floating element, read on the device.

    Other arguments as for ``cross_entropy_indices``.
    """
    x, labels = _logits_and_targets(casting, "cross_entropy_indices_backward", logits, targets)
    factor = as_is(scale)
    require_floats("cross_entropy_indices_backward", scale=factor)
    # Only the rows' statistics are wanted: netcl's two functions share nothing but the scale.
    forward = replace(ops.label_loss(x, labels, ignore_index), count=None)
    return ops.label_gradient(x, labels, forward, factor.value, bridge.canonical_dtype(logits.dtype))


@implements("netcl.ops.softmax.softmax_backward", uses=(softmax_gradient,))
def softmax_backward(casting: Casting, out: Any, grad_out: Any, axis: int = -1) -> Tensor:
    """``out * (grad_out - sum(grad_out * out))`` along an axis, in the dtype of out: the gradient of softmax.

    Args:
        out: the result of softmax, float32, float16 or bfloat16.
        grad_out: its gradient, in any of these.

    Raises:
        ValueError: the shapes differ, or there is no such axis.
    """
    y, grad = as_is(out), as_is(grad_out)
    require_floats("softmax_backward", out=y, grad_out=grad)
    return softmax_gradient(y.value, grad.value, axis, out_dtype=y.grad_dtype)
