"""PReLU under autograd and as netcl's layer calls it."""

from __future__ import annotations

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tape
from clamp.casting.policies import Match
from clamp.functions import activations as functions
from tests.functions.operands import leaf
from tests.reference import assert_close, to_device


def test_a_tensor_without_dimensions(queue: cl.CommandQueue) -> None:
    x, slope = (leaf(queue, value) for value in (-2.0, 0.5))
    x.value, slope.value = (bridge.view(node.value, ()) for node in (x, slope))
    out = functions.prelu(Match(), x, slope)
    Tape().backward(out, bridge.view(to_device(queue, 3.0), ()))
    for result, expected in ((out.value, -1.0), (x.grad, 1.5), (slope.grad, -6.0)):
        assert_close(result, expected)


def test_tensor_level(queue: cl.CommandQueue) -> None:
    x, slope = to_device(queue, [[-2.0, 4.0]], "float16"), to_device(queue, [0.5])
    dx, dslope = functions.tensor_prelu_backward(Match(), x, slope, to_device(queue, [[1.0, 1.0]], "float16"))
    assert_close(dx, [[0.5, 1]])
    assert_close(dslope, [-2.0])
