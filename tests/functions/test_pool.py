"""Pooling and padding under autograd and through netcl's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl import nn
from netcl.nn import padding, pooling

from clamp import amp
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match
from clamp.functions import pool
from tests.functions.operands import leaf
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

X = np.random.default_rng(0).permutation(2 * 3 * 6 * 8).reshape(2, 3, 6, 8) / 8.0 - 15


FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (pool.max_pool2d, {}),
    (pool.max_pool2d, {"kernel_size": 3, "stride": 1}),
    (pool.avg_pool2d, {}),
    (pool.avg_pool2d, {"kernel_size": 3, "stride": 2}),
    (pool.global_avg_pool2d, {}),
    (pool.pad2d, {}),
    (pool.pad2d, {"pad": 2, "mode": "reflect"}),
    (pool.pad2d, {"pad": 0}),
]


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(("function", "kwargs"), FUNCTIONS)
def test_dtypes_follow_the_input(
    queue: cl.CommandQueue, function: Callable[..., Any], kwargs: dict[str, Any], dtype: str
) -> None:
    x = leaf(queue, X, dtype)
    tape = Tape()
    out = function(Match(), x, tape=tape, **kwargs)
    assert out.value.dtype == dtype
    tape.backward(out, to_device(queue, np.ones(out.value.shape), dtype))
    assert x.grad.dtype == dtype
    assert x.grad.shape == X.shape
    # Each of these is a sum of inputs with weights that add up to one for each output, or to none for a zero.
    total = out.value.size
    if function is pool.pad2d and kwargs.get("mode") != "reflect":
        total = X.size
    np.testing.assert_allclose(to_numpy(x.grad).sum(), total, rtol=2**-7)
    assert function(Float(), leaf(queue, X, dtype), **kwargs).value.dtype == "float32"


@pytest.mark.parametrize(("function", "kwargs"), FUNCTIONS)
def test_leaves_without_gradient_and_bare_tensors(
    queue: cl.CommandQueue, function: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    assert function(Match(), leaf(queue, X, requires_grad=False), **kwargs).grad_fn is None
    x = to_device(queue, X, "float16")
    bare = function(Match(), x, **kwargs)
    assert isinstance(bare, Tensor)
    with ag.no_grad():
        without_grad = function(Match(), leaf(queue, X, "float16"), **kwargs)
    assert isinstance(without_grad, Tensor)
    np.testing.assert_array_equal(to_numpy(bare), to_numpy(without_grad))


def test_no_padding_leaves_the_tensor_and_its_gradient_alone(queue: cl.CommandQueue) -> None:
    x = leaf(queue, X, "float16")
    tape = Tape()
    out = pool.pad2d(Match(), x, pad=0, tape=tape)
    assert out.value is not x.value  # the engine adds to the gradient it finds on a node's tensor
    tape.backward(out, to_device(queue, X, "float16"))
    assert_close(x.grad, to_numpy(x.value), ulps=0)


def test_tensor_level_functions(queue: cl.CommandQueue) -> None:
    with amp.init():
        x = to_device(queue, X, "float16")
        values = to_numpy(x)
        windows = values.reshape(2, 3, 3, 2, 4, 2)
        assert_close(pooling.max_pool2d(x), windows.max((3, 5)), ulps=0)
        assert_close(pooling.avg_pool2d(x), windows.mean((3, 5)))
        assert_close(pooling.global_avg_pool2d(x), values.mean((2, 3), keepdims=True), slack=2.0**-18)
        assert padding.pad2d(x, 2).shape == (2, 3, 10, 12)
        grad = to_device(queue, np.ones((2, 3, 3, 4)))
        is_largest = windows == windows.max((3, 5), keepdims=True)
        assert_close(pooling.max_pool2d_backward(x, grad), is_largest.reshape(X.shape), ulps=0)
        assert_close(pooling.avg_pool2d_backward(x, grad), np.full(X.shape, 0.25), ulps=0)
        one = to_device(queue, np.ones((2, 3, 1, 1)))
        assert_close(pooling.global_avg_pool2d_backward(x, one), np.full(X.shape, 1 / 48))
        framed = to_device(queue, np.ones((2, 3, 8, 10)), "float16")
        assert_close(padding.pad2d_backward(framed, 1, in_shape=X.shape), np.ones(X.shape), ulps=0)
        assert padding.pad2d_backward(framed, 0) is framed
        with pytest.raises(ValueError, match="in_shape"):
            padding.pad2d_backward(framed, 1)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(3, 2), nn.AvgPool2d(2), nn.GlobalAvgPool2d(), nn.AdaptiveAvgPool2d(1)])
def test_layers(queue: cl.CommandQueue, layer: Any) -> None:
    with amp.init():
        x = leaf(queue, X, "float16")
        recorded = layer(x)
        assert recorded.value.dtype == "float16"
        for value in (to_device(queue, X, "float16"), leaf(queue, X, "float16")):
            with ag.no_grad():
                bare = layer(value)
            assert isinstance(bare, Tensor)
            np.testing.assert_array_equal(to_numpy(bare), to_numpy(recorded.value))
        Tape().backward(recorded, to_device(queue, np.ones(recorded.value.shape), "float16"))
        np.testing.assert_allclose(to_numpy(x.grad).sum(), recorded.value.size, rtol=2**-7)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_scaled_losses_give_scaled_gradients(queue: cl.CommandQueue, scale: float) -> None:
    gradients = []
    for seed in (1.0, scale):
        x = leaf(queue, X)
        tape = Tape()
        y = pool.pad2d(Match(), x, 1, "reflect", tape=tape)
        y = pool.avg_pool2d(Match(), pool.max_pool2d(Match(), y, 3, 1, tape=tape), tape=tape)
        y = pool.global_avg_pool2d(Match(), y, tape=tape)
        tape.backward(y, to_device(queue, np.full(y.value.shape, seed)))
        gradients.append(to_numpy(x.grad) / seed)
    np.testing.assert_array_equal(gradients[0], gradients[1])


def test_integers_and_wrong_arguments(queue: cl.CommandQueue) -> None:
    integers = Tensor.from_host(queue, np.ones((1, 1, 4, 4), np.int32), dtype="int32")
    for function, kwargs in FUNCTIONS:
        with pytest.raises(NotOwned):
            function(Match(), integers, **kwargs)
    x = leaf(queue, X)
    with pytest.raises(ValueError, match="does not fit"):
        pool.max_pool2d(Match(), x, 7)
    with pytest.raises(ValueError, match="mode must be"):
        pool.pad2d(Match(), x, 1, "circular")
