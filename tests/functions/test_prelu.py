"""PReLU under autograd and as netcl's layer calls it."""

from __future__ import annotations

import pyopencl as cl

from clamp.casting.policies import Match
from clamp.functions import activations as functions
from tests.reference import assert_close, to_device


def test_tensor_level(queue: cl.CommandQueue) -> None:
    x, slope = to_device(queue, [[-2.0, 4.0]], "float16"), to_device(queue, [0.5])
    dx, dslope = functions.tensor_prelu_backward(Match(), x, slope, to_device(queue, [[1.0, 1.0]], "float16"))
    assert_close(dx, [[0.5, 1]])
    assert_close(dslope, [-2.0])
