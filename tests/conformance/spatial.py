"""Resizing, sampling on grids, rotations, and prelu. Coordinates and slopes are read in their own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.conformance.table import Array, Case, Normal, Op, Uniform

Size = Sequence[int]


def axis_weights(inputs: int, outputs: int, mode: str, align_corners: bool) -> Array:
    """(outputs, inputs): how much of each input is in each output."""
    weights = np.zeros((outputs, inputs))
    for o in range(outputs):
        if mode == "nearest":
            weights[o, min(int(np.float32(o) * np.float32(inputs / outputs)), inputs - 1)] = 1
            continue
        at = o * (inputs - 1) / max(outputs - 1, 1) if align_corners else max((o + 0.5) * inputs / outputs - 0.5, 0)
        i = min(int(at), inputs - 1)
        weights[o, i] += 1 - (at - i)
        weights[o, min(i + 1, inputs - 1)] += at - i
    return weights


def upsample(
    x: Array,
    size: Size | int | None = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool = False,
) -> Array:
    """Both axes resized by their weights."""
    if size is None:
        factors = scale_factor if isinstance(scale_factor, tuple) else (scale_factor, scale_factor)
        size = [int(x.shape[2 + k] * factors[k]) for k in (0, 1)]
    elif isinstance(size, int):
        size = (size, size)
    rows, columns = (axis_weights(x.shape[2 + k], size[k], mode, align_corners) for k in (0, 1))
    return rows @ x @ columns.T


def pixel(coordinates: Array, size: int, align_corners: bool) -> Array:
    """Coordinates -1 .. 1 as numbers of pixels."""
    return (coordinates + 1) / 2 * (size - 1) if align_corners else ((coordinates + 1) * size - 1) / 2


def grid_sample(
    x: Array, grid: Array, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Array:
    """x between the four pixels around each place of the grid."""
    n, c, h, w = x.shape
    across, down = pixel(grid[..., 0], w, align_corners), pixel(grid[..., 1], h, align_corners)
    left, top = np.floor(across).astype(int), np.floor(down).astype(int)
    out = np.zeros((n, c, *grid.shape[1:3]))
    image = np.arange(n)[:, None, None]
    for t in range(4):
        i, j = top + t // 2, left + t % 2
        inside = (i >= 0) & (i < h) & (j >= 0) & (j < w) | (padding_mode == "border")
        weight = np.abs(across - left - 1 + t % 2) * np.abs(down - top - 1 + t // 2)
        values = np.moveaxis(x[image, :, np.clip(i, 0, h - 1), np.clip(j, 0, w - 1)], -1, 1)
        out += values * (weight * inside)[:, None]
    return out


def coordinates(size: int, align_corners: bool) -> Array:
    """The outputs of an axis as coordinates -1 .. 1."""
    i = np.arange(size)
    if align_corners:
        return 2 * i / (size - 1) - 1 if size > 1 else np.zeros(1)
    return (2 * i + 1) / size - 1


def affine_grid(theta: Array, size: Size, align_corners: bool = False) -> Array:
    """theta @ (across, down, 1) for every place."""
    down, across = (coordinates(size[k], align_corners) for k in (2, 3))
    base = np.stack([*np.meshgrid(across, down), np.ones((size[2], size[3]))], -1)
    return np.einsum("hwk,nck->nhwc", base, theta)


def rotate_2d_grid(x: Array, angles: Any, padding_mode: str = "border", align_corners: bool = False) -> Array:
    """x sampled on a rotated grid."""
    a = np.broadcast_to(np.asarray(angles, np.float64).reshape(-1), x.shape[0])
    zero = np.zeros(len(a))
    theta = np.stack([np.cos(a), np.sin(a), zero, -np.sin(a), np.cos(a), zero], 1).reshape(-1, 2, 3)
    return grid_sample(x, affine_grid(theta, x.shape, align_corners), "bilinear", padding_mode, align_corners)


def prelu(x: Array, alpha: Array) -> Array:
    """x where positive, a multiple of it elsewhere."""
    return np.where(x > 0, x, x * (alpha.reshape(-1, *(1 for _ in x.shape[2:])) if x.ndim > 1 else alpha))


def near(x: Array, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Coordinates and weights are known to an ulp or so of the image's extent."""
    return max(x.shape[2:]) + 4, np.abs(x).max()


#: Far from the kinks between pixels, where a central difference would straddle two slopes.
_PLACES = Uniform(-1.3, 1.3, 2, 3, 5, 2)
_SPATIAL = {"terms": near, "slack": 8.0, "special": False}

OPS = [
    Op("netcl.autograd.upsample", upsample, [
        Case(Normal(2, 3, 4, 5), scale_factor=2, mode="bilinear"),
        Case(Normal(2, 3, 4, 5), scale_factor=2),
        Case(Normal(1, 2, 5, 19), (11, 38), mode="bilinear"),
        Case(Normal(1, 2, 5, 7), 9, mode="bilinear", align_corners=True),
        Case(Normal(1, 2, 6, 7), (2, 3), mode="bilinear"),
        Case(Normal(1, 2, 6, 7), scale_factor=(1.5, 0.5)),
        Case(Normal(1, 2, 1, 7), (3, 1), mode="bilinear", align_corners=True),
    ], **_SPATIAL),
    Op("netcl.autograd.grid_sample", grid_sample, [
        Case(Normal(2, 3, 4, 5), _PLACES.aside()),
        Case(Normal(2, 3, 4, 5), _PLACES.aside(), padding_mode="border"),
        Case(Normal(2, 3, 4, 5), _PLACES.aside(), align_corners=True),
        Case(Normal(2, 3, 4, 5), _PLACES.aside(), "bilinear", "border", True),
    ], **_SPATIAL),
    Op("netcl.autograd.affine_grid", affine_grid, [
        Case(Normal(2, 2, 3), (2, 1, 4, 5)),
        Case(Normal(3, 2, 3), (3, 1, 7, 1), align_corners=True),
    ], terms=lambda theta, size, align_corners=False: (8, np.abs(theta).max()), special=False),
    Op("netcl.autograd.rotate_2d_grid", rotate_2d_grid, [
        Case(Normal(2, 3, 4, 5), 0.4),
        Case(Normal(2, 3, 4, 5), [0.3, -2.0], "zeros", True),
        Case(Normal(2, 3, 5, 4), Uniform(-3, 3, 2).aside()),
    ], **_SPATIAL),
    Op("netcl.autograd.prelu", prelu, [
        Case(Normal(2, 3, 4, 5), Uniform(-0.5, 0.5, 3).aside()),
        Case(Normal(4, 7), Uniform(-0.5, 0.5, 7).aside()),
        Case(Normal(2, 3, 4, 5), Uniform(-0.5, 0.5, 1).aside()),
        Case(Normal(7), Uniform(-0.5, 0.5, 1).aside()),
    ]),
]  # fmt: skip
