"""Slicing under autograd: narrow, split, chunk, ``x[...]``; and netcl's tensor-level narrow, write_into, zeros_like.

netcl's tensors are whole buffers, so a slice is a copy. The gradients of a tensor's slices are not each padded with
zeros to its full size and added up, as in netcl: between a node and its slices stands one node more, which collects
their gradients and writes them, with zeros where no slice was, into one tensor (see ``_Slices``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting, NotOwned, Operand, bound, owned_value
from clamp.casting.registry import implements
from clamp.functions.shape import moved_dtype, shape_of, stretches_of, view
from clamp.ops import concat as ops
from clamp.ops.arguments import around_axis, axis_of, whole_number
from clamp.ops.concat import Part
from clamp.ops.elementwise import elementwise
from clamp.params import delivery


class _Slices:
    """The gradients of all slices of one node in one backward pass, and the one gradient they make.

    Its node stands between the node that is sliced and the slices. The engine runs the slices' backward before this
    node's, in whatever order. The first gradient to come opens the pass: it is handed to the engine, so that the
    engine comes to this node; the others are kept beside it.

    A node has one as long as one of its slices lives. It is on no tape, because a tape that dies takes the gradient
    functions of its nodes with it, and a slice of a later iteration may share this one.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.node: Callable[[], Node | None] = lambda: None
        self._shape, self._dtype = shape, dtype
        self._parts: list[tuple[int, Part]] = []

    @classmethod
    def of(cls, sliced: Operand) -> tuple[_Slices, Node]:
        """The one of an operand's parent, and its node, which the caller must hold."""
        slices: _Slices | None = vars(sliced.parent).get("_clamp_slices")
        node = None if slices is None else slices.node()
        if slices is None or node is None:
            slices = cls(sliced.shape, sliced.grad_dtype)
            node = bridge.OffTape(
                value=bridge.view(sliced.parent.value, sliced.shape),
                grad_fn=slices._gradient,
                parents=[sliced.parent],
                requires_grad=True,
                op_name="slices",
            )
            bridge.note_child(node)
            slices.node = weakref.ref(node)
            vars(sliced.parent)["_clamp_slices"] = slices
        return slices, node

    def take(self, rows: int, part: Part) -> Tensor | None:
        """Takes the gradient of a slice: ``part`` of each of ``rows`` rows. What the slice returns to the engine."""
        node = self.node()
        if node is None:
            return None
        if node.grad is not None:
            self._parts.append((rows, part))
            return None
        node.value.grad = None
        self._parts = [(rows, part)]
        return part.tensor

    def _gradient(self, _: Tensor) -> list[Tensor | None]:
        parts, self._parts = self._parts, []
        node = self.node()
        if node is not None:
            node.grad = node.value.grad = None
        dtype = delivery.gradient_dtype(self._dtype)
        return [bridge.view(gradient_of_slices(self._shape, dtype, parts), self._shape)]


