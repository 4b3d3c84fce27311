"""Views, permutations and joining (cat, stack) under autograd; any dtype. Views share the buffer, backward, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from math import prod
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Gradients, Operand, bound, owned_value
from clamp.casting.registry import Function, implements
from clamp.functions.recompute import computed
from clamp.ops import concat
from clamp.ops import shape as ops
from clamp.ops.arguments import axis_of, shown, whole_number
from clamp.ops.cast import cast


def view(casting: Casting, x: Any, shape: Sequence[int], op_name: str, tape: Tape | None) -> Any:
    """x under another shape, in its own memory."""
    (operand,) = casting.operands(x)
    before, value = operand.shape, operand.value
    out = computed(lambda: bridge.view(value, shape), value, shape, value.dtype)
    gradients: Gradients = {operand: lambda grad, dtype: bridge.view(cast(grad, dtype), before)}
    return bound(out, gradients, op_name, tape, moves=True)


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an argument that clamp's kernels can read."""
    return tuple(int(extent) for extent in owned_value(x).shape)


def _whole_numbers(name: str, argument: str, given: Any, least: int | None = None) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(f"{name}: {argument} is {shown(given)}; pass a tuple of whole numbers")
    given = tuple(given)
    what = f"an extent of {argument}" if argument == "shape" else f"an axis of {argument}"
    return tuple(whole_number(name, f"{what} {shown(given)}", one, least) for one in given)


