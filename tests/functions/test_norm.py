"""Norms under autograd, on bare tensors and in netcl's layers, against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting
from clamp.casting.policies import Float, Half, Match
from clamp.casting.registry import OWNED
from clamp.functions import norm as F
from tests.conformance.norm import of_channels
from tests.functions.operands import half, leaf
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

RNG = np.random.default_rng(0)
EPS = 2.0**-24
SHAPE = (3, 4, 5, 3)
AXES = (0, 2, 3)

_NAMES = ("batch_norm2d", "batch_norm2d_relu", "batch_norm2d_leaky_relu", "group_norm", "layer_norm", "rms_norm")
nodes = SimpleNamespace(**{name: OWNED[f"netcl.autograd.{name}"] for name in _NAMES})  # without the statistics


def parameters(queue: cl.CommandQueue, n: int, requires_grad: bool = True) -> tuple[Node, Node]:
    return leaf(queue, RNG.uniform(0.5, 1.5, n), requires_grad=requires_grad), leaf(
        queue, RNG.standard_normal(n), requires_grad=requires_grad
    )


def running(queue: cl.CommandQueue, channels: int) -> tuple[Tensor, Tensor]:
    return to_device(queue, np.zeros(channels)), to_device(queue, np.ones(channels))


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("casting", [Match(), Float(), half()], ids=["match", "float", "half"])
def test_running_statistics(queue: cl.CommandQueue, casting: Casting, dtype: str) -> None:
    for function in (nodes.batch_norm2d, nodes.batch_norm2d_relu, nodes.batch_norm2d_leaky_relu):
        x, (mean, var) = leaf(queue, RNG.standard_normal(SHAPE), dtype), running(queue, 4)
        function(casting, x, *parameters(queue, 4), mean, var)
        values = to_numpy(x.value)
        if isinstance(casting, Half):
            values = quantize(values, "float16").astype(float)
        assert_close(mean, 0.1 * values.mean(AXES), slack=64 * EPS)
        assert_close(var, 0.9 + 0.1 * values.var(AXES), slack=64 * EPS)


def test_evaluation_backward_uses_the_statistics_of_its_forward(queue: cl.CommandQueue) -> None:
    x, (gamma, beta), (mean, var) = (
        leaf(queue, RNG.standard_normal(SHAPE), "float16"),
        parameters(queue, 4),
        running(queue, 4),
    )
    tape = Tape()
    out = nodes.batch_norm2d(Match(), x, gamma, beta, mean, var, training=False, tape=tape)
    nodes.batch_norm2d(Match(), leaf(queue, 100 + 9 * RNG.standard_normal(SHAPE)), gamma, beta, mean, var, momentum=1.0)
    assert to_numpy(mean).min() > 50
    grad = to_device(queue, RNG.standard_normal(SHAPE), "float16")
    tape.backward(out, grad)
    expected = to_numpy(grad) * of_channels(to_numpy(gamma.value)) / np.sqrt(1 + 1e-5)
    assert_close(x.grad, expected, slack=8 * EPS)
    expected = (to_numpy(grad) * to_numpy(x.value)).sum(AXES) / np.sqrt(1 + 1e-5)
    assert_close(gamma.grad, expected, slack=2048 * EPS)


def test_bare_tensors(queue: cl.CommandQueue) -> None:
    x, gamma = to_device(queue, RNG.standard_normal(SHAPE), "float16"), to_device(queue, RNG.uniform(1, 2, 4))
    values, mean, var = to_numpy(x), *running(queue, 4)
    out, batch_mean, batch_var = F.batch_norm2d(Match(), x, gamma, gamma, mean, var)
    assert isinstance(out, Tensor)
    assert out.dtype == "float16"
    assert_close(batch_mean, values.mean(AXES), slack=64 * EPS)
    assert_close(batch_var, values.var(AXES), slack=64 * EPS)
    _, given_mean, given_var = F.batch_norm2d(Match(), x, gamma, gamma, mean, var, training=False)
    assert given_mean is mean
    assert given_var is var
    scale = to_device(queue, RNG.uniform(1, 2, 3))
    out, row_mean, row_var = F.layer_norm(Float(), x, scale, scale)
    assert out.dtype == "float32"
    assert row_mean.shape == row_var.shape == (*SHAPE[:-1], 1)
    _, group_mean, _ = F.group_norm(Float(), x, gamma, gamma, 2)
    assert group_mean.shape == (3, 2)
    out, inverse = F.rms_norm(Float(), x, scale)
    assert_close(inverse, 1 / np.sqrt((values**2).mean(-1).reshape(-1) + 1e-6), slack=256 * EPS)
    assert F.tensor_l2_normalize(Float(), x).dtype == "float32"
    shifted = F.fused_bn_relu(Match(), x, gamma, gamma)
    gamma_values = of_channels(to_numpy(gamma))
    assert_close(shifted, np.maximum(values * gamma_values + gamma_values, 0))


def test_backwards_of_bare_tensors_are_those_of_autograd(queue: cl.CommandQueue) -> None:
    x, grad = (
        leaf(queue, RNG.standard_normal(SHAPE), "float16"),
        to_device(queue, RNG.standard_normal(SHAPE), "float16"),
    )
    (gamma, beta), (scale, shift), statistics = parameters(queue, 4), parameters(queue, 3), running(queue, 4)

    def both(node: Any, found: tuple[Any, ...]) -> None:
        expected = node.grad_fn(grad)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(to_numpy(one), to_numpy(other), rtol=1e-3, atol=1e-5)

    bare = x.value, gamma.value
    _, mean, var = F.batch_norm2d(Match(), *bare, beta.value, *statistics)
    node = nodes.batch_norm2d(Match(), x, gamma, beta, *statistics)
    both(node, F.tensor_batch_norm2d_backward(Match(), *bare, grad, mean, var))
    node = nodes.batch_norm2d_leaky_relu(Match(), x, gamma, beta, *statistics, negative_slope=0.25)
    both(node, F.tensor_batch_norm2d_backward(
        Match(), *bare, grad, mean, var, out=node.value, leaky_slope=0.25
    ))  # fmt: skip
    kept = [to_device(queue, [0.5, -1, 0, 2], "float16"), to_device(queue, [1, 2, 0.5, 4], "float16")]
    node = nodes.batch_norm2d(Match(), x, gamma, beta, *kept, training=False)
    both(node, F.tensor_batch_norm2d_backward(Match(), *bare, grad, *kept, training=False))
    _, mean, var = F.group_norm(Float(), *bare, beta.value, 2)
    node = nodes.group_norm(Float(), x, gamma, beta, 2)
    both(node, F.tensor_group_norm_backward(Float(), *bare, grad, mean, var, 2))
    bare = x.value, scale.value
    _, mean, var = F.layer_norm(Float(), *bare, shift.value)
    node = nodes.layer_norm(Float(), x, scale, shift)
    both(node, F.tensor_layer_norm_backward(Float(), *bare, grad, mean, var))
    _, inverse = F.rms_norm(Float(), *bare)
    both(nodes.rms_norm(Float(), x, scale), F.tensor_rms_norm_backward(Float(), *bare, grad, inverse))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_backwards_of_bare_tensors_read_16_bit_statistics(queue: cl.CommandQueue, dtype: str, training: bool) -> None:
    """The kernels take fp32 statistics: words of 16 bits would be read two at a time, and beyond the end."""
    x, grad = (to_device(queue, RNG.standard_normal(SHAPE), "float16") for _ in range(2))
    gamma, scale = to_device(queue, RNG.uniform(1, 2, 4)), to_device(queue, RNG.uniform(1, 2, 3))

    def check(function: Callable[..., Any], weight: Tensor, count: int, statistics: int = 2, **options: Any) -> None:
        narrow = [to_device(queue, RNG.uniform(0.5, 2, count), dtype) for _ in range(statistics)]
        wide = [to_device(queue, to_numpy(statistic)) for statistic in narrow]
        found, expected = (function(Match(), x, weight, grad, *given, **options) for given in (narrow, wide))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(to_numpy(one), to_numpy(other))

    check(F.tensor_batch_norm2d_backward, gamma, 4, training=training)
    check(F.tensor_group_norm_backward, gamma, 3 * 2, groups=2)
    check(F.tensor_layer_norm_backward, scale, 3 * 4 * 5)
    check(F.tensor_rms_norm_backward, scale, 3 * 4 * 5, statistics=1)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_statistics_that_a_layer_keeps(queue: cl.CommandQueue, dtype: str) -> None:
    images, layer = to_device(queue, RNG.standard_normal(SHAPE), dtype), BatchNorm2dModule(queue, 4)
    with amp.init(dtype=dtype, verbose=False), ag.no_grad():
        layer(ag.tensor(images, requires_grad=True))
        layer(images)
        layer.training = False
        out = layer(images)
    values = to_numpy(images)
    twice = 0.1 * values.mean(AXES) * 1.9
    assert_close(layer.running_mean, twice, slack=64 * EPS)
    r = 1 / np.sqrt(to_numpy(layer.running_var) + 1e-5)
    assert_close(out, (values - of_channels(twice)) * of_channels(r), slack=64 * EPS)
