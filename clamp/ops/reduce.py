"""Sums over one axis, or all, and the gradient of a sum. A tensor is seen as (outer, n, inner) around the axis n."""

from __future__ import annotations

from collections.abc import Sequence

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.launches import Launch
from clamp.opencl.program import READ_STORAGE, Kernel, Prepared
from clamp.ops.arguments import around_axis, reduced_shape
from clamp.ops.launch import STRIP, launch, parts_of, pieces_for, plan_columns, plan_rows, span_for

SUM_ROWS = Kernel("reduce.cl", "sum_rows")
SUM_COLUMNS = Kernel("reduce.cl", "sum_columns")
EXPAND_ROWS = Kernel("reduce.cl", "expand_rows", "X Y")
EXPAND_COLUMNS = Kernel("reduce.cl", "expand_columns", "X Y")

_launches = Prepared(1024)


def reduce_sum(
    x: Tensor, axis: int | None = None, keepdims: bool = False, *, out_dtype: str, divisor: float = 1.0
) -> Tensor:
    """Sum over one axis, or over everything, divided by ``divisor``.

    The sum is formed in blocks: its error is below ``(8 + n / 1024) * 2**-24 * sum|x|``, and the same input on the
    same device gives the same bits.
    """
    outer, n, inner = around_axis(x.shape, axis)
    out = bridge.empty(x.queue, reduced_shape(x.shape, axis, keepdims), out_dtype)
    if outer * inner == 0:
        return out
    parts, span = parts_of(x.queue, outer * -(-inner // STRIP), n, min(inner, STRIP))
    if parts > 1:
        partial = bridge.empty(x.queue, (outer * parts * inner,), "float32")
        _summing(x.queue, outer, n, inner, parts, span, x.dtype, "float32")(x.queue, x.buffer, partial.buffer)
        x, n = partial, parts
    _summing(x.queue, outer, n, inner, 1, n, x.dtype, out_dtype, divisor)(x.queue, x.buffer, out.buffer)
    return out


def bind_summing(
    queue: cl.CommandQueue, outer: int, n: int, inner: int, x_dtype: str, out_dtype: str
) -> tuple[Launch, int, str]:
    """A launch that sums the middle axis of tensors (outer, n, inner), or so many parts of it by themselves.

    Returns:
        The launch, which leaves open the tensor and the result (outer, parts, inner); how many parts; the dtype of the
        result, float32 where there are several parts.
    """
    parts, span = parts_of(queue, outer * -(-inner // STRIP), n, min(inner, STRIP))
    y_dtype = out_dtype if parts == 1 else "float32"
    return _summing(queue, outer, n, inner, parts, span if parts > 1 else n, x_dtype, y_dtype), parts, y_dtype


def _summing(
    queue: cl.CommandQueue, outer: int, n: int, inner: int, parts: int, span: int, x_dtype: str, y_dtype: str,
    divisor: float = 1.0,
) -> Launch:  # fmt: skip
    """The launch for such tensors, whose axis is cut into parts of ``span`` elements."""
    key = (queue.context.int_ptr, outer, n, inner, parts, span, x_dtype, y_dtype, divisor)
    found: Launch | None = _launches.known.get(key)
    if found is not None:
        return found
    types = {"X_T": READ_STORAGE[x_dtype], "Y_T": bridge.STORAGE[y_dtype]}
    sums = outer * parts
    if inner == 1:
        plan = plan_rows(queue, sums, min(n, span))
        numbers = sums, n, span, parts, plan.each, divisor
        made = SUM_ROWS.bind(queue, *plan.sizes, ..., ..., *numbers, SUM_ROWS=1, **types, **plan.macros)
    else:
        sizes, width, strips = plan_columns(queue, sums, min(n, span), inner)
        made = SUM_COLUMNS.bind(
            queue, *sizes, ..., ..., n, inner, span, width, sums, strips, parts, divisor,
            SUM_COLUMNS=1, **types, ONE_COLUMN=int(width == 1),
        )  # fmt: skip
    return _launches.keep(key, made)


def expand(x: Tensor, shape: Sequence[int], axis: int | None = None, *, out_dtype: str, divisor: float = 1.0) -> Tensor:
    """Spreads a reduced tensor back: the gradient of ``reduce_sum`` over ``axis`` of a tensor of this shape."""
    outer, n, inner = around_axis(shape, axis)
    if x.size != outer * inner:
        raise ValueError(f"cannot expand a tensor of shape {x.shape} along axis {axis} to {tuple(shape)}")
    out = bridge.empty(x.queue, shape, out_dtype)
    if out.size == 0:
        return out
    span = span_for(x.queue, out.size)
    sizes = launch(x.queue, -(-out.size // span))
    pieces = pieces_for(x.queue)
    if inner == 1:
        EXPAND_ROWS(x.queue, *sizes, x, out, out.size, n, span, divisor, PIECES=pieces)
    else:
        EXPAND_COLUMNS(x.queue, *sizes, x, out, out.size, n, inner, span, divisor, PIECES=pieces)
    return out