def _resolved(name: str, before: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    """A shape with its -1 filled in."""
    wanted = _whole_numbers(name, "shape", shape, -1)
    if wanted.count(-1) > 1:
        raise ValueError(f"{name}: only one dimension can be -1, got {wanted}")
    total, known = prod(before), prod(extent for extent in wanted if extent != -1)
    if -1 in wanted and known > 0 and total % known == 0:
        wanted = tuple(total // known if extent == -1 else extent for extent in wanted)
    if min(wanted, default=0) < 0 or prod(wanted) != total:
        raise ValueError(f"{name}: cannot reshape {before} into {shape}: {total} elements against {known}")
    return wanted


def _reshaping(name: str) -> Function:
    """x under another shape of as many elements; one extent may be -1.

    Raises:
        ValueError: the number of elements differs, or two extents are -1.
    """

    @implements(f"netcl.autograd.{name}", uses=())
    def function(casting: Casting, x: Any, shape: Sequence[int], tape: Tape | None = None) -> Any:
        return view(casting, x, _resolved(name, shape_of(x), shape), name, tape)

    return function


reshape, flatten = _reshaping("reshape"), _reshaping("flatten")  # two names of netcl's for it


@implements("netcl.autograd.unsqueeze", uses=())
def unsqueeze(casting: Casting, x: Any, axis: int, tape: Tape | None = None) -> Any:
    """x with an axis of extent 1 more, at ``axis`` of the result.

    Raises:
        ValueError: the result has no such axis.
    """
    shape = shape_of(x)
    axis = axis_of("unsqueeze", axis, len(shape) + 1)
    return view(casting, x, (*shape[:axis], 1, *shape[axis:]), "unsqueeze", tape)


@implements("netcl.autograd.squeeze", uses=())
def squeeze(casting: Casting, x: Any, axis: int | None = None, tape: Tape | None = None) -> Any:
    """x without ``axis``, of extent 1, or without every axis of extent 1 (at least one axis is left).

    Raises:
        ValueError: there is no such axis, or its extent is not 1.
    """
    shape = shape_of(x)
    if axis is None:
        return view(casting, x, tuple(extent for extent in shape if extent != 1) or (1,), "squeeze", tape)
    axis = axis_of("squeeze", axis, len(shape))
    if shape[axis] != 1:
        raise ValueError(f"squeeze: cannot squeeze axis {axis} with size {shape[axis]} of shape {shape}; it must be 1")
    return view(casting, x, shape[:axis] + shape[axis + 1 :], "squeeze", tape)


@implements("netcl.autograd.permute", "netcl.ops.permute.permute", uses=(ops, cast))
def permute(casting: Casting, x: Any, dims: Sequence[int], tape: Tape | None = None) -> Any:
    """A copy of x with its axes in the order ``dims``; any number of axes.

    Raises:
        ValueError: dims is no permutation of x's axes.
    """
    (operand,) = casting.operands(x)
    dims = _whole_numbers("permute", "dims", dims)
    out = ops.permute(operand.value, dims)
    inverse = sorted(range(len(dims)), key=lambda axis: dims[axis])
    gradients: Gradients = {operand: lambda grad, dtype: ops.permute(cast(grad, dtype), inverse)}
    return bound(out, gradients, "permute", tape, moves=True)


# ------------------------------------------------------------------------------------------ joining


def moved_dtype(casting: Casting, name: str, *operands: Operand) -> str:
    """Dtype of a result that holds the operands' elements; integers stay what they are.

    Raises:
        TypeError: integers and floating operands together.
    """
    floating = {operand.value.dtype in bridge.STORAGE for operand in operands}
    if len(floating) > 1:
        dtypes = ", ".join(operand.value.dtype for operand in operands)
        raise TypeError(f"{name}: integer and floating tensors do not go together ({dtypes}); convert one of them")
    return casting.result_dtype(*operands) if floating.pop() else "int32"


def stretches_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of stretches that follow each other."""
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]


@implements("netcl.autograd.cat", "netcl.ops.tensor_ops.cat", uses=(concat,))
def cat(
    casting: Casting, tensors: Sequence[Any], axis: int = 0, tape: Tape | None = None, out: Tensor | None = None
) -> Any:
    """The tensors one after the other along an axis. Backward gives each its own stretch, in its own dtype.

    Args:
        tensors: at least one, float32, float16 or bfloat16 in any mixture, or all int32; all extents but that of the
            axis agree.
        out: of bare tensors alone: what the result is written to, of its shape and dtype.

    Raises:
        ValueError: there is no tensor, no such axis, or the shapes do not fit.
        TypeError: integers and floating tensors together.
    """
    return _joined(casting, "cat", tensors, axis, tape, out)


@implements("netcl.autograd.stack", uses=(concat,))
def stack(casting: Casting, tensors: Sequence[Any], axis: int = 0, tape: Tape | None = None) -> Any:
    """The tensors, all of one shape, along an axis that the result has more than they."""
    return _joined(casting, "stack", tensors, axis, tape)


def _joined(
    casting: Casting, name: str, tensors: Any, axis: int, tape: Tape | None, out: Tensor | None = None
) -> Any:  # fmt: skip
    if not isinstance(tensors, Iterable):
        raise TypeError(f"{name}: tensors is of type {type(tensors).__name__}; pass a list of nodes or tensors")
    operands = casting.operands(*tensors)
    if not operands:
        raise ValueError(f"{name} needs at least one tensor")
    dtype = moved_dtype(casting, name, *operands)
    shapes, is_stack = [operand.shape for operand in operands], name == "stack"
    if is_stack and len(set(shapes)) > 1:
        shown_shapes = ", ".join(map(str, shapes))
        raise ValueError(
            f"stack: the tensors must have one shape, got {shown_shapes}; cat joins what differs along its axis"
        )
    axis = axis_of(name, axis, len(shapes[0]) + is_stack)
    if is_stack:
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
    views = [bridge.view(operand.value, shape) for operand, shape in zip(operands, shapes, strict=True)]
    joined = concat.cat(views, axis, out_dtype=dtype, out=None if out is None else owned_value(out))
    if out is not None:
        return joined
    stretches = stretches_of([shape[axis] for shape in shapes])
    del views

    def backward(grad: Tensor, *dtypes: str | None) -> list[Tensor | None]:
        wanted = list(filter(None, dtypes))
        pieces = iter(concat.split(grad, axis, list(compress(stretches, dtypes)), out_dtypes=wanted))
        return [
            bridge.view(next(pieces), x.shape) if dtype else None for x, dtype in zip(operands, dtypes, strict=True)
        ]

    return bound(joined, {operands: backward}, name, tape, moves=True)


# ------------------------------------------------------------------------------------------ tensor level


@implements("netcl.ops.transpose.transpose2d", uses=(ops, cast))
def tensor_transpose2d(casting: Casting, x: Any) -> Any:
    """Transpose of a bare matrix.

    Raises:
        ValueError: x has not two dimensions.
    """
    (operand,) = casting.operands(x)
    if len(operand.shape) != 2:
        raise ValueError(f"transpose2d expects a 2D tensor, got shape {operand.shape}")
    return ops.permute(operand.value, (1, 0))
