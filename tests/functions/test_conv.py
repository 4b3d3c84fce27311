"""Convolutions in autograd: gradients against float64, mixed dtypes, what netcl's layers call, bad input."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.nn.layers import _FusedConvReLUTrain

import clamp.functions.conv  # noqa: F401  (registers)
from clamp import amp
from clamp.bridge import Parameter, Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Half, Promote
from clamp.casting.registry import OWNED
from tests.functions.operands import half, leaf
from tests.ops.conv_reference import Case, forward, input_grad, weight_grad
from tests.reference import assert_close, quantize, to_device, to_numpy

HALVES = [half(dtype) for dtype in ("float16", "bfloat16", "float32")]
DTYPES = pytest.mark.parametrize("casting", HALVES, ids=lambda casting: casting.dtype)
CASE = Case(2, 3, 4, (6, 7), (3, 3), (2, 2), (1, 1))
WINDOW = {"stride": 2, "pad": 1}


def call(name: str, casting: Any, *args: Any, **kwargs: Any) -> Any:
    return OWNED[name if "." in name else f"netcl.autograd.{name}"](casting, *args, **kwargs)


def close(tensor: Tensor, expected: Any) -> None:
    assert_close(tensor, expected, slack=2e-6 * np.abs(expected).max())


@DTYPES
@pytest.mark.parametrize("case", [CASE, Case(1, 2, 3, (5, 6), (3, 2), (1, 1), (2, 2), (2, 2), groups=2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv2d_and_its_gradients(queue: cl.CommandQueue, casting: Half, case: Case, with_bias: bool) -> None:
    x, w, g = case.arrays()
    bias = np.linspace(-1, 1, len(w))
    nodes = [leaf(queue, a) for a in (x, w, bias)][: 3 if with_bias else 2]
    options = {"stride": case.stride, "pad": case.pad, "dilation": case.dilation, "groups": case.groups}
    out = call("conv2d", casting, *nodes, **options)
    assert out.value.dtype == casting.dtype
    x, w = (quantize(a.astype(np.float32), casting.dtype).astype(np.float64) for a in (x, w))
    expected = forward(x, w, case) + (bias.astype(np.float32)[:, None, None] if with_bias else 0)
    close(out.value, expected)
    grad = to_device(queue, g, casting.dtype)
    Tape().backward(out, grad)
    g = to_numpy(grad)
    for node, want in zip(nodes, (input_grad(g, w, case), weight_grad(x, g, case), g.sum((0, 2, 3))), strict=False):
        assert node.grad.dtype == "float32", "a leaf's gradient has the leaf's dtype"
        close(node.grad, want)


@DTYPES
def test_conv2d_relu_and_its_gradients(queue: cl.CommandQueue, casting: Half) -> None:
    x, w, g = CASE.arrays()
    bias = np.linspace(-1, 1, len(w))
    nodes = [leaf(queue, a) for a in (x, w, bias)]
    out = call("conv2d_relu", casting, *nodes, **WINDOW)
    grad = to_device(queue, g, casting.dtype)
    Tape().backward(out, grad)
    x, w = (quantize(a.astype(np.float32), casting.dtype).astype(np.float64) for a in (x, w))
    close(out.value, np.maximum(forward(x, w, CASE) + bias.astype(np.float32)[:, None, None], 0))
    g = to_numpy(grad) * (to_numpy(out.value) > 0)
    for node, want in zip(nodes, (input_grad(g, w, CASE), weight_grad(x, g, CASE), g.sum((0, 2, 3))), strict=True):
        close(node.grad, want)


def test_conv2d_relu_finds_its_groups(queue: cl.CommandQueue) -> None:
    case = Case(1, 2, 2, (4, 4), (3, 3), groups=3)
    x, w, _ = case.arrays()
    out = call("conv2d_relu", Float(), leaf(queue, x), leaf(queue, w))
    close(out.value, np.maximum(forward(*(quantize(a, "float32") for a in (x, w)), case), 0))  # type: ignore[call-arg]


@DTYPES
def test_conv_transpose2d_and_its_gradients(queue: cl.CommandQueue, casting: Half) -> None:
    case = Case(2, 3, 4, (7, 9), (3, 3), (2, 2), (1, 1))
    g, w, x = case.arrays()  # the convolution's output gradient is what is convolved here
    bias = np.linspace(-1, 1, 3)
    nodes = [leaf(queue, a) for a in (x, w, bias)]
    out = call("conv_transpose2d", casting, *nodes, **WINDOW)
    x, w = (quantize(a.astype(np.float32), casting.dtype).astype(np.float64) for a in (x, w))
    close(out.value, input_grad(x, w, case) + bias.astype(np.float32)[:, None, None])
    grad = to_device(queue, g, casting.dtype)
    Tape().backward(out, grad)
    g = to_numpy(grad)
    for node, want in zip(nodes, (forward(g, w, case), weight_grad(g, x, case), g.sum((0, 2, 3))), strict=True):
        assert node.grad.dtype == "float32"
        close(node.grad, want)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("casting", [Promote(), Float(), HALVES[0]], ids=["promote", "float", "half"])
def test_mixed_inputs(queue: cl.CommandQueue, casting: Any, dtypes: tuple[str, str]) -> None:
    x, w, g = CASE.arrays()
    left, right = leaf(queue, x, dtypes[0]), leaf(queue, w, dtypes[1])
    out = call("conv2d", casting, left, right, **WINDOW)
    dtype = "float16" if casting is HALVES[0] else "float32"
    assert out.value.dtype == dtype
    Tape().backward(out, to_device(queue, g, dtype))
    assert (left.grad.dtype, right.grad.dtype) == dtypes
    np.testing.assert_allclose(to_numpy(out.value), forward(x, w, CASE), atol=0.1)
    np.testing.assert_allclose(to_numpy(left.grad), input_grad(g, w, CASE), atol=0.1)
    np.testing.assert_allclose(to_numpy(right.grad), weight_grad(x, g, CASE), atol=0.2)


def test_an_input_that_needs_no_gradient_gets_none(queue: cl.CommandQueue) -> None:
    x, w, g = CASE.arrays()
    image, weight, bias = leaf(queue, x, requires_grad=False), leaf(queue, w), leaf(queue, np.ones(4), "float16", False)
    out = call("conv2d", HALVES[0], image, weight, bias, **WINDOW)
    Tape().backward(out, to_device(queue, g, "float16"))
    assert image.grad is None
    assert bias.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("exponent", [-10, 0, 8, 16])
def test_the_scale_divides_out(queue: cl.CommandQueue, exponent: int) -> None:
    x, w, g = CASE.arrays()
    scale = 2.0**exponent

    def gradients(factor: float) -> list[Any]:
        nodes = [leaf(queue, x), leaf(queue, w), leaf(queue, np.zeros(4))]
        out = call("conv2d_relu", HALVES[0], *nodes, **WINDOW)
        Tape().backward(out, to_device(queue, g * 0.1 * factor, "float16"))
        return [to_numpy(node.grad) / factor for node in nodes]

    for scaled, plain in zip(gradients(scale), gradients(1.0), strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=2e-3, atol=2e-3 * np.abs(plain).max())


def test_bare_tensors_in_bare_tensors_out(queue: cl.CommandQueue) -> None:
    x, w, g = CASE.arrays()
    tensors = to_device(queue, x), Parameter.from_host(queue, w.astype(np.float32)), to_device(queue, np.ones(4))
    plain = call("netcl.ops.conv2d.conv2d", HALVES[0], *tensors, **WINDOW)
    assert isinstance(plain, Tensor)
    assert plain.dtype == "float16"
    fused = call("netcl.ops.conv2d.conv2d", HALVES[0], *tensors, fuse_relu=True, **WINDOW)
    named = call("netcl.ops.fused_ops.fused_conv_bias_relu", HALVES[0], *tensors, 2, 1)
    np.testing.assert_array_equal(to_numpy(fused), np.maximum(to_numpy(plain), 0))
    np.testing.assert_array_equal(to_numpy(named), to_numpy(fused))
    back = call("netcl.ops.conv_transpose2d.conv_transpose2d", HALVES[0], plain, tensors[1], **WINDOW)
    assert (back.dtype, back.shape) == ("float16", (2, 3, 5, 7))
    grad = to_device(queue, g, "float16")
    gx, gw, gb = call("netcl.ops.conv2d.conv2d_backward", HALVES[0], *tensors[:2], grad, tensors[2], **WINDOW)
    assert {tensor.dtype for tensor in (gx, gw, gb)} == {"float32"}
    np.testing.assert_allclose(to_numpy(gw), weight_grad(x, g, CASE), atol=0.1)
    assert (
        call("netcl.ops.conv2d.conv2d_backward", Promote(), *tensors[:2], grad, need_grad_x=False, **WINDOW)[0] is None
    )
    with pytest.raises(NotOwned):
        call("netcl.ops.conv2d.conv2d", HALVES[0], *tensors, out=plain, **WINDOW)


def test_a_weight_that_is_used_again_is_packed_once(queue: cl.CommandQueue) -> None:
    casting = Half("float16", lambda source, target: None, True)
    x, w, _ = CASE.arrays()
    weight = Parameter.from_host(queue, w.astype(np.float32))
    image = to_device(queue, x)
    results = [to_numpy(call("conv2d", casting, image, weight, **WINDOW)) for _ in range(4)]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": 0}, "stride is 0"),
        ({"pad": -1}, "pad is -1"),
        ({"dilation": (1, 2, 3)}, "dilation is"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": 3}, "channels"),
        ({"dilation": 9}, "larger than the image"),
    ],
)
def test_bad_arguments(queue: cl.CommandQueue, arguments: dict[str, Any], message: str) -> None:
    x, w = leaf(queue, np.ones((1, 3, 6, 7))), leaf(queue, np.ones((4, 3, 3, 3)))
    with pytest.raises(ValueError, match=message):
        call("conv2d", Float(), x, w, **arguments)


def test_bad_shapes(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, np.ones((1, 3, 6, 7))), leaf(queue, np.ones((4, 3, 3, 3)))
    with pytest.raises(ValueError, match="four dimensions"):
        call("conv2d", Float(), leaf(queue, np.ones((3, 6, 7))), w)
    with pytest.raises(ValueError, match="the bias has shape"):
        call("conv2d", Float(), x, w, leaf(queue, np.ones(3)))
    with pytest.raises(ValueError, match="has 3 channels"):
        call("conv_transpose2d", Float(), x, w)
    with pytest.raises(ValueError, match="leaves no pixel"):
        call("conv_transpose2d", Float(), leaf(queue, np.ones((1, 4, 1, 1))), w, pad=2)


@pytest.mark.parametrize(
    "full_name",
    ["netcl.autograd.conv2d", "netcl.autograd.conv2d_relu", "netcl.autograd.conv_transpose2d",
     "netcl.ops.conv2d.conv2d", "netcl.ops.conv2d.conv2d_backward", "netcl.ops.conv_transpose2d.conv_transpose2d",
     "netcl.ops.fused_ops.fused_conv_bias_relu"],
)  # fmt: skip
def test_signatures_are_netcls(full_name: str) -> None:
    module, _, name = full_name.rpartition(".")
    importlib.import_module(module)
    netcls = inspect.signature(getattr(sys.modules[module], name)).parameters
    ours = list(inspect.signature(OWNED[full_name]).parameters.items())[1:]
    assert [(n, p.default) for n, p in ours] == [(n, p.default) for n, p in netcls.items()]


def test_netcls_layers(queue: cl.CommandQueue) -> None:
    from netcl import autograd as ag
    from netcl import nn

    layer = nn.Conv2d(queue, 4, 6, kernel_size=3, pad=1, groups=2)
    x = to_device(queue, np.random.default_rng(0).standard_normal((2, 4, 5, 5)))
    with amp.init():
        recorded = layer(ag.tensor(x))
        fused = _FusedConvReLUTrain(layer)(ag.tensor(x))
        with ag.no_grad():
            bare = layer(x)
    assert recorded.value.dtype == bare.dtype == fused.value.dtype == "float16"
    np.testing.assert_array_equal(to_numpy(recorded.value), to_numpy(bare))
    np.testing.assert_array_equal(to_numpy(fused.value), np.maximum(to_numpy(bare), 0))
