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
    out = bridge.empty(x.queue, x.shape, out_dtype)
    _run(SOFTMAX_ROWS, SOFTMAX_COLUMNS, (x, out), axis)
    return out


def softmax_backward(y: Tensor, grad: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """Gradient of softmax from its result y: ``y * (grad - sum(grad * y))`` along the axis."""
    require_gradient("softmax", grad, y.shape)
    out = bridge.empty(y.queue, y.shape, out_dtype)
    _run(SOFTMAX_ROWS_BACKWARD, SOFTMAX_COLUMNS_BACKWARD, (y, grad, out), axis)
    return out


def _run(by_rows: Kernel, by_columns: Kernel, tensors: tuple[Tensor, ...], axis: int) -> None:
    x, queue = tensors[0], tensors[0].queue
    outer, n, inner = around_axis(x.shape, axis, "softmax")
    if x.size == 0:
        return
    if inner > 1:
        sizes, width, strips = plan_columns(queue, outer, n, inner)
        by_columns(queue, *sizes, *tensors, n, inner, width, strips, outer, ONE_COLUMN=int(width == 1))
        return
    plan = plan_rows(queue, outer, n)
    if by_rows is SOFTMAX_ROWS and plan.group == 1 and n <= _KEPT:
        SOFTMAX_KEPT_ROWS(queue, *plan.sizes, *tensors, outer, n, plan.each, KEPT=_KEPT)
    else:
        by_rows(queue, *plan.sizes, *tensors, outer, n, plan.each, **plan.macros)
