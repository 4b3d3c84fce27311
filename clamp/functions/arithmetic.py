"""Arithmetic, comparison and choice: functions of several operands that broadcast as in numpy.

Signatures are netcl's with the casting in front; an operand may be a node, a tensor or a number. Values and ties
are netcl's (the first operand of ``maximum`` wins), NaNs are numpy's.

A function is a name in ``clamp.ops.elementwise.OPS``; its gradients are told as data: which function of the
result's gradient ``g`` and of the forward's operands gives the gradient of each operand. A gradient is one
kernel; where the operand was broadcast, a sum to the operand's shape follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, NotOwned, Operand, bound, float_operands
from clamp.casting.registry import implements, leave_to_netcl_if
from clamp.functions.indexing import whole_value
from clamp.functions.recompute import computed
from clamp.ops.arguments import number
from clamp.ops.elementwise import elementwise, masked_fill_backward
from clamp.ops.elementwise import masked_fill as fill_masked
from clamp.ops.reduce_to_shape import sum_to_shape

Argument = TensorLike | float

#: A function's name, then what it takes: positions among the forward's operands, or "g" for the gradient.
Gradient = tuple[str | int, ...]

#: The gradient passes as it is.
PASS: Gradient = ("copy", "g")

_NUMBERS = (int, float, np.floating, np.integer, np.bool_)


def is_scalar(x: object) -> bool:
    """Returns whether x is a Python or numpy number, or an array of numpy's without dimensions."""
    return isinstance(x, _NUMBERS) or (isinstance(x, np.ndarray) and x.ndim == 0)


def apply_unary(
    casting: Casting, x: TensorLike, tape: Tape | None, op: str, grad_op: str, *parameters: float,
    from_out: bool = False,
) -> Any:  # fmt: skip
    """Records ``y = op(x)``; backward is ``grad_op(g, x)``, or ``grad_op(g, y)`` with ``from_out``."""
    (operand,) = float_operands(casting, x)
    dtype, value = casting.result_dtype(operand), operand.value
    out = computed(partial(elementwise, op, dtype, value, parameters=parameters), value, operand.shape, dtype)
    del value  # as below
    read = Operand(out, out) if from_out else operand  # nothing else of the two is held

    def gradient(grad: Tensor, dtype: str) -> Tensor:
        return elementwise(grad_op, dtype, grad, read.value, parameters=parameters)

    unread, besides = ((operand,), (read,)) if from_out else ((), ())
    return bound(out, {operand: gradient}, op, tape, unread=unread, besides=besides)


def apply_broadcast(
    casting: Casting, xs: Sequence[TensorLike | float], tape: Tape | None, op: str, *gradients: Gradient
) -> Any:
    """Records ``op`` of tensors and numbers that broadcast; one gradient for each of ``xs``, numbers included."""
    operands, inputs = _with_numbers(casting, *xs)
    dtype, shapes = casting.result_dtype(*operands), {operand.shape for operand in operands}
    make = partial(elementwise, op, dtype, *_values(inputs))
    out = computed(make, operands[0].value, shapes.pop(), dtype) if len(shapes) == 1 else make()
    del make  # backward reads operands anew, so that an input's 16-bit copy does not live until then
    read = {name for x, rule in zip(inputs, gradients, strict=True) if isinstance(x, Operand) for name in rule}
    unread = [x for index, x in enumerate(inputs) if isinstance(x, Operand) and index not in read]
    return bound(out, gradients_by(inputs, gradients, inputs), op, tape, unread=unread)


def _with_numbers(casting: Casting, *xs: Any) -> tuple[tuple[Operand, ...], list[Operand | float]]:
    """The tensors among these as operands, and all of them in their order; NotOwned if all are numbers."""
    tensors = [x for x in xs if not is_scalar(x)]
    if not tensors:
        raise NotOwned
    operands = float_operands(casting, *tensors)
    found = iter(operands)
    return operands, [_number(x) if is_scalar(x) else next(found) for x in xs]


def _number(x: Any) -> float:
    return x.item() if isinstance(x, np.ndarray) else x


def _values(inputs: Sequence[Any]) -> list[Any]:
    return [x.value if isinstance(x, Operand) else x for x in inputs]


def gradients_by(xs: Sequence[Operand | float], rules: Sequence[Gradient], inputs: Sequence[Any]) -> Gradients:
    """For each operand among ``xs`` the function of its gradient that its rule tells, given what rules count in."""
    return {
        x: partial(_gradient_of, x, rule, inputs) for x, rule in zip(xs, rules, strict=True) if isinstance(x, Operand)
    }


def _gradient_of(
    operand: Operand, rule: Gradient, inputs: Sequence[Operand | float], grad: Tensor, dtype: str
) -> Tensor:
    """The gradient of one operand, in its shape."""
    op, *names = rule
    if op == "copy":
        return sum_to_shape(grad, operand.shape, dtype)
    arguments = [grad if name == "g" else inputs[int(name)] for name in names]
    tensors = _values(arguments)
    if operand.shape == grad.shape:
        return elementwise(str(op), dtype, *tensors)
    # The terms of the sum are kept in float32: in half they could overflow, or lose the bits the sum would keep.
    return sum_to_shape(elementwise(str(op), "float32", *tensors), operand.shape, dtype)


