"""Pooling and padding under autograd and through netcl's layers."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from netcl.nn import padding, pooling

from clamp import amp
from clamp.bridge import Tape
from clamp.casting.policies import Match
from clamp.functions import spatial as pool
from tests.functions.operands import leaf
from tests.reference import assert_close, to_device, to_numpy

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
