"""Sampling on a grid, affine grids and rotations, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import grid as ops
from tests.conformance.spatial import coordinates, pixel
from tests.ops.plans import plans_of
from tests.reference import assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24
Array = np.ndarray[Any, np.dtype[np.float64]]

MODES = [("zeros", False), ("zeros", True), ("border", False), ("border", True)]

#: n, c, input extents, output extents
SHAPES = [
    (1, 1, (1, 1), (1, 1)),
    (2, 3, (5, 7), (3, 11)),
    (1, 10, (4, 3), (2, 9)),
    (3, 2, (1, 6), (5, 4)),
    (1, 1, (19, 2), (1, 37)),
]


plan = plans_of(ops)


def reference(x: Array, grid: Array, g: Array, padding: str, align: bool) -> tuple[Array, ...]:
    """Result, both gradients, and for each the sum of the magnitudes of its terms (weights counted as one)."""
    n, _, h, w = x.shape
    out, terms = np.zeros(g.shape), np.zeros(g.shape)
    dx, dx_terms, dgrid, dgrid_terms = np.zeros(x.shape), np.zeros(x.shape), np.zeros(grid.shape), np.zeros(grid.shape)
    for b, i, j in np.ndindex(n, *grid.shape[1:3]):
        u, v = pixel(grid[b, i, j, 0], w, align), pixel(grid[b, i, j, 1], h, align)
        du, dv = ((extent - align) / 2 for extent in (w, h))
        left, top = int(np.floor(u)), int(np.floor(v))
        fu, fv = u - left, v - top
        gradient = g[b, :, i, j]
        for t in range(4):
            row, column = top + t // 2, left + t % 2
            if padding == "border":
                row, column = min(max(row, 0), h - 1), min(max(column, 0), w - 1)
            elif not (0 <= row < h and 0 <= column < w):
                continue
            wu, wv = (fu if t % 2 else 1 - fu), (fv if t // 2 else 1 - fv)
            value = x[b, :, row, column]
            out[b, :, i, j] += wu * wv * value
            terms[b, :, i, j] += np.abs(value)
            dx[b, :, row, column] += wu * wv * gradient
            dx_terms[b, :, row, column] += np.abs(gradient)
            dgrid[b, i, j, 0] += (1 if t % 2 else -1) * wv * (gradient @ value) * du
            dgrid[b, i, j, 1] += (1 if t // 2 else -1) * wu * (gradient @ value) * dv
            dgrid_terms[b, i, j] += np.abs(gradient) @ np.abs(value) * np.array([du, dv])
    return out, dx, dgrid, terms, dx_terms, dgrid_terms


def check(
    queue: cl.CommandQueue, shape: tuple[Any, ...], mode: tuple[str, bool], types: tuple[str, str, str, str]
) -> None:
    """All three kernels; types of image, grid, gradient and what is written."""
    n, c, hw, size = shape
    rng = np.random.default_rng(n + c)
    x = to_device(queue, rng.standard_normal((n, c, *hw)), types[0])
    grid = to_device(queue, rng.uniform(-1.4, 1.4, (n, *size, 2)), types[1])
    g = to_device(queue, rng.standard_normal((n, c, *size)), types[2])
    out, dx, dgrid, *terms = reference(to_numpy(x), to_numpy(grid), to_numpy(g), *mode)
    near = 8 * EPS * (1 + max(hw))  # a place is known to an ulp of the image's extent
    assert_close(ops.grid_sample(x, grid, *mode, out_dtype=types[3]), out, slack=near * terms[0])
    got = ops.grid_sample_backward_input(g, grid, x.shape, *mode, out_dtype=types[3])
    assert_close(got, dx, slack=(near + EPS * size[0] * size[1]) * terms[1])
    got = ops.grid_sample_backward_grid(g, x, grid, *mode, out_dtype=types[3])
    assert_close(got, dgrid, slack=(near + c * EPS) * terms[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("plan")
def test_every_shape_and_mode(queue: cl.CommandQueue, shape: tuple[Any, ...], mode: tuple[str, bool]) -> None:
    check(queue, shape, mode, ("float16", "float32", "float32", "float32"))


@pytest.mark.parametrize(
    ("mode", "types"),
    [
        (("zeros", True), ("float32", "float32", "float32", "float32")),
        (("border", False), ("bfloat16", "float16", "bfloat16", "bfloat16")),
        (("zeros", False), ("float32", "bfloat16", "float16", "float16")),
    ],
)
def test_storage_types(queue: cl.CommandQueue, mode: tuple[str, bool], types: tuple[str, str, str, str]) -> None:
    check(queue, (2, 3, (6, 5), (4, 5)), mode, types)


@pytest.mark.slow
def test_many_positions(queue: cl.CommandQueue, simulated: bool) -> None:
    check(queue, (2, 5, (23, 31), (9, 13) if simulated else (47, 53)), ("border", False), ("float32",) * 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("plan")
def test_places_far_outside(queue: cl.CommandQueue, mode: tuple[str, bool]) -> None:
    """Zeros, or the border; no gradient for the grid; NaN samples NaN and reaches no pixel."""
    x = to_device(queue, np.arange(1.0, 7).reshape(1, 1, 2, 3))
    far = np.array([[-np.inf, 0], [np.inf, 0], [3e38, -3e38], [-1e9, 2.0**31], [0, -3e9], [np.nan, np.nan], [-40, 40]])
    grid = to_device(queue, far.reshape(1, 1, -1, 2))
    out = to_numpy(ops.grid_sample(x, grid, *mode, out_dtype="float32")).ravel()
    border = np.array([2.5, 4.5, 3, 4, 2, np.nan, 4])
    expected = np.where(np.isnan(border), border, border * (mode[0] == "border"))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    g = to_device(queue, np.ones((1, 1, 1, 7)))
    dgrid = to_numpy(ops.grid_sample_backward_grid(g, x, grid, *mode, out_dtype="float32")).reshape(7, 2)
    np.testing.assert_array_equal(dgrid[[2, 3, 6]], 0)
    assert np.isnan(dgrid[5]).all()
    # Zeros: no place, the NaN's included, has a pixel. Border: all but the NaN's give one each.
    finite = to_device(queue, far[[0, 1, 2, 3, 4, 6]].reshape(1, 1, -1, 2))
    g = to_device(queue, np.ones((1, 1, 1, 6)))
    dx = to_numpy(ops.grid_sample_backward_input(g, finite, x.shape, *mode, out_dtype="float32"))
    assert dx.sum() == pytest.approx(6.0 if mode[0] == "border" else 0.0)


def test_gradients_repeat_bit_for_bit(queue: cl.CommandQueue) -> None:
    rng = np.random.default_rng(3)
    grid = to_device(queue, rng.uniform(-0.2, 0.2, (2, 6, 7, 2)))  # many positions meet in few pixels
    g = to_device(queue, rng.standard_normal((2, 3, 6, 7)))
    runs = [to_numpy(ops.grid_sample_backward_input(g, grid, (2, 3, 4, 5), out_dtype="float32")) for _ in range(3)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("n", "size"), [(1, (1, 1)), (3, (2, 5)), (2, (9, 8)), (1, (3, 33))])
@pytest.mark.usefixtures("plan")
def test_affine_grid(queue: cl.CommandQueue, n: int, size: tuple[int, int], align: bool) -> None:
    rng = np.random.default_rng(4)
    base = np.stack([*np.meshgrid(coordinates(size[1], align), coordinates(size[0], align)), np.ones(size)], -1)
    for source, target in (("float32", "float32"), ("float16", "float32"), ("bfloat16", "float16")):
        theta = to_device(queue, rng.standard_normal((n, 2, 3)), source)
        values = to_numpy(theta)
        got = ops.affine_grid(theta, (n, 4, *size), align, out_dtype=target)
        terms = np.einsum("hwk,nck->nhwc", np.ones_like(base), np.abs(values))
        assert_close(got, np.einsum("hwk,nck->nhwc", base, values), slack=8 * EPS * terms)
        grad = to_device(queue, rng.standard_normal(got.shape), source)
        values = to_numpy(grad)
        slack = (8 + size[0] * size[1]) * EPS * np.einsum("nhwc->nc", np.abs(values))[..., None]
        got = ops.affine_grid_backward(grad, align, out_dtype=target)
        assert_close(got, np.einsum("hwk,nhwc->nck", base, values), slack=slack)


@pytest.mark.parametrize(("count", "n"), [(1, 1), (1, 5), (3, 3)])
def test_rotation(queue: cl.CommandQueue, count: int, n: int) -> None:
    rng = np.random.default_rng(5)
    angles = to_device(queue, rng.uniform(-4, 4, count), "float16")
    a = np.broadcast_to(to_numpy(angles), n)
    c, s, zero = np.cos(a), np.sin(a), np.zeros(n)
    theta = ops.rotation(angles, n)
    assert_close(theta, np.stack([c, s, zero, -s, c, zero], 1).reshape(n, 2, 3), ulps=4, slack=4 * EPS)
    grad = to_device(queue, rng.standard_normal((n, 2, 3)))
    g = to_numpy(grad)
    expected = c * (g[:, 0, 1] - g[:, 1, 0]) - s * (g[:, 0, 0] + g[:, 1, 1])
    expected = expected if count == n else expected.sum(keepdims=True)
    assert_close(ops.rotation_backward(grad, angles, out_dtype="float32"), expected, slack=32 * n * EPS)


def test_empty(queue: cl.CommandQueue) -> None:
    def ones(*shape: int) -> Tensor:
        return to_device(queue, np.ones(shape))

    assert ops.grid_sample(ones(2, 0, 3, 3), ones(2, 4, 4, 2), out_dtype="float32").shape == (2, 0, 4, 4)
    assert ops.grid_sample(ones(2, 3, 3, 3), ones(2, 0, 4, 2), out_dtype="float32").shape == (2, 3, 0, 4)
    empty = ones(2, 3, 0, 4)
    dx = ops.grid_sample_backward_input(empty, ones(2, 0, 4, 2), (2, 3, 2, 2), out_dtype="float16")
    np.testing.assert_array_equal(to_numpy(dx), np.zeros((2, 3, 2, 2)))
    dgrid = ops.grid_sample_backward_grid(ones(2, 0, 1, 4), ones(2, 0, 3, 3), ones(2, 1, 4, 2), out_dtype="float32")
    np.testing.assert_array_equal(to_numpy(dgrid), np.zeros((2, 1, 4, 2)))
    np.testing.assert_array_equal(to_numpy(ops.affine_grid_backward(ones(2, 0, 4, 2), out_dtype="float32")), 0)
