"""netcl's functions on bare tensors, which its layers call under ``no_grad`` and for tensor inputs.

Each hands over to the function of the same name in ``netcl.autograd``: bare tensors in, bare tensor out. What
writes into a tensor of the caller's (``out=``) or hands out a mask stays netcl's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clamp.bridge import Tensor
from clamp.casting.operands import Casting, NotOwned, float_operands, implements, leave_to_netcl_if
from clamp.functions import activations, arithmetic
from clamp.ops.elementwise import elementwise

# -------------------------------------------------------------------------------------------- activations


def _adapter(name: str) -> None:
    function: Callable[..., Any] = activations.PLAIN[name]

    def adapted(casting: Casting, x: Tensor, out: Tensor | None = None, pool: Any = None) -> Any:
        leave_to_netcl_if(out)
        return function(casting, x)

    adapted.__name__ = adapted.__qualname__ = name
    implements(f"netcl.ops.elementwise.{name}")(adapted)


for _name in ("relu", "sigmoid", "tanh", "swish", "softplus", "hard_sigmoid", "hard_swish"):
    _adapter(_name)


@implements("netcl.ops.elementwise.leaky_relu")
def leaky_relu(
    casting: Casting, x: Tensor, negative_slope: float = 0.01, out: Tensor | None = None, pool: Any = None
) -> Any:
    """See ``activations.leaky_relu``."""
    leave_to_netcl_if(out)
    return activations.leaky_relu(casting, x, negative_slope)


@implements("netcl.ops.elementwise.gelu")
def gelu(casting: Casting, x: Tensor, approximate: bool = True, out: Tensor | None = None) -> Any:
    """See ``activations.gelu``."""
    leave_to_netcl_if(out)
    return activations.gelu(casting, x, approximate)


@implements("netcl.ops.elementwise.elu")
def elu(casting: Casting, x: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Any:
    """See ``activations.elu``."""
    leave_to_netcl_if(out)
    return activations.elu(casting, x, alpha)


@implements("netcl.ops.elementwise.clamp")
def clamp(casting: Casting, x: Tensor, min_val: float, max_val: float, out: Tensor | None = None) -> Any:
    """See ``activations.clamp``."""
    leave_to_netcl_if(out)
    return activations.clamp(casting, x, min_val, max_val)


@implements("netcl.ops.elementwise.hard_tanh")
def hard_tanh(
    casting: Casting, x: Tensor, min_val: float = -1.0, max_val: float = 1.0, out: Tensor | None = None
) -> Any:
    """See ``activations.hard_tanh``."""
    leave_to_netcl_if(out)
    return activations.hard_tanh(casting, x, min_val, max_val)


@implements("netcl.ops.elementwise.dropout")
def dropout(
    casting: Casting,
    x: Tensor,
    p: float = 0.5,
    seed: int | None = None,
    out: Tensor | None = None,
    pool: Any = None,
    return_mask: bool = False,
    mask: Tensor | None = None,
) -> Any:
    """See ``activations.dropout``."""
    leave_to_netcl_if(out, return_mask, mask)
    return activations.dropout(casting, x, p, seed)


# --------------------------------------------------------------------------------------------- arithmetic


@implements("netcl.ops.elementwise.bias_add")
def bias_add(casting: Casting, x: Tensor, bias: Tensor, out: Tensor | None = None, pool: Any = None) -> Any:
    """See ``arithmetic.bias_add``."""
    leave_to_netcl_if(out)
    return arithmetic.bias_add(casting, x, bias)


@implements("netcl.ops.elementwise_optimized.fused_bias_relu")
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


@implements("netcl.ops.elementwise.elementwise_scalar")
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


@implements("netcl.ops.broadcast.broadcast_binary")
def broadcast_binary(
    casting: Casting, a: Tensor, b: Tensor, op: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """A function of two tensors that broadcast, by netcl's name for it."""
    leave_to_netcl_if(out)
    if op not in _BINARY_OPS:
        raise NotOwned
    operands = float_operands(casting, a, b)
    return elementwise(_BINARY_OPS[op], casting.result_dtype(*operands), *(x.value for x in operands))


@implements("netcl.ops.elementwise.elementwise_binary")
def elementwise_binary(
    casting: Casting, a: Tensor, b: Tensor, expression: str, out: Tensor | None = None, pool: Any = None
) -> Tensor:
    """A function of two tensors of one shape, as the operators of tensors write it: ``"ADD(v0, v1)"``."""
    op = expression.removesuffix("(v0, v1)")
    if tuple(a.shape) != tuple(b.shape):
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"elementwise_binary: the shapes {shapes} differ; broadcast_binary takes such tensors")
    return broadcast_binary(casting, a, b, op, out)
