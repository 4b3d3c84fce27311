"""Losses of bare tensors, and the backward functions of netcl that take and return them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.operands import Casting, NotOwned, as_is, as_node
from clamp.casting.registry import implements
from clamp.functions.loss import IGNORE_INDEX, require_floats
from clamp.ops import loss as ops
from clamp.ops.elementwise import elementwise
from clamp.ops.softmax import softmax_backward as softmax_gradient


def _logits_and_targets(casting: Casting, name: str, logits: Any, targets: Any) -> tuple[Tensor, Tensor]:
    (x,) = casting.operands(as_node(logits))
    require_floats(name, logits=x)
    if len(x.shape) != 2:
        raise ValueError(f"{name}: logits have shape {x.shape}, and must be (N, C); reshape them to two dimensions")
    if not isinstance(targets, Tensor) or not bridge.on_device(targets) or targets.dtype not in ops.LABEL_STORAGE:
        raise NotOwned
    bridge.require_same_queue(name, x.value, targets)
    if targets.size != x.shape[0]:
        raise ValueError(f"{name}: expected {x.shape[0]} targets, got {targets.size}")
    return x.value, targets


@implements("netcl.ops.lm_ops.cross_entropy_indices", uses=(ops.LABEL_LOSS, elementwise))
def cross_entropy_indices(
    casting: Casting, logits: Any, targets: Any, ignore_index: int = IGNORE_INDEX, pool: Any = None
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of logits (N, C) against N class numbers, and one over the number of rows that count.

    Args:
        logits: float32, float16 or bfloat16.
        targets: a device tensor. A class outside 0 .. C-1 makes the loss NaN.
        ignore_index: rows with this target do not count.

    Returns:
        Two float32 tensors of shape (1,).

    Raises:
        ValueError: the shapes do not match.
        TypeError: the logits are not floating.
    """
    x, labels = _logits_and_targets(casting, "cross_entropy_indices", logits, targets)
    forward = ops.label_loss(x, labels, ignore_index)
    assert forward.count is not None
    return forward.loss, elementwise("div", "float32", 1.0, forward.count)


@implements("netcl.ops.lm_ops.cross_entropy_indices_backward", uses=(ops.LABEL_LOSS,))
def cross_entropy_indices_backward(
    casting: Casting, logits: Any, targets: Any, scale: Any, ignore_index: int = IGNORE_INDEX, pool: Any = None
) -> Tensor:
    """``(softmax(logits) - onehot(targets)) * scale``, 0 in ignored rows: the logits' shape.

    Args:
        scale: one floating element, read on the device.

    Other arguments and errors as for ``cross_entropy_indices``.
    """
    x, labels = _logits_and_targets(casting, "cross_entropy_indices_backward", logits, targets)
    factor = as_is(scale)
    require_floats("cross_entropy_indices_backward", scale=factor)
    # Only the rows' statistics are wanted: netcl's two functions share nothing but the scale.
    forward = replace(ops.label_loss(x, labels, ignore_index), count=None)
    return ops.label_gradient(x, labels, forward, factor.value, bridge.canonical_dtype(logits.dtype))


@implements("netcl.ops.softmax.softmax_backward", uses=(softmax_gradient,))
def softmax_backward(
    casting: Casting, out: Any, grad_out: Any, grad_in: Tensor | None = None, pool: Any = None, axis: int = -1
) -> Tensor:
    """``out * (grad_out - sum(grad_out * out))`` along an axis, in the dtype of out: the gradient of softmax.

    Args:
        out: the result of softmax, float32, float16 or bfloat16.
        grad_out: its gradient, in any of these.

    Raises:
        ValueError: the shapes differ, or there is no such axis.
        TypeError: one of them is not floating.
        NotOwned: ``grad_in`` is given.
    """
    if grad_in is not None:
        raise NotOwned
    y, grad = as_is(out), as_is(grad_out)
    require_floats("softmax_backward", out=y, grad_out=grad)
    return softmax_gradient(y.value, grad.value, axis, out_dtype=y.grad_dtype)
