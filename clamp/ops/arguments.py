"""Checks of the arguments that a user passes: each error names the function, what was passed and what to pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


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
    message = f"{function}: {argument} is {value!r}; it must be {wanted}" + (f": {instead}" if instead else "")
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(message)
    if not math.isfinite(value) or value != int(value) or (least is not None and value < least):
        raise ValueError(message)
    return int(value)


def number(function: str, argument: str, value: Any) -> float:
    """The value as a float.

    Raises:
        TypeError: it is no number.
    """
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{function}: {argument} is {value!r}; it must be a number")
    return float(value)


def probability(function: str, argument: str, value: Any) -> float:
    """The value as a float from 0 to 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN, or not from 0 to 1.
    """
    if not 0 <= number(function, argument, value) <= 1:  # a NaN is not either
        raise ValueError(f"{function}: {argument} is {value!r}; it must be a number from 0 to 1")
    return float(value)