#: netcl's name -> the gradients of its two operands. At a tie that of maximum and minimum is the first one's, or the
#: tensor's where the other is a number.
_OF_TWO: dict[str, tuple[Gradient, Gradient]] = {
    "add": (PASS, PASS),
    "sub": (PASS, ("neg", "g")),
    "mul": (("mul", "g", 1), ("mul", "g", 0)),
    "div": (("div", "g", 1), ("div_grad", "g", 0, 1)),
    "maximum": (("maximum_grad_a", "g", 0, 1), ("maximum_grad_b", "g", 0, 1)),
    "minimum": (("minimum_grad_a", "g", 0, 1), ("minimum_grad_b", "g", 0, 1)),
}


def _of_two(op: str, rules: tuple[Gradient, Gradient]) -> None:
    tensor_first = op in ("maximum", "minimum")

    @implements(f"netcl.autograd.{op}", uses=(elementwise, sum_to_shape))
    def function(casting: Casting, a: Argument, b: Argument, tape: Tape | None = None) -> Any:
        if tensor_first and is_scalar(a):
            a, b = b, a
        return apply_broadcast(casting, (a, b), tape, op, *rules)


for _op, _rules in _OF_TWO.items():
    _of_two(_op, _rules)


@implements("netcl.autograd.add_relu", uses=(elementwise, sum_to_shape))
def add_relu(casting: Casting, a: TensorLike, b: TensorLike, tape: Tape | None = None) -> Any:
    """relu(a + b), without the sum in between."""
    operands = float_operands(casting, a, b)
    out = elementwise("add_relu", casting.result_dtype(*operands), operands[0].value, operands[1].value)
    result = Operand(out, out)

    def through(grad: Tensor) -> Tensor:
        # All operands get this one tensor, summed or rounded only where they differ from the result.
        wanted = [operand for operand in operands if operand.needs_grad]
        dtypes = {operand.grad_dtype for operand in wanted}
        whole = all(operand.shape == out.shape for operand in wanted)
        return elementwise("relu_grad", dtypes.pop() if whole and len(dtypes) == 1 else "float32", grad, result.value)

    gradients = gradients_by(operands, (PASS, PASS), ())
    return bound(out, gradients, "add_relu", tape, first=through, unread=operands, besides=(result,))


def through_relu(result: Operand, grad: Tensor) -> Tensor:
    """The gradient of what relu was applied to in the store of its result, in the result's dtype."""
    return elementwise("relu_grad", result.dtype, grad, result.value)


@implements("netcl.autograd.bias_add", "netcl.ops.elementwise.bias_add", uses=(elementwise, sum_to_shape))
def bias_add(casting: Casting, x: TensorLike, bias: TensorLike, tape: Tape | None = None) -> Any:
    """x + bias, a bias of shape (N,) on every row of x, of shape (M, N)."""
    require_bias_shapes(tuple(x.value.shape), tuple(bias.value.shape))
    return apply_broadcast(casting, (x, bias), tape, "add", PASS, PASS)


