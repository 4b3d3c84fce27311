"""Whether a parameter's gradient is still multiplied by a loss scale.

Backward leaves a mark on each gradient that it delivers; dividing by the scale changes the mark. So nothing divides
a gradient twice, and what must not meet a scaled gradient (clipping, an optimizer's step) can say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.recording import host_step, recorder

Held: TypeAlias = tuple[Tensor, Tensor, str | None]  # a tensor, its gradient, and the gradient's mark

SCALE_OP = "scale_loss"  #: name of the node that multiplies a loss by a scale

_PLAIN = "plain"  # no scaled loss had a part in it, as far as clamp knows
_SCALED = "scaled"
_UNSCALED = "unscaled"
_MIXED = "mixed"  # a sum of an unscaled and a scaled gradient


@contextmanager
def delivered(leaves: Sequence[Any], scaled: bool) -> Iterator[None]:
    """Around a backward pass: marks the gradients that it gives to the leaves of its graph.

    Args:
        leaves: values of the leaf nodes.
        scaled: whether the graph multiplies by a loss scale.
    """
    before = [getattr(leaf, "grad", None) for leaf in leaves]
    yield
    for leaf, earlier in zip(leaves, before, strict=True):
        grad = getattr(leaf, "grad", None)
        if grad is None or grad is earlier:
            continue
        last = _mark(earlier)
        if scaled:
            grad._loss_scaling = _MIXED if last in (_UNSCALED, _MIXED) else _SCALED
        else:
            grad._loss_scaling = _MIXED if last in (_SCALED, _MIXED) else last or _PLAIN
    if recorder() is not None:
        host_step(partial(restore, snapshot(leaves)))


def snapshot(tensors: Iterable[Any]) -> list[Held]:
    """The gradients that tensors have now, with their marks."""
    grads = [(tensor, getattr(tensor, "grad", None)) for tensor in tensors]
    return [(tensor, grad, _mark(grad)) for tensor, grad in grads if grad is not None]


def restore(held: Iterable[Held]) -> None:
    """Gives tensors these gradients again: a replay has written them anew."""
    for tensor, grad, mark in held:
        tensor.grad = grad
        if mark is not None:
            grad._loss_scaling = mark


def _mark(grad: Any) -> str | None:
    return getattr(grad, "_loss_scaling", None)


def is_unscaled(grad: Tensor) -> bool:
    """Whether a gradient has been divided by its loss scale already."""
    return _mark(grad) == _UNSCALED


def is_penalty(tensor: Any) -> bool:
    """Whether a constant of a loss is a gradient, or one number computed from gradients."""
    if _mark(tensor) is not None:
        return True
    return getattr(tensor, "_made_from_gradient", False) and tensor.size == 1 and not bridge.is_trained(tensor)


def refuse_penalty(found: bool) -> None:
    """Raises NotImplementedError if a loss needs second derivatives."""
    if found:
        raise NotImplementedError(
            "netcl has no second derivatives: backward does not record what it computes (create_graph=True), so a "
            "gradient penalty, or another loss made from gradients, would not train the weights through them. Leave "
            "the penalty out, or take its gradient by finite differences of two backward passes. What is meant as a "
            "constant can be copied: Tensor.from_host(queue, gradient.to_host())."
        )


def note_result(made: TensorLike, parents: Iterable[TensorLike]) -> None:
    """Follows what is computed from gradients, to notice where a penalty enters a loss as a constant.

    Raises:
        NotImplementedError: here it does.
    """
    for parent in parents:
        value = parent.value
        if _mark(value) is None and not hasattr(value, "_made_from_gradient"):
            continue
        if not bridge.is_leaf(made):
            refuse_penalty(not isinstance(parent, Node) and is_penalty(value))  # nodes are looked at by backward
        elif isinstance(made.value, Tensor):
            made.value._made_from_gradient = True


def mark_unscaled(grad: Tensor) -> None:
    """A gradient has just been divided by its loss scale, or computed from such."""
    grad._loss_scaling = _UNSCALED


def require_one_scale(params: Iterable[Tensor]) -> None:
    """Raises RuntimeError where a gradient is the sum of a scaled and an unscaled one: no division is right for it."""
    for index, param in enumerate(params):
        if _mark(param.grad) == _MIXED:
            raise RuntimeError(
                f"the gradient of parameter {index}, of shape {tuple(param.shape)}, is the sum of one that is "
                "multiplied by the loss scale and one that is not (any more). Run every backward of a step with the "
                "scaled loss, and all of them before unscaling; clear old gradients with optimizer.zero_grad()."
            )


def require_unscaled(params: Iterable[Any], call: str, remedy: str) -> None:
    """Raises RuntimeError where a parameter's gradient is still multiplied by a loss scale.

    Args:
        call: what must not see such gradients, for the message.
        remedy: what to do first, for the message.
    """
    for index, param in enumerate(params):
        for tensor in (param, bridge.model_parameter(param)):
            if _mark(getattr(tensor, "grad", None)) in (_SCALED, _MIXED):
                raise RuntimeError(
                    f"{call} was called while gradients are still multiplied by the loss scale (parameter {index}, of "
                    f"shape {tuple(param.shape)}): {remedy}"
                )
