"""PReLU under autograd and as netcl's layer calls it."""

from __future__ import annotations

import numpy as np
import pyopencl as cl

from clamp.bridge import Tensor
from clamp.casting.policies import Match
from clamp.casting.registry import OWNED
from clamp.functions import activations as functions
from tests.reference import assert_close, to_device

RNG = np.random.default_rng(0)


def test_tensor_level(queue: cl.CommandQueue) -> None:
    x, slope = to_device(queue, [[-2.0, 4.0]], "float16"), to_device(queue, [0.5])
    out = OWNED["netcl.ops.elementwise.prelu"](Match(), x, slope)
    assert isinstance(out, Tensor)
    assert_close(out, [[-1, 4]])
    dx, dslope = functions.tensor_prelu_backward(Match(), x, slope, to_device(queue, [[1.0, 1.0]], "float16"))
    assert_close(dx, [[0.5, 1]])
    assert_close(dslope, [-2.0])
