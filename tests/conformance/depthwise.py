"""Depthwise convolution."""

from __future__ import annotations

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op


def depthwise_conv2d(x: Array, w: Array, bias: Array | None = None, stride: int = 1, pad: int = 0) -> Array:
    """Each channel with its own filter, zeros around."""
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    out = np.einsum("nchwij,cij->nchw", windows, w[:, 0])
    return out if bias is None else out + bias[:, None, None]


def terms(x: Array, w: Array, bias: Array | None = None, stride: int = 1, pad: int = 0) -> tuple[float, Array]:
    """A sum over the filter."""
    offset = None if bias is None else np.abs(bias)
    return w[0].size + 1, depthwise_conv2d(np.abs(x), np.abs(w), offset, stride, pad)


OPS = [
    Op("netcl.autograd.depthwise_conv2d", depthwise_conv2d, [
        Case(Normal(2, 3, 5, 7), Normal(3, 1, 3, 3), bias=Normal(3).aside(), stride=1, pad=1),
        Case(Normal(2, 2, 8, 9), Normal(2, 1, 3, 3), stride=2, pad=1),
        Case(Normal(1, 2, 6, 7), Normal(2, 1, 2, 5), Normal(2).aside(), pad=3),
        Case(Normal(1, 2, 9, 10), Normal(2, 1, 3, 3), stride=3),
    ], terms=terms),
]  # fmt: skip
