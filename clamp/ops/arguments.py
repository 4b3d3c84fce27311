"""Arguments of a user's calls: checked, axes counted from the front, and numbers where they meet a storage type.

Each error names the function, what was passed and what to pass.

A finite number never becomes infinite by being stored: a mask of -1e9 in float16 is -65504, and softmax of a row that
is masked throughout is uniform, as in fp32, not NaN. An infinity that the user passes stays one. What arithmetic makes
of numbers is another matter: 1e5 * x is computed in fp32, with 1e5 as it is, and a *result* beyond float16 is infinite.

A bound holds as it is stored: in float16 0.9999 is 1.0 to the nearest, and what is not above 0.9999 is 0.9995 at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor


def shown(x: object) -> str:
    """Returns a value as messages show it: nodes and tensors, in containers too, by shape and dtype.

    netcl's repr of a node has its whole graph, once for each path through it: gigabytes after 20 residual blocks.
    """
    value = x.value if isinstance(x, Node) else x
    if isinstance(value, Tensor):
        return f"<{type(x).__name__} of shape {tuple(value.shape)}, {value.dtype}>"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key!r}: {shown(item)}' for key, item in x.items())}}}"[:200]
    if isinstance(x, list | tuple):
        left, right = "()" if isinstance(x, tuple) else "[]"
        return f"{left}{', '.join(map(shown, x))}{right}"[:200]
    return f"{x!r:.80}"


def _alone(value: Any) -> Any:
    """Returns the element of an array of one element; anything else unchanged."""
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def whole_number(function: str, argument: str, value: Any, least: int | None = None, instead: str = "") -> int:
    """The value as an int.

    Args:
        function, argument: what the user called, and which of its arguments this is.
        least: the smallest number allowed; None: any.
        instead: what to do instead, where there is more to say than which numbers are allowed.

    Raises:
        TypeError: it is no number.
        ValueError: it is no whole number, or too small.
    """
    wanted = "a whole number" if least is None else f"a whole number from {least} on"
    message = f"{function}: {argument} is {shown(value)}; it must be {wanted}" + (f": {instead}" if instead else "")
    value = _alone(value)
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(message)
    if not math.isfinite(value) or value != int(value) or (least is not None and value < least):
        raise ValueError(message)
    return int(value)


def number(function: str, argument: str, value: Any) -> float:
    """The value as a float, finite if it is finite.

    Raises:
        TypeError: it is no number.
    """
    value = _alone(value)
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return saturated(value, "float32")
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{function}: {argument} is {shown(value)}; it must be a number")


def yes_or_no(function: str, argument: str, value: Any) -> bool:
    """The value as a bool; None is no.

    Raises:
        TypeError: it is something else, which Python would take for True: a mask, a word.
    """
    value = _alone(value)
    if value is not None and not isinstance(value, int | np.integer | np.bool_):
        raise TypeError(f"{function}: {argument} is {shown(value)}; pass True or False")
    return bool(value)


def probability(function: str, argument: str, value: Any) -> float:
    """The value as a float from 0 to 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN, or not from 0 to 1.
    """
    probability = number(function, argument, value)
    if not 0 <= probability <= 1:  # a NaN is not either
        raise ValueError(f"{function}: {argument} is {value!r}; it must be a number from 0 to 1")
    return probability


def require_gradient(function: str, grad: Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError for a gradient of another shape than the result's."""
    if tuple(grad.shape) != tuple(shape):
        raise ValueError(f"{function}: gradient of shape {tuple(grad.shape)} for a result of shape {tuple(shape)}")


def require_nchw(function: str, shape: Sequence[int]) -> None:
    """Raises ValueError unless channels are found where they are meant to be."""
    if len(shape) != 4:
        raise ValueError(f"{function} takes x of shape (N, C, H, W), got {tuple(shape)}")


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
        remedy = f"pass one from {-ndim} to {ndim - 1}" if ndim else "reshape it to (1,)"
        raise ValueError(f"{function}: axis {axis} out of bounds for tensor with {ndim} dimensions; {remedy}")
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


#: largest finite number of each storage type
LARGEST = {"f32": (2 - 2**-23) * 2.0**127, "f16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
#: of the 16-bit types: bits of a number, and the exponent of the least one
_BITS = {"f16": (11, -24), "bf16": (8, -133)}


def saturated(value: float, dtype: str) -> float:
    """The number as it is stored in a dtype, before rounding: finite if it is finite, NaN and infinities as they are.

    Args:
        value: any Python or numpy number, an integer beyond float's range too.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, or netcl's other names for them.
    """
    largest = LARGEST[bridge.STORAGE[dtype]]
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.copysign(largest, 1 if value > 0 else -1)
    if -largest <= number <= largest or not math.isfinite(number):
        return number
    return math.copysign(largest, number)


@lru_cache(1024)
def at_least(value: float, dtype: str) -> float:
    """The least number of a 16-bit dtype that is not below the value; in float32 as ``saturated``.

    Finite values stay finite: of one beyond the dtype its largest number.
    """
    number, storage = saturated(value, dtype), bridge.STORAGE[dtype]
    if storage == "f32" or number == 0 or not math.isfinite(number):
        return number
    bits, least = _BITS[storage]
    step = max(math.frexp(number)[1] - bits, least)
    return math.ldexp(math.ceil(math.ldexp(number, -step)), step)


def at_most(value: float, dtype: str) -> float:
    """The greatest number of a 16-bit dtype that is not above the value; see ``at_least``."""
    return -at_least(-saturated(value, dtype), dtype)


@lru_cache(1024)
def bounds(low: float, high: float, dtype: str) -> tuple[float, float]:
    """Two bounds such that what lies between them in a dtype lies between them as they were given.

    Where no number of the dtype does, each is the nearest.
    """
    inside = at_least(low, dtype), at_most(high, dtype)
    return inside if inside[0] <= inside[1] or low > high else (_nearest(low, dtype), _nearest(high, dtype))


def _nearest(value: float, dtype: str) -> float:
    return min(at_least(value, dtype), at_most(value, dtype), key=lambda stored: abs(stored - value))
