"""Resizing, grids and rotations under autograd, through netcl's layers, and on bare tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional, padding, pooling

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.policies import Float, Match
from clamp.functions import spatial
from clamp.functions import spatial as pool
from tests.conformance import spatial as reference
from tests.functions.operands import leaf
from tests.reference import assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
IMAGE = (2, 3, 4, 5)


def places(shape: tuple[int, ...] = (2, 3, 6, 2)) -> Any:
    return RNG.uniform(-1.3, 1.3, shape)


@pytest.mark.parametrize("angles", [0.5, np.float32(-1), [0.1, 2.0], np.array([3.0])])
def test_rotation_by_numbers(queue: cl.CommandQueue, angles: Any) -> None:
    x = leaf(queue, RNG.standard_normal(IMAGE), "float16")
    out = spatial.rotate_2d_grid(Float(), x, angles)
    assert_close(out.value, reference.rotate_2d_grid(to_numpy(x.value), angles), slack=2e-5)


def test_what_stands_in_netcls_functional(queue: cl.CommandQueue) -> None:
    x = leaf(queue, RNG.standard_normal(IMAGE), "float16")
    with amp.init():
        assert_close(functional.interpolate(x, size=(3, 3)).value, reference.upsample(to_numpy(x.value), (3, 3)))
        turned = functional.rotate_2d_grid(x, leaf(queue, [0.5], requires_grad=False)).value
        assert_close(turned, reference.rotate_2d_grid(to_numpy(x.value), 0.5, "zeros"), slack=2e-5)
        angles = Node(value=Tensor.from_host(queue, np.full(IMAGE[0], 0.5), dtype="float64"))  # netcl reads any dtype
        turned = ag.rotate_2d_grid(x, angles, padding_mode="zeros").value
        assert_close(turned, reference.rotate_2d_grid(to_numpy(x.value), 0.5, "zeros"), slack=2e-5)


def test_tensor_level_adapters(queue: cl.CommandQueue) -> None:
    x, grid = to_device(queue, RNG.standard_normal(IMAGE), "float16"), to_device(queue, places())
    casting = Float()
    grad = to_device(queue, np.ones((2, 3, 3, 6)), "float16")
    dx, dgrid = spatial.tensor_grid_sample_backward(casting, grad, x, grid)
    assert (dx.shape, dx.dtype, dgrid.shape, dgrid.dtype) == (IMAGE, "float32", (2, 3, 6, 2), "float32")
    grad = to_device(queue, np.ones((2, 3, 8, 10)), "float16")
    assert_close(spatial.tensor_upsample_backward(casting, grad, IMAGE), np.full(IMAGE, 4.0))
    grad = to_device(queue, np.ones((2, 4, 5, 2)))
    assert_close(spatial.tensor_affine_grid_backward(casting, grad, IMAGE), [[[0, 0, 20]] * 2] * 2, slack=1e-5)


# ------------------------------------------------------- Pooling and padding under autograd and through netcl's layers.


X = np.random.default_rng(0).permutation(2 * 3 * 6 * 8).reshape(2, 3, 6, 8) / 8.0 - 15


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
        windows = to_numpy(x).reshape(2, 3, 3, 2, 4, 2)
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