def require_bias_shapes(x: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """Raises ValueError unless a bias of this shape fits on the rows of x."""
    if len(x) != 2 or len(bias) != 1:
        raise ValueError(f"bias_add expects x of shape (M, N) and a bias of shape (N,), got {x} and {bias}")
    if x[1] != bias[0]:
        raise ValueError(f"bias_add: bias dimension mismatch: rows of {x[1]} elements, a bias of {bias[0]}")


# -------------------------------------------------------------------------------------- comparison, choice


def _comparison(op: str) -> None:
    """1 where it holds, else 0, in the operands' dtype; never differentiable."""

    @implements(f"netcl.autograd.{op}", uses=(elementwise,))
    def compare(casting: Casting, a: Argument, b: Argument) -> Node:
        operands, inputs = _with_numbers(casting, a, b)
        # netcl returns a node here even for bare tensors and without grad mode.
        out = elementwise(op, casting.result_dtype(*operands), *_values(inputs))
        return bridge.Comparison(value=out, requires_grad=False)


for _op in ("lt", "le", "gt", "ge"):
    _comparison(_op)


@implements("netcl.autograd.where", uses=(elementwise, sum_to_shape))
def where(casting: Casting, condition: TensorLike, a: Argument, b: Argument, tape: Tape | None = None) -> Any:
    """a where the condition is not zero, b elsewhere; nothing of the branch not taken gets into the result.

    Args:
        condition: tensor of any dtype that clamp reads, int32 and int64 included. It is never cast: a number that half
            would round to zero is not zero.

    Raises:
        ValueError: a and b are both numbers, or the shapes do not broadcast.
    """
    if is_scalar(a) and is_scalar(b):
        raise ValueError("where needs at least one Tensor/Node branch")
    choice = Operand(condition, whole_value(condition))
    operands, inputs = _with_numbers(casting, a, b)
    bridge.require_same_queue("where", choice.value, *(x.parent.value for x in operands))
    out = elementwise("where", casting.result_dtype(*operands), choice.value, *_values(inputs))
    rules = (("where_grad_a", "g", 0), ("where_grad_b", "g", 0))
    gradients = gradients_by(inputs, rules, (choice,))
    return bound(out, {choice: None, **gradients}, "where", tape, unread=operands)


def _masked_operands(casting: Casting, x: TensorLike, mask: TensorLike) -> tuple[Operand, Operand]:
    (operand,) = float_operands(casting, x)
    where = whole_value(mask)
    bridge.require_same_queue("masked_fill", operand.value, where)
    return operand, Operand(where, where)


@implements("netcl.autograd.masked_fill", "netcl.ops.lm_ops.masked_fill", uses=(elementwise,))
def masked_fill(casting: Casting, x: TensorLike, mask: TensorLike, fill: float = -1e9, tape: Tape | None = None) -> Any:
    """x with ``fill`` wherever the mask is not zero; no gradient flows there.

    The mask may have any dtype and any shape whose size divides x's: it repeats over the leading elements.

    Raises:
        ValueError: it does not divide x's, or its shape promises to broadcast otherwise.
    """
    operand, where = _masked_operands(casting, x, mask)
    fill = number("masked_fill", "fill", fill)
    out = fill_masked(operand.value, where.value, fill, out_dtype=casting.result_dtype(operand))
    gradients: Gradients = {operand: lambda grad, dtype: masked_fill_backward(grad, where.value, out_dtype=dtype)}
    return bound(out, gradients, "masked_fill", tape, unread=(operand,), besides=(where,))


@implements("netcl.ops.lm_ops.masked_fill_backward", uses=(elementwise,))
def tensor_masked_fill_backward(casting: Casting, grad_out: Tensor, mask: Tensor) -> Tensor:
    """The gradient where the mask is zero, 0 elsewhere."""
    operand, where = _masked_operands(casting, grad_out, mask)
    return masked_fill_backward(operand.value, where.value, out_dtype=casting.result_dtype(operand))


@implements("netcl.ops.elementwise_optimized.fused_bias_relu", uses=(elementwise, sum_to_shape))
def fused_bias_relu(casting: Casting, x: Tensor, bias: Tensor) -> Any:
    """relu(x + bias), a bias of shape (N,) on every row of x, of shape (M, N)."""
    require_bias_shapes(tuple(x.shape), tuple(bias.shape))
    return add_relu(casting, x, bias)


#: netcl's names of functions of a tensor and a number; of those with an R the number is the first operand
_SCALAR_OPS = ("ADD", "SUB", "RSUB", "MUL", "DIV", "RDIV")


@implements("netcl.ops.elementwise.elementwise_scalar", uses=(elementwise,))
def elementwise_scalar(
    casting: Casting, x: Tensor, scalar: float, op: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """x with a number added, subtracted (RSUB: x subtracted from it), multiplied or divided by (RDIV: it by x)."""
    leave_to_netcl_if(out)
    if op not in _SCALAR_OPS:
        raise NotOwned  # netcl's error names the ops there are
    (operand,) = float_operands(casting, x)
    scalar = number("elementwise_scalar", "scalar", scalar)
    operands = (scalar, operand.value) if op.startswith("R") else (operand.value, scalar)
    return elementwise(op.removeprefix("R").lower(), casting.result_dtype(operand), *operands)


#: netcl's name -> the function
_BINARY_OPS = {"MAX": "maximum", "MIN": "minimum"} | {
    name.upper(): name for name in ("add", "sub", "mul", "div", "lt", "le", "gt", "ge")
}


@implements("netcl.ops.broadcast.broadcast_binary", uses=(elementwise,))
def broadcast_binary(
    casting: Casting, a: Tensor, b: Tensor, op: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """A function of two tensors that broadcast, by netcl's name for it."""
    leave_to_netcl_if(out)
    if op not in _BINARY_OPS:
        raise NotOwned
    operands = float_operands(casting, a, b)
    return elementwise(_BINARY_OPS[op], casting.result_dtype(*operands), *(x.value for x in operands))


@implements("netcl.ops.elementwise.elementwise_binary", uses=(elementwise,))
def elementwise_binary(
    casting: Casting, a: Tensor, b: Tensor, expression: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """A function of two tensors of one shape, as the operators of tensors write it: ``"ADD(v0, v1)"``."""
    op = expression.removesuffix("(v0, v1)")
    if tuple(a.shape) != tuple(b.shape):
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"elementwise_binary: the shapes {shapes} differ; broadcast_binary takes such tensors")
    return broadcast_binary(casting, a, b, op, out)
