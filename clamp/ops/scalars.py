"""A user's number where it meets a storage type.

A finite number never becomes infinite by being stored: a mask of -1e9 in float16 is -65504, and softmax of a row that
is masked throughout is uniform, as in fp32, not NaN. An infinity that the user passes stays one. What arithmetic makes
of numbers is another matter: 1e5 * x is computed in fp32, with 1e5 as it is, and a *result* beyond float16 is infinite.
"""

from __future__ import annotations

import math

from clamp import bridge

#: largest finite number of each storage type
LARGEST = {"f32": (2 - 2**-23) * 2.0**127, "f16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}


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
