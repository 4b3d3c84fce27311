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


def gradient(f: Callable[[Array], Array], x: Array, cotangent: Array) -> Gradient:
    """Central differences of f at x, contracted with the cotangent; f's result may have any shape."""
    at_x = f(x)
    value, magnitude, counts = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape, int)
    smooth = np.ones(x.shape, bool)
    moved = x.copy()
    for index in np.ndindex(x.shape):
        step = _STEP * max(1.0, abs(float(x[index])))
        moved[index] = x[index] + step
        right = (f(moved) - at_x) / step
        moved[index] = x[index] - step
        left = (at_x - f(moved)) / step
        moved[index] = x[index]
        terms = cotangent * (right + left) / 2
        value[index] = terms.sum()
        magnitude[index] = np.abs(terms).sum()
        counts[index] = np.count_nonzero(terms)
        # A second derivative of 100 still passes for smooth. (np.allclose takes as long as f.)
        smooth[index] = (np.abs(right - left) <= 2e-3 + 1e-3 * np.abs(left)).all()
    return Gradient(value, magnitude, int(counts.max(initial=0)), smooth)
