"""Softmax over one axis, and its backward."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import get_kernel
from clamp.ops.cast import launch
from clamp.ops.reduce import around_axis, column_width, plan_rows

_KEPT = 4096  # elements of a row that a CPU's work-item keeps as floats in its private memory: half of a 32 KiB cache


def softmax(x: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis, computed in fp32 relative to the largest element.

    Args:
        x: float32, float16 or bfloat16, at least one dimension.
        axis: the axis that sums to one.
        out_dtype: dtype of the result.

    Raises:
        ValueError: there is no such axis.
    """
    outer, n, inner = around_axis(x.shape, axis, "softmax")
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype]}
    if inner == 1:
        plan = plan_rows(x.queue, outer, n)
        if plan.group == 1 and n <= _KEPT:
            kernel = get_kernel(
                x.queue, "softmax.cl", "softmax_kept_rows", "ppqqu", SOFTMAX_KEPT_ROWS=1, KEPT=_KEPT, **types
            )
        else:
            kernel = get_kernel(x.queue, "softmax.cl", "softmax_rows", "ppqqu", SOFTMAX_ROWS=1, WG=plan.group, **types)
        kernel(x.queue, plan.global_size, plan.local_size, x.buffer, out.buffer, outer, n, plan.each)
    else:
        width = column_width(x.queue, outer, n, inner)
        strips = -(-inner // width)
        kernel = get_kernel(x.queue, "softmax.cl", "softmax_columns", "ppqqquq", SOFTMAX_COLUMNS=1, **types)
        kernel(x.queue, *launch(x.queue, strips * outer), x.buffer, out.buffer, n, inner, width, strips, outer)
    return out


def softmax_backward(y: Tensor, grad: Tensor, axis: int = -1, *, out_dtype: str) -> Tensor:
    """Gradient of softmax from its result y: ``y * (grad - sum(grad * y))`` along the axis.

    Args:
        y: what ``softmax`` returned.
        grad: gradient of y, of the same shape, in any storage type.
        out_dtype: dtype of the gradient returned.

    Raises:
        ValueError: the shapes differ, or there is no such axis.
    """
    if tuple(y.shape) != tuple(grad.shape):
        raise ValueError(f"softmax: gradient of shape {grad.shape} for a result of shape {y.shape}")
    outer, n, inner = around_axis(y.shape, axis, "softmax")
    out = bridge.empty(y.queue, y.shape, out_dtype)
    if out.size == 0:
        return out
    types = {"Y_T": bridge.STORAGE[y.dtype], "G_T": bridge.STORAGE[grad.dtype], "DX_T": bridge.STORAGE[out_dtype]}
    if inner == 1:
        plan = plan_rows(y.queue, outer, n)
        kernel = get_kernel(
            y.queue, "softmax.cl", "softmax_rows_backward", "pppqqu", SOFTMAX_ROWS_BACKWARD=1, WG=plan.group, **types
        )
        kernel(y.queue, plan.global_size, plan.local_size, y.buffer, grad.buffer, out.buffer, outer, n, plan.each)
    else:
        width = column_width(y.queue, outer, n, inner)
        kernel = get_kernel(
            y.queue, "softmax.cl", "softmax_columns_backward", "pppqqquq", SOFTMAX_COLUMNS_BACKWARD=1, **types
        )
        strips = -(-inner // width)
        sizes = launch(y.queue, strips * outer)
        kernel(y.queue, *sizes, y.buffer, grad.buffer, out.buffer, n, inner, width, strips, outer)
    return out
