"""The place of the maximum and the k largest elements along an axis."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, axis_of, whole_number
from clamp.ops.launch import column_width, launch, plan_rows

ARGMAX_ROWS = Kernel("topk.cl", "argmax_rows")
ARGMAX_COLUMNS = Kernel("topk.cl", "argmax_columns")
TOPK_HEAP = Kernel("topk.cl", "topk_heap")
TOPK_SELECT = Kernel("topk.cl", "topk_select")

_PIECES = 16  # pieces of work for each core of a CPU
_LARGEST, _LAST = "INT_MAX", "INT_MIN"  # where a kernel puts NaN
_WORD = {2: "ushort", 4: "uint"}


def argmax(x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
    """The place of the largest element along an axis, int32; the first of equal ones. NaN is the largest, as in numpy.

    Args:
        x: float32, float16 or bfloat16.
        axis: the axis, which must not be empty.
        keepdims: whether it stays, with extent 1.

    Raises:
        ValueError: there is no such axis, or it is empty.
    """
    axis = axis_of("argmax", axis, len(x.shape))
    outer, n, inner = around_axis(x.shape, axis)
    if n == 0:
        raise ValueError(f"argmax: axis {axis} of shape {tuple(x.shape)} is empty")
    shape = (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :])
    out = bridge.empty(x.queue, shape or (1,), "int32")
    if out.size == 0:
        return out
    macros = {"X_T": bridge.STORAGE[x.dtype], "NAN_KEY": _LARGEST}
    if inner == 1:
        plan = plan_rows(x.queue, outer, n)
        ARGMAX_ROWS(
            x.queue, plan.global_size, plan.local_size, x, out, outer, n, plan.each,
            ARGMAX_ROWS=1, WG=plan.group, **macros,
        )  # fmt: skip
    else:
        width = column_width(x.queue, outer, n, inner)
        strips = -(-inner // width)
        ARGMAX_COLUMNS(
            x.queue, *launch(x.queue, strips * outer), x, out, n, inner, width, strips, outer,
            ARGMAX_COLUMNS=1, **macros,
        )  # fmt: skip
    return out


def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along an axis, bit for bit, in descending order, and their places, int32.

    Equal elements (-0 and 0 are equal) come in the order of their places. NaN comes last, after -inf, as in netcl's
    numpy backend.

    Args:
        x: float32, float16 or bfloat16.
        k: 1 .. extent of the axis.

    Raises:
        ValueError: there is no such axis, or k is out of range.
    """
    axis = axis_of("topk", axis, len(x.shape))
    outer, n, inner = around_axis(x.shape, axis)
    k = whole_number("topk", "k", k)
    if not 1 <= k <= n:
        raise ValueError(f"topk: k={k} out of range for axis of size {n} (axis {axis} of {tuple(x.shape)})")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    values, places = bridge.empty(x.queue, shape, x.dtype), bridge.empty(x.queue, shape, "int32")
    if values.size == 0:
        return values, places
    word = _WORD[bridge.nbytes(x) // x.size]
    macros = {"TOPK": 1, "X_T": bridge.STORAGE[x.dtype], "WORD": word, "NAN_KEY": _LAST}
    lanes = outer * inner
    device = capabilities(x.queue)
    if device.is_cpu:
        each = -(-lanes // (_PIECES * device.compute_units))
        items = -(-lanes // each)
        heaps = bridge.empty(x.queue, (items * k * 2,), "int32")
        TOPK_HEAP(x.queue, (items,), (1,), x, values, places, heaps, n, inner, k, lanes, each, TOPK_HEAP=1, **macros)
        return values, places
    group = plan_rows(x.queue, lanes, n).group
    TOPK_SELECT(x.queue, (lanes * group,), (group,), x, values, places, n, inner, k, TOPK_SELECT=1, WG=group, **macros)
    return values, places
