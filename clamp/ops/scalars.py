"""A user's number where it meets a storage type.

A finite number never becomes infinite by being stored: a mask of -1e9 in float16 is -65504, and softmax of a row that
is masked throughout is uniform, as in fp32, not NaN. An infinity that the user passes stays one. What arithmetic makes
of numbers is another matter: 1e5 * x is computed in fp32, with 1e5 as it is, and a *result* beyond float16 is infinite.

A bound holds as it is stored: in float16 0.9999 is 1.0 to the nearest, and what is not above 0.9999 is 0.9995 at most.
"""

from __future__ import annotations

import math
from functools import lru_cache

from clamp import bridge

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
