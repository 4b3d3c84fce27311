"""Matrix products in autograd: every shape netcl takes, gradients against float64, in every dtype."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp
from clamp.bridge import Parameter, Tape
from clamp.casting.policies import Half
from tests.functions.operands import call, half, leaf
from tests.reference import quantize, to_device, to_numpy

HALVES = [half(dtype) for dtype in ("float16", "bfloat16", "float32")]


@pytest.mark.parametrize("casting", HALVES, ids=lambda casting: casting.dtype)
@pytest.mark.parametrize("stored_as", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 512), (61, 40, 257), (5, 1, 300)])
def test_what_is_stored_in_one_dtype_is_read_in_any(
    queue: cl.CommandQueue, casting: Half, stored_as: str, m: int, n: int, k: int
) -> None:
    """Small products round float32 as they read it; of other tensors they must not take the bits for something else."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((m, k), (k, n)))  # exact in every dtype
    given = (to_device(queue, x, stored_as) for x in (a, b))
    out = call("matmul_op", casting, *given)
    np.testing.assert_array_equal(to_numpy(out), quantize(a @ b, casting.dtype))


@pytest.mark.parametrize("on_the_left", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backward_uses_the_weight_that_forward_read(queue: cl.CommandQueue, dtype: str, on_the_left: bool) -> None:
    casting = Half(dtype, lambda *_: None, True)
    weight = Parameter.from_host(queue, np.full((4, 4), 2.0, np.float32))
    x = leaf(queue, np.ones((4, 4)))
    with Tape() as tape:
        left, right = (weight, x) if on_the_left else (x, weight)
        out = call("matmul_op", casting, left, right)
    weight.write(np.full((4, 4), 100.0, np.float32))
    tape.backward(out, grad=to_device(queue, np.ones((4, 4)), dtype))
    np.testing.assert_array_equal(to_numpy(x.value.grad), np.full((4, 4), 8.0))


@pytest.mark.parametrize("ours", [False, True])
def test_netcl_takes_the_same_shapes(queue: cl.CommandQueue, ours: bool) -> None:
    from netcl import autograd as ag

    for shape_a, shape_b in (((5, 7), (7, 3)), ((2, 2, 3, 7), (7, 5)), ((3, 7), (4, 7, 5)), ((4, 3, 7), (4, 7, 5))):
        a, b = np.ones(shape_a), np.ones(shape_b)
        with amp.autocast(enabled=ours):
            product = ag.matmul_op(leaf(queue, a), leaf(queue, b))
        np.testing.assert_array_equal(to_numpy(product.value), a @ b)


def test_a_weight_used_twice_gets_both_gradients_in_fp32(queue: cl.CommandQueue) -> None:
    weight = leaf(queue, np.eye(4))
    x = leaf(queue, np.full((1, 4), 2.0**-10), requires_grad=False)
    casting = HALVES[0]
    out = call("matmul_op", casting, call("matmul_op", casting, x, weight), weight)
    Tape().backward(out, to_device(queue, np.ones((1, 4)), "float16"))
    np.testing.assert_array_equal(weight.grad.to_host(), np.full((4, 4), 2.0**-9))
    assert x.grad is None
