"""Sums over axes, the gradient of a sum, softmax. A tensor is seen as (outer, n, inner) around the axis n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import axis_of
from clamp.ops.cast import launch, span_for

SUM_ROWS = Kernel("reduce.cl", "sum_rows")
SUM_COLUMNS = Kernel("reduce.cl", "sum_columns")
EXPAND_ROWS = Kernel("reduce.cl", "expand_rows")
EXPAND_COLUMNS = Kernel("reduce.cl", "expand_columns")

_MIN_SPAN = 4096  # elements that are worth a work-group of their own on a CPU
_STRIP = 64  # columns that a CPU's work-item sums at a time
_GPU_GROUP = 256  # work-items that share one row on a GPU; each takes 16 elements at a time


def around_axis(shape: Sequence[int], axis: int | None, function: str = "sum") -> tuple[int, int, int]:
    """(outer, n, inner): how many elements lie before, along and after an axis; with None everything lies along it.

    Args:
        function: what the user called, for the error.

    Raises:
        ValueError: there is no such axis.
    """
    if axis is None:
        return 1, prod(shape), 1
    axis = axis_of(function, axis, len(shape))
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def reduced_shape(shape: Sequence[int], axis: int | None, keepdims: bool) -> tuple[int, ...]:
    """Shape of a sum over an axis. netcl has no tensors without dimensions: a full sum has shape (1,)."""
    if axis is None:
        return (1,) * len(shape) if keepdims else (1,)
    axis = axis_of("sum", axis, len(shape))
    kept = (1,) if keepdims else ()
    return (*shape[:axis], *kept, *shape[axis + 1 :]) or (1,)


@dataclass(frozen=True)
class RowPlan:
    """How rows are dealt to work-groups by a kernel that goes through whole rows.

    Attributes:
        group: work-items of a work-group.
        each: rows a work-group does one after the other.
        groups: work-groups.
    """

    group: int
    each: int
    groups: int

    @property
    def global_size(self) -> tuple[int]:
        """Work-items of the launch."""
        return (self.groups * self.group,)

    @property
    def local_size(self) -> tuple[int]:
        """Work-items of a work-group."""
        return (self.group,)


def plan_rows(queue: cl.CommandQueue, rows: int, n: int) -> RowPlan:
    """A plan for ``rows`` rows of n elements: few, long pieces on a CPU, a work-group a row on a GPU."""
    device = capabilities(queue)
    if not device.is_cpu:
        group = _GPU_GROUP if n > 1024 else 32
        while group > device.max_work_group:
            group //= 2
        return RowPlan(group, 1, max(rows, 1))
    each = max(1, _MIN_SPAN // max(n, 1))
    # No more pieces than keep the cores evenly busy, no fewer than one a core.
    each = min(max(each, -(-rows // (64 * device.compute_units))), max(1, -(-rows // device.compute_units)))
    return RowPlan(1, each, max(1, -(-rows // each)))


def parts_of(queue: cl.CommandQueue, sums: int, n: int, wide: int = 1) -> tuple[int, int]:
    """(parts, span): into how many spans n elements are cut where ``sums`` independent sums are formed.

    Args:
        wide: sums that are formed side by side, so that shorter spans are worth their launch.
    """
    device = capabilities(queue)
    target = (4 if device.is_cpu else 16) * device.compute_units
    smallest = max(16, _MIN_SPAN // wide)
    parts = max(1, min(target // max(sums, 1), n // smallest))
    span = max(16, 16 * -(-n // (16 * parts)))
    return max(1, -(-n // span)), span


def reduce_sum(
    x: Tensor, axis: int | None = None, keepdims: bool = False, *, out_dtype: str, divisor: float = 1.0
) -> Tensor:
    """Sum over one axis, or over everything, divided by ``divisor``; summed in fp32 and rounded once.

    The sum is formed in blocks: its error is below ``(8 + n / 1024) * 2**-24 * sum|x|``, and the same input on the
    same device gives the same bits.

    Args:
        x: float32, float16 or bfloat16, any shape.
        axis: the axis to sum over; None: all.
        keepdims: whether that axis stays, with extent 1.
        out_dtype: dtype of the result.

    Raises:
        ValueError: there is no such axis.
    """
    outer, n, inner = around_axis(x.shape, axis)
    out = bridge.empty(x.queue, reduced_shape(x.shape, axis, keepdims), out_dtype)
    if outer * inner == 0:
        return out
    sum_stage = _sum_rows if inner == 1 else _sum_columns
    parts, span = parts_of(x.queue, outer * -(-inner // _STRIP), n, min(inner, _STRIP))
    if parts > 1:
        partial = bridge.empty(x.queue, (outer * parts * inner,), "float32")
        sum_stage(x, partial, outer, n, inner, parts, span, 1.0)
        x, n, span = partial, parts, parts
    sum_stage(x, out, outer, n, inner, 1, max(n, span), divisor)
    return out


def _sum_rows(x: Tensor, y: Tensor, outer: int, n: int, inner: int, parts: int, span: int, divisor: float) -> None:
    plan = plan_rows(x.queue, outer * parts, min(n, span))
    SUM_ROWS(
        x.queue, plan.global_size, plan.local_size, x, y, outer * parts, n, span, parts, plan.each, divisor,
        X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[y.dtype], WG=plan.group,
    )  # fmt: skip


def _sum_columns(x: Tensor, y: Tensor, outer: int, n: int, inner: int, parts: int, span: int, divisor: float) -> None:
    width = column_width(x.queue, outer * parts, min(n, span), inner)
    strips = -(-inner // width)
    SUM_COLUMNS(
        x.queue, *launch(x.queue, strips * parts * outer), x, y, n, inner, span, width, outer * parts, strips, parts,
        divisor,
        X_T=bridge.STORAGE[x.dtype], Y_T=bridge.STORAGE[y.dtype],
    )  # fmt: skip


def column_width(queue: cl.CommandQueue, planes: int, n: int, inner: int) -> int:
    """Neighbouring columns a work-item should take: one on a GPU; on a CPU a multiple of 64 worth a work-item."""
    device = capabilities(queue)
    if not device.is_cpu:
        return 1
    worth = _MIN_SPAN // max(n, 1)
    fair = -(-inner * planes // (4 * device.compute_units))
    return max(_STRIP, -(-min(worth, fair) // _STRIP) * _STRIP)


def expand(x: Tensor, shape: Sequence[int], axis: int | None = None, *, out_dtype: str, divisor: float = 1.0) -> Tensor:
    """Spreads a reduced tensor back: the gradient of ``reduce_sum`` over ``axis`` of a tensor of this shape.

    Args:
        x: as many elements as ``shape`` without ``axis`` (one, with axis None), float32, float16 or bfloat16.
        divisor: what every element is divided by.

    Raises:
        ValueError: x has another number of elements, or there is no such axis.
    """
    outer, n, inner = around_axis(shape, axis)
    if x.size != outer * inner:
        raise ValueError(f"cannot expand a tensor of shape {x.shape} along axis {axis} to {tuple(shape)}")
    out = bridge.empty(x.queue, shape, out_dtype)
    if out.size == 0:
        return out
    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype]}
    span = span_for(x.queue, out.size)
    sizes = launch(x.queue, -(-out.size // span))
    if inner == 1:
        EXPAND_ROWS(x.queue, *sizes, x, out, out.size, n, span, divisor, **types)
    else:
        EXPAND_COLUMNS(x.queue, *sizes, x, out, out.size, n, inner, span, divisor, **types)
    return out
