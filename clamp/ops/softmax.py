"""Softmax over one axis, and its backward."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, require_gradient
from clamp.ops.launch import plan_columns, plan_rows

SOFTMAX_KEPT_ROWS = Kernel("softmax.cl", "softmax_kept_rows", "X Y")
SOFTMAX_ROWS = Kernel("softmax.cl", "softmax_rows", "X Y")
SOFTMAX_COLUMNS = Kernel("softmax.cl", "softmax_columns", "X Y")
SOFTMAX_ROWS_BACKWARD = Kernel("softmax.cl", "softmax_rows_backward", "Y G DX")
SOFTMAX_COLUMNS_BACKWARD = Kernel("softmax.cl", "softmax_columns_backward", "Y G DX")

_KEPT = 4096  # elements of a row that a CPU's work-item keeps as floats in its private memory: half of a 32 KiB cache


def softmax(x: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis, computed in fp32 relative to the largest element."""
    outer, n, inner = around_axis(x.shape, axis, "softmax")
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    if inner == 1:
        plan = plan_rows(x.queue, outer, n)
        if plan.group == 1 and n <= _KEPT:
            SOFTMAX_KEPT_ROWS(x.queue, *plan.sizes, x, out, outer, n, plan.each, KEPT=_KEPT)
        else:
            SOFTMAX_ROWS(x.queue, *plan.sizes, x, out, outer, n, plan.each, **plan.macros)
    else:
        _by_columns(SOFTMAX_COLUMNS, (x, out), outer, n, inner)
    return out


def softmax_backward(y: Tensor, grad: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """Gradient of softmax from its result y: ``y * (grad - sum(grad * y))`` along the axis."""
    require_gradient("softmax", grad, y.shape)
    outer, n, inner = around_axis(y.shape, axis, "softmax")
    out = bridge.empty(y.queue, y.shape, out_dtype)
    if out.size == 0:
        return out
    if inner == 1:
        plan = plan_rows(y.queue, outer, n)
        SOFTMAX_ROWS_BACKWARD(y.queue, *plan.sizes, y, grad, out, outer, n, plan.each, **plan.macros)
    else:
        _by_columns(SOFTMAX_COLUMNS_BACKWARD, (y, grad, out), outer, n, inner)
    return out


def _by_columns(kernel: Kernel, tensors: tuple[Tensor, ...], outer: int, n: int, inner: int) -> None:
    queue = tensors[0].queue
    sizes, width, strips = plan_columns(queue, outer, n, inner)
    kernel(queue, *sizes, *tensors, n, inner, width, strips, outer, ONE_COLUMN=int(width == 1))
