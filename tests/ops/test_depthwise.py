"""Depthwise convolution and its gradients against numpy's float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops import depthwise, launch
from clamp.ops.depthwise import columns, problem
from clamp.ops.reduce_to_shape import sum_channels
from tests.reference import assert_close, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

Array = npt.NDArray[np.float64]
EPS = 2.0**-24

#: storage types of x, w, bias, result or gradient
MIXES = [("float32", "float32", "float32", "float32"), ("float16", "float16", "float32", "float16"),
         ("bfloat16", "float32", "float16", "bfloat16")]  # fmt: skip
#: (N, C, H, W), (KH, KW), stride, pad, mixture: each engine meets every mixture, at whole planes, edges and remainders
CASES = [
    ((2, 3, 9, 20), (3, 3), 1, 1, MIXES[0]),
    ((2, 2, 11, 37), (3, 3), 2, 1, MIXES[1]),
    ((1, 2, 8, 8), (3, 3), 2, 0, MIXES[1]),
    ((1, 1, 1, 1), (1, 1), 1, 0, MIXES[0]),
    ((1, 2, 5, 18), (5, 3), 1, 2, MIXES[2]),
    ((2, 1, 10, 13), (2, 4), 2, 3, MIXES[2]),
    ((1, 2, 7, 9), (3, 3), 3, 1, MIXES[1]),
    ((1, 2, 6, 35), (3, 3), 1, 4, MIXES[1]),
    ((1, 1, 12, 12), (9, 9), 1, 4, MIXES[0]),
    ((1, 3, 7, 21), (3, 3), 1, 1, MIXES[1]),
    ((2, 1, 5, 17), (3, 3), 1, 1, MIXES[2]),
]


@pytest.fixture(params=["columns", "tiles", "elements"])
def plan(request: pytest.FixtureRequest, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of CPU devices, columns where they fit and tiles, and that of all others."""
    chosen = dataclasses.replace(capabilities(queue), is_cpu=request.param != "elements")
    monkeypatch.setattr(columns, "_PLANES_PER_CORE", 0 if request.param == "columns" else 2**32)
    for module in (problem, launch):
        monkeypatch.setattr(module, "capabilities", lambda queue: chosen)


class Reference:
    """Value and gradients, each with the sum of the magnitudes that it adds up."""

    def __init__(self, x: Array, w: Array, stride: int, pad: int) -> None:
        self.x, self.w, self.stride, self.pad = x, w, stride, pad
        self.padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        size = w.shape[2:]
        view = np.lib.stride_tricks.sliding_window_view(self.padded, size, axis=(2, 3))
        self.windows = view[:, :, ::stride, ::stride]

    def value(self) -> Array:
        return np.einsum("nchwij,cij->nchw", self.windows, self.w[:, 0])

    def weight_gradient(self, grad: Array) -> Array:
        return np.einsum("nchwij,nchw->cij", self.windows, grad)[:, None]

    def input_gradient(self, grad: Array) -> Array:
        result = np.zeros_like(self.padded)
        rows, columns = grad.shape[2:]
        for kh in range(self.w.shape[2]):
            for kw in range(self.w.shape[3]):
                span = np.s_[
                    :, :, kh : kh + rows * self.stride : self.stride, kw : kw + columns * self.stride : self.stride
                ]
                result[span] += grad * self.w[:, 0, kh, kw][:, None, None]
        height, width = self.x.shape[2:]
        return result[:, :, self.pad : self.pad + height, self.pad : self.pad + width]


def check(
    queue: cl.CommandQueue, shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int, mix: tuple[str, ...],
    roundings: int = 4,
) -> None:  # fmt: skip
    """Result and gradients; of each term that is added up so many roundings may show."""
    rng = np.random.default_rng(0)
    x = to_device(queue, rng.standard_normal(shape), mix[0])
    w = to_device(queue, rng.standard_normal((shape[1], 1, *size)), mix[1])
    bias = to_device(queue, rng.standard_normal(shape[1]), mix[2])
    exact = Reference(to_numpy(x), to_numpy(w), stride, pad)
    terms = Reference(np.abs(to_numpy(x)), np.abs(to_numpy(w)), stride, pad)
    offset = to_numpy(bias)[:, None, None]
    slack = roundings * size[0] * size[1] * EPS * (terms.value() + np.abs(offset))
    y = depthwise.depthwise_conv2d(x, w, bias, stride, pad, out_dtype=mix[3])
    assert_close(y, exact.value() + offset, slack=slack)
    alone = mix == MIXES[1]  # without a bias, or for one gradient, it is another program
    if alone:
        without = depthwise.depthwise_conv2d(x, w, None, stride, pad, out_dtype=mix[3])
        assert_close(without, exact.value(), slack=slack)

    grad = to_device(queue, rng.standard_normal(y.shape), mix[3])
    g = to_numpy(grad)
    dx, dw = depthwise.gradients(x, w, grad, stride, pad, dx_dtype=mix[0], dw_dtype=mix[1])
    assert dx is not None
    assert dw is not None
    assert_close(
        dx, exact.input_gradient(g), slack=roundings * size[0] * size[1] * EPS * terms.input_gradient(np.abs(g))
    )
    count = g.size // shape[1]
    assert_close(dw, exact.weight_gradient(g), slack=roundings * count * EPS * terms.weight_gradient(np.abs(g)))
    db = sum_channels(grad, mix[2])
    assert_close(db, g.sum((0, 2, 3)), slack=roundings * count * EPS * np.abs(g).sum((0, 2, 3)))
    if alone:
        for one, together in (
            (input_gradient(x, w, grad, stride, pad, mix[0]), dx),
            (weight_gradient(x, w, grad, stride, pad, mix[1]), dw),
        ):
            np.testing.assert_array_equal(to_numpy(one), to_numpy(together))


