"""Floating numbers of the host as the words that devices, files and messages hold. numpy has no bfloat16."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def from_words(words: Array, dtype: str) -> npt.NDArray[np.float32]:
    """float32 numbers from words of 2 (float16, bfloat16) or 4 bytes (float32).

    Args:
        words: unsigned integers.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(dtype).astype(np.float32, copy=False)


def to_words(numbers: npt.NDArray[np.float32], dtype: str) -> Array:
    """Words of ``dtype`` from float32 numbers, rounded to nearest even; nan stays nan."""
    if dtype == "float32":
        return numbers.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)
