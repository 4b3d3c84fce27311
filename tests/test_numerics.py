"""What docs/numerics.md says of weights that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node
from tests.reference import to_device, to_numpy


@pytest.fixture(autouse=True)
def handle() -> Iterator[amp.AmpHandle]:
    with amp.init(dtype="float32") as handle:
        yield handle


def _run(queue: cl.CommandQueue, name: str, tap: tuple[int, int], **kwargs: int) -> Any:
    """The result for 6 x 6 ones and a kernel of ones, of which one tap is infinite."""
    w = np.ones((1, 1, 3, 3))
    w[0, 0, *tap] = np.inf
    image, kernel = (Node(value=to_device(queue, array)) for array in (np.ones((1, 1, 6, 6)), w))
    return to_numpy(getattr(ag, name)(image, kernel, None, **kwargs).value)[0, 0]


def test_an_infinite_weight_of_conv2d_is_nan_where_it_meets_padding(queue: cl.CommandQueue) -> None:
    y = _run(queue, "conv2d", (0, 0), pad=1)
    assert np.isnan(y[0]).all()
    assert np.isnan(y[:, 0]).all()
    assert np.isposinf(y[1:, 1:]).all()


@pytest.mark.parametrize("stride", [1, 2])
def test_an_infinite_weight_of_conv_transpose2d_spreads_to_the_edges_only(queue: cl.CommandQueue, stride: int) -> None:
    y = _run(queue, "conv_transpose2d", (0, 0), stride=stride)
    reached = y[: 5 * stride + 1, : 5 * stride + 1]
    assert np.isposinf(reached[::stride, ::stride]).all()
    others = np.ones(reached.shape, bool)
    others[::stride, ::stride] = False
    assert np.isfinite(reached[others]).all()
    assert not np.isposinf(y[5 * stride + 1 :]).any()  # NaN, or finite


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_an_infinite_weight_of_a_depthwise_convolution_shows_wherever_it_meets_the_image(
    queue: cl.CommandQueue, stride: int
) -> None:
    y = _run(queue, "depthwise_conv2d", (0, 0), pad=1, stride=stride)
    assert np.isposinf(y[1:, 1:]).all()
    assert not np.isposinf(y[0]).any()  # NaN, or finite
    assert not np.isposinf(y[:, 0]).any()
