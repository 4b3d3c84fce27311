"""softsign, x / (1 + |x|), and its gradient."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch, span_for

SOFTSIGN = Kernel("softsign.cl", "softsign")
SOFTSIGN_BACKWARD = Kernel("softsign.cl", "softsign_backward")


def softsign(x: Tensor, *, out_dtype: str) -> Tensor:
    """x / (1 + |x|) of every element, computed in fp32.

    Args:
        x: float32, float16 or bfloat16.
        out_dtype: dtype of the result.
    """
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if y.size:
        span = span_for(x.queue, x.size)
        SOFTSIGN(
            x.queue, *launch(x.queue, -(-x.size // span)), x, y, x.size, span,
            SOFTSIGN=1, X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[out_dtype],
        )  # fmt: skip
    return y


def softsign_backward(grad: Tensor, x: Tensor, *, out_dtype: str) -> Tensor:
    """The gradient of x from that of the result, which has x's shape."""
    dx = bridge.empty(x.queue, x.shape, out_dtype)
    if dx.size:
        span = span_for(x.queue, x.size)
        SOFTSIGN_BACKWARD(
            x.queue, *launch(x.queue, -(-x.size // span)), grad, x, dx, x.size, span,
            SOFTSIGN_BACKWARD=1, G_T=bridge.STORAGE[grad.dtype], X_T=bridge.STORAGE[x.dtype],
            DX_T=bridge.STORAGE[out_dtype],
        )  # fmt: skip
    return dx
