"""Gradients of a float64 reference by central differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.conformance.table import Array

_STEP = 1e-5


@dataclass(frozen=True)
class Gradient:
    """The gradient of ``sum(cotangent * f(x))`` with respect to x.

    Attributes:
        value: the gradient.
        magnitude: for each element the sum of the magnitudes of the terms it is a sum of.
        terms: the largest number of terms of an element.
        smooth: where the differences to the left and to the right agree; elsewhere x lies on a kink.
    """

    value: Array
    magnitude: Array
    terms: int
    smooth: Array


def gradient(f: Callable[[], Array], x: Array, cotangent: Array) -> Gradient:
    """Central differences of f, which reads x, contracted with the cotangent; f's result may have any shape.

    x is moved in its place, and put back: to put together what f is called with takes as long as most of f.
    """
    at_x = f().copy()  # it may be a view of x
    right, left = (np.empty((x.size, at_x.size)) for _ in "rl")
    for number, index in enumerate(np.ndindex(x.shape)):
        here = float(x[index])
        step = _STEP * max(1.0, abs(here))
        x[index] = here + step
        right[number] = ((f() - at_x) / step).ravel()
        x[index] = here - step
        left[number] = ((at_x - f()) / step).ravel()
        x[index] = here
    terms = cotangent.ravel() * (right + left) / 2
    # A second derivative of 100 still passes for smooth.
    smooth = (np.abs(right - left) <= 2e-3 + 1e-3 * np.abs(left)).all(axis=1)
    counts = np.count_nonzero(terms, axis=1)
    value, magnitude, smooth = (of.reshape(x.shape) for of in (terms.sum(axis=1), np.abs(terms).sum(axis=1), smooth))
    return Gradient(value, magnitude, int(counts.max(initial=0)), smooth)
