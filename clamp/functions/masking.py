"""masked_fill, under autograd and for bare tensors."""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Operand, as_node, bound, float_operands, owned_value
from clamp.casting.registry import implements
from clamp.ops import elementwise as ops


def _operands(casting: Casting, x: TensorLike, mask: TensorLike) -> tuple[Operand, Tensor]:
    (operand,) = float_operands(casting, x)
    where = owned_value(as_node(mask))
    bridge.require_same_queue("masked_fill", operand.value, where)
    return operand, where


@implements("netcl.autograd.masked_fill", "netcl.ops.lm_ops.masked_fill")
def masked_fill(casting: Casting, x: TensorLike, mask: TensorLike, fill: float = -1e9, tape: Tape | None = None) -> Any:
    """x with ``fill`` wherever the mask is not zero; no gradient flows there.

    The mask may have any dtype and any shape whose size divides x's: it repeats over the leading elements.

    Raises:
        ValueError: it does not divide x's.
    """
    operand, where = _operands(casting, x, mask)
    out = ops.masked_fill(operand.value, where, fill, out_dtype=casting.result_dtype(operand))

    def gradient(grad: Tensor) -> Tensor:
        return ops.masked_fill_backward(grad, where, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "masked_fill", tape)


@implements("netcl.ops.lm_ops.masked_fill_backward")
def tensor_masked_fill_backward(casting: Casting, grad_out: Tensor, mask: Tensor, pool: Any = None) -> Tensor:
    """The gradient where the mask is zero, 0 elsewhere."""
    operand, where = _operands(casting, grad_out, mask)
    return ops.masked_fill_backward(operand.value, where, out_dtype=casting.result_dtype(operand))
