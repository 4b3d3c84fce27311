"""Resizing and its gradient against matrices in float64: y = R x C^T, so dx = R^T g C."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import upsample as ops
from tests.conformance.spatial import axis_weights
from tests.ops.plans import plans_of
from tests.reference import assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24

#: planes, input extents, output extents: doubled (also beyond a vector and a strip), odd ratios, shrunk, single
SHAPES = [
    ((1, 1), (1, 1), (1, 1)),
    ((2, 1), (3, 5), (6, 10)),
    ((1, 2), (5, 16), (10, 32)),
    ((1, 1), (2, 37), (4, 74)),
    ((1, 3), (4, 7), (7, 19)),
    ((1, 1), (7, 20), (3, 6)),
    ((2, 2), (1, 6), (5, 12)),
    ((1, 1), (5, 1), (2, 2)),
    ((1, 1), (3, 2), (9, 45)),
]
MODES = [("nearest", False), ("bilinear", False), ("bilinear", True)]


plan = plans_of(ops)


def check(
    queue: cl.CommandQueue,
    planes: tuple[int, ...],
    hw: tuple[int, int],
    size: tuple[int, int],
    mode: tuple[str, bool],
    source: str,
    target: str,
) -> None:
    rng = np.random.default_rng(0)
    r, c = (axis_weights(hw[k], size[k], *mode) for k in (0, 1))
    x = to_device(queue, rng.standard_normal((*planes, *hw)), source)
    values = to_numpy(x)
    # A weight near zero is a difference from one: what it is wrong by counts in ulps of one.
    reach = ((r > 0) * 1.0, (c > 0) * 1.0)
    slack = 8 * EPS * (reach[0] @ np.abs(values) @ reach[1].T)
    assert_close(ops.upsample(x, size, *mode, out_dtype=target), r @ values @ c.T, slack=slack)
    g = to_device(queue, rng.standard_normal((*planes, *size)), source)
    values = to_numpy(g)
    terms = r.sum(0).max() + c.sum(0).max()
    slack = (8 + 2 * terms) * EPS * (reach[0].T @ np.abs(values) @ reach[1])
    assert_close(ops.upsample_backward(g, x.shape, *mode, out_dtype=target), r.T @ values @ c, slack=slack)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("planes", "hw", "size"), SHAPES)
@pytest.mark.usefixtures("plan")
def test_every_shape(
    queue: cl.CommandQueue, planes: tuple[int, int], hw: tuple[int, int], size: tuple[int, int], mode: tuple[str, bool]
) -> None:
    check(queue, planes, hw, size, mode, "float16", "float32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_storage_types(queue: cl.CommandQueue, source: str, target: str, mode: tuple[str, bool]) -> None:
    for size in ((6, 36), (8, 11)):
        check(queue, (1, 2), (3, 18), size, mode, source, target)


def test_more_than_one_strip_and_band(queue: cl.CommandQueue, simulated: bool) -> None:
    for mode in MODES:
        check(
            queue, (1, 1), (9, 131 if simulated else 300), (18, 262 if simulated else 600), mode, "float32", "float32"
        )
        check(queue, (1, 1), (9, 7), (31, 261 if simulated else 777), mode, "float32", "float32")


@pytest.mark.parametrize("plan", ["other plan"], indirect=True)
def test_netcl_picks_the_same_pixels(queue: cl.CommandQueue, plan: None, simulated: bool) -> None:
    from netcl.ops.upsample import upsample

    for inputs, outputs in ((7, 25), (3, 41), (10, 49), (49, 10), (6, 7)):
        x = to_device(queue, np.arange(inputs, dtype=np.float32).reshape(1, 1, 1, inputs))
        expected = upsample(x, size=(1, outputs)).to_host()
        np.testing.assert_array_equal(to_numpy(ops.upsample(x, (1, outputs), out_dtype="float32")), expected)


@pytest.mark.parametrize("mode", MODES)
def test_special_values_stay_where_they_are(queue: cl.CommandQueue, mode: tuple[str, bool]) -> None:
    """A pixel that has no part in an output cannot make it NaN, even with a weight of zero."""
    x = np.arange(6.0).reshape(1, 1, 1, 6)
    x[..., 3] = np.inf
    for size in ((1, 6), (1, 11), (3, 12)):
        got = to_numpy(ops.upsample(to_device(queue, x), size, *mode, out_dtype="float32"))
        touched = axis_weights(6, size[1], *mode)[:, 3] > 0
        assert np.isposinf(got[..., touched]).all()
        assert np.isfinite(got[..., ~touched]).all()
    grad = np.ones((1, 1, 1, 6))
    grad[..., 3] = np.nan
    got = to_numpy(ops.upsample_backward(to_device(queue, grad), (1, 1, 1, 6), *mode, out_dtype="float32"))
    np.testing.assert_array_equal(got, grad)


def test_largest_halves_do_not_overflow(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.full((1, 1, 2, 3), 65504.0), "float16")
    for size in ((4, 6), (5, 5)):
        assert_close(ops.upsample(x, size, "bilinear", out_dtype="float16"), np.full((1, 1, *size), 65504.0))


def test_empty(queue: cl.CommandQueue) -> None:
    nothing = to_device(queue, np.empty((0, 3, 2, 2)))
    assert ops.upsample(nothing, (4, 4), out_dtype="float32").shape == (0, 3, 4, 4)
