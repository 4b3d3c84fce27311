"""Convolutions in autograd: gradients against float64, mixed dtypes, what netcl's layers call, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl

from clamp.bridge import Parameter, Tape, Tensor
from clamp.casting.policies import Float, Half, Promote
from clamp.functions import conv as functions
from tests.functions.operands import call, half, leaf
from tests.ops.conv_reference import Case, forward, weight_grad
from tests.ops.test_depthwise import Reference
from tests.reference import assert_close, quantize, to_device, to_numpy

HALVES = [half(dtype) for dtype in ("float16", "bfloat16", "float32")]
CASE = Case(2, 3, 4, (6, 7), (3, 3), (2, 2), (1, 1))
WINDOW = {"stride": 2, "pad": 1}


def close(tensor: Tensor, expected: Any) -> None:
    assert_close(tensor, expected, slack=2e-6 * np.abs(expected).max())


def test_conv2d_relu_finds_its_groups(queue: cl.CommandQueue) -> None:
    case = Case(1, 2, 2, (4, 4), (3, 3), groups=3)
    x, w, _ = case.arrays()
    out = call("conv2d_relu", Float(), leaf(queue, x), leaf(queue, w))
    close(out.value, np.maximum(forward(*(quantize(a, "float32") for a in (x, w)), case), 0))  # type: ignore[call-arg]


def test_bare_tensors_in_bare_tensors_out(queue: cl.CommandQueue) -> None:
    x, w, g = CASE.arrays()
    tensors = to_device(queue, x), Parameter.from_host(queue, w.astype(np.float32)), to_device(queue, np.ones(4))
    plain = call("ops.conv2d.conv2d", HALVES[0], *tensors, **WINDOW)
    fused = call("ops.conv2d.conv2d", HALVES[0], *tensors, fuse_relu=True, **WINDOW)
    named = call("ops.fused_ops.fused_conv_bias_relu", HALVES[0], *tensors, 2, 1)
    np.testing.assert_array_equal(to_numpy(fused), np.maximum(to_numpy(plain), 0))
    np.testing.assert_array_equal(to_numpy(named), to_numpy(fused))
    grad = to_device(queue, g, "float16")
    gx, gw, gb = call("ops.conv2d.conv2d_backward", HALVES[0], *tensors[:2], grad, tensors[2], **WINDOW)
    assert {tensor.dtype for tensor in (gx, gw, gb)} == {"float32"}
    np.testing.assert_allclose(to_numpy(gw), weight_grad(x, g, CASE), atol=0.1)
    assert call("ops.conv2d.conv2d_backward", Promote(), *tensors[:2], grad, need_grad_x=False, **WINDOW)[0] is None


def test_a_weight_that_is_used_again_is_packed_once(queue: cl.CommandQueue) -> None:
    casting = Half("float16", lambda source, target: None, True)
    x, w, _ = CASE.arrays()
    weight = Parameter.from_host(queue, w.astype(np.float32))
    image = to_device(queue, x)
    results = [to_numpy(call("conv2d", casting, image, weight, **WINDOW)) for _ in range(4)]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


# ------------------------------------------------------ Depthwise convolution under autograd and through netcl's layer.


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
    y = call("ops.depthwise_conv2d.depthwise_conv2d", half(), x, w, bias, 1, 1, algo="naive")
    exact = Reference(to_numpy(x), to_numpy(w), 1, 1)
    gx, gw, gb = functions.depthwise_conv2d_backward(half(), x, w, y, bias, 1, 1)
    assert_close(gx, exact.input_gradient(to_numpy(y)), slack=2.0**-17)
    assert_close(gw, exact.weight_gradient(to_numpy(y)), slack=2.0**-14)
    assert gb is not None
    assert gb.dtype == "float32"
    assert functions.depthwise_conv2d_backward(half(), x, w, y, None, 1, 1)[2] is None
