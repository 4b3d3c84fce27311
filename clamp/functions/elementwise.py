"""What every element-by-element function with a gradient is made of: operands, scalars, and its gradients.

A function is a name in ``clamp.ops.elementwise.OPS``; its gradients are told as data: which function of the
result's gradient ``g`` and of the forward's operands gives the gradient of each operand. A gradient is one
kernel; where the operand was broadcast, a sum to the operand's shape follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, NotOwned, Operand, record
from clamp.ops.elementwise import elementwise
from clamp.ops.reduce_to_shape import sum_to_shape

#: A function's name, then what it takes: positions among the forward's operands, or "g" for the gradient.
Gradient = tuple[str | int, ...]

#: The gradient passes as it is.
PASS: Gradient = ("copy", "g")

_NUMBERS = (int, float, np.floating, np.integer)


def is_scalar(x: object) -> bool:
    """Whether x is a Python or numpy number."""
    return isinstance(x, _NUMBERS)


def float_operands(casting: Casting, *xs: TensorLike) -> tuple[Operand, ...]:
    """The arguments as operands.

    Raises:
        NotOwned: one of them is not float32, float16 or bfloat16 on an OpenCL device.
    """
    operands = casting.operands(*xs)
    for operand in operands:
        if operand.parent.value.dtype not in bridge.STORAGE:
            raise NotOwned
    return operands


def apply_unary(
    casting: Casting,
    x: TensorLike,
    tape: Tape | None,
    op: str,
    grad_op: str,
    *parameters: float,
    from_out: bool = False,
) -> Any:
    """Records ``y = op(x)``; backward is ``grad_op(g, x)``, or ``grad_op(g, y)`` with ``from_out``."""
    (operand,) = float_operands(casting, x)
    out = elementwise(op, casting.result_dtype(operand), operand.value, parameters=parameters)

    def backward(grad: Tensor) -> list[Tensor | None]:
        if not operand.needs_grad:
            return [None]
        saved = out if from_out else operand.value
        return [elementwise(grad_op, operand.grad_dtype, grad, saved, parameters=parameters)]

    return record(out, backward, (operand,), op, tape)


def apply_broadcast(
    casting: Casting,
    xs: Sequence[TensorLike | float],
    tape: Tape | None,
    op: str,
    *gradients: Gradient,
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

    def backward(grad: Tensor) -> list[Tensor | None]:
        return [
            gradient_of(x, rule, grad, inputs) if x.needs_grad else None
            for x, rule in zip(inputs, gradients, strict=True)
            if isinstance(x, Operand)
        ]

    return record(out, backward, operands, op, tape)


def gradient_of(operand: Operand, rule: Gradient, grad: Tensor, inputs: Sequence[Operand | float]) -> Tensor:
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
