"""Resizing, grids and rotations under autograd, through netcl's layers, and on bare tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional
from netcl.nn.containers import Upsample

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match
from clamp.casting.registry import OWNED
from clamp.functions import spatial
from tests.conformance import spatial as reference
from tests.functions.operands import half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
IMAGE = (2, 3, 4, 5)


def places(shape: tuple[int, ...] = (2, 3, 6, 2)) -> Any:
    return RNG.uniform(-1.3, 1.3, shape)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_results_follow_the_policy_and_gradients_the_operands(queue: cl.CommandQueue, dtype: str) -> None:
    """The grid keeps its own dtype, for its value and its gradient, whatever the image is cast to."""
    for casting, expected in ((Float(), "float32"), (Match(), dtype), (half(), "float16")):
        x, grid = leaf(queue, RNG.standard_normal(IMAGE), dtype), leaf(queue, places())
        tape = Tape()
        small = spatial.upsample(casting, x, scale_factor=2, mode="bilinear", tape=tape)
        out = spatial.grid_sample(casting, small, grid, tape=tape)
        tape.backward(out, to_device(queue, np.ones(out.value.shape), out.value.dtype))
        assert (small.value.dtype, out.value.dtype) == (expected, expected)
        assert (x.grad.dtype, grid.grad.dtype) == (dtype, "float32")
        want = reference.upsample(to_numpy(x.value), scale_factor=2, mode="bilinear")
        want = reference.grid_sample(want, to_numpy(grid.value))
        np.testing.assert_allclose(to_numpy(out.value), want, atol=2e-5 if expected == "float32" else 0.05)


def test_a_half_grid_is_read_as_it_is(queue: cl.CommandQueue) -> None:
    x, grid = leaf(queue, RNG.standard_normal(IMAGE), "float16"), leaf(queue, places(), "bfloat16")
    tape = Tape()
    out = spatial.grid_sample(Float(), x, grid, padding_mode="border", tape=tape)
    tape.backward(out, to_device(queue, np.ones(out.value.shape)))
    want = reference.grid_sample(to_numpy(x.value), to_numpy(grid.value), padding_mode="border")
    assert_close(out.value, want, slack=1e-5)
    assert (x.grad.dtype, grid.grad.dtype) == ("float16", "bfloat16")


CALLS: list[Callable[..., Any]] = [
    lambda x, grid, theta, angle: spatial.upsample(Float(), x, 7),
    lambda x, grid, theta, angle: spatial.grid_sample(Float(), x, grid),
    lambda x, grid, theta, angle: spatial.affine_grid(Float(), theta, IMAGE),
    lambda x, grid, theta, angle: spatial.rotate_2d_grid(Float(), x, angle),
]


def inputs(queue: cl.CommandQueue, requires_grad: tuple[bool, ...]) -> list[Node]:
    values = (RNG.standard_normal(IMAGE), places(), RNG.standard_normal((2, 2, 3)), [0.3, -0.4])
    return [leaf(queue, value, requires_grad=wanted) for value, wanted in zip(values, requires_grad, strict=True)]


@pytest.mark.parametrize("call", CALLS)
def test_gradients_only_where_wanted(queue: cl.CommandQueue, call: Callable[..., Any]) -> None:
    for which in range(4):
        nodes = inputs(queue, tuple(k == which for k in range(4)))
        out = call(*nodes)
        if out.grad_fn is None:
            continue
        Tape().backward(out, to_device(queue, np.ones(out.value.shape)))
        assert [node.grad is not None for node in nodes] == [k == which for k in range(4)]
    assert call(*inputs(queue, (False,) * 4)).grad_fn is None


@pytest.mark.parametrize("call", CALLS)
def test_bare_tensors_stay_bare(queue: cl.CommandQueue, call: Callable[..., Any]) -> None:
    nodes = inputs(queue, (False,) * 4)
    bare = call(*(node.value for node in nodes))
    assert isinstance(bare, Tensor)
    with ag.no_grad():
        np.testing.assert_array_equal(to_numpy(call(*nodes)), to_numpy(bare))


@pytest.mark.parametrize("angles", [0.5, np.float32(-1), [0.1, 2.0], np.array([3.0])])
def test_rotation_by_numbers(queue: cl.CommandQueue, angles: Any) -> None:
    x = leaf(queue, RNG.standard_normal(IMAGE), "float16")
    out = spatial.rotate_2d_grid(Float(), x, angles)
    assert_close(out.value, reference.rotate_2d_grid(to_numpy(x.value), angles), slack=2e-5)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_scaled_losses_give_scaled_gradients(queue: cl.CommandQueue, scale: float) -> None:
    host = (RNG.standard_normal(IMAGE), places((2, 8, 10, 2)), RNG.standard_normal((2, 2, 3)), [0.3])
    gradients = []
    for seed in (1.0, scale):
        x, grid, theta, angle = (leaf(queue, values) for values in host)
        tape = Tape()
        large = spatial.upsample(Float(), x, scale_factor=2, mode="bilinear", tape=tape)
        turned = spatial.rotate_2d_grid(Float(), large, angle, tape=tape)
        warped = spatial.grid_sample(Float(), turned, grid, tape=tape)
        out = spatial.grid_sample(Float(), warped, spatial.affine_grid(Float(), theta, (2, 3, 8, 10), tape=tape))
        tape.backward(out, to_device(queue, np.full(out.value.shape, seed)))
        gradients.append([to_numpy(node.grad) / seed for node in (x, grid, theta, angle)])
    for plain, scaled in zip(*gradients, strict=True):
        np.testing.assert_array_equal(plain, scaled)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_netcls_layers_train_and_infer(queue: cl.CommandQueue, dtype: str) -> None:
    host = RNG.standard_normal(IMAGE)
    rounded = to_numpy(to_device(queue, host, dtype))
    want = reference.upsample(rounded, scale_factor=2, mode="bilinear")
    with amp.init(dtype=dtype, loss_scale=1.0):
        layer = Upsample(scale_factor=2, mode="bilinear")
        x = leaf(queue, host, dtype)
        out = layer(x)
        Tape().backward(ag.sum(out))
        assert (out.value.dtype, x.grad.dtype) == ("float32", dtype)
        assert_close(out.value, want, slack=1e-5)
        with ag.no_grad():
            assert_close(layer(x), want, slack=1e-5)
        assert_close(layer(x.value), want, slack=1e-5)
        assert_close(functional.interpolate(x, size=(3, 3)).value, reference.upsample(rounded, (3, 3)))
        turned = functional.rotate_2d_grid(x, leaf(queue, [0.5], requires_grad=False)).value
        assert_close(turned, reference.rotate_2d_grid(rounded, 0.5, "zeros"), slack=2e-5)


def test_tensor_level_adapters(queue: cl.CommandQueue) -> None:
    x, grid = to_device(queue, RNG.standard_normal(IMAGE), "float16"), to_device(queue, places())
    theta = to_device(queue, RNG.standard_normal((2, 2, 3)))
    casting = Float()
    assert_close(OWNED["netcl.ops.upsample.upsample"](casting, x, 3), reference.upsample(to_numpy(x), 3))
    want = reference.grid_sample(to_numpy(x), to_numpy(grid))
    assert_close(OWNED["netcl.ops.grid_sample.grid_sample"](casting, x, grid), want, slack=1e-5)
    want = reference.affine_grid(to_numpy(theta), IMAGE)
    assert_close(OWNED["netcl.ops.grid_sample.affine_grid"](casting, theta, IMAGE), want, slack=1e-5)
    grad = to_device(queue, np.ones((2, 3, 3, 6)), "float16")
    dx, dgrid = spatial.tensor_grid_sample_backward(casting, grad, x, grid)
    assert (dx.shape, dx.dtype, dgrid.shape, dgrid.dtype) == (IMAGE, "float32", (2, 3, 6, 2), "float32")
    grad = to_device(queue, np.ones((2, 3, 8, 10)), "float16")
    assert_close(spatial.tensor_upsample_backward(casting, grad, IMAGE), np.full(IMAGE, 4.0))
    grad = to_device(queue, np.ones((2, 4, 5, 2)))
    assert_close(spatial.tensor_affine_grid_backward(casting, grad, IMAGE), [[[0, 0, 20]] * 2] * 2, slack=1e-5)
    for call in (
        lambda: OWNED["netcl.ops.upsample.upsample"](casting, x, 3, out=x),
        lambda: OWNED["netcl.ops.grid_sample.grid_sample"](casting, x, grid, out=x),
        lambda: OWNED["netcl.ops.grid_sample.affine_grid"](casting, theta, IMAGE, out=x),
        lambda: spatial.grid_sample(
            casting, x, Tensor.from_host(queue, np.ones((2, 1, 1, 2), np.int32), dtype="int32")
        ),
    ):
        with pytest.raises(NotOwned):
            call()


def test_bad_input(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.ones(IMAGE))
    for call, message in (
        (lambda: spatial.upsample(Float(), x), "exactly one of size or scale_factor"),
        (lambda: spatial.upsample(Float(), x, 3, 2.0), "exactly one of size or scale_factor"),
        (lambda: spatial.upsample(Float(), x, scale_factor=0.1), "invalid output size"),
        (lambda: spatial.upsample(Float(), x, 3, mode="area"), "unsupported upsample mode 'area'"),
        (lambda: spatial.upsample(Float(), leaf(queue, [1.0]), 3), "4D NCHW"),
        (lambda: spatial.grid_sample(Float(), x, leaf(queue, places()), mode="nearest"), "mode='bilinear'"),
        (lambda: spatial.grid_sample(Float(), x, leaf(queue, places()), padding_mode="wrap"), "padding_mode 'wrap'"),
        (lambda: spatial.rotate_2d_grid(Float(), leaf(queue, [1.0]), 0.1), "4D input"),
        (lambda: spatial.rotate_2d_grid(Float(), x, [0.1, 0.2, 0.3]), "3 angles for 2 images"),
        (lambda: spatial.affine_grid(Float(), leaf(queue, np.ones((2, 3))), IMAGE), "theta shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
