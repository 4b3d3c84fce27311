"""Views and permutations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op


def squeeze(x: Array, axis: int | None = None) -> Array:
    """netcl's squeeze: one axis stays."""
    return np.atleast_1d(np.squeeze(x, axis))


def transpose(x: Array, dims: Sequence[int]) -> Array:
    """Axes in another order."""
    return np.transpose(x, dims)


OPS = [
    Op("netcl.autograd.reshape", np.reshape, [
        Case(Normal(4, 6), (2, 12)),
        Case(Normal(4, 6), (3, -1)),
        Case(Normal(2, 3), (-1,)),
    ], exact=True),
    Op("netcl.autograd.flatten", np.reshape, [Case(Normal(2, 3, 5), (2, 15))], exact=True),
    Op("netcl.autograd.squeeze", squeeze, [
        Case(Normal(3, 1, 5), 1),
        Case(Normal(1, 3, 1)),
        Case(Normal(2, 1, 3), -2),
    ], exact=True),
    Op("netcl.autograd.unsqueeze", np.expand_dims, [Case(Normal(3, 5), 1), Case(Normal(3), -1)], exact=True),
    Op("netcl.autograd.permute", transpose, [
        Case(Normal(3, 5, 4), (2, 0, 1)),
        Case(Normal(17, 33), (1, 0)),
        Case(Normal(2, 3, 4, 5), (0, 2, 1, 3)),
        Case(Normal(2, 3, 1, 2, 3), (4, 1, 0, 3, 2)),
        Case(Normal(5), (0,)),
    ], exact=True),
]  # fmt: skip