def input_gradient(x: Tensor, w: Tensor, grad: Tensor, stride: int, pad: int, dtype: str = "float32") -> Tensor:
    dx, dw = depthwise.gradients(x, w, grad, stride, pad, dx_dtype=dtype)
    assert dx is not None
    assert dw is None
    return dx


def weight_gradient(x: Tensor, w: Tensor, grad: Tensor, stride: int, pad: int, dtype: str = "float32") -> Tensor:
    dx, dw = depthwise.gradients(x, w, grad, stride, pad, dw_dtype=dtype)
    assert dx is None
    assert dw is not None
    return dw


@pytest.mark.parametrize(("shape", "size", "stride", "pad", "mix"), CASES)
def test_value_and_gradients(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int,
    mix: tuple[str, ...],
) -> None:  # fmt: skip
    check(queue, shape, size, stride, pad, mix)


@pytest.mark.unsimulated
@pytest.mark.parametrize("shape", [(1, 1, 9, 700), (1, 2, 150, 90), (9, 1, 33, 17)])
def test_planes_larger_than_a_frame(queue: cl.CommandQueue, shape: tuple[int, ...]) -> None:
    for stride in (1, 2):
        check(queue, shape, (3, 3), stride, 1, MIXES[1])
        check(queue, shape, (5, 4), stride, 3, MIXES[2])


