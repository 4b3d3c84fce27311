"""softsign, x / (1 + |x|), and its gradient."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch, span_for

SOFTSIGN = Kernel("softsign.cl", "softsign", "X Y")
SOFTSIGN_BACKWARD = Kernel("softsign.cl", "softsign_backward", "G X DX")


def softsign(x: Tensor, *, out_dtype: str) -> Tensor:
    """x / (1 + |x|) of every element, computed in fp32.

    Args:
        x: float32, float16 or bfloat16.
        out_dtype: dtype of the result.
    """
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if y.size:
        span = span_for(x.queue, x.size)
        SOFTSIGN(x.queue, *launch(x.queue, -(-x.size // span)), x, y, x.size, span)
    return y


def softsign_backward(grad: Tensor, x: Tensor, *, out_dtype: str) -> Tensor:
    """The gradient of x from that of the result, which has x's shape."""
    dx = bridge.empty(x.queue, x.shape, out_dtype)
    if dx.size:
        span = span_for(x.queue, x.size)
        SOFTSIGN_BACKWARD(x.queue, *launch(x.queue, -(-x.size // span)), grad, x, dx, x.size, span)
    return dx
