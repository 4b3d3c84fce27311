"""Depthwise convolution under autograd and through netcl's layer."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl import nn

from clamp import amp
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float
from clamp.casting.registry import OWNED
from clamp.functions import depthwise
from tests.functions.operands import half, leaf
from tests.ops.test_depthwise import Reference
from tests.reference import assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
X, W, BIAS = RNG.standard_normal((2, 3, 6, 9)), RNG.standard_normal((3, 1, 3, 3)), RNG.standard_normal(3)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), [("float32", "float32"), ("float16", "float32"), ("float32", "float16")]
)
def test_gradients_have_the_operands_own_dtypes(queue: cl.CommandQueue, x_dtype: str, w_dtype: str) -> None:
    x, w, bias = leaf(queue, X, x_dtype), leaf(queue, W, w_dtype), leaf(queue, BIAS)
    tape = Tape()
    y = depthwise.depthwise_conv2d(half(), x, w, bias, 2, 1, tape=tape)
    assert y.value.dtype == "float16"
    rounded_x, rounded_w = X.astype(np.float16).astype(float), W.astype(np.float16).astype(float)
    exact = Reference(rounded_x, rounded_w, 2, 1)
    assert_close(y.value, exact.value() + to_numpy(bias.value)[:, None, None], slack=2.0**-19)
    grad = to_device(queue, RNG.standard_normal(y.value.shape), "float16")
    tape.backward(y, grad)
    g = to_numpy(grad)
    assert (x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (x_dtype, w_dtype, "float32")
    assert_close(x.grad, exact.input_gradient(g), slack=2.0**-19)
    assert_close(w.grad, exact.weight_gradient(g), slack=2.0**-17)
    assert_close(bias.grad, g.sum((0, 2, 3)), slack=2.0**-18)


def test_a_large_weight_gradient_stays_finite(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, np.full((4, 1, 16, 16), 100.0), "float16"), leaf(queue, np.ones((1, 1, 1, 1)))
    tape = Tape()
    y = depthwise.depthwise_conv2d(half(), x, w, tape=tape)
    tape.backward(y, to_device(queue, np.full(y.value.shape, 1000.0), "float16"))
    assert_close(w.grad, [[[[4 * 256 * 1e5]]]])


@pytest.mark.parametrize("wanted", ["x", "w", "bias"])
def test_only_what_is_needed(queue: cl.CommandQueue, wanted: str) -> None:
    operands = {name: leaf(queue, v, "float32", name == wanted) for name, v in (("x", X), ("w", W), ("bias", BIAS))}
    tape = Tape()
    y = depthwise.depthwise_conv2d(half(), *operands.values(), pad=1, tape=tape)
    tape.backward(y, to_device(queue, np.ones(y.value.shape), "float16"))
    assert {name for name, node in operands.items() if node.grad is not None} == {wanted}


def test_float_policy_bare_tensors_and_no_grad(queue: cl.CommandQueue) -> None:
    x, w, bias = to_device(queue, X, "float16"), to_device(queue, W), to_device(queue, BIAS)
    y = depthwise.depthwise_conv2d(Float(), x, w, bias, pad=1)
    assert isinstance(y, Tensor)
    assert y.dtype == "float32"
    assert_close(y, Reference(to_numpy(x), to_numpy(w), 1, 1).value() + to_numpy(bias)[:, None, None], slack=2.0**-19)
    with ag.no_grad():
        assert isinstance(depthwise.depthwise_conv2d(half(), leaf(queue, X), leaf(queue, W)), Tensor)


def test_tensor_level_functions(queue: cl.CommandQueue) -> None:
    x, w, bias = to_device(queue, X, "float16"), to_device(queue, W, "float16"), to_device(queue, BIAS)
    y = OWNED["netcl.ops.depthwise_conv2d.depthwise_conv2d"](half(), x, w, bias, 1, 1, algo="naive")
    exact = Reference(to_numpy(x), to_numpy(w), 1, 1)
    assert_close(y, exact.value() + to_numpy(bias)[:, None, None], slack=2.0**-19)
    gx, gw, gb = depthwise.depthwise_conv2d_backward(half(), x, w, y, bias, 1, 1)
    assert_close(gx, exact.input_gradient(to_numpy(y)), slack=2.0**-17)
    assert_close(gw, exact.weight_gradient(to_numpy(y)), slack=2.0**-14)
    assert gb is not None
    assert gb.dtype == "float32"
    assert depthwise.depthwise_conv2d_backward(half(), x, w, y, None, 1, 1)[2] is None
    with pytest.raises(NotOwned):
        OWNED["netcl.ops.depthwise_conv2d.depthwise_conv2d"](half(), x, w, out=y)


def test_the_layer(queue: cl.CommandQueue) -> None:
    layer = nn.DepthwiseConv2d(3, 3, stride=2, pad=1, queue=queue)
    with amp.init():
        recorded = layer(leaf(queue, X))
        assert recorded.value.dtype == "float16"
        with ag.no_grad():
            bare = layer(leaf(queue, X))
        np.testing.assert_array_equal(to_numpy(bare), to_numpy(recorded.value))
        Tape().backward(recorded, to_device(queue, np.ones(recorded.value.shape), "float16"))
    assert layer.weight.grad.dtype == "float32"
    assert_close(layer.bias.grad, np.full(3, 2 * 3 * 5.0))


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_scaled_losses_give_scaled_gradients(queue: cl.CommandQueue, scale: float) -> None:
    gradients = []
    for seed in (1.0, scale):
        operands = [leaf(queue, values) for values in (X, W, BIAS)]
        tape = Tape()
        y = depthwise.depthwise_conv2d(Float(), *operands, pad=1, tape=tape)
        tape.backward(y, to_device(queue, np.full(y.value.shape, seed)))
        gradients.append([to_numpy(node.grad) / seed for node in operands])
    for plain, scaled in zip(*gradients, strict=True):
        np.testing.assert_array_equal(plain, scaled)


def test_wrong_arguments(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, X), leaf(queue, W)
    with pytest.raises(ValueError, match="takes x"):
        depthwise.depthwise_conv2d(half(), x, leaf(queue, np.ones((6, 1, 3, 3))))
    with pytest.raises(ValueError, match="bias"):
        depthwise.depthwise_conv2d(half(), x, w, leaf(queue, np.ones(2)))
    with pytest.raises(NotOwned):
        depthwise.depthwise_conv2d(half(), Tensor.from_host(queue, X.astype(np.int32), dtype="int32"), w)
