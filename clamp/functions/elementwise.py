"""Parts of every element-by-element function with a gradient: operands, scalars, and its gradients.

A function is a name in ``clamp.ops.elementwise.OPS``; its gradients are told as data: which function of the
result's gradient ``g`` and of the forward's operands gives the gradient of each operand. A gradient is one
kernel; where the operand was broadcast, a sum to the operand's shape follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, NotOwned, Operand, bound, float_operands
from clamp.ops.elementwise import elementwise
from clamp.ops.reduce_to_shape import sum_to_shape

#: A function's name, then what it takes: positions among the forward's operands, or "g" for the gradient.
Gradient = tuple[str | int, ...]

#: The gradient passes as it is.
PASS: Gradient = ("copy", "g")

_NUMBERS = (int, float, np.floating, np.integer)


def is_scalar(x: object) -> bool:
    """Returns whether x is a Python or numpy number."""
    return isinstance(x, _NUMBERS)


def apply_unary(
    casting: Casting, x: TensorLike, tape: Tape | None, op: str, grad_op: str, *parameters: float,
    from_out: bool = False,
) -> Any:  # fmt: skip
    """Records ``y = op(x)``; backward is ``grad_op(g, x)``, or ``grad_op(g, y)`` with ``from_out``."""
    (operand,) = float_operands(casting, x)
    out = elementwise(op, casting.result_dtype(operand), operand.value, parameters=parameters)

    def gradient(grad: Tensor) -> Tensor:
        saved = out if from_out else operand.value
        return elementwise(grad_op, operand.grad_dtype, grad, saved, parameters=parameters)

    return bound(out, {operand: gradient}, op, tape)


def apply_broadcast(
    casting: Casting, xs: Sequence[TensorLike | float], tape: Tape | None, op: str, *gradients: Gradient
) -> Any:
    """Records ``op`` of tensors and numbers that broadcast; one gradient for each of ``xs``, numbers included."""
    tensors = [x for x in xs if not is_scalar(x)]
    if not tensors:
        raise NotOwned
    operands = float_operands(casting, *tensors)
    found = iter(operands)
    inputs = [x if is_scalar(x) else next(found) for x in xs]
    values = [x.value if isinstance(x, Operand) else x for x in inputs]
    out = elementwise(op, casting.result_dtype(*operands), *values)
    del values  # backward reads operands anew, so that an input's 16-bit copy does not live until then
    return bound(out, gradients_by(inputs, gradients, inputs), op, tape)


def gradients_by(xs: Sequence[Operand | float], rules: Sequence[Gradient], inputs: Sequence[Any]) -> Gradients:
    """For each operand among ``xs`` the function of its gradient that its rule tells, given what rules count in."""
    return {
        x: partial(_gradient_of, x, rule, inputs) for x, rule in zip(xs, rules, strict=True) if isinstance(x, Operand)
    }


def _gradient_of(operand: Operand, rule: Gradient, inputs: Sequence[Operand | float], grad: Tensor) -> Tensor:
    """The gradient of one operand, in its shape and dtype."""
    op, *names = rule
    if op == "copy":
        return sum_to_shape(grad, operand.shape, operand.grad_dtype)
    arguments = [grad if name == "g" else inputs[int(name)] for name in names]
    tensors = [x.value if isinstance(x, Operand) else x for x in arguments]
    if operand.shape == grad.shape:
        return elementwise(str(op), operand.grad_dtype, *tensors)
    # The terms of the sum are kept in float32: in half they could overflow, or lose the bits the sum would keep.
    return sum_to_shape(elementwise(str(op), "float32", *tensors), operand.shape, operand.grad_dtype)


def as_constant_node(value: Tensor) -> Node:
    """A node that no gradient flows through."""
    return Node(value=value, requires_grad=False)
