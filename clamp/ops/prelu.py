"""PReLU: x where positive, a learned slope times x elsewhere; and its gradients."""

from __future__ import annotations

from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.arguments import require_gradient
from clamp.ops.elementwise import elementwise
from clamp.ops.launch import parts_of, plan_rows
from clamp.ops.reduce import reduce_sum

PRELU = Kernel("prelu.cl", "prelu", "X SLOPE Y")
PRELU_BACKWARD = Kernel("prelu.cl", "prelu_backward", "G X SLOPE DX")


def prelu(x: Tensor, slope: Tensor, *, out_dtype: str) -> Tensor:
    """x (N, C, ...) where positive, slope * x elsewhere: one slope for each channel, or one for all, in any shape."""
    beside = _beside(slope, x)
    n = _row(x, slope)
    if n == 1 or x.size == 0:
        return elementwise("prelu", out_dtype, x, beside)
    rows = x.size // n
    parts, span = parts_of(x.queue, rows, n)
    out = bridge.empty(x.queue, x.shape, out_dtype)
    plan = plan_rows(x.queue, rows * parts, min(n, span))
    PRELU(
        x.queue, *plan.sizes, x, slope, out, slope.size, n, span, parts, plan.each, rows * parts, **plan.macros
    )  # fmt: skip
    return out


def prelu_backward(
    grad: Tensor, x: Tensor, slope: Tensor, *, dx_dtype: str | None, slope_dtype: str | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the slope, in their shapes; the slope's is summed in fp32 in a fixed order."""
    beside = _beside(slope, x)
    require_gradient("prelu", grad, x.shape)
    if slope_dtype is None:
        return (None if dx_dtype is None else elementwise("prelu_grad", dx_dtype, grad, x, beside)), None
    channels = slope.size
    if x.size == 0:
        dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
        return dx, bridge.zeros(slope.queue, slope.shape, slope_dtype)
    n = _row(x, slope)
    if n == 1:
        dx = None if dx_dtype is None else elementwise("prelu_grad", dx_dtype, grad, x, beside)
        sums = elementwise("prelu_grad_slope", "float32", grad, x)
    else:
        dx, sums = _one_pass(grad, x, slope, n, dx_dtype)
    sums = bridge.view(sums, (sums.size // channels, channels))
    return dx, bridge.view(reduce_sum(sums, 0, out_dtype=slope_dtype), slope.shape)


def _one_pass(grad: Tensor, x: Tensor, slope: Tensor, n: int, dx_dtype: str | None) -> tuple[Tensor | None, Tensor]:
    """The gradient of x, and sums for the slope's: (images * parts, channels)."""
    rows, channels = x.size // n, slope.size
    parts, span = parts_of(x.queue, rows, n)
    sums = bridge.empty(x.queue, (rows * parts,), "float32")
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    plan = plan_rows(x.queue, rows * parts, min(n, span))
    PRELU_BACKWARD(
        x.queue, *plan.sizes, grad, x, slope, dx or sums, sums, channels, n, span, parts, plan.each, rows * parts,
        WITH_DX=int(dx is not None), **plan.macros,
    )  # fmt: skip
    return dx, sums


def _row(x: Tensor, slope: Tensor) -> int:
    """Returns the number of neighbouring elements that have one slope."""
    return x.size if slope.size == 1 else prod(x.shape[2:])


def _beside(slope: Tensor, x: Tensor) -> Tensor:
    """The slopes in the shape in which they broadcast against x."""
    channels = x.shape[1] if len(x.shape) > 1 else 1
    if slope.size not in (1, channels):
        raise ValueError(
            f"prelu: a slope of shape {slope.shape} for x of shape {x.shape}; pass {channels} slopes (alpha shape must "
            "match channels), or one"
        )
    return bridge.view(slope, (1,) * min(len(x.shape), 1) if slope.size == 1 else (channels, *(1 for _ in x.shape[2:])))
