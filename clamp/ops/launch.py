"""Launch sizes: how many work-items share a pass over elements, rows or columns, on CPU devices and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyopencl as cl

from clamp.opencl.device import capabilities
from clamp.opencl.program import Prepared

_SPAN_CPU = 16384  # elements a work-item; smaller tensors use less, so that every core has work
_SPAN_GPU = 16
_GROUP_GPU = 64  # work-items of a work-group whose items share nothing
_MIN_SPAN = 4096  # elements that are worth a work-group of their own on a CPU
STRIP = 64  # columns that a CPU's work-item sums at a time
_GROUP_GPU_ROWS = 256  # work-items that share one row on a GPU; each takes 16 elements at a time


def launch(queue: cl.CommandQueue, items: int) -> tuple[tuple[int], tuple[int]]:
    """(global size, local size) of a launch of at least ``items`` work-items, which share nothing.

    On a CPU each is a work-group of its own. The size is always given, because PoCL compiles a kernel anew for
    every work-group size it picks itself. On a GPU the number is rounded up: kernels must ignore what is too many.
    """
    if capabilities(queue).is_cpu:
        return (items,), (1,)
    return (-(-items // _GROUP_GPU) * _GROUP_GPU,), (_GROUP_GPU,)


def pieces_for(queue: cl.CommandQueue) -> int:
    """The macro PIECES of kernels/pieces.clh: whether 16 elements are moved 16 bytes at a time."""
    return int(not capabilities(queue).is_cpu)


def index_type(largest: int) -> str:
    """The macro INDEX of kernels that divide numbers of elements, up to this one or a little beyond it.

    GPUs divide 32 bits several times as fast as 64.
    """
    return "uint" if largest < 1 << 31 else "ulong"


def span_for(queue: cl.CommandQueue, size: int) -> int:
    """Elements a work-item should handle in a pass over ``size`` contiguous elements."""
    device = capabilities(queue)
    if not device.is_cpu:
        return _SPAN_GPU
    span = _SPAN_CPU
    while span > 256 and size < span * 4 * device.compute_units:
        span //= 4
    return span


def group_macros(queue: cl.CommandQueue, group: int) -> dict[str, object]:
    """Returns macros of kernels with work-groups of this size (kernels/group_sum.clh, kernels/pieces.clh)."""
    macros: dict[str, object] = {"WG": group}
    if group > 1:
        macros["EXCHANGE"] = capabilities(queue).exchange
    if pieces_for(queue):
        macros["PIECES"] = 1
    return macros


@dataclass(frozen=True)
class RowPlan:
    """Division of rows among work-groups by a kernel that goes through whole rows."""

    group: int  # work-items of a work-group
    each: int  # rows a work-group does one after the other
    groups: int  # work-groups
    macros: dict[str, object]  # what the kernel is built with

    @cached_property
    def sizes(self) -> tuple[tuple[int], tuple[int]]:
        """Work-items of the launch, and of a work-group."""
        return (self.groups * self.group,), (self.group,)


_row_plans = Prepared(1024)


def plan_rows(queue: cl.CommandQueue, rows: int, n: int) -> RowPlan:
    """A plan for ``rows`` rows of n elements: few, long pieces on a CPU, a work-group a row on a GPU."""
    key = (queue.device.int_ptr, rows, n)
    return _row_plans.known.get(key) or _row_plans.keep(key, _new_plan(queue, rows, n))


def _new_plan(queue: cl.CommandQueue, rows: int, n: int) -> RowPlan:
    device = capabilities(queue)
    if not device.is_cpu:
        group = _GROUP_GPU_ROWS if n > 1024 else 32
        while group > device.max_work_group:
            group //= 2
        return RowPlan(group, 1, max(rows, 1), group_macros(queue, group))
    each = max(1, _MIN_SPAN // max(n, 1))
    # No more pieces than keep the cores evenly busy, no fewer than one a core.
    each = min(max(each, -(-rows // (64 * device.compute_units))), max(1, -(-rows // device.compute_units)))
    return RowPlan(1, each, max(1, -(-rows // each)), group_macros(queue, 1))


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


def plan_columns(
    queue: cl.CommandQueue, planes: int, n: int, inner: int
) -> tuple[tuple[tuple[int], tuple[int]], int, int]:
    """((global size, local size), width, strips) of a launch over the columns of planes (n, inner).

    Each work-item takes a strip of neighbouring columns: one on a GPU; on a CPU a multiple of 64 worth a work-item.
    """
    device, width = capabilities(queue), 1
    if device.is_cpu:
        worth = _MIN_SPAN // max(n, 1)
        fair = -(-inner * planes // (4 * device.compute_units))
        width = max(STRIP, -(-min(worth, fair) // STRIP) * STRIP)
    strips = -(-inner // width)
    return launch(queue, strips * planes), width, strips
