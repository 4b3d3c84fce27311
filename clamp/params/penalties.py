"""Losses made from gradients, which would not train, say so: netcl has no second derivatives.

What is computed from gradients is followed until it meets a loss as a constant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.params.gradient_marks import mark_of


def refuse_penalty(found: bool) -> None:
    """Raises NotImplementedError if a loss needs second derivatives."""
    if found:
        raise NotImplementedError(
            "netcl has no second derivatives: backward does not record what it computes (create_graph=True), so a "
            "gradient penalty, or another loss made from gradients, would not train the weights through them. Leave "
            "the penalty out, or take its gradient by finite differences of two backward passes. What is meant as a "
            "constant can be copied: Tensor.from_host(queue, gradient.to_host())."
        )


def is_made_from_gradient(value: Any) -> bool:
    """Returns whether a value is a gradient, or was computed from gradients."""
    return hasattr(value, "_loss_scaling") or hasattr(value, "_made_from_gradient")


def refuse_penalties_in(loss: Node, computed: Iterable[Node], leaves: Iterable[Node]) -> None:
    """Raises NotImplementedError if a part of a loss is computed from gradients; ``computed`` and ``leaves`` are the
    nodes of its graph with parents, and those without."""
    suspects = {id(x) for x in leaves if not x.requires_grad and is_made_from_gradient(x.value)}
    for node in computed if suspects else ():
        for parent in node.parents:
            refuse_penalty(id(parent) in suspects and _is_penalty(parent.value, node.value))
    seen, summands = set[int](), [loss]
    while summands:
        node = summands.pop()
        if id(node) not in seen:
            seen.add(id(node))
            refuse_penalty(id(node) in suspects and not bridge.is_trained(node.value))
            refuse_penalty(_name(node) in _SUMS and hasattr(node.value, "_beside_bare"))
            summands += _summands(node)


#: ops that add up, or only move, what they are given: its value has no part in any gradient
_SUMS = {"scale_loss", "add", "sub", "sum", "mean", "stack", "cat", "cast"}
_SUMS |= {"reshape", "flatten", "squeeze", "unsqueeze", "permute", "narrow", "getitem"}


def _summands(node: Node) -> list[Node]:
    """The nodes that a node is a weighted sum of; none where it is another function of them, as far as is known."""
    name, parents = _name(node), list[Node](node.parents)
    if name in _SUMS:
        return parents
    if len(parents) == 1:  # and a number, by which one element was divided, or it by that
        return parents if name == "mul" or (name == "div" and node.value.size == 1) else []
    trained = [parent for parent in parents if bridge.needs_grad(parent)]
    return trained if name == "mul" and len(trained) == 1 else []


def _name(node: Node) -> str:
    """The name of a node's op; netcl has names of their own for an op of a node and a number."""
    return (node.op_name or "").partition("_scalar_")[0]


def note_result(made: TensorLike, parents: Iterable[TensorLike]) -> TensorLike:
    """Follows what is computed from gradients, to notice where a penalty enters a loss as a constant. Returns ``made``.

    Raises:
        NotImplementedError: here it does.
    """
    for parent in parents:  # of every op: short
        value = parent.value
        if not (hasattr(value, "_loss_scaling") or hasattr(value, "_made_from_gradient")):
            continue
        if bridge.is_leaf(made):
            if isinstance(made.value, Tensor):
                made.value._made_from_gradient = True
        elif not isinstance(parent, Node):  # backward looks at nodes
            refuse_penalty(_is_penalty(value, made.value))
            made.value._beside_bare = True  # its graph does not have the bare tensor
    return made


def _is_penalty(constant: Any, result: Any) -> bool:
    """Returns whether a constant is a gradient, or one number computed from gradients that meets another number.

    A step by hand (first-order MAML: ``fast = w - lr * w.grad``) makes weights from gradients, and a weight of one
    element is one number too; but it meets a batch.
    """
    if mark_of(constant) is not None:
        return True
    made = getattr(constant, "_made_from_gradient", False)
    return bool(made and constant.size == 1 and result.size == 1 and not bridge.is_trained(constant))
