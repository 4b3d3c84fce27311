"""softsign."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op


def softsign(x: Array) -> Array:
    """x / (1 + |x|)."""
    return x / (1 + np.abs(x))


OPS = [Op("netcl.autograd.softsign", softsign, [Case(Normal(3, 5, 7, scale=4)), Case(Normal(33))])]
