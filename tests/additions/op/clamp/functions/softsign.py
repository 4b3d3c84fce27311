"""softsign under autograd."""

from __future__ import annotations

from typing import Any

from clamp.bridge import Tape, TensorLike
from clamp.casting.operands import Casting, Gradients, bound, float_operands
from clamp.casting.registry import implements
from clamp.ops import softsign as ops


@implements("netcl.autograd.softsign")
def softsign(casting: Casting, x: TensorLike, tape: Tape | None = None) -> Any:
    """x / (1 + |x|) of every element."""
    (operand,) = float_operands(casting, x)
    out = ops.softsign(operand.value, out_dtype=casting.result_dtype(operand))
    gradients: Gradients = {operand: lambda grad, dtype: ops.softsign_backward(grad, operand.value, out_dtype=dtype)}
    return bound(out, gradients, "softsign", tape)
