"""Joining under autograd: cat and stack; and netcl's tensor-level cat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Operand, as_node, bound, owned_value
from clamp.casting.registry import implements
from clamp.ops import concat as ops
from clamp.ops.arguments import axis_of


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


@implements("netcl.autograd.cat")
def cat(casting: Casting, tensors: Sequence[Any], axis: int = 0, tape: Tape | None = None) -> Any:
    """The tensors one after the other along an axis. Backward gives each its own stretch, in its own dtype.

    Args:
        tensors: at least one, float32, float16 or bfloat16 in any mixture, or all int32; all extents but that of the
            axis agree.

    Raises:
        ValueError: there is no tensor, no such axis, or the shapes do not fit.
        TypeError: integers and floating tensors together.
    """
    return _joined(casting, tensors, axis, "cat", tape, lambda shape, axis: shape)


@implements("netcl.autograd.stack")
def stack(casting: Casting, tensors: Sequence[Any], axis: int = 0, tape: Tape | None = None) -> Any:
    """The tensors, all of one shape, along an axis that the result has more than they.

    Arguments and errors as for ``cat``.
    """

    def with_new_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        axis = axis_of("stack", axis, len(shape) + 1)
        return (*shape[:axis], 1, *shape[axis:])

    return _joined(casting, tensors, axis, "stack", tape, with_new_axis)


def _joined(
    casting: Casting, tensors: Sequence[Any], axis: int, name: str, tape: Tape | None,
    seen_as: Callable[[tuple[int, ...], int], tuple[int, ...]],
) -> Any:  # fmt: skip
    if not tensors:
        raise ValueError(f"{name} needs at least one tensor")
    operands = casting.operands(*(as_node(x) for x in tensors))
    dtype = moved_dtype(casting, name, *operands)
    if name == "stack" and len({operand.shape for operand in operands}) > 1:
        shapes = ", ".join(str(operand.shape) for operand in operands)
        raise ValueError(f"stack: the tensors must have one shape, got {shapes}; cat joins what differs along its axis")
    views = [bridge.view(operand.value, seen_as(operand.shape, axis)) for operand in operands]
    axis = axis_of(name, axis, len(views[0].shape))
    out = ops.cat(views, axis, out_dtype=dtype)
    stretches = list(stretches_of([x.shape[axis] for x in views]))
    del views

    def backward(grad: Tensor) -> list[Tensor | None]:
        wanted = [(operand, at) for operand, at in zip(operands, stretches, strict=True) if operand.needs_grad]
        dtypes = [operand.grad_dtype for operand, _ in wanted]
        pieces = iter(ops.split(grad, axis, [at for _, at in wanted], out_dtypes=dtypes))
        return [bridge.view(next(pieces), operand.shape) if operand.needs_grad else None for operand in operands]

    return bound(out, {operands: backward}, name, tape, moves=True)


@implements("netcl.ops.tensor_ops.cat")
def tensor_cat(
    casting: Casting, tensors: Sequence[Tensor], axis: int = 0, out: Tensor | None = None, pool: Any = None
) -> Any:
    """``cat`` of bare tensors, into ``out`` if it is given (of the result's shape and dtype)."""
    tensors = list(tensors)
    if out is None or not tensors:
        return cat(casting, tensors, axis)
    operands = casting.operands(*(as_node(x) for x in tensors))
    dtype = moved_dtype(casting, "cat", *operands)
    return ops.cat([operand.value for operand in operands], axis, out_dtype=dtype, out=owned_value(out))
