"""Rotary positions against numpy's float64, from the float32 angles that the function promises."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import launch
from clamp.ops import rope as module
from clamp.ops.rope import rope
from tests.conformance.attention import rope as reference
from tests.ops.plans import plans_of
from tests.reference import assert_close, integers, to_device, to_numpy

pytestmark = pytest.mark.kernel


plan = plans_of(module, launch)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("shape", [(1, 2), (3, 7, 6), (2, 2, 5, 64), (2, 3, 34), (1, 1, 9, 50)])
def test_shapes(queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], source: str, target: str) -> None:
    rng = np.random.default_rng(0)
    x = to_device(queue, rng.standard_normal(shape), source)
    places = rng.integers(0, 500, shape[-2])
    values = to_numpy(x)
    slack = 2.0**-22 * np.abs(values).max()
    for inverse in (False, True):
        out = rope(x, integers(queue, places), inverse=inverse, out_dtype=target)
        assert_close(out, reference(values, -places if inverse else places), slack=slack)


def test_far_positions(queue: cl.CommandQueue) -> None:
    places = np.array([0, 1, 11, 355, 710, 99_998, 99_999, 100_000, 1_000_003, 2**24, -5, -100_000])
    x = to_device(queue, np.random.default_rng(1).standard_normal((len(places), 40)))
    out = rope(x, integers(queue, places), 500.0, out_dtype="float32")
    assert_close(out, reference(to_numpy(x), places, 500.0), slack=2.0**-21)


def test_floating_positions(queue: cl.CommandQueue) -> None:
    places = np.array([0.5, 1.25, -3.0])
    x = to_device(queue, np.ones((3, 4)))
    out = rope(x, to_device(queue, places, "float16"), out_dtype="float32")
    assert_close(out, reference(np.ones((3, 4)), places), slack=2.0**-21)


def test_special_values_stay_in_their_pair(queue: cl.CommandQueue) -> None:
    x = np.ones((2, 6))
    x[0, 1], x[1, 2] = np.nan, np.inf
    out = to_numpy(rope(to_device(queue, x, "float16"), integers(queue, np.array([1, 2])), out_dtype="float16"))
    np.testing.assert_array_equal(np.isnan(out), [[1, 1, 0, 0, 0, 0], [0] * 6])
    np.testing.assert_array_equal(np.isinf(out), [[0] * 6, [0, 0, 1, 1, 0, 0]])


def test_the_inverse_turns_back(queue: cl.CommandQueue, simulated: bool) -> None:
    shape = (2, 9 if simulated else 300, 64)
    x = to_device(queue, np.random.default_rng(2).standard_normal(shape))
    places = integers(queue, np.arange(shape[1]))
    back = rope(rope(x, places, out_dtype="float32"), places, inverse=True, out_dtype="float32")
    assert_close(back, to_numpy(x), slack=2.0**-20)


def test_empty(queue: cl.CommandQueue) -> None:
    nothing = to_device(queue, np.empty((0, 2, 4)))
    assert rope(nothing, integers(queue, np.arange(2)), out_dtype="float16").shape == (0, 2, 4)
