"""Losses made from gradients: netcl has no second derivatives, so what would not train says so.

What is computed from gradients is followed until it meets a loss as a constant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.params.gradient_marks import mark_of


def refuse(found: bool) -> None:
    """Raises NotImplementedError if a loss needs second derivatives."""
    if found:
        raise NotImplementedError(
            "netcl has no second derivatives: backward does not record what it computes (create_graph=True), so a "
            "gradient penalty, or another loss made from gradients, would not train the weights through them. Leave "
            "the penalty out, or take its gradient by finite differences of two backward passes. What is meant as a "
            "constant can be copied: Tensor.from_host(queue, gradient.to_host())."
        )


def refuse_in(computed: Iterable[Node], leaves: Iterable[Node]) -> None:
    """Raises NotImplementedError if a part of a loss is computed from gradients.

    Args:
        computed, leaves: the nodes of its graph with parents, and those without.
    """
    suspects = {id(leaf) for leaf in leaves if _is_of_gradients(leaf.value) and not leaf.requires_grad}
    for node in computed if suspects else ():
        for parent in node.parents:
            refuse(id(parent) in suspects and _is_penalty(parent.value, node.value))


def _is_of_gradients(tensor: Any) -> bool:
    """Returns whether a tensor is a gradient, or computed from such."""
    return hasattr(tensor, "_loss_scaling") or hasattr(tensor, "_made_from_gradient")


def note_result(made: TensorLike, parents: Iterable[TensorLike]) -> TensorLike:
    """Follows what is computed from gradients, to notice where a penalty enters a loss as a constant. Returns ``made``.

    Raises:
        NotImplementedError: here it does.
    """
    for parent in parents:  # of every op: as ``_is_of_gradients``, and short
        value = parent.value
        if not (hasattr(value, "_loss_scaling") or hasattr(value, "_made_from_gradient")):
            continue
        if not bridge.is_leaf(made):
            refuse(not isinstance(parent, Node) and _is_penalty(value, made.value))  # backward looks at nodes
        elif isinstance(made.value, Tensor):
            made.value._made_from_gradient = True
    return made


def _is_penalty(constant: Any, result: Any) -> bool:
    """Returns whether a constant is a gradient, or one number computed from gradients that meets another number.

    A step by hand (first-order MAML: ``fast = w - lr * w.grad``) makes weights from gradients, and a weight of one
    element is one number too; but it meets a batch.
    """
    if mark_of(constant) is not None:
        return True
    made = getattr(constant, "_made_from_gradient", False)
    return bool(made and constant.size == 1 and getattr(result, "size", 0) == 1 and not bridge.is_trained(constant))
