"""Depthwise convolution under autograd and through netcl's layer."""

from __future__ import annotations

import numpy as np
import pyopencl as cl

from clamp.bridge import Tape
from clamp.casting.registry import OWNED
from clamp.functions import conv as functions
from tests.functions.operands import half, leaf
from tests.ops.test_depthwise import Reference
from tests.reference import assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
X, W, BIAS = RNG.standard_normal((2, 3, 6, 9)), RNG.standard_normal((3, 1, 3, 3)), RNG.standard_normal(3)


def test_a_large_weight_gradient_stays_finite(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, np.full((4, 1, 16, 16), 100.0), "float16"), leaf(queue, np.ones((1, 1, 1, 1)))
    tape = Tape()
    y = functions.depthwise_conv2d(half(), x, w, tape=tape)
    tape.backward(y, to_device(queue, np.full(y.value.shape, 1000.0), "float16"))
    assert_close(w.grad, [[[[4 * 256 * 1e5]]]])


def test_tensor_level_functions(queue: cl.CommandQueue) -> None:
    x, w, bias = to_device(queue, X, "float16"), to_device(queue, W, "float16"), to_device(queue, BIAS)
    y = OWNED["netcl.ops.depthwise_conv2d.depthwise_conv2d"](half(), x, w, bias, 1, 1, algo="naive")
    exact = Reference(to_numpy(x), to_numpy(w), 1, 1)
    gx, gw, gb = functions.depthwise_conv2d_backward(half(), x, w, y, bias, 1, 1)
    assert_close(gx, exact.input_gradient(to_numpy(y)), slack=2.0**-17)
    assert_close(gw, exact.weight_gradient(to_numpy(y)), slack=2.0**-14)
    assert gb is not None
    assert gb.dtype == "float32"
    assert functions.depthwise_conv2d_backward(half(), x, w, y, None, 1, 1)[2] is None
