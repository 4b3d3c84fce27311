"""Pooling and its gradients against numpy's float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.ops import launch, pool
from clamp.ops.pool import elements
from tests.conformance.pool import windows
from tests.ops.plans import plans_of
from tests.reference import SPECIAL, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

Array = npt.NDArray[np.float64]

#: (shape, kernel size, stride): windows that overlap, touch, leave gaps, do not reach the border; one element; windows
#: that cover every element once, 16 in a row and more
CASES = [
    ((2, 3, 8, 8), 2, 2),
    ((1, 2, 9, 37), 2, 2),
    ((2, 1, 11, 19), 3, 1),
    ((1, 3, 13, 34), 3, 2),
    ((1, 1, 1, 1), 1, 1),
    ((3, 1, 7, 5), 2, 1),
    ((1, 2, 10, 23), 2, 3),
    ((1, 1, 17, 20), 5, 3),
    ((1, 2, 7, 7), 6, 1),
    ((2, 2, 6, 32), 2, 2),
    ((1, 3, 4, 52), 2, 2),
    ((3, 1, 2, 64), 2, 2),
]
#: with storage types in turn: each kernel is met with every one
IN_TURN = [(*case, STORAGE_DTYPES[number % 3]) for number, case in enumerate(CASES)]
#: storage types of the gradients of result and source
GRADIENTS = {"float32": ("float32", "float32"), "float16": ("float16", "float16"), "bfloat16": ("float32", "float16")}
PLANS = ["own plan", "other plan"]


plan = plans_of(pool, launch)


def scatter(shape: tuple[int, ...], shares: Array, stride: int) -> Array:
    """What each element gets from all windows; ``shares`` is (N, C, OH, OW, size, size)."""
    grad = np.zeros(shape)
    rows, columns, size = shares.shape[2], shares.shape[3], shares.shape[4]
    for kh in range(size):
        for kw in range(size):
            span = np.s_[:, :, kh : kh + rows * stride : stride, kw : kw + columns * stride : stride]
            grad[span] += shares[..., kh, kw]
    return grad


def max_pool_gradient(x: Array, grad: Array, size: int, stride: int) -> Array:
    taps = windows(x, size, stride).reshape(*grad.shape, -1)
    shares = grad[..., None] * (np.arange(size * size) == taps.argmax(-1)[..., None])
    return scatter(x.shape, shares.reshape(*grad.shape, size, size), stride)


@pytest.mark.parametrize("plan", PLANS, indirect=True)
@pytest.mark.parametrize(("shape", "size", "stride", "dtype"), IN_TURN)
def test_pooling(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], size: int, stride: int, dtype: str
) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal(shape), dtype)
    taps = windows(to_numpy(x), size, stride)
    assert_close(pool.max_pool2d(x, size, stride, out_dtype=dtype), taps.max((-1, -2)), ulps=0)
    slack = (2 + size**2) * 2.0**-24 * np.abs(taps).mean((-1, -2))
    assert_close(pool.avg_pool2d(x, size, stride, out_dtype=dtype), taps.mean((-1, -2)), slack=slack)


@pytest.mark.parametrize("plan", PLANS, indirect=True)
@pytest.mark.parametrize(("shape", "size", "stride", "source"), IN_TURN)
def test_gradients(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], size: int, stride: int, source: str
) -> None:
    gradient, target = GRADIENTS[source]
    rng = np.random.default_rng(1)
    x = to_device(queue, rng.integers(-4, 4, shape), source)  # many ties
    out_shape = windows(to_numpy(x), size, stride).shape[:4]
    grad = to_device(queue, rng.standard_normal(out_shape), gradient)
    g = to_numpy(grad)
    slack = 2.0**-22 * scatter(shape, np.broadcast_to(np.abs(g)[..., None, None], (*g.shape, size, size)), stride)
    result = pool.max_pool2d_backward(x, grad, size, stride, out_dtype=target)
    assert_close(result, max_pool_gradient(to_numpy(x), g, size, stride), slack=slack)
    share = np.broadcast_to(g[..., None, None] / size**2, (*g.shape, size, size))
    result = pool.avg_pool2d_backward(shape, grad, size, stride, out_dtype=target)
    assert_close(result, scatter(shape, share, stride), slack=slack)


@pytest.mark.parametrize("shape", [(1, 1, 3, 2500), (1, 2, 70, 150), (1, 1, 200, 300)])
def test_planes_larger_than_a_tile(queue: cl.CommandQueue, simulated: bool, shape: tuple[int, ...]) -> None:
    if simulated and shape[2] > 3:
        pytest.skip("large for the simulator")
    rng = np.random.default_rng(2)
    x = to_device(queue, rng.standard_normal(shape), "float16")
    for size, stride in ((2, 2), (3, 1), (3, 2), (3, 3)):
        taps = windows(to_numpy(x), size, stride)
        assert_close(pool.max_pool2d(x, size, stride, out_dtype="float16"), taps.max((-1, -2)), ulps=0)
        slack = 11 * 2.0**-24 * np.abs(taps).mean((-1, -2))
        assert_close(pool.avg_pool2d(x, size, stride, out_dtype="float16"), taps.mean((-1, -2)), slack=slack)
        grad = to_device(queue, rng.integers(-8, 8, taps.shape[:4]), "float16")
        g = to_numpy(grad)
        result = pool.max_pool2d_backward(x, grad, size, stride, out_dtype="float16")
        assert_close(result, max_pool_gradient(to_numpy(x), g, size, stride), ulps=0)
        share = np.broadcast_to(g[..., None, None] / size**2, (*g.shape, size, size))
        result = pool.avg_pool2d_backward(shape, grad, size, stride, out_dtype="float16")
        assert_close(result, scatter(shape, share, stride), slack=2.0**-18)


@pytest.mark.parametrize("plan", PLANS, indirect=True)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 9, 20), (2, 2, 8, 36)])
def test_special_values(queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(3)
    values = quantize(rng.choice(SPECIAL, shape), dtype)
    values[0, 0] = -0.0
    values[0, 1, :4] = -np.nan  # the sign of a NaN says nothing
    values[0, 1, 1, 1::2] = -np.inf
    values[1, 0] = -np.inf
    x = to_device(queue, values, dtype)
    for size, stride in ((2, 2), (3, 1), (4, 3)):
        taps = windows(to_numpy(x), size, stride)
        result = pool.max_pool2d(x, size, stride, out_dtype=dtype)
        assert_close(result, taps.max((-1, -2)), ulps=0)
        assert np.signbit(to_numpy(result)[0, 0]).all()
        gradient, target = GRADIENTS[dtype]
        ones = to_device(queue, np.ones(taps.shape[:4]), gradient)
        result = pool.max_pool2d_backward(x, ones, size, stride, out_dtype=target)
        # the first maximum, the first NaN, and of zeros of either sign the first
        assert_close(result, max_pool_gradient(to_numpy(x), np.ones(taps.shape[:4]), size, stride), ulps=0)
        with np.errstate(invalid="ignore"):
            expected = taps.mean((-1, -2))
        finite = np.where(np.isfinite(taps), np.abs(taps), 0).mean((-1, -2))
        if dtype == "float16":
            assert_close(pool.avg_pool2d(x, size, stride, out_dtype=dtype), expected, slack=18 * 2.0**-24 * finite)


@pytest.mark.parametrize("plan", PLANS, indirect=True)
def test_global_average(queue: cl.CommandQueue, plan: None) -> None:
    for shape, dtype in (((2, 3, 5, 7), "float16"), ((1, 1, 1, 1), "bfloat16"), ((2, 2, 33, 40), "float32")):
        x = to_device(queue, np.random.default_rng(4).standard_normal(shape), dtype)
        values = to_numpy(x)
        slack = 64 * 2.0**-24 * np.abs(values).mean((2, 3), keepdims=True)
        assert_close(pool.global_avg_pool2d(x, out_dtype=dtype), values.mean((2, 3), keepdims=True), slack=slack)
        grad = to_device(queue, np.random.default_rng(5).standard_normal((*shape[:2], 1, 1)), dtype)
        expected = np.broadcast_to(to_numpy(grad) / (shape[2] * shape[3]), shape)
        assert_close(pool.global_avg_pool2d_backward(shape, grad, out_dtype="float16"), expected)


def test_a_result_of_another_dtype(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.random.default_rng(6).standard_normal((1, 2, 6, 6)), "float16")
    taps = windows(to_numpy(x), 2, 2)
    assert_close(pool.max_pool2d(x, 2, 2, out_dtype="float32"), taps.max((-1, -2)), ulps=0)
    assert_close(pool.avg_pool2d(x, 2, 2, out_dtype="float32"), taps.mean((-1, -2)), slack=2.0**-20)


def test_every_engine_gives_the_same_bits(queue: cl.CommandQueue) -> None:
    x, grad = (to_device(queue, np.random.default_rng(7).standard_normal((1, 1, n, n)), "float16") for n in (32, 16))
    for engine in pool.ENGINES:
        y = pool.max_pool2d(x, 2, 2, out_dtype="float16", engine=engine.NAME)
        assert_close(y, windows(to_numpy(x), 2, 2).max((-1, -2)), ulps=0)
    gradients = [
        to_numpy(pool.max_pool2d_backward(x, grad, 2, 2, out_dtype="float16", engine=engine.NAME))
        for engine in pool.ENGINES
    ]
    assert all(np.array_equal(gradient, gradients[0]) for gradient in gradients)
    with pytest.raises(ValueError, match=r"pairs does not compute Problem.*stride=2.*takes 2x2 windows"):
        pool.avg_pool2d(x, 3, 2, out_dtype="float16", engine="pairs")


def test_as_if_there_were_too_many_elements_for_32_bits(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = to_device(queue, np.random.default_rng(1).standard_normal((2, 3, 7, 9)))
    grad = to_device(queue, np.random.default_rng(2).standard_normal((2, 3, 3, 4)))

    def results() -> list[Array]:
        y = pool.max_pool2d(x, 3, 2, out_dtype="float32", engine="elements")
        dx = pool.max_pool2d_backward(x, grad, 3, 2, out_dtype="float32", engine="elements")
        return [to_numpy(y), to_numpy(dx)]

    expected = results()
    monkeypatch.setattr(elements, "index_type", lambda largest: "ulong")
    for got, wanted in zip(results(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_empty(queue: cl.CommandQueue) -> None:
    empty = to_device(queue, np.empty((0, 3, 4, 4)))
    assert pool.max_pool2d(empty, 2, 2, out_dtype="float32").shape == (0, 3, 2, 2)
    assert pool.avg_pool2d(empty, 2, 2, out_dtype="float32").shape == (0, 3, 2, 2)
    assert pool.global_avg_pool2d(empty, out_dtype="float32").shape == (0, 3, 1, 1)
    nothing = to_device(queue, np.empty((0, 3, 2, 2)))
    assert pool.max_pool2d_backward(empty, nothing, 2, 2, out_dtype="float32").shape == (0, 3, 4, 4)
    assert pool.avg_pool2d_backward((0, 3, 4, 4), nothing, 2, 2, out_dtype="float32").shape == (0, 3, 4, 4)
