"""Convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op, Reference

Pair = int | tuple[int, int]  # of the rows and of the columns, or one for both


def both(given: Pair) -> tuple[int, int]:
    """That of the rows, and that of the columns."""
    return given if isinstance(given, tuple) else (given, given)


def conv2d(
    x: Array, w: Array, bias: Array | None = None, stride: Pair = 1, pad: Pair = 0, dilation: Pair = 1, groups: int = 1
) -> Array:
    """Each group of channels with its own filters, zeros around."""
    (down, right), (apart_down, apart_right) = both(stride), both(dilation)
    padded = np.pad(x, ((0, 0), (0, 0), *((zeros, zeros) for zeros in both(pad))))
    reach = [(extent - 1) * apart + 1 for extent, apart in zip(w.shape[2:], both(dilation), strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(2, 3))
    windows = windows[:, :, ::down, ::right, ::apart_down, ::apart_right]
    windows = windows.reshape(len(x), groups, -1, *windows.shape[2:])
    out = np.einsum("ngchwij,gfcij->ngfhw", windows, w.reshape(groups, -1, *w.shape[1:]))
    out = out.reshape(len(x), len(w), *out.shape[3:])
    return out if bias is None else out + bias[:, None, None]


def conv2d_relu(x: Array, w: Array, bias: Array | None = None, **window: Any) -> Array:
    """relu of a convolution."""
    return np.maximum(conv2d(x, w, bias, **window), 0)


def depthwise_conv2d(x: Array, w: Array, bias: Array | None = None, stride: int = 1, pad: int = 0) -> Array:
    """Each channel with its own filter."""
    return conv2d(x, w, bias, stride, pad, groups=len(w))


def conv_transpose2d(x: Array, w: Array, bias: Array | None = None, stride: Pair = 1, pad: Pair = 0) -> Array:
    """Every pixel spreads its multiple of the filter over the result."""
    (down, right), (top, left) = both(stride), both(pad)
    rows, columns = ((x.shape[2 + i] - 1) * both(stride)[i] + w.shape[2 + i] for i in (0, 1))
    out = np.zeros((len(x), w.shape[1], rows, columns))
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            spread = np.einsum("nf,fcyx->ncyx", x[:, :, i, j], w)
            out[:, :, i * down : i * down + w.shape[2], j * right : j * right + w.shape[3]] += spread
    out = out[:, :, top : rows - top, left : columns - left]
    return out if bias is None else out + bias[:, None, None]


def _terms_of(reference: Reference) -> Reference:
    """How many terms a convolution adds up (a transposed one as many as all filters have), and their magnitudes."""

    def terms(x: Array, w: Array, bias: Array | None = None, *window: int, **named: Any) -> tuple[float, Array]:
        size = w.size if reference is conv_transpose2d else w[0].size
        return size + 1, reference(np.abs(x), np.abs(w), None if bias is None else np.abs(bias), *window, **named)

    return terms


OPS = [
    Op("netcl.autograd.conv2d", conv2d, [
        Case(Normal(2, 3, 5, 6), Normal(4, 3, 3, 3), bias=Normal(4).aside(), stride=2, pad=1),
        Case(Normal(1, 2, 4, 5), Normal(3, 2, 3, 3), pad=1),
        Case(Normal(2, 3, 3, 4), Normal(5, 3, 1, 1), bias=Normal(5).aside()),
        Case(Normal(1, 4, 5, 4), Normal(2, 2, 2, 2), bias=Normal(2).aside(), pad=1, dilation=2, groups=2),
        Case(Normal(1, 2, 2, 3), Normal(2, 2, 5, 5), pad=2),
        Case(Normal(2, 3, 5, 6), Normal(4, 3, 3, 3), stride=5),
        Case(Normal(1, 4, 5, 4), Normal(4, 2, 2, 3), pad=4, stride=3, groups=2),
        Case(Normal(1, 1, 7, 1), Normal(2, 1, 3, 1), stride=4, pad=3),
        Case(Normal(1, 2, 5, 7), Normal(3, 2, 2, 3), stride=(2, 1), pad=(0, 2), dilation=(1, 3)),
        Case(Normal(1, 4, 6, 5), Normal(4, 2, 3, 2), stride=(1, 3), pad=(2, 0), dilation=(2, 1), groups=2),
    ], terms=_terms_of(conv2d)),
    Op("netcl.autograd.conv2d_relu", conv2d_relu, [
        Case(Normal(2, 2, 4, 5), Normal(3, 2, 3, 3), bias=Normal(3).aside(), pad=1),
        Case(Normal(1, 3, 5, 5), Normal(4, 3, 3, 3), stride=2),
    ], terms=_terms_of(conv2d)),
    Op("netcl.autograd.depthwise_conv2d", depthwise_conv2d, [
        Case(Normal(2, 3, 5, 7), Normal(3, 1, 3, 3), bias=Normal(3).aside(), stride=1, pad=1),
        Case(Normal(2, 2, 8, 9), Normal(2, 1, 3, 3), stride=2, pad=1),
        Case(Normal(1, 2, 6, 7), Normal(2, 1, 2, 5), Normal(2).aside(), pad=3),
        Case(Normal(1, 2, 9, 10), Normal(2, 1, 3, 3), stride=3),
    ], terms=_terms_of(depthwise_conv2d)),
    Op("netcl.autograd.conv_transpose2d", conv_transpose2d, [
        Case(Normal(2, 3, 3, 4), Normal(3, 2, 3, 3), bias=Normal(2).aside(), stride=2, pad=1),
        Case(Normal(1, 2, 3, 3), Normal(2, 3, 4, 4), stride=3),
        Case(Normal(1, 2, 4, 3), Normal(2, 1, 2, 2), bias=Normal(1).aside()),
        Case(Normal(2, 3, 5, 1), Normal(3, 2, 2, 2), stride=5),
        Case(Normal(1, 2, 3, 4), Normal(2, 3, 3, 2), stride=(1, 2), pad=(1, 0)),
    ], terms=_terms_of(conv_transpose2d)),
]  # fmt: skip