@pytest.mark.parametrize("size", sweep([3, 5, 7]))
@pytest.mark.parametrize("width", [1, 7, 15, 16, 17, 32, 33, 49])
@pytest.mark.parametrize("plan", ["columns"], indirect=True)
def test_columns_of_every_width_and_padding(
    queue: cl.CommandQueue, simulated: bool, plan: None, size: int, width: int
) -> None:
    for pad, height in itertools.product(sorted({0, 1, size // 2, size - 1}), (1, 9)):
        fits = min(height, width) + 2 * pad >= size
        if not fits or (simulated and (height > 1 or width > 17)):
            continue
        check(queue, (1, 3, height, width), (size, size), 1, pad, MIXES[0], roundings=1)


@pytest.mark.parametrize("height", [207, 208])
def test_planes_that_fill_the_frame(queue: cl.CommandQueue, plan: None, height: int) -> None:
    """Zeros below such a plane are written beyond the frame's 8192 floats (the simulator would tell)."""
    check(queue, (1, 1, height, 4), (3, 3), 1, 1, MIXES[1])


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(("stride", "pad"), [(1, 1), (2, 1), (1, 0)])
def test_what_does_not_meet_a_value_stays_finite(
    queue: cl.CommandQueue, plan: None, stride: int, pad: int, value: float
) -> None:
    """An element of x that is not finite shows in the results and taps that it has a part in, and in no others."""
    rng = np.random.default_rng(4)
    shape, wide = (2, 3, 7, 21), (3, 1, 3, 3)
    for place in ((0, 1, 3, 20), (1, 1, 2, 0), (0, 1, 6, 20), (1, 1, 0, 15), (0, 1, 2, 16)):
        values = rng.standard_normal(shape)
        values[place] = value
        x, w = to_device(queue, values, "float16"), to_device(queue, rng.standard_normal(wide), "float16")
        exact = Reference(to_numpy(x), to_numpy(w), stride, pad)
        y = depthwise.depthwise_conv2d(x, w, None, stride, pad, out_dtype="float16")
        assert_close(y, exact.value(), slack=2.0**-17)
        grad = to_device(queue, rng.standard_normal(y.shape), "float16")
        dw = weight_gradient(x, w, grad, stride, pad)
        assert_close(dw, exact.weight_gradient(to_numpy(grad)), slack=2.0**-15)


@pytest.mark.parametrize(("stride", "pad"), [(1, 1), (2, 1), (1, 0)])
def test_an_infinite_gradient_shows_where_it_belongs(queue: cl.CommandQueue, plan: None, stride: int, pad: int) -> None:
    rng = np.random.default_rng(5)
    shape, wide = (2, 3, 7, 21), (3, 1, 3, 3)
    x, w = (to_device(queue, rng.standard_normal(extents), "float16") for extents in (shape, wide))
    exact = Reference(to_numpy(x), to_numpy(w), stride, pad)
    for place in ((0, 1, 1, -1), (1, 1, 2, 1), (0, 1, -1, 0)):
        values = rng.standard_normal(exact.value().shape)
        values[place] = np.inf
        grad = to_device(queue, values, "float16")
        dx, dw = depthwise.gradients(x, w, grad, stride, pad, dx_dtype="float16", dw_dtype="float32")
        assert dx is not None
        assert dw is not None
        assert_close(dx, exact.input_gradient(to_numpy(grad)), slack=2.0**-17)
        others = [0, 2]
        np.testing.assert_allclose(to_numpy(dw)[others], exact.weight_gradient(to_numpy(grad))[others], atol=2.0**-15)


@cache
def nan_leaver(queue: cl.CommandQueue) -> Callable[[], None]:
    """What fills the stacks of the device's threads with NaN, which later kernels then find in private memory."""
    program = cl.Program(queue.context, """
        __kernel __attribute__((reqd_work_group_size(1, 1, 1))) void leave_nans(__global uint *out) {
            volatile uint stack[1 << 14];
            for (uint i = 0; i < 1 << 14; i++) stack[i] = 0x7fc00000;
            out[get_global_id(0)] = stack[get_global_id(0) % (1 << 14)];
        }""").build()  # fmt: skip
    kernel = cl.Kernel(program, "leave_nans")
    groups = 512 * capabilities(queue).compute_units  # so many that no thread gets none
    out = cl.Buffer(queue.context, cl.mem_flags.WRITE_ONLY, 4 * groups)

    def leave_nans() -> None:
        kernel(queue, (groups,), (1,), out)
        queue.finish()

    leave_nans()  # the first launch compiles: that would use the stacks again
    return leave_nans


@pytest.mark.unsimulated  # kernels share no stack in the simulator
@pytest.mark.parametrize(("shape", "size", "stride", "pad", "mix"), CASES)
def test_memory_that_nobody_wrote(
    queue: cl.CommandQueue, shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int,
    mix: tuple[str, ...],
) -> None:  # fmt: skip
    rng = np.random.default_rng(6)
    extents = (shape, (shape[1], 1, *size), (shape[1],))
    x, w, bias = (to_device(queue, rng.standard_normal(each), t) for each, t in zip(extents, mix, strict=False))

    def results() -> Iterator[Tensor]:
        y = depthwise.depthwise_conv2d(x, w, bias, stride, pad, out_dtype=mix[3])
        yield y
        yield from filter(None, depthwise.gradients(x, w, y, stride, pad, dx_dtype=mix[0], dw_dtype=mix[1]))

    expected = [to_numpy(result) for result in results()]
    assert len(expected) == 3
    leave_nans = nan_leaver(queue)
    leave_nans()
    for result, want in zip(results(), expected, strict=True):
        np.testing.assert_array_equal(to_numpy(result), want)
        leave_nans()


def test_the_same_bits_every_time(queue: cl.CommandQueue, plan: None) -> None:
    rng = np.random.default_rng(1)
    x = to_device(queue, rng.standard_normal((3, 2, 7, 19)), "float16")
    grad = to_device(queue, rng.standard_normal((3, 2, 7, 19)), "float16")
    w = to_device(queue, rng.standard_normal((2, 1, 3, 3)), "float16")
    runs = [weight_gradient(x, w, grad, 1, 1) for _ in range(2)]
    np.testing.assert_array_equal(to_numpy(runs[0]), to_numpy(runs[1]))


def test_empty(queue: cl.CommandQueue) -> None:
    w = to_device(queue, np.ones((2, 1, 3, 3)))
    empty = to_device(queue, np.empty((0, 2, 4, 4)))
    y = depthwise.depthwise_conv2d(empty, w, None, 1, 1, out_dtype="float32")
    assert y.shape == (0, 2, 4, 4)
    assert input_gradient(empty, w, y, 1, 1).shape == (0, 2, 4, 4)
    assert_close(weight_gradient(empty, w, y, 1, 1), np.zeros((2, 1, 3, 3)))
    assert_close(sum_channels(y, "float32"), np.zeros(2))
    assert depthwise.gradients(empty, w, y, 1, 1) == (None, None)
