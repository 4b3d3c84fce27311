"""Pooling and padding."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Distinct, Normal, Op


def windows(x: Array, size: int, stride: int) -> Array:
    """(N, C, OH, OW, size, size)"""
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]


def max_pool2d(x: Array, kernel_size: int = 2, stride: int = 2) -> Array:
    """The largest of each window, or NaN."""
    return windows(x, kernel_size, stride).max((-1, -2))


def avg_pool2d(x: Array, kernel_size: int = 2, stride: int = 2) -> Array:
    """The mean of each window."""
    return windows(x, kernel_size, stride).mean((-1, -2))


def global_avg_pool2d(x: Array) -> Array:
    """The mean of each plane."""
    return x.mean((2, 3), keepdims=True)


def pad2d(x: Array, pad: int = 1, mode: str = "zero") -> Array:
    """Zeros around, or the plane mirrored with its edge (which netcl calls reflect)."""
    return np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="constant" if mode == "zero" else "symmetric")


OPS = [
    Op("netcl.autograd.max_pool2d", max_pool2d, [
        Case(Distinct(2, 2, 6, 8)),
        Case(Distinct(1, 2, 7, 9), kernel_size=3, stride=2),
        Case(Distinct(1, 1, 9, 21), kernel_size=3, stride=1),
        Case(Distinct(1, 1, 8, 8), kernel_size=2, stride=3),
        Case(Distinct(1, 2, 5, 5), 3, 7),
    ], ulps=0.0, ulps32=0.0),
    Op("netcl.autograd.avg_pool2d", avg_pool2d, [
        Case(Normal(2, 3, 6, 8)),
        Case(Normal(1, 2, 7, 9), kernel_size=3, stride=2),
        Case(Normal(1, 2, 9, 21), kernel_size=3, stride=1),
        Case(Normal(2, 2, 4, 4), kernel_size=4),
    ], terms=lambda x, kernel_size=2, stride=2: (kernel_size**2, avg_pool2d(np.abs(x), kernel_size, stride))),
    Op("netcl.autograd.global_avg_pool2d", global_avg_pool2d, [
        Case(Normal(2, 3, 5, 7)),
        Case(Normal(3, 1, 1, 1)),
    ], terms=lambda x: (x.shape[2] * x.shape[3], global_avg_pool2d(np.abs(x)))),
    Op("netcl.autograd.pad2d", pad2d, [
        Case(Normal(2, 2, 3, 5)),
        Case(Normal(1, 2, 4, 4), pad=2, mode="reflect"),
        Case(Normal(1, 2, 4, 4), pad=0),
    ], ulps=0.0, ulps32=0.0, exact=True),
]  # fmt: skip
