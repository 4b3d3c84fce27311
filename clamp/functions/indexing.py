"""Selecting, adding and comparing by index under autograd, and netcl's tensor-level versions.

Indices are an int32 or int64 tensor of any shape, read flat; a floating tensor of whole numbers; or whole numbers on
the host, where a boolean mask or another number raises. A negative index counts from the end. One that is no place of
the axis raises if it comes from the host; on the device it cannot: there it is read as NaN and adds to nothing
(ops/indexing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, NotOwned, Operand, bound, float_operands, owned_value
from clamp.casting.policies import Match
from clamp.casting.registry import implements
from clamp.ops import concat
from clamp.ops import indexing as ops
from clamp.ops.arguments import axis_of, shown, whole_number
from clamp.ops.cast import cast

_PICKED, _LARGEST = (ops.PICK, concat, cast), (ops.TOPK_HEAP,)  # not all of its kernels


def _indices(name: str, index: Any, x: Tensor, axis: int) -> Tensor:
    """Indices into an axis of x, as int32 on x's queue; ``name``: what the user called."""
    index = index.value if isinstance(index, Node) else index
    if isinstance(index, Tensor):
        value = whole_value(index)
        bridge.require_same_queue(name, x, value)
        return _as_int32(value)
    extent = x.shape[axis_of(name, axis, len(x.shape))]
    host = host_integers(name, index)
    if np.asarray(index).dtype == bool:
        raise TypeError(f"{name}: the indices are a boolean mask, and must be numbers; pass np.flatnonzero(mask)")
    wrong = host[(host < -extent) | (host >= extent)]
    if wrong.size:
        raise IndexError(f"{name}: index {wrong[0]} out of range for axis {axis} of size {extent}")
    return int32_on_device(host, x.queue)


def whole_value(x: TensorLike) -> Tensor:
    """The tensor of an argument that holds indices, positions or a mask: as ``owned_value``, int64 as int32
    (``ops.to_index``).

    Raises:
        NotOwned: it is something else.
    """
    value: Any = x.value if isinstance(x, (Node, Tensor)) else None
    if getattr(value, "dtype", None) == "int64" and bridge.on_device(value):
        return bridge.view(ops.to_index(value), value.shape)
    return owned_value(x)


def host_integers(name: str, numbers: Any) -> Any:
    """Numbers of the host as a flat int64 array; ``name``: what the user called.

    Raises:
        TypeError: they are no numbers.
        ValueError: one is no whole number.
        NotOwned: they are a tracer's.
    """
    try:
        given = np.asarray(numbers)
        with np.errstate(invalid="ignore"):
            whole = given.astype(np.int64)
    except (TypeError, ValueError) as error:
        if numbers is None or isinstance(numbers, str | bytes | list | tuple | dict | np.ndarray):
            raise TypeError(f"{name} was given {shown(numbers)} where it takes whole numbers") from error
        raise NotOwned from None  # a tracer's value: netcl's own function judges
    if given.dtype.kind in "fu" and (wrong := given[given != whole]).size:
        raise ValueError(f"{name}: indices and class labels must be whole numbers that int64 holds, got {wrong[0]}")
    return whole.ravel()


def int32_on_device(host: Any, queue: Any) -> Tensor:
    """Integers of the host as an int32 tensor; what no int32 is becomes the nearest, and no other number's place."""
    if host.size == 0:
        return bridge.empty(queue, (0,), "int32")
    limits = np.iinfo(np.int32)
    return Tensor.from_host(queue, host.clip(limits.min, limits.max).astype(np.int32), dtype="int32")


def _select(
    casting: Casting, x: Any, axis: int, index: Any, name: str, tape: Tape | None, out: Tensor | None = None
) -> Any:
    (operand,) = casting.operands(x)
    axis = axis_of(name, axis, len(operand.shape))
    at = _indices(name, index, operand.value, axis)
    dtype = casting.result_dtype(operand) if operand.value.dtype in bridge.STORAGE else "int32"
    if out is not None:
        return ops.index_select(operand.value, axis, at, out_dtype=dtype, out=owned_value(out))
    selected, index = ops.index_select(operand.value, axis, at, out_dtype=dtype), Operand(at, at)
    gradients: Gradients = {
        operand: lambda grad, dtype: _selected_gradient(grad, operand.shape, axis, index.value, dtype)
    }
    return bound(selected, gradients, name, tape, unread=(operand,), besides=(index,))


def _selected_gradient(grad: Tensor, shape: Sequence[int], axis: int, at: Tensor, dtype: str) -> Tensor:
    gradient = bridge.empty(grad.queue, shape, dtype)
    ops.index_add(grad, shape, axis, at, gradient, None)
    return gradient


@implements("netcl.autograd.index_select", "netcl.ops.indexing.index_select", uses=_PICKED)
def index_select(
    casting: Casting, x: Any, axis: int, idx: Any, tape: Tape | None = None, out: Tensor | None = None
) -> Any:
    """The places of x along an axis that ``idx`` names, in its order, bit for bit.

    Backward sums the gradients of a place that is named often in fp32, in a fixed order, and rounds once.

    Args:
        x: float32, float16, bfloat16 or int32.
        idx: the indices (see the top of this file).
        out: of a bare tensor alone: what the result is written to, of its shape and dtype.

    Raises:
        IndexError: an index given on the host is no place of the axis.
    """
    return _select(casting, x, axis, idx, "index_select", tape, out)


@implements("netcl.autograd.gather", uses=_PICKED)
def gather(casting: Casting, x: Any, axis: int, idx: Any, tape: Tape | None = None) -> Any:
    """netcl's other name for ``index_select``."""
    return _select(casting, x, axis, idx, "gather", tape)


