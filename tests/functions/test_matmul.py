"""Matrix products in autograd: every shape netcl takes, gradients against float64, in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Parameter, Tape, Tensor
from clamp.casting.policies import Float, Half, Promote
from clamp.casting.registry import OWNED
from tests.functions.operands import half, leaf
from tests.reference import assert_close, quantize, to_device, to_numpy

HALVES = [half(dtype) for dtype in ("float16", "bfloat16", "float32")]

SHAPES = [
    ((1, 1), (1, 1)),
    ((5, 7), (7, 3)),
    ((33, 65), (65, 17)),
    ((2, 3, 7), (7, 5)),
    ((2, 2, 3, 7), (7, 5)),
    ((3, 7), (4, 7, 5)),
    ((4, 3, 7), (4, 7, 5)),
    ((3, 300), (300, 2)),
]


def product_gradients(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of sum(g * (a @ b)) with numpy's broadcasting over leading dimensions."""
    ga = g @ np.swapaxes(b, -1, -2)
    gb = np.swapaxes(a, -1, -2) @ g
    ga = ga.sum(axis=tuple(range(ga.ndim - a.ndim)))
    gb = gb.sum(axis=tuple(range(gb.ndim - b.ndim)))
    return ga, gb


def bound(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far fp32 accumulation may be off in each gradient: terms * 2^-24 * sum |terms|."""
    ga, gb = product_gradients(np.abs(a), np.abs(b), np.abs(g))
    return ga * 2.0**-24 * g.size, gb * 2.0**-24 * g.size


def call(name: str, casting: Any, *args: Any, **kwargs: Any) -> Any:
    return OWNED[f"netcl.autograd.{name}"](casting, *args, **kwargs)


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


@pytest.mark.parametrize("casting", HALVES, ids=lambda casting: casting.dtype)
@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES)
def test_matmul_and_its_gradients(queue: cl.CommandQueue, casting: Half, shape_a: Any, shape_b: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(shape_a), rng.standard_normal(shape_b)
    left, right = leaf(queue, a), leaf(queue, b)
    out = call("matmul_op", casting, left, right)
    assert out.value.dtype == casting.dtype
    stored_a, stored_b = (quantize(x.astype(np.float32), casting.dtype).astype(np.float64) for x in (a, b))
    expected = stored_a @ stored_b
    slack = np.abs(stored_a) @ np.abs(stored_b) * 2.0**-24 * shape_a[-1]
    assert_close(out.value, expected, slack=slack)

    g = to_device(queue, rng.standard_normal(expected.shape), casting.dtype)
    Tape().backward(out, g)
    gradients = product_gradients(stored_a, stored_b, to_numpy(g))
    slacks = bound(stored_a, stored_b, to_numpy(g))
    for node, want, allowed in zip((left, right), gradients, slacks, strict=True):
        assert node.grad.dtype == "float32", "a leaf's gradient has the leaf's dtype"
        assert_close(node.grad, want, slack=allowed)


def test_netcl_takes_the_same_shapes(queue: cl.CommandQueue) -> None:
    from netcl import autograd as ag

    for shape_a, shape_b in SHAPES:
        a, b = np.ones(shape_a), np.ones(shape_b)
        assert tuple(ag.matmul_op(leaf(queue, a), leaf(queue, b)).shape) == (a @ b).shape


@pytest.mark.parametrize("casting", HALVES, ids=lambda casting: casting.dtype)
def test_bmm_with_several_leading_dimensions(queue: cl.CommandQueue, casting: Half) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3, 5, 7)), rng.standard_normal((2, 3, 7, 4))
    left, right = leaf(queue, a, casting.dtype), leaf(queue, b, casting.dtype)
    out = call("bmm", casting, left, right)
    stored_a, stored_b = to_numpy(left.value), to_numpy(right.value)
    assert_close(out.value, stored_a @ stored_b, slack=1e-5)
    g = to_device(queue, rng.standard_normal((2, 3, 5, 4)), casting.dtype)
    Tape().backward(out, g)
    ga, gb = product_gradients(stored_a, stored_b, to_numpy(g))
    assert left.grad.dtype == right.grad.dtype == casting.dtype
    assert_close(left.grad, ga, slack=1e-5)
    assert_close(right.grad, gb, slack=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("casting", HALVES, ids=lambda casting: casting.dtype)
def test_linear_relu_and_its_gradients(queue: cl.CommandQueue, casting: Half, with_bias: bool) -> None:
    rng = np.random.default_rng(2)
    x, w, bias = rng.standard_normal((19, 31)), rng.standard_normal((31, 13)), rng.standard_normal(13)
    nodes = [leaf(queue, x), leaf(queue, w), leaf(queue, bias)][: 3 if with_bias else 2]
    out = call("linear_relu", casting, *nodes)
    x, w = (quantize(v.astype(np.float32), casting.dtype).astype(np.float64) for v in (x, w))
    pre = x @ w + (bias.astype(np.float32) if with_bias else 0.0)
    assert_close(out.value, np.maximum(pre, 0), slack=1e-5)
    mask = to_numpy(out.value) > 0
    g = to_device(queue, rng.standard_normal(pre.shape), casting.dtype)
    Tape().backward(out, g)
    masked = to_numpy(g) * mask
    expected = [masked @ w.T, x.T @ masked, masked.sum(0)]
    for node, want in zip(nodes, expected, strict=False):
        assert node.grad.dtype == "float32"
        assert_close(node.grad, want, slack=1e-4 * np.abs(want).max())


def test_a_weight_used_twice_gets_both_gradients_in_fp32(queue: cl.CommandQueue) -> None:
    weight = leaf(queue, np.eye(4))
    x = leaf(queue, np.full((1, 4), 2.0**-10), requires_grad=False)
    casting = HALVES[0]
    out = call("matmul_op", casting, call("matmul_op", casting, x, weight), weight)
    Tape().backward(out, to_device(queue, np.ones((1, 4)), "float16"))
    np.testing.assert_array_equal(weight.grad.to_host(), np.full((4, 4), 2.0**-9))
    assert x.grad is None


def test_mixed_inputs_under_promote_and_float(queue: cl.CommandQueue) -> None:
    a, b = np.ones((3, 4)), np.ones((4, 5))
    for casting, dtype in ((Promote(), "float32"), (Float(), "float32")):
        left, right = leaf(queue, a, "float16"), leaf(queue, b)
        out = call("matmul_op", casting, left, right)
        assert out.value.dtype == dtype
        Tape().backward(out, to_device(queue, np.ones((3, 5))))
        assert (left.grad.dtype, right.grad.dtype) == ("float16", "float32")
        np.testing.assert_array_equal(to_numpy(left.grad), np.full((3, 4), 5.0))


@pytest.mark.parametrize("exponent", range(-10, 17, 2))
def test_the_scale_divides_out(queue: cl.CommandQueue, exponent: int) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((8, 16)), rng.standard_normal((16, 4))
    g = rng.standard_normal((8, 4)) * 0.25
    scale = 2.0**exponent

    def gradients(factor: float) -> list[np.ndarray]:
        nodes = [leaf(queue, x), leaf(queue, w)]
        out = call("linear_relu", HALVES[0], *nodes)
        Tape().backward(out, to_device(queue, g * factor, "float16"))
        return [to_numpy(node.grad) / factor for node in nodes]

    for scaled, plain in zip(gradients(scale), gradients(1.0), strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=2e-3, atol=2e-3 * np.abs(plain).max())


def test_bare_tensors_in_bare_tensor_out(queue: cl.CommandQueue) -> None:
    a = to_device(queue, np.ones((2, 3)))
    weight = Parameter.from_host(queue, np.ones((3, 4), np.float32))
    out = OWNED["netcl.ops.matmul.matmul"](HALVES[0], a, weight)
    assert isinstance(out, Tensor)
    assert out.dtype == "float16"
    np.testing.assert_array_equal(to_numpy(out), np.full((2, 4), 3.0))
    batch = to_device(queue, np.ones((2, 2, 3)))
    assert OWNED["netcl.ops.bmm.bmm"](Promote(), batch, to_device(queue, np.ones((2, 3, 1)))).shape == (2, 2, 1)
