"""How far numbers are from what they should be, and how far rounding alone would have taken them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.cast import cast

Array: TypeAlias = NDArray[np.float32]

#: half the distance between 1 and the next number
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127"), "float32": np.inf}


@dataclass(frozen=True)
class Error:
    """How far a tensor is from another one.

    Attributes:
        relative: the norm of the difference by the norm of the right one; inf where only one of both is inf or nan.
        largest: the largest difference by the largest magnitude of the right one; likewise.
    """

    relative: float
    largest: float


def on_host(tensor: Any) -> Array | None:
    """The numbers of a float32, float16 or bfloat16 tensor on a device, as float32; None of any other."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in bridge.STORAGE or not bridge.on_device(tensor):
        return None
    found: Array = cast(tensor, "float32").to_host()
    return found


def error_of(actual: Array, right: Array, largest: float = np.inf) -> Error:
    """The error of numbers, which are as many as the right ones; nan in both is none.

    Args:
        largest: what is beyond it and came out as this, as the -1e9 of a mask does in float16, is left out.
    """
    actual, right = actual.ravel(), right.ravel()
    if (saturated := (np.abs(right) > largest) & (actual == np.copysign(largest, right))).any():
        actual, right = actual[~saturated], right[~saturated]
    differs = ~((actual == right) | (np.isnan(actual) & np.isnan(right)))
    finite = np.isfinite(actual) & np.isfinite(right)
    if (differs & ~finite).any():
        return Error(np.inf, np.inf)
    wanted = right[finite].astype(np.float64)
    difference = actual[finite] - wanted
    if not difference.any():
        return Error(0.0, 0.0)
    return Error(_quotient(np.linalg.norm(difference), np.linalg.norm(wanted)),
                 _quotient(np.abs(difference).max(), np.abs(wanted).max()))  # fmt: skip


def rounding_of(right: Array, dtype: str) -> float:
    """The relative error (``Error.relative``) of the right numbers once they have as many digits as a dtype."""
    return error_of(with_digits_of(dtype, right), right).relative


def with_digits_of(dtype: str, numbers: Array) -> Array:
    """float32 numbers rounded to as many digits as a dtype has, whatever its range, to nearest even."""
    significand, exponent = np.frexp(numbers)
    return np.ldexp(np.rint(significand / UNIT_ROUNDOFF[dtype]) * UNIT_ROUNDOFF[dtype], exponent).astype(np.float32)


def _quotient(error: Any, size: Any) -> float:
    return float(error / size) if size else np.inf
