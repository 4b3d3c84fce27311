"""Views share the buffer forward and backward; permutations are numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tape, Tensor
from clamp.casting.operands import say_nothing
from clamp.casting.policies import Half, Match
from clamp.functions import shape as F
from tests.functions.operands import leaf
from tests.reference import STORAGE_DTYPES, to_device, to_numpy

VIEWS = [
    (F.reshape, {"shape": (4, 6)}, (4, 6)),
    (F.reshape, {"shape": [-1, 2]}, (12, 2)),
    (F.flatten, {"shape": (24,)}, (24,)),
    (F.flatten, {"shape": (2, -1)}, (2, 12)),
    (F.unsqueeze, {"axis": 1}, (2, 1, 3, 1, 4)),
    (F.unsqueeze, {"axis": -1}, (2, 3, 1, 4, 1)),
    (F.squeeze, {}, (2, 3, 4)),
    (F.squeeze, {"axis": -2}, (2, 3, 4)),
]


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(("function", "arguments", "shape"), VIEWS)
def test_views(queue: cl.CommandQueue, function: Any, arguments: Any, shape: tuple[int, ...], dtype: str) -> None:
    values = np.arange(24.0).reshape(2, 3, 1, 4)
    x = leaf(queue, values, dtype)
    tape = Tape()
    out = function(Match(), x, **arguments, tape=tape)
    assert out.value.buffer is x.value.buffer
    assert out.value.dtype == dtype
    np.testing.assert_array_equal(to_numpy(out.value), values.reshape(shape))
    grad = to_device(queue, np.ones(shape), dtype)
    tape.backward(out, grad)
    assert x.grad.shape == values.shape
    assert x.grad.buffer is grad.buffer


@pytest.mark.parametrize(
    ("function", "arguments"), [*((f, given) for f, given, _ in VIEWS), (F.permute, {"dims": (3, 0, 1, 2)})]
)
def test_a_leaf_that_is_read_in_16_bits_gets_a_float32_gradient(
    queue: cl.CommandQueue, function: Any, arguments: Any
) -> None:
    """Where a custom list puts one of these under half."""
    x, tape = leaf(queue, np.arange(24.0).reshape(2, 3, 1, 4), "float32"), Tape()
    out = function(Half("float16", say_nothing, use_cache=False), x, **arguments, tape=tape)
    assert out.value.dtype == "float16"
    tape.backward(out, to_device(queue, np.full(out.value.shape, 3.0), "float16"))
    assert x.grad.dtype == "float32"
    np.testing.assert_array_equal(to_numpy(x.grad), np.full((2, 3, 1, 4), 3.0))


def test_integers_are_moved_too(queue: cl.CommandQueue) -> None:
    host = np.arange(6, dtype=np.int32).reshape(2, 3)
    x = Tensor.from_host(queue, host, dtype="int32")
    np.testing.assert_array_equal(F.permute(Match(), x, (1, 0)).to_host(), host.T)
    np.testing.assert_array_equal(F.reshape(Match(), x, (3, 2)).to_host(), host.reshape(3, 2))
    np.testing.assert_array_equal(F.tensor_transpose2d(Match(), x).to_host(), host.T)


def test_what_is_empty_has_any_empty_shape(queue: cl.CommandQueue) -> None:
    nothing = to_device(queue, np.empty((0, 3)))
    assert [tuple(F.reshape(Match(), nothing, shape).shape) for shape in ((3, 0), (0,))] == [(3, 0), (0,)]
