"""Rows picked out of a tensor by index, rows added to where an index says, one-hot rows; the place of the maximum and
the k largest elements along an axis.

Indices are int32 tensors of any shape, read flat. A negative one counts from the end of the axis, as in netcl. What is
still no place of the axis cannot raise on the device: it is read as NaN, and adds to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import around_axis, axis_of, whole_number
from clamp.ops.concat import WORDS, overwrite, require_same_but, result_tensor, widest_word
from clamp.ops.launch import index_type, launch, plan_columns, plan_rows, span_for

PICK = Kernel("indexing.cl", "pick")
ADD_LISTED = Kernel("indexing.cl", "add_listed", "X - Y")
ADD_SORTED = Kernel("indexing.cl", "add_sorted", "X - - Y")
COUNT_DIGITS = Kernel("indexing.cl", "count_digits")
SCAN_COUNTS = Kernel("indexing.cl", "scan_counts")
MOVE_KEYS = Kernel("indexing.cl", "move_keys")
FIND_SEGMENTS = Kernel("indexing.cl", "find_segments")
ONE_HOT = Kernel("indexing.cl", "one_hot", "- Y")
TO_INDEX = Kernel("indexing.cl", "to_index", "X")

_PIECES = 4  # CPU: pieces of work for each core, at most
_INDEX_COST = 200  # CPU: elements moved in the time that ten owners take to look at an index
_BLOCK = 256  # CPU: bytes of neighbouring rows that one work-item owns, at least
_TILE = 256  # GPU: keys a work-group sorts, and values of a digit
_LANES, _COLUMNS = 8, 32  # GPU: a work-group that sums rows with many positions
_CROWDED = 8  # positions a row, from which on several lanes share them

#: Bits of a quiet NaN in each storage type, filling 4 bytes; for integers the number that is furthest from any other.
_NAN_BITS = {"f32": 0x7FC00000, "f16": 0x7E007E00, "bf16": 0x7FC07FC0, "int32": 0x80000000}


def index_select(
    x: Tensor, axis: int, index: Tensor, *, out_dtype: str, missing: float = np.nan, out: Tensor | None = None
) -> Tensor:
    """The places of x along an axis that ``index`` names, in its order; bits are kept where the dtype is.

    Args:
        x: float32, float16, bfloat16 or int32; the result is int32 if it is.
        missing: what stands where an index names no place: NaN (the lowest integer, if x is int32) or 0.
        out: where to write the result, if not to a new tensor.

    Raises:
        ValueError: there is no such axis, or nothing along it, or ``out`` does not fit, or is what is read.
    """
    axis = axis_of("index_select", axis, len(x.shape))
    outer, dim, inner = around_axis(x.shape, axis)
    n = index.size
    if out is not None and out.buffer in (x.buffer, index.buffer):
        raise ValueError(
            "index_select: out is in the memory of x, or of the indices, whose places are read while others are "
            "written already: pass another tensor, or none"
        )
    out = result_tensor(x.queue, (*x.shape[:axis], n, *x.shape[axis + 1 :]), out_dtype, out)
    if out.size == 0:
        return out
    if dim == 0:
        raise ValueError(f"index_select: axis {axis} of shape {tuple(x.shape)} is empty, there is nothing to select")
    is_cpu = capabilities(x.queue).is_cpu
    source, target = (bridge.STORAGE.get(dtype, "int32") for dtype in (x.dtype, out_dtype))
    if source == target:
        itemsize = bridge.nbytes(out) // out.size
        word = widest_word(itemsize, inner, 1, (), is_cpu)
        inner = inner * itemsize // word
        types, fill = {"WORD": WORDS[word]}, _NAN_BITS[target]
    else:
        types, fill = {"X_T": source, "Y_T": target}, _NAN_BITS["f32"]
    span = span_for(x.queue, outer * n * inner) if is_cpu else 1
    deep = max(1, span // inner)
    items = -(-outer * n // deep) * -(-inner // span)
    PICK(
        x.queue, *launch(x.queue, items), x, index, out, dim, n, inner, outer * n, span, deep,
        fill if np.isnan(missing) else 0,
        PICK=1, VECTORS=int(is_cpu), SINGLES=int(is_cpu and inner == 1),
        INDEX=index_type(max(items, outer * n)), **types,
    )  # fmt: skip
    return out


def index_add(x: Tensor, shape: Sequence[int], axis: int, index: Tensor, out: Tensor, base: Tensor | None) -> None:
    """``out = base``, with the places of x added to those along an axis that ``index`` names; without a base, to 0.

    Sums are formed in the order of x: the same bits every time. A place of ``out`` that nothing is added to keeps the
    base's value.

    Args:
        x: what is added: ``index.size`` places along the axis, and the other extents of ``shape``.
        shape: of out, and of base, which may be one tensor.
    """
    axis = axis_of("index_add", axis, len(shape))
    require_same_but(axis, shape, x.shape, "index_add")
    if x.shape[axis] != index.size:
        raise ValueError(
            f"index_add: {index.size} indices for a source of shape {tuple(x.shape)}, whose axis {axis} has "
            f"{x.shape[axis]} places; pass one index for each"
        )
    outer, dim, inner = around_axis(shape, axis)
    if outer * dim * inner == 0:
        return
    if index.size == 0:
        if base is not out:
            overwrite(out, base)
        return
    bases, types = ((), {}) if base is None else ((base,), {"BASE_T": bridge.STORAGE[base.dtype]})
    add = _add_listed if capabilities(x.queue).is_cpu else _add_sorted
    add(x, index, out, (outer, dim, inner), *bases, ADD=1, IN_PLACE=int(base is out), **types)


def _add_listed(
    x: Tensor, index: Tensor, out: Tensor, extents: tuple[int, int, int], *bases: Tensor, **macros: object
) -> None:
    outer, dim, inner = extents
    n = index.size
    cores = capabilities(x.queue).compute_units
    # Every owner reads all indices, which must stay a small part of the work.
    pieces = min(_PIECES * cores, max(cores, (dim + n) * inner * outer // (_INDEX_COST * n)))
    slices = min(outer, pieces)
    owners = 1 << (min(dim, -(-pieces // slices)) - 1).bit_length()
    size = bridge.nbytes(out) // outer
    block = max(0, (min(max(size // (owners * 64), _BLOCK), 64 * _BLOCK) * dim // size).bit_length() - 1)
    lists = bridge.empty(x.queue, (slices * (dim + n),), "int32")
    ADD_LISTED(
        x.queue, *launch(x.queue, slices * owners), x, index, out, lists, dim, n, inner, outer, slices, owners, block,
        *bases, **macros,
    )  # fmt: skip


def _add_sorted(
    x: Tensor, index: Tensor, out: Tensor, extents: tuple[int, int, int], *bases: Tensor, **macros: object
) -> None:
    outer, dim, inner = extents
    n = index.size
    positions, starts = sort_positions(index, dim, min(_TILE, capabilities(x.queue).max_work_group))
    crowded = n >= _CROWDED * dim
    lanes, columns = (_LANES, _COLUMNS) if crowded else (1, 1)
    groups = outer * dim * -(-inner // columns)
    sizes = ((groups * columns, lanes), (columns, lanes)) if crowded else launch(x.queue, groups)
    ADD_SORTED(
        x.queue, *sizes, x, positions, starts, out, dim, n, inner, outer, *bases,
        LANES=lanes, COLUMNS=columns, **macros,
    )  # fmt: skip


def sort_positions(index: Tensor, dim: int, tile: int) -> tuple[Tensor, Tensor]:
    """The positions of ``index`` in the order of the rows they name, and where each row's begin (dim + 1 numbers).

    Positions of one row keep their order. A least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5), in work-groups
    of ``tile`` keys, with digits of as many values.

    Args:
        tile: a power of two.
    """
    queue, n = index.queue, index.size
    keys, positions = index, index  # of the first round: positions are not read
    tiles = max(1, -(-n // tile))
    counts = bridge.empty(queue, (tiles * tile,), "int32")
    sizes = (tiles * tile,), (tile,)
    digit_bits = tile.bit_length() - 1
    sort: dict[str, object] = {"SORT": 1, "TILE": tile}
    for shift in range(0, dim.bit_length(), digit_bits):
        to_keys, to_positions = (bridge.empty(queue, (max(n, 1),), "int32") for _ in range(2))
        COUNT_DIGITS(queue, *sizes, keys, counts, dim, n, shift, tiles, **sort)
        SCAN_COUNTS(queue, (tile,), (tile,), counts, tiles, **sort)
        MOVE_KEYS(queue, *sizes, keys, positions, counts, to_keys, to_positions, dim, n, shift, tiles, **sort)
        keys, positions = to_keys, to_positions
    starts = bridge.empty(queue, (dim + 1,), "int32")
    FIND_SEGMENTS(queue, *launch(queue, dim + 1), keys, starts, dim, n, SORT=1, TILE=tile)
    return positions, starts


def one_hot(index: Tensor, classes: int, *, out_dtype: str) -> Tensor:
    """A row of ``classes`` zeros for each index, with a one where it says; none where it is no class (or negative)."""
    out = bridge.zeros(index.queue, (index.size, classes), out_dtype)
    if out.size:
        span = span_for(index.queue, index.size)
        sizes = launch(index.queue, -(-index.size // span))
        ONE_HOT(index.queue, *sizes, index, out, index.size, classes, span)
    return out


def to_index(x: Tensor) -> Tensor:
    """Whole numbers of a floating dtype or of int64 as a flat int32 tensor: fractions are cut off, as by ``astype``;
    what is beyond int32 becomes the nearest there, which is no place of any axis, and not 0."""
    out = bridge.empty(x.queue, (x.size,), "int32")
    if x.size:
        span = span_for(x.queue, x.size)
        TO_INDEX(x.queue, *launch(x.queue, -(-x.size // span)), x, out, x.size, span)
    return out


# ---------------------------------------------------------------------------------------------- the largest

ARGMAX_ROWS = Kernel("topk.cl", "argmax_rows", "X")
ARGMAX_COLUMNS = Kernel("topk.cl", "argmax_columns", "X")
TOPK_HEAP = Kernel("topk.cl", "topk_heap", "X")
TOPK_SELECT = Kernel("topk.cl", "topk_select", "X")

_TOPK_PIECES = 16  # pieces of work for each core of a CPU
_LARGEST, _LAST = "INT_MAX", "INT_MIN"  # where a kernel puts NaN


def argmax(x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
    """The place of the largest element along an axis, int32; the first of equal ones. NaN is the largest (numpy)."""
    axis = axis_of("argmax", axis, len(x.shape))
    outer, n, inner = around_axis(x.shape, axis)
    if n == 0:
        raise ValueError(f"argmax: axis {axis} of shape {tuple(x.shape)} is empty")
    shape = (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :])
    out = bridge.empty(x.queue, shape or (1,), "int32")
    if out.size == 0:
        return out
    if inner == 1:
        plan = plan_rows(x.queue, outer, n)
        ARGMAX_ROWS(x.queue, *plan.sizes, x, out, outer, n, plan.each, WG=plan.group, NAN_KEY=_LARGEST)
    else:
        sizes, width, strips = plan_columns(x.queue, outer, n, inner)
        ARGMAX_COLUMNS(x.queue, *sizes, x, out, n, inner, width, strips, outer, NAN_KEY=_LARGEST)
    return out


def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along an axis, bit for bit, in descending order, and their places, int32.

    Equal elements (-0 and 0 are equal) come in the order of their places. NaN comes last, after -inf, as in netcl's
    numpy backend.
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
    macros: dict[str, object] = {"TOPK": 1, "WORD": WORDS[bridge.nbytes(x) // x.size], "NAN_KEY": _LAST}
    lanes = outer * inner
    device = capabilities(x.queue)
    if device.is_cpu:
        each = -(-lanes // (_TOPK_PIECES * device.compute_units))
        items = -(-lanes // each)
        heaps = bridge.empty(x.queue, (items * k * 2,), "int32")
        TOPK_HEAP(x.queue, (items,), (1,), x, values, places, heaps, n, inner, k, lanes, each, **macros)
        return values, places
    group = plan_rows(x.queue, lanes, n).group
    TOPK_SELECT(x.queue, (lanes * group,), (group,), x, values, places, n, inner, k, WG=group, **macros)
    return values, places
