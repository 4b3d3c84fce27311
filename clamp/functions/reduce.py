"""Sums, means and softmax under autograd, and netcl's tensor-level versions of them."""

from __future__ import annotations

from typing import Any

from clamp.bridge import Tape
from clamp.casting.operands import Casting, Gradients, Operand, bound, float_operands
from clamp.casting.registry import Function, implements
from clamp.ops import reduce as ops
from clamp.ops import softmax as softmax_ops
from clamp.ops.arguments import around_axis, axis_of, yes_or_no


def _reduction(name: str) -> Function:
    """Sum or mean over one axis, or over everything into shape (1,); accumulated in fp32, rounded once, so that the sum
    of a mean cannot overflow in half. As in netcl, ``keepdims`` has no effect on one over everything."""

    @implements(f"netcl.autograd.{name}", uses=(ops,))
    def function(
        casting: Casting, x: Any, axis: int | None = None, keepdims: bool = False, tape: Tape | None = None
    ) -> Any:
        (operand,) = float_operands(casting, x)
        shape, keepdims = operand.shape, yes_or_no(name, "keepdims", keepdims) and axis is not None
        axis = None if axis is None else axis_of(name, axis, len(shape))
        divisor = float(around_axis(shape, axis)[1]) if name == "mean" else 1.0
        out = ops.reduce_sum(operand.value, axis, keepdims, out_dtype=casting.result_dtype(operand), divisor=divisor)
        gradients: Gradients = {
            operand: lambda grad, dtype: ops.expand(grad, shape, axis, out_dtype=dtype, divisor=divisor)
        }
        return bound(out, gradients, name, tape, unread=(operand,))

    return function


sum, mean = _reduction("sum"), _reduction("mean")


@implements("netcl.autograd.softmax", "netcl.ops.softmax.softmax", uses=(softmax_ops,))
def softmax(casting: Casting, x: Any, axis: int = -1, dim: int | None = None, tape: Tape | None = None) -> Any:
    """``exp(x) / sum(exp(x))`` along an axis. Backward keeps the result, not the input.

    Args:
        axis, dim: the axis; ``dim`` wins.
    """
    (operand,) = float_operands(casting, x)
    axis = axis_of("softmax", axis if dim is None else dim, len(operand.shape))
    out = softmax_ops.softmax(operand.value, axis, out_dtype=casting.result_dtype(operand))
    result = Operand(out, out)
    gradients: Gradients = {
        operand: lambda grad, dtype: softmax_ops.softmax_backward(result.value, grad, axis, out_dtype=dtype)
    }
    return bound(out, gradients, "softmax", tape, unread=(operand,), besides=(result,))


# ------------------------------------------------------------------------------------------ tensor level


@implements("netcl.ops.reduction.reduce_sum", uses=(ops,))
def tensor_reduce_sum(casting: Casting, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """``sum`` of a bare tensor; here ``keepdims`` holds for a sum over everything as well."""
    (operand,) = float_operands(casting, x)
    axis = None if axis is None else axis_of("reduce_sum", axis, len(operand.shape))
    return ops.reduce_sum(operand.value, axis, keepdims, out_dtype=casting.result_dtype(operand))
