"""netcl's arithmetic on bare tensors, which has no counterpart in ``netcl.autograd`` or is called by an op's name."""

from __future__ import annotations

from typing import Any

from clamp.bridge import Tensor
from clamp.casting.operands import Casting, NotOwned, float_operands
from clamp.casting.registry import implements, leave_to_netcl_if
from clamp.functions import arithmetic
from clamp.ops.elementwise import elementwise
from clamp.ops.reduce_to_shape import sum_to_shape


@implements("netcl.ops.elementwise_optimized.fused_bias_relu", uses=(elementwise, sum_to_shape))
def fused_bias_relu(casting: Casting, x: Tensor, bias: Tensor, out: Tensor | None = None, pool: Any = None) -> Any:
    """relu(x + bias), a bias of shape (N,) on every row of x, of shape (M, N)."""
    leave_to_netcl_if(out)
    arithmetic.require_bias_shapes(tuple(x.shape), tuple(bias.shape))
    return arithmetic.add_relu(casting, x, bias)


#: netcl's name -> the function, and whether the number is its first operand
_SCALAR_OPS = {
    "ADD": ("add", False),
    "SUB": ("sub", False),
    "RSUB": ("sub", True),
    "MUL": ("mul", False),
    "DIV": ("div", False),
    "RDIV": ("div", True),
}


@implements("netcl.ops.elementwise.elementwise_scalar", uses=(elementwise,))
def elementwise_scalar(
    casting: Casting, x: Tensor, scalar: float, op: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """x with a number added, subtracted (RSUB: x subtracted from it), multiplied or divided by (RDIV: it by x)."""
    leave_to_netcl_if(out)
    if op not in _SCALAR_OPS:
        raise NotOwned  # netcl's error names the ops there are
    (operand,) = float_operands(casting, x)
    function, number_first = _SCALAR_OPS[op]
    operands = (float(scalar), operand.value) if number_first else (operand.value, float(scalar))
    return elementwise(function, casting.result_dtype(operand), *operands)


#: netcl's name -> the function
_BINARY_OPS = {
    "ADD": "add",
    "SUB": "sub",
    "MUL": "mul",
    "DIV": "div",
    "MAX": "maximum",
    "MIN": "minimum",
    "LT": "lt",
    "LE": "le",
    "GT": "gt",
    "GE": "ge",
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
