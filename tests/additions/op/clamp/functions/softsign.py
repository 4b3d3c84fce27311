"""softsign under autograd."""

from __future__ import annotations

from typing import Any

from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, bound, float_operands
from clamp.casting.registry import implements
from clamp.ops import softsign as ops


@implements("netcl.autograd.softsign")
def softsign(casting: Casting, x: TensorLike, tape: Tape | None = None) -> Any:
    """x / (1 + |x|) of every element."""
    (operand,) = float_operands(casting, x)
    out = ops.softsign(operand.value, out_dtype=casting.result_dtype(operand))

    def gradient(grad: Tensor) -> Tensor:
        return ops.softsign_backward(grad, operand.value, out_dtype=operand.grad_dtype)

    return bound(out, {operand: gradient}, "softsign", tape)