def gradient_of_slices(shape: Sequence[int], dtype: str, parts: Sequence[tuple[int, Part]]) -> Tensor:
    """The sum of gradients of slices of a tensor, each padded with zeros to the tensor's shape.

    Args:
        shape, dtype: of the tensor.
        parts: at least one: into how many rows the slice cuts the tensor, and which part of each row it is.
    """
    # Slices of equal rows that do not overlap are written side by side into one tensor.
    layers: list[tuple[int, list[Part]]] = []
    for rows, part in sorted(parts, key=lambda entry: (entry[0], entry[1].start)):
        for layer_rows, layer in layers:
            if layer_rows == rows and layer[-1].start + layer[-1].length <= part.start:
                layer.append(part)
                break
        else:
            layers.append((rows, [part]))
    size, total = prod(shape), None
    for rows, layer in layers:
        first = layer[0].tensor
        assert first is not None
        if len(layer) == 1 and first.size == size and bridge.canonical_dtype(first.dtype) == dtype:
            gradient = bridge.view(first, shape)
        else:
            gradient = ops.assemble(first.queue, (rows, size // rows), 1, layer, dtype)
            gradient = bridge.view(gradient, shape)
        total = gradient if total is None else elementwise("add", dtype, total, gradient)
    assert total is not None
    return total


def _sliced(
    casting: Casting, x: Any, rows: int, row: int, stretches: Sequence[tuple[int, int]],
    shapes: Sequence[tuple[int, ...]], name: str, tape: Tape | None,
) -> list[Any]:  # fmt: skip
    """Slices of x, seen as ``rows`` rows: a stretch of each row, under a shape of its own."""
    (operand,) = casting.operands(x)
    dtype = moved_dtype(casting, name, operand)
    whole = bridge.view(operand.value, (rows, row))
    pieces = ops.split(whole, 1, stretches, out_dtypes=[dtype] * len(stretches))
    slices: _Slices | None = None
    parent = operand
    if isinstance(operand.parent, Node) and operand.needs_grad and whole.size > 0:
        slices, node = _Slices.of(operand)
        parent = Operand(node, operand.value)

    def gradient(start: int, length: int, grad: Tensor, dtype: str) -> Tensor | None:
        if slices is None:  # there is nothing to cut
            return bridge.empty(grad.queue, parent.shape, dtype)
        return slices.take(rows, Part(start, length, bridge.view(grad, (rows, length))))

    operand.forward_done()
    return [
        bound(bridge.view(piece, shape), {parent: partial(gradient, *stretch)}, name, tape, moves=True)
        for piece, shape, stretch in zip(pieces, shapes, stretches, strict=True)
    ]


def _along(
    casting: Casting, x: Any, axis: int, stretches: Sequence[tuple[int, int]], name: str, tape: Tape | None
) -> list[Any]:
    shape = shape_of(x)
    axis = axis_of(name, axis, len(shape))
    for start, length in stretches:
        ops.require_inside(shape, axis, start, length, name)
    rows, extent, inner = around_axis(shape, axis)
    flat = [(start * inner, length * inner) for start, length in stretches]
    shapes = [(*shape[:axis], length, *shape[axis + 1 :]) for _, length in stretches]
    return _sliced(casting, x, rows, extent * inner, flat, shapes, name, tape)


@implements("netcl.autograd.narrow", "netcl.ops.tensor_ops.narrow")
def narrow(
    casting: Casting, x: Any, axis: int, start: int, length: int, tape: Tape | None = None, out: Tensor | None = None
) -> Any:
    """A copy of ``length`` places of x along an axis, from ``start`` on (a negative one counts from the end).

    Args:
        out: of a bare tensor alone: what the result is written to, of its shape and dtype.

    Raises:
        ValueError: there is no such axis, or the places are not all inside it.
    """
    shape, start = shape_of(x), whole_number("narrow", "start", start)
    start += shape[axis_of("narrow", axis, len(shape))] if start < 0 else 0
    if out is not None:
        (operand,) = casting.operands(x)
        dtype = moved_dtype(casting, "narrow", operand)
        return ops.split(operand.value, axis, [(start, int(length))], out_dtypes=[dtype], outs=[owned_value(out)])[0]
    length = whole_number("narrow", "length", length, 0)
    return _along(casting, x, axis, [(start, length)], "narrow", tape)[0]


@implements("netcl.autograd.split")
def split(
    casting: Casting, x: Any, split_size_or_sections: int | Sequence[int], axis: int = 0, tape: Tape | None = None
) -> list[Any]:
    """x cut along an axis into pieces of one size (the last may be smaller), or of the sizes given.

    Raises:
        ValueError: there is no such axis, the size is not positive, or the sizes do not sum to the extent.
    """
    shape = shape_of(x)
    extent = shape[axis_of("split", axis, len(shape))]
    if isinstance(split_size_or_sections, Sequence):
        sizes = [whole_number("split", "a section's size", size, 0) for size in split_size_or_sections]
        if sum(sizes) != extent:
            raise ValueError(f"split: split sections {sizes} do not sum to axis size {extent}")
    else:
        sizes = _pieces_of(extent, whole_number("split", "the size of a piece", split_size_or_sections, 1))
    return _along(casting, x, axis, stretches_of(sizes), "split", tape)


@implements("netcl.autograd.chunk")
def chunk(casting: Casting, x: Any, chunks: int, axis: int = 0, tape: Tape | None = None) -> list[Any]:
    """x cut along an axis into at most ``chunks`` pieces of one size (the last may be smaller).

    Raises:
        ValueError: there is no such axis, or ``chunks`` is not positive.
    """
    chunks = whole_number("chunk", "chunks", chunks, 1)
    shape = shape_of(x)
    extent = shape[axis_of("chunk", axis, len(shape))]
    sizes = _pieces_of(extent, max(1, -(-extent // chunks)))
    return _along(casting, x, axis, stretches_of(sizes), "chunk", tape)


def _pieces_of(extent: int, size: int) -> list[int]:
    return [min(size, extent - start) for start in range(0, extent, size)]


@implements("netcl.autograd.getitem")
def getitem(casting: Casting, x: Any, key: Any, tape: Tape | None = None) -> Any:
    """``x[key]`` for integers, slices of step 1 and an ellipsis, as in numpy; but one element has shape (1,).

    Neighbouring axes of which the first has one place left, or the second all, are cut at once: ``x[i]``, ``x[:, i]``
    and ``x[i, j]`` are one copy each, ``x[:, i:j, k]`` is two. Where nothing is cut off, x itself is returned.

    Raises:
        IndexError: too many indices, or one out of range.
        NotImplementedError: a slice with a step.
        TypeError: another kind of index.
    """
    shape = shape_of(x)
    stretches, dropped = _parse(key, shape)
    groups: list[tuple[int, int, int]] = []  # extent, start, length
    for extent, (start, length) in zip(shape, stretches, strict=True):
        if groups and (groups[-1][2] == 1 or length == extent):
            before = groups.pop()
            extent, start, length = before[0] * extent, before[1] * extent + start, before[2] * length
        groups.append((extent, start, length))
    kept = tuple(length for axis, (_, length) in enumerate(stretches) if axis not in dropped) or (1,)
    cuts = [at for at, (extent, _, length) in enumerate(groups) if length < extent]
    if not cuts:
        return x if kept == shape else view(casting, x, kept, "getitem", tape)
    extents = [extent for extent, _, _ in groups]
    cuts.sort(key=lambda at: groups[at][2] / groups[at][0])  # what cuts most comes first
    for at in cuts:
        extent, start, length = groups[at]
        rows, inner = prod(extents[:at]), prod(extents[at + 1 :])
        extents[at] = length
        result = kept if at == cuts[-1] else tuple(extents)
        (x,) = _sliced(casting, x, rows, extent * inner, [(start * inner, length * inner)], [result], "getitem", tape)
    return x


def _parse(key: Any, shape: tuple[int, ...]) -> tuple[list[tuple[int, int]], set[int]]:
    """(start, length) of every axis, and the axes that the key drops."""
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [at for at, k in enumerate(keys) if k is Ellipsis]
    if ellipses:
        at = ellipses[0]
        keys[at : at + 1] = [slice(None)] * (len(shape) - (len(keys) - 1))
    if len(keys) > len(shape):
        raise IndexError(f"getitem: {len(keys)} indices are too many indices for {len(shape)}D tensor of shape {shape}")
    keys += [slice(None)] * (len(shape) - len(keys))
    stretches, dropped = [], set()
    for axis, (k, extent) in enumerate(zip(keys, shape, strict=True)):
        if isinstance(k, slice):
            if k.step not in (None, 1):
                raise NotImplementedError(f"getitem: strided slicing is not supported, got {k}; take a slice of step 1")
            start, stop, _ = k.indices(extent)
            stretches.append((start, max(stop - start, 0)))
        elif isinstance(k, int | np.integer) and not isinstance(k, bool):  # numpy means a mask by that
            if not -extent <= k < extent:
                raise IndexError(f"getitem: index {k} out of range for axis {axis} of size {extent}")
            stretches.append((int(k) % extent, 1))
            dropped.add(axis)
        else:
            raise TypeError(f"getitem: unsupported index type {type(k).__name__}; pass integers, slices or ...")
    return stretches, dropped


# -------------------------------------------------------------------------------------------- tensor level


@implements("netcl.ops.tensor_ops.write_into", uses=(ops,))
def tensor_write_into(casting: Casting, dst: Tensor, src: Tensor, axis: int, start: int) -> Tensor:
    """Writes src over ``dst[..., start:start + n, ...]`` along an axis, converted to dst's dtype; returns dst.

    Raises:
        ValueError: there is no such axis, src does not fit there, or their other extents differ.
        TypeError: one is int32 and the other floating.
    """
    target, x = owned_value(dst), owned_value(src)
    moved_dtype(casting, "write_into", Operand(dst, target), Operand(src, x))
    bridge.require_same_queue("write_into", target, x)
    ops.write_into(target, x, axis, int(start))
    return dst


@implements("netcl.ops.tensor_ops.zeros_like", uses=())
def tensor_zeros_like(casting: Casting, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Zeros of x's dtype, of its shape or another."""
    value = owned_value(x)
    if value.dtype not in bridge.STORAGE:
        raise NotOwned
    return bridge.zeros(value.queue, value.shape if shape is None else tuple(int(n) for n in shape), value.dtype)
