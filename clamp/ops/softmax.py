"""Softmax over one axis, and its backward."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, require_gradient
from clamp.ops.launch import column_width, launch, plan_rows

SOFTMAX_KEPT_ROWS = Kernel("softmax.cl", "softmax_kept_rows")
SOFTMAX_ROWS = Kernel("softmax.cl", "softmax_rows")
SOFTMAX_COLUMNS = Kernel("softmax.cl", "softmax_columns")
SOFTMAX_ROWS_BACKWARD = Kernel("softmax.cl", "softmax_rows_backward")
SOFTMAX_COLUMNS_BACKWARD = Kernel("softmax.cl", "softmax_columns_backward")

_KEPT = 4096  # elements of a row that a CPU's work-item keeps as floats in its private memory: half of a 32 KiB cache


def softmax(x: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis, computed in fp32 relative to the largest element."""
    outer, n, inner = around_axis(x.shape, axis, "softmax")
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype]}
    if inner == 1:
        plan = plan_rows(x.queue, outer, n)
        sizes = plan.global_size, plan.local_size
        if plan.group == 1 and n <= _KEPT:
            SOFTMAX_KEPT_ROWS(x.queue, *sizes, x, out, outer, n, plan.each, SOFTMAX_KEPT_ROWS=1, KEPT=_KEPT, **types)
        else:
            SOFTMAX_ROWS(x.queue, *sizes, x, out, outer, n, plan.each, SOFTMAX_ROWS=1, **plan.macros, **types)
    else:
        width = column_width(x.queue, outer, n, inner)
        strips = -(-inner // width)
        SOFTMAX_COLUMNS(
            x.queue, *launch(x.queue, strips * outer), x, out, n, inner, width, strips, outer,
            SOFTMAX_COLUMNS=1, ONE_COLUMN=int(width == 1), **types,
        )  # fmt: skip
    return out


def softmax_backward(y: Tensor, grad: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """Gradient of softmax from its result y: ``y * (grad - sum(grad * y))`` along the axis."""
    require_gradient("softmax", grad, y.shape)
    outer, n, inner = around_axis(y.shape, axis, "softmax")
    out = bridge.empty(y.queue, y.shape, out_dtype)
    if out.size == 0:
        return out
    types = {"Y_T": bridge.STORAGE[y.dtype], "G_T": bridge.STORAGE[grad.dtype], "DX_T": bridge.STORAGE[out_dtype]}
    if inner == 1:
        plan = plan_rows(y.queue, outer, n)
        SOFTMAX_ROWS_BACKWARD(
            y.queue, plan.global_size, plan.local_size, y, grad, out, outer, n, plan.each,
            SOFTMAX_ROWS_BACKWARD=1, **plan.macros, **types,
        )  # fmt: skip
    else:
        width = column_width(y.queue, outer, n, inner)
        strips = -(-inner // width)
        sizes = launch(y.queue, strips * outer)
        SOFTMAX_COLUMNS_BACKWARD(
            y.queue, *sizes, y, grad, out, n, inner, width, strips, outer,
            SOFTMAX_COLUMNS_BACKWARD=1, ONE_COLUMN=int(width == 1), **types,
        )  # fmt: skip
    return out
