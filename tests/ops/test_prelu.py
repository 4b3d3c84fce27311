"""PReLU's backward in one pass, against float64."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import launch
from clamp.ops import prelu as ops
from tests.ops.plans import plans_of
from tests.reference import assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24

#: shape of x, number of slopes: none broadcast, one for all, no pixels, single elements, rows beyond a vector
SHAPES = [
    ((2, 3, 4, 5), 3),
    ((3, 2, 1, 67), 2),
    ((2, 3, 4, 5), 1),
    ((5, 7), 7),
    ((1, 1), 1),
    ((4, 1, 3), 1),
    ((37,), 1),
    ((2, 5, 1, 1), 5),
]


plan = plans_of(launch)


def check(
    queue: cl.CommandQueue, shape: tuple[int, ...], slopes: int, types: tuple[str, str, str], target: str
) -> None:
    """Forward and backward; types of x, slope and gradient, and of what is written."""
    rng = np.random.default_rng(len(shape) + slopes)
    x = to_device(queue, np.where(rng.random(shape) < 0.1, 0.0, rng.standard_normal(shape)), types[0])
    slope = to_device(queue, rng.uniform(-0.5, 0.5, slopes), types[1])
    grad = to_device(queue, rng.standard_normal(shape), types[2])
    values, alpha, g = to_numpy(x), to_numpy(slope), to_numpy(grad)
    beside = alpha.reshape(-1, *(1 for _ in shape[2:])) if slopes > 1 else alpha
    assert_close(ops.prelu(x, slope, out_dtype=target), np.where(values > 0, values, beside * values))
    dx, dslope = ops.prelu_backward(grad, x, slope, dx_dtype=target, slope_dtype=types[1])
    assert_close(dx, np.where(values > 0, g, beside * g))
    terms = np.where(values > 0, 0.0, g * values)
    over = tuple(k for k in range(len(shape)) if k != 1) if slopes > 1 else None
    slack = (8 + values.size // slopes) * EPS * np.abs(terms).sum(over)
    assert_close(dslope, terms.sum(over).reshape(slopes), slack=np.reshape(slack, -1))


@pytest.mark.parametrize(("shape", "slopes"), SHAPES)
@pytest.mark.usefixtures("plan")
def test_every_shape(queue: cl.CommandQueue, shape: tuple[int, ...], slopes: int) -> None:
    check(queue, shape, slopes, ("float16", "float32", "float16"), "float16")


@pytest.mark.parametrize(
    ("types", "target"),
    [
        (("float32", "float32", "float32"), "float32"),
        (("bfloat16", "float16", "bfloat16"), "bfloat16"),
        (("float32", "bfloat16", "float16"), "float32"),
    ],
)
def test_storage_types(queue: cl.CommandQueue, types: tuple[str, str, str], target: str) -> None:
    check(queue, (2, 3, 3, 7), 3, types, target)


@pytest.mark.usefixtures("plan")
def test_long_rows_are_cut_into_parts(queue: cl.CommandQueue, simulated: bool) -> None:
    check(queue, (1, 2, 9000 if simulated else 70001), 2, ("float16", "float32", "float32"), "float16")
    check(queue, (3, 5, 601 if simulated else 9001), 1, ("float16", "float32", "float16"), "float16")


def test_special_values(queue: cl.CommandQueue) -> None:
    inf, nan = np.inf, np.nan
    x = to_device(queue, [[[inf, -inf, nan, -0.0, 0.0, 65504, -65504, 6e-8]]], "float16")
    slope = to_device(queue, [0.5])
    expected = [inf, -inf, nan, -0.0, 0.0, 65504, -32752, to_numpy(x)[0, 0, 7]]
    got = to_numpy(ops.prelu(x, slope, out_dtype="float16"))[0, 0]
    np.testing.assert_array_equal(got, expected)
    assert np.signbit(got[3])
    # The gradient of the slope takes nothing from where x is positive, whatever arrives there.
    grad = to_device(queue, [[[inf, 1, 1, 1, 1, nan, 2, inf]]])
    dx, dslope = ops.prelu_backward(grad, x, slope, dx_dtype="float32", slope_dtype="float32")
    np.testing.assert_array_equal(to_numpy(dx)[0, 0], [inf, 0.5, 0.5, 0.5, 0.5, nan, 1, inf])
    np.testing.assert_array_equal(to_numpy(dslope), [nan])  # of the NaN in x, which is not positive
    x = to_device(queue, [[[inf, -inf, 65504]]], "float16")
    _, dslope = ops.prelu_backward(to_device(queue, [[[nan, 1, inf]]]), x, slope, dx_dtype=None, slope_dtype="float32")
    np.testing.assert_array_equal(to_numpy(dslope), [-inf])


def test_only_what_is_wanted(queue: cl.CommandQueue) -> None:
    for shape in ((2, 3, 4), (2, 3), (0, 3, 4)):
        x, slope = to_device(queue, -np.ones(shape)), to_device(queue, np.full(3, 0.25))
        dx, dslope = ops.prelu_backward(x, x, slope, dx_dtype="float32", slope_dtype=None)
        np.testing.assert_array_equal(to_numpy(dx), np.full(shape, -0.25))
        assert dslope is None
        dx, dslope = ops.prelu_backward(x, x, slope, dx_dtype=None, slope_dtype="float32")
        assert dx is None
        np.testing.assert_array_equal(to_numpy(dslope), np.full(3, np.prod(shape) / 3))
