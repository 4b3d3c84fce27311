"""Axes of tensors: checked, counted from the front, and what lies around them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from clamp.ops.arguments import whole_number


def axis_of(function: str, axis: Any, ndim: int) -> int:
    """An axis of a tensor, counted from the front.

    Raises:
        TypeError: it is no number, but several axes, say.
        ValueError: there is no such axis.
    """
    one_by_one = "call it for one axis after the other, the last first"
    instead = one_by_one if function in ("sum", "mean", "reduce_sum") and axis is not None else ""
    axis = whole_number(function, "axis", axis, instead=instead)
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{function}: axis {axis} out of bounds for tensor with {ndim} dimensions; "
            f"pass one from {-ndim} to {ndim - 1}"
        )
    return axis % ndim


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
