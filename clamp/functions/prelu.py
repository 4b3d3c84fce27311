"""PReLU under autograd, and netcl's tensor-level versions of it. The slope is read, and gets its gradient, in its
own dtype under every policy."""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Operand, as_is, bound, float_operands, floats_as_is
from clamp.casting.registry import implements
from clamp.ops import prelu as ops


def _operands(casting: Casting, x: Any, alpha: Any) -> tuple[Operand, Operand]:
    (operand,) = float_operands(casting, x)
    (slope,) = floats_as_is(alpha)
    bridge.require_same_queue("prelu", operand.parent.value, slope.value)
    return operand, slope


@implements("netcl.autograd.prelu", "netcl.ops.elementwise.prelu")
def prelu(casting: Casting, x: Any, alpha: Any, tape: Tape | None = None) -> Any:
    """x where positive, alpha * x elsewhere.

    Args:
        x: (N, C, ...), float32, float16 or bfloat16.
        alpha: the slope of each channel, C elements, or one for all; float32, float16 or bfloat16.

    Raises:
        ValueError: the number of slopes is another.
    """
    operand, slope = operands = _operands(casting, x, alpha)
    out = ops.prelu(operand.value, slope.value, out_dtype=casting.result_dtype(operand))

    def backward(grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return ops.prelu_backward(
            grad, operand.value, slope.value, dx_dtype=operand.wanted_dtype, slope_dtype=slope.wanted_dtype
        )

    return bound(out, {operands: backward}, "prelu", tape)


@implements("netcl.ops.elementwise.prelu_backward")
def tensor_prelu_backward(casting: Casting, x: Any, alpha: Any, grad_out: Any) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and alpha from that of ``prelu``'s result.

    Raises:
        ValueError: the shapes do not belong together.
    """
    operand, slope = _operands(casting, x, alpha)
    grad = as_is(grad_out)
    return ops.prelu_backward(
        grad.value,
        operand.value,
        slope.value,
        dx_dtype=casting.result_dtype(operand),
        slope_dtype=bridge.canonical_dtype(slope.value.dtype),
    )