@implements("netcl.autograd.embedding", uses=_PICKED)
def embedding(casting: Casting, weight: Any, idx: Any, tape: Tape | None = None) -> Any:
    """The rows of a table (num_embeddings, dim) that ``idx`` names: (number of indices, dim)."""
    return _select(casting, weight, 0, idx, "embedding", tape)


@implements("netcl.autograd.index_add", uses=_PICKED)
def index_add(casting: Casting, dst: Any, axis: int, idx: Any, src: Any, tape: Tape | None = None) -> Any:
    """A copy of dst, with each place of src added to the place of the axis that its index names.

    The sums are formed in fp32, in a fixed order, and rounded once.

    Args:
        dst, src: float32, float16 or bfloat16, in any mixture. src has dst's extents, but one place for each index.
        idx: the indices (see the top of this file).

    Raises:
        ValueError: there is no such axis, or src has another shape.
        IndexError: an index given on the host is no place of the axis.
    """
    to, source = float_operands(casting, dst, src)
    axis = axis_of("index_add", axis, len(to.shape))
    at = _indices("index_add", idx, to.value, axis)
    out = bridge.empty(to.value.queue, to.shape, casting.result_dtype(to, source))
    ops.index_add(source.value, to.shape, axis, at, out, to.value)
    index = Operand(at, at)

    gradients: Gradients = {
        to: lambda grad, dtype: cast(grad, dtype),
        source: lambda grad, dtype: ops.index_select(grad, axis, index.value, out_dtype=dtype, missing=0.0),
    }
    return bound(out, gradients, "index_add", tape, unread=(to, source), besides=(index,))


@implements("netcl.autograd.argmax", "netcl.ops.indexing.argmax", uses=_LARGEST)
def argmax(casting: Casting, x: Any, axis: int = -1, keepdims: bool = False) -> Tensor:
    """The place of the largest element along an axis, an int32 tensor; the first of equal ones, or of NaNs (numpy).

    Raises:
        ValueError: there is no such axis, or it is empty.
    """
    (operand,) = float_operands(casting, x)
    return ops.argmax(operand.value, axis, keepdims)


@implements("netcl.autograd.topk", "netcl.ops.indexing.topk", uses=(*_LARGEST, cast))
def topk(casting: Casting, x: Any, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along an axis in descending order, and their places (int32). Not differentiable.

    Equal elements come in the order of their places, NaN after everything else.

    Raises:
        ValueError: there is no such axis, or k is not in 1 .. its extent.
    """
    (operand,) = float_operands(casting, x)
    values, places = ops.topk(operand.value, k, axis)
    return cast(values, casting.result_dtype(operand)), places


@implements("netcl.autograd.one_hot", "netcl.ops.indexing.one_hot", uses=(ops.ONE_HOT,))
def one_hot(casting: Casting, idx: Any, num_classes: int, queue: Any = None, dtype: str = "float32") -> Tensor:
    """A row of zeros for each index, with a one at the index: (number of indices, num_classes).

    An index outside 0 .. num_classes - 1 has a row of zeros, as in netcl (here nothing counts from the end).

    Raises:
        ValueError: num_classes is negative.
        NotOwned: no floating dtype of clamp's, or indices on the host without a queue.
    """
    if dtype not in bridge.STORAGE:
        raise NotOwned
    if not isinstance(idx, Tensor):
        if queue is None:
            raise NotOwned
        idx = int32_on_device(host_integers("one_hot", idx), queue)
    num_classes = whole_number("one_hot", "num_classes", num_classes, 0)
    return ops.one_hot(_as_int32(whole_value(idx)), num_classes, out_dtype=dtype)


def _as_int32(index: Tensor) -> Tensor:
    return ops.to_index(index) if index.dtype in bridge.STORAGE else index


# -------------------------------------------------------------------------------------------- tensor level


@implements("netcl.ops.indexing.index_select_backward", uses=_PICKED)
def tensor_index_select_backward(
    casting: Casting, grad_out: Tensor, x_shape: Sequence[int], axis: int, idx: Any
) -> Tensor:
    """The gradient of ``index_select`` for a tensor of shape ``x_shape``, in the incoming gradient's dtype."""
    (grad,) = float_operands(casting, grad_out)
    shape, queue = tuple(int(extent) for extent in x_shape), grad.value.queue
    axis = axis_of("index_select_backward", axis, len(shape))
    if not isinstance(idx, Tensor):
        idx = int32_on_device(host_integers("index_select_backward", idx), queue)
    at = _as_int32(whole_value(idx))
    return _selected_gradient(grad.value, shape, axis, at, casting.result_dtype(grad))


@implements("netcl.ops.indexing.index_add", uses=_PICKED)
def tensor_index_add(casting: Casting, dst: Tensor, axis: int, idx: Any, src: Tensor) -> Tensor:
    """Adds src to dst in place, as ``index_add`` adds to a copy, and returns dst; both are read as they are, whatever
    the policy."""
    to, source = float_operands(Match().of("index_add"), dst, src)
    target = to.value
    ops.index_add(source.value, to.shape, axis, _indices("index_add", idx, target, axis), target, target)
    return dst


@implements("netcl.ops.indexing.as_index_tensor", uses=(ops.TO_INDEX,))
def tensor_as_index_tensor(casting: Casting, idx: Any, queue: Any = None, backend: str | None = None) -> Tensor:
    """A floating tensor of whole numbers as flat int32, converted on the device; what else there is stays netcl's.

    Raises:
        NotOwned: idx is no such tensor.
    """
    if not isinstance(idx, Tensor) or idx.dtype not in bridge.STORAGE:
        raise NotOwned
    return ops.to_index(owned_value(idx))
