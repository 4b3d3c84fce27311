"""Sums over axes, the gradient of a sum, softmax. A tensor is seen as (outer, n, inner) around the axis n."""

from __future__ import annotations

from collections.abc import Sequence

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, reduced_shape
from clamp.ops.launch import STRIP, launch, parts_of, pieces_for, plan_columns, plan_rows, span_for

SUM_ROWS = Kernel("reduce.cl", "sum_rows", "X Y")
SUM_COLUMNS = Kernel("reduce.cl", "sum_columns", "X Y")
EXPAND_ROWS = Kernel("reduce.cl", "expand_rows", "X Y")
EXPAND_COLUMNS = Kernel("reduce.cl", "expand_columns", "X Y")


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
    sum_stage = _sum_rows if inner == 1 else _sum_columns
    parts, span = parts_of(x.queue, outer * -(-inner // STRIP), n, min(inner, STRIP))
    if parts > 1:
        partial = bridge.empty(x.queue, (outer * parts * inner,), "float32")
        sum_stage(x, partial, outer, n, inner, parts, span, 1.0)
        x, n, span = partial, parts, parts
    sum_stage(x, out, outer, n, inner, 1, max(n, span), divisor)
    return out


def _sum_rows(x: Tensor, y: Tensor, outer: int, n: int, _: int, parts: int, span: int, divisor: float) -> None:
    plan = plan_rows(x.queue, outer * parts, min(n, span))
    SUM_ROWS(x.queue, *plan.sizes, x, y, outer * parts, n, span, parts, plan.each, divisor, **plan.macros)


def _sum_columns(x: Tensor, y: Tensor, outer: int, n: int, inner: int, parts: int, span: int, divisor: float) -> None:
    sizes, width, strips = plan_columns(x.queue, outer * parts, min(n, span), inner)
    SUM_COLUMNS(
        x.queue, *sizes, x, y, n, inner, span, width, outer * parts, strips, parts, divisor, ONE_COLUMN=int(width == 1)
    )


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
