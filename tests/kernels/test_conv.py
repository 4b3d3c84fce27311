"""Convolutions: all kernels, every geometry and storage type, against float64 of the stored values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import capabilities
from clamp.ops import conv as ops
from clamp.ops import conv_dot_bf16, conv_geometry, conv_stage, conv_winograd, conv_winograd_grad, gemm_dot_bf16
from clamp.ops.conv import ConvKernel
from clamp.ops.conv_geometry import Window
from tests.reference import STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

Array = npt.NDArray[Any]
KERNELS = pytest.mark.parametrize(
    "kernel", [ConvKernel.DOT_BF16, ConvKernel.PACKED, ConvKernel.TILED], ids=lambda kernel: kernel.value
)


@pytest.fixture(autouse=True)
def _kernel_that_runs_here(request: pytest.FixtureRequest, queue: cl.CommandQueue) -> None:
    """Skips what needs an instruction that the processor lacks."""
    parameters = getattr(request.node, "callspec", None)
    if parameters and parameters.params.get("kernel") is ConvKernel.DOT_BF16 and not gemm_dot_bf16.works(queue):
        pytest.skip("no bfloat16 dot product here")


def storage_of(kernel: ConvKernel) -> str:
    """The storage type that most tests of a kernel use."""
    return "bfloat16" if kernel is ConvKernel.DOT_BF16 else "float16"


@dataclass(frozen=True)
class Case:
    """x (n, groups * c, *image), w (groups * f, c, *kernel)."""

    n: int
    c: int
    f: int
    image: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def window(self) -> Window:
        return Window(self.stride, self.pad, self.dilation, self.groups)

    def arrays(self) -> tuple[Array, Array, Array]:
        """x, w and a gradient of the output."""
        rng = np.random.default_rng([self.n, self.c, self.f, *self.image, *self.kernel])
        size = self.window.output(self.image, self.kernel)
        x = rng.standard_normal((self.n, self.groups * self.c, *self.image))
        w = rng.standard_normal((self.groups * self.f, self.c, *self.kernel))
        return x, w, rng.standard_normal((self.n, self.groups * self.f, *size))


CASES = {
    "1x1 of one pixel": Case(1, 1, 1, (1, 1), (1, 1)),
    "1x1": Case(2, 5, 13, (4, 9), (1, 1)),
    "3x3, padded": Case(2, 3, 5, (5, 7), (3, 3), pad=(1, 1)),
    "3x3, not padded, rows of 19": Case(1, 2, 13, (4, 21), (3, 3)),
    "rows of 37": Case(1, 1, 2, (3, 37), (3, 3), pad=(1, 1)),
    "stride 2": Case(2, 3, 4, (7, 9), (3, 3), (2, 2), (1, 1)),
    "stride 2, rows of 40": Case(1, 1, 3, (3, 80), (3, 3), (2, 2), (1, 1)),
    "stride 2 of an even image": Case(1, 2, 3, (6, 8), (4, 4), (2, 2), (1, 1)),
    "1x1, stride 2": Case(2, 3, 4, (5, 6), (1, 1), (2, 2)),
    "stride larger than the kernel": Case(1, 2, 3, (11, 13), (2, 3), (5, 4), (0, 1)),
    "dilation": Case(1, 2, 3, (9, 8), (3, 2), pad=(2, 1), dilation=(2, 3)),
    "stride 4, dilation 2": Case(1, 2, 2, (13, 11), (3, 3), (4, 4), (3, 2), (2, 2)),
    "stride 3, dilation 2": Case(1, 1, 2, (10, 11), (3, 3), (3, 3), (1, 2), (2, 2)),
    "kernel larger than the image": Case(2, 2, 3, (2, 3), (5, 5), pad=(2, 2)),
    "padding of more than 16": Case(1, 2, 2, (2, 18), (1, 2), pad=(1, 20)),
    "padding of more than 16, stride 2": Case(1, 1, 2, (2, 7), (2, 3), (1, 2), (0, 35)),
    "padding larger than the kernel": Case(1, 1, 2, (3, 3), (2, 2), pad=(3, 4)),
    "oblong": Case(1, 3, 2, (8, 5), (1, 5), (2, 1), (0, 2)),
    "one pixel left": Case(3, 4, 5, (3, 3), (3, 3)),
    "groups": Case(2, 3, 4, (5, 6), (3, 3), (1, 1), (1, 1), groups=3),
    "groups, stride 2": Case(1, 1, 2, (6, 5), (3, 3), (2, 2), (1, 1), groups=2),
    "depthwise": Case(1, 1, 1, (5, 5), (3, 3), pad=(1, 1), groups=7),
}


SIMULATED_TILED = [CASES["1x1"], CASES["stride 4, dilation 2"], CASES["padding larger than the kernel"]]


def patches(x: Array, case: Case) -> Array:
    """x's windows, (n, groups, c, KH, KW, OH, OW)."""
    (ph, pw), (sh, sw), (dh, dw) = case.pad, case.stride, case.dilation
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    oh, ow = case.window.output(case.image, case.kernel)
    taps = [
        padded[:, :, i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw]
        for i in range(case.kernel[0])
        for j in range(case.kernel[1])
    ]
    stacked = np.stack(taps, axis=2)
    return stacked.reshape(len(x), case.groups, case.c, *case.kernel, oh, ow)


def forward(x: Array, w: Array, case: Case) -> Array:
    w = w.reshape(case.groups, case.f, case.c, *case.kernel)
    out = np.einsum("ngcijrq,gfcij->ngfrq", patches(x, case), w)
    return out.reshape(len(x), case.groups * case.f, *out.shape[3:])


def weight_grad(x: Array, g: Array, case: Case) -> Array:
    g = g.reshape(len(g), case.groups, case.f, *g.shape[2:])
    return np.einsum("ngcijrq,ngfrq->gfcij", patches(x, case), g).reshape(case.groups * case.f, case.c, *case.kernel)


def input_grad(g: Array, w: Array, case: Case) -> Array:
    (ph, pw), (sh, sw), (dh, dw) = case.pad, case.stride, case.dilation
    (h, wd), (oh, ow) = case.image, g.shape[2:]
    g = g.reshape(len(g), case.groups, case.f, oh, ow)
    w = w.reshape(case.groups, case.f, case.c, *case.kernel)
    padded = np.zeros((len(g), case.groups * case.c, h + 2 * ph, wd + 2 * pw))
    for i in range(case.kernel[0]):
        for j in range(case.kernel[1]):
            part = np.einsum("ngfrq,gfc->ngcrq", g, w[..., i, j]).reshape(len(g), case.groups * case.c, oh, ow)
            padded[:, :, i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw] += part
    return padded[:, :, ph : ph + h, pw : pw + wd]


def largest_nearby(x: Array, reach: int) -> Array:
    """The largest magnitude in what is added to an element before it is multiplied: up to ``reach`` rows and columns
    away."""
    height, width = x.shape[2:]
    padded = np.pad(np.abs(x), ((0, 0), (0, 0), (reach, reach), (reach, reach)))
    sides = range(2 * reach + 1)
    return np.max([padded[:, :, i : i + height, j : j + width] for i in sides for j in sides], axis=0) if x.size else x


def slack(magnitude: Array, terms: int) -> Array:
    """What fp32 sums may be off by."""
    return (terms + 1) * 2.0**-24 * magnitude


def check(
    queue: cl.CommandQueue,
    case: Case,
    kernel: ConvKernel,
    dtypes: tuple[str, str, str, str] | None = None,
    *,
    with_bias: bool = True,
) -> None:
    """Forward and all gradients of a case; storage types of x, w, the gradient and what is computed."""
    dtypes = dtypes or (storage_of(kernel),) * 4
    out_dtype = dtypes[3]
    x, w, g = (quantize(a, d).astype(np.float64) for a, d in zip(case.arrays(), dtypes, strict=False))
    tensors = [to_device(queue, a, d) for a, d in zip((x, w, g), dtypes, strict=False)]
    options: Any = {"out_dtype": out_dtype, "kernel": kernel}
    # Winograd's sums of multiples of elements: some roundings more, of the largest in a tile.
    is_winograd = kernel is ConvKernel.WINOGRAD
    reach = 3 * case.stride[0]
    nearby, roundings = (partial(largest_nearby, reach=reach), 3) if is_winograd else (np.abs, 1)
    bias = np.linspace(-2, 2, w.shape[0]).astype(np.float32)
    bias_tensor = to_device(queue, bias) if with_bias else None
    y = ops.conv2d(tensors[0], tensors[1], case.window, bias=bias_tensor, relu=with_bias, **options)
    expected, magnitude = forward(x, w, case), roundings * forward(nearby(x), np.abs(w), case)
    if with_bias:
        expected = np.maximum(expected + bias.astype(np.float64)[:, None, None], 0)
        magnitude = magnitude + 2
    steps = w[0].size
    assert_close(y, expected, slack=slack(magnitude, steps))

    check_weight_grad(x, g, tensors, case, options, with_bias=with_bias)

    bias_c = np.linspace(-1, 3, x.shape[1]).astype(np.float32)
    bias_tensor = to_device(queue, bias_c) if with_bias else None
    gx = ops.conv2d_input_grad(tensors[2], tensors[1], case.image, case.window, bias=bias_tensor, **options)
    expected, magnitude = input_grad(g, w, case), roundings * input_grad(nearby(g), np.abs(w), case) + 3
    if with_bias:
        expected = expected + bias_c.astype(np.float64)[:, None, None]
    assert_close(gx, expected, slack=slack(magnitude, w.size))


def check_weight_grad(x: Array, g: Array, tensors: list[Tensor], case: Case, options: Any, *, with_bias: bool) -> None:
    terms = g.shape[0] * g.shape[2] * g.shape[3]
    gw = ops.conv2d_weight_grad(tensors[0], tensors[2], case.kernel, case.window, **options)
    if with_bias:
        without = to_numpy(gw)
        gw, gb = ops.conv2d_parameter_grads(
            tensors[0], tensors[2], case.kernel, case.window, bias_dtype="float32", **options
        )
        np.testing.assert_array_equal(to_numpy(gw), without)
        assert_close(gb, g.sum((0, 2, 3)), slack=slack(np.abs(g).sum((0, 2, 3)), terms))
    magnitude = weight_grad(np.abs(x), np.abs(g), case)
    if options["kernel"] is ConvKernel.WINOGRAD:
        nearby_x, nearby_g = largest_nearby(x, 3 * case.stride[0]), largest_nearby(g, 3)
        magnitude = 3 * weight_grad(nearby_x, nearby_g, case)
    assert_close(gw, weight_grad(x, g, case), slack=slack(magnitude, terms))


@KERNELS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_geometries(queue: cl.CommandQueue, simulated: bool, case: Case, kernel: ConvKernel) -> None:
    if simulated and kernel is ConvKernel.TILED and case not in SIMULATED_TILED:
        pytest.skip("slow to simulate; the geometry is the same in all kernels")
    check(queue, case, kernel)


@KERNELS
@pytest.mark.parametrize("x_dtype", sweep(STORAGE_DTYPES))
def test_storage_types(queue: cl.CommandQueue, simulated: bool, x_dtype: str, kernel: ConvKernel) -> None:
    others = {
        "float32": ("float16", "bfloat16"),
        "float16": ("bfloat16", "float32"),
        "bfloat16": ("float32", "float16"),
    }
    w_dtype, out_dtype = others[x_dtype]
    if kernel is ConvKernel.DOT_BF16:
        x_dtype = w_dtype = "bfloat16"
    case = Case(1, 1, 2, (3, 5), (3, 3), pad=(1, 1)) if simulated else Case(2, 2, 5, (5, 18), (3, 3), pad=(1, 1))
    grad_dtype = w_dtype if kernel is ConvKernel.DOT_BF16 else out_dtype
    check(queue, case, kernel, (x_dtype, w_dtype, grad_dtype, out_dtype), with_bias=False)
    check(queue, case, kernel, (x_dtype,) * 4)


@KERNELS
@pytest.mark.parametrize("features", [*range(1, 14), 16, 20, 28])
def test_numbers_of_channels(queue: cl.CommandQueue, simulated: bool, features: int, kernel: ConvKernel) -> None:
    """Panels of weights are of two heights: every remainder, forward and in the input gradient."""
    if simulated:
        pytest.skip("slow to simulate; other tests have panels of both heights")
    check(queue, Case(2, features, features, (3, 6), (3, 3), pad=(1, 1), groups=2), kernel)


@KERNELS
def test_sums_of_several_blocks(queue: cl.CommandQueue, simulated: bool, kernel: ConvKernel) -> None:
    if simulated and kernel is ConvKernel.TILED:
        pytest.skip("the tiled kernel has no such blocks, and is slow to simulate")
    channels = 33 if simulated else 131
    dtypes = ("bfloat16",) * 4 if kernel is ConvKernel.DOT_BF16 else ("float32",) * 4
    check(queue, Case(1, channels, 14, (2, 9), (3, 3), pad=(1, 1)), kernel, dtypes)


@KERNELS
def test_positions_of_several_blocks(queue: cl.CommandQueue, simulated: bool, kernel: ConvKernel) -> None:
    if simulated:
        pytest.skip("slow to simulate")
    check(queue, Case(2, 2, 3, (31, 47), (3, 3), pad=(1, 1)), kernel)
    check(queue, Case(3, 9, 13, (29, 29), (1, 1)), kernel)


@KERNELS
def test_a_batch_in_slices(queue: cl.CommandQueue, kernel: ConvKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_stage, "_WORKSPACE_BYTES", 1500)
    check(queue, Case(3, 2, 3, (5, 6), (3, 3), (2, 2), (1, 1)), kernel)
    check(queue, Case(3, 1, 2, (5, 6), (3, 3), pad=(1, 1), groups=2), kernel)


@KERNELS
@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4)])
def test_nothing_to_sum(queue: cl.CommandQueue, shape: tuple[int, ...], kernel: ConvKernel) -> None:
    n, c, h, w = shape
    case = Case(n, c, 3, (h, w), (3, 3), pad=(2, 2))
    check(queue, case, kernel)


@KERNELS
def test_infinities_and_nan_stay_where_they_are(queue: cl.CommandQueue, kernel: ConvKernel) -> None:
    case = Case(1, 1, 1, (3, 40), (3, 3), pad=(1, 1))
    x, w, _ = case.arrays()
    x[0, 0, 0, 0], x[0, 0, 2, 20], x[0, 0, 1, 39] = np.inf, np.nan, -np.inf
    w = np.abs(w)
    dtype = "bfloat16" if kernel is ConvKernel.DOT_BF16 else "float32"
    tensors = to_device(queue, x, dtype), to_device(queue, w, dtype)
    y = ops.conv2d(*tensors, case.window, out_dtype="float16", relu=True, kernel=kernel)
    with np.errstate(invalid="ignore"):
        expected = forward(*(quantize(a, dtype).astype(np.float64) for a in (x, w)), case)
        expected = np.where(np.isnan(expected), np.nan, np.maximum(expected, 0))
    assert_close(y, expected, slack=1e-3)
    assert np.isnan(to_numpy(y)).sum() == 6


@KERNELS
def test_weights_whose_sums_do_not_read_an_infinity_stay_finite(queue: cl.CommandQueue, kernel: ConvKernel) -> None:
    """Rows of five outputs: what lies behind them in memory belongs to other weights, or to the next row."""
    case = Case(1, 1, 1, (3, 7), (3, 3))
    x, _, g = case.arrays()
    x[0, 0, 1, 5] = np.inf
    tensors = [to_device(queue, a, storage_of(kernel)) for a in (x, g)]
    gw = to_numpy(ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", kernel=kernel))
    np.testing.assert_array_equal(np.isfinite(gw[0, 0]), [[True] * 3, [True, False, False], [True] * 3])


@KERNELS
def test_repeatable(queue: cl.CommandQueue, kernel: ConvKernel) -> None:
    case = Case(2, 3, 5, (9, 11), (3, 3), (2, 2), (1, 1))
    x, _, g = case.arrays()
    tensors = to_device(queue, x, storage_of(kernel)), to_device(queue, g, storage_of(kernel))
    runs = [
        to_numpy(ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", kernel=kernel))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


WINOGRAD_CASES = {
    "one output": Case(1, 1, 1, (3, 3), (3, 3)),
    "one column of tiles": Case(2, 3, 5, (5, 2), (3, 3), pad=(1, 1)),
    "odd rows and columns": Case(2, 3, 4, (5, 7), (3, 3), pad=(1, 1)),
    "not padded, rows of more than 16 tiles": Case(1, 2, 11, (5, 39), (3, 3)),
    "rows of 32 tiles": Case(1, 1, 2, (6, 64), (3, 3), pad=(1, 1)),
    "rows of 33 tiles, the last of one column": Case(1, 1, 7, (4, 65), (3, 3), pad=(1, 1)),
    "padded by 2": Case(2, 2, 6, (4, 6), (3, 3), pad=(2, 0)),
    "groups": Case(2, 3, 4, (5, 6), (3, 3), pad=(1, 2), groups=3),
    "more sums than rest at a time": Case(1, 2, 100, (3, 4), (3, 3), pad=(1, 1)),
    "more tiles than are multiplied at a time": Case(7, 2, 3, (10, 9), (3, 3), pad=(1, 1)),
    "more images than work-items": Case(70, 1, 2, (9, 8), (3, 3), pad=(1, 1)),
    "stride 2": Case(2, 3, 5, (7, 9), (3, 3), (2, 2), (1, 1)),
    "stride 2, one pixel": Case(3, 2, 1, (1, 1), (3, 3), (2, 2), (1, 1)),
    "stride 2, even rows and columns": Case(2, 2, 7, (10, 18), (3, 3), (2, 2), (1, 1)),
    "stride 2, rows of 6 tiles": Case(3, 5, 4, (9, 43), (3, 3), (2, 2), (1, 1)),
    "stride 2, rows of 18 tiles": Case(1, 2, 29, (4, 137), (3, 3), (2, 2), (1, 1)),
    "stride 2, groups": Case(2, 3, 4, (5, 6), (3, 3), (2, 2), (1, 1), groups=3),
    "stride 2, no channel": Case(2, 0, 3, (4, 4), (3, 3), (2, 2), (1, 1)),
    "no channel": Case(2, 0, 3, (4, 4), (3, 3), pad=(1, 1)),
    "no image": Case(0, 2, 3, (4, 4), (3, 3), pad=(1, 1)),
    "no row": Case(2, 2, 3, (0, 4), (3, 3), pad=(2, 1)),
}
SIMULATED_WINOGRAD = [
    "one column of tiles",
    "not padded, rows of more than 16 tiles",
    "groups",
    "no channel",
    "stride 2",
    "stride 2, groups",
]


@pytest.mark.parametrize("name", WINOGRAD_CASES)
def test_fewer_multiplications(queue: cl.CommandQueue, simulated: bool, name: str) -> None:
    if simulated and name not in SIMULATED_WINOGRAD:
        pytest.skip("slow to simulate")
    check(queue, WINOGRAD_CASES[name], ConvKernel.WINOGRAD)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), sweep([("float16", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")])
)
def test_fewer_multiplications_of_any_storage_type(
    queue: cl.CommandQueue, simulated: bool, x_dtype: str, w_dtype: str
) -> None:
    if simulated:
        pytest.skip("slow to simulate; storage types are those of the other kernels")
    case = Case(2, 131, 14, (3, 19), (3, 3), pad=(1, 1))
    other = {"float16": "bfloat16", "bfloat16": "float16"}[x_dtype]
    check(queue, case, ConvKernel.WINOGRAD, (x_dtype, w_dtype, x_dtype, x_dtype))
    check(queue, case, ConvKernel.WINOGRAD, (x_dtype, w_dtype, x_dtype, other), with_bias=False)


@pytest.mark.parametrize(("x_dtype", "out_dtype"), [("float32", "float16"), ("bfloat16", "float32")])
def test_fewer_multiplications_are_not_for_float32(queue: cl.CommandQueue, x_dtype: str, out_dtype: str) -> None:
    x, w = to_device(queue, np.ones((1, 2, 5, 5)), x_dtype), to_device(queue, np.ones((2, 2, 3, 3)), "float16")
    with pytest.raises(ValueError, match=f"WINOGRAD reads and stores 16 bits; x is {x_dtype}, the result {out_dtype}"):
        ops.conv2d(x, w, Window(), out_dtype=out_dtype, kernel=ConvKernel.WINOGRAD)


def test_fewer_multiplications_of_channels_in_blocks(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of more output channels than rest at a time, over more input channels than are multiplied at a time."""
    monkeypatch.setattr(conv_winograd, "_PANEL_FLOATS", 128)
    case = Case(1, 19, 27 if simulated else 53, (2, 5), (3, 3), pad=(1, 1))
    check(queue, case, ConvKernel.WINOGRAD)
    x, w, _ = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    x[0, 11, 1, 2] = np.inf
    y = ops.conv2d(
        to_device(queue, x, "float16"), to_device(queue, w, "float16"), case.window,
        out_dtype="float16", kernel=ConvKernel.WINOGRAD,
    )  # fmt: skip
    assert_close(y, forward(x, w, case), slack=slack(forward(np.minimum(np.abs(x), 9), np.abs(w), case), w[0].size))


@pytest.mark.parametrize("place", [(0, 0), (2, 5), (3, 4), (6, 38)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_fewer_multiplications_keep_to_what_an_output_reads(
    queue: cl.CommandQueue, simulated: bool, value: float, place: tuple[int, int]
) -> None:
    """What is not finite reaches the outputs that read it, as numpy has them, and changes no bit of other tiles."""
    if simulated and (place != (3, 4) or value != np.inf):
        pytest.skip("slow to simulate")
    case = Case(1, 2, 3, (7, 39), (3, 3), pad=(1, 1))
    x, w, _ = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    spoiled = x.copy()
    spoiled[0, 1][place] = value
    bias = to_device(queue, np.array([1, -2, 3], np.float32))
    results = [
        ops.conv2d(
            to_device(queue, array, "float16"), to_device(queue, w, "float16"), case.window,
            bias=bias, out_dtype="float16", kernel=ConvKernel.WINOGRAD,
        )
        for array in (x, spoiled)
    ]  # fmt: skip
    expected = forward(spoiled, w, case) + np.array([1, -2, 3])[:, None, None]
    magnitude = forward(largest_nearby(x, 3), np.abs(w), case) + 3
    assert_close(results[1], expected, slack=3 * slack(magnitude, w[0].size))
    reads = np.zeros(case.image, dtype=bool)
    reads[max(0, place[0] - 1) : place[0] + 2, max(0, place[1] - 1) : place[1] + 2] = True
    tiles = np.add.reduceat(np.add.reduceat(reads, range(0, 7, 4), 0), range(0, 39, 4), 1) > 0
    others = ~tiles.repeat(4, 0).repeat(4, 1)[:7, :39]
    before, after = (to_numpy(result)[..., others] for result in results)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("place", [(0, 0), (2, 5), (3, 8), (4, 19)])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_fewer_multiplications_with_stride_keep_to_what_an_output_reads(
    queue: cl.CommandQueue, simulated: bool, value: float, place: tuple[int, int]
) -> None:
    if simulated and (place != (3, 8) or value != np.inf):
        pytest.skip("slow to simulate")
    case = Case(1, 2, 3, (9, 39), (3, 3), (2, 2), (1, 1))
    x, w, g = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    options: Any = {"out_dtype": "float16", "kernel": ConvKernel.WINOGRAD}
    x_magnitude, g_magnitude = (np.abs(array).max() * np.abs(w).sum((1, 2, 3)).max() for array in (x, g))
    x[0, 1][2 * place[0], 2 * place[1]] = g[0, 1][place] = value
    tensors = [to_device(queue, array, "float16") for array in (x, w, g)]
    y = ops.conv2d(tensors[0], tensors[1], case.window, **options)
    assert_close(y, forward(x, w, case), slack=3 * slack(x_magnitude, w[0].size))
    gx = ops.conv2d_input_grad(tensors[2], tensors[1], case.image, case.window, **options)
    assert_close(gx, input_grad(g, w, case), slack=3 * slack(g_magnitude, w.size))


def test_fewer_multiplications_of_an_overflow(queue: cl.CommandQueue, simulated: bool) -> None:
    """Where nothing is finite, on more tiles than are transformed at a time; and where only adding elements up would
    overflow."""
    if simulated:
        pytest.skip("slow to simulate")
    case = Case(2, 3, 2, (9, 75), (3, 3), pad=(1, 1))
    x, w, _ = (quantize(array, "bfloat16").astype(np.float64) for array in case.arrays())
    options: Any = {"out_dtype": "bfloat16", "kernel": ConvKernel.WINOGRAD, "relu": True}
    x[np.abs(x) > 1.5] *= 2.0**123
    y = ops.conv2d(to_device(queue, x, "bfloat16"), to_device(queue, w, "bfloat16"), case.window, **options)
    expected = np.maximum(forward(x, w, case), 0)
    assert np.isfinite(expected).all()
    assert expected.max() > 2.0**123
    assert_close(y, expected, slack=3 * slack(forward(largest_nearby(x, 3), np.abs(w), case), w[0].size))
    y = ops.conv2d(
        to_device(queue, np.full(x.shape, np.nan), "bfloat16"), to_device(queue, w, "bfloat16"), case.window, **options
    )
    assert np.isnan(to_numpy(y).astype(np.float32)).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_fewer_multiplications_keep_gradients_of_other_channels(
    queue: cl.CommandQueue, simulated: bool, value: float
) -> None:
    """What is not finite shows in every filter that reads it, and changes no bit of the others."""
    if simulated:
        pytest.skip("slow to simulate")
    case = Case(2, 7, 5, (6, 39), (3, 3), pad=(1, 1))
    x, _, g = case.arrays()
    for spoiled_x, spoiled_g in ((True, False), (False, True)):
        results = []
        for is_spoiled in (False, True):
            arrays = x.copy(), g.copy()
            arrays[0][1, 4, 3, 17] = value if is_spoiled and spoiled_x else arrays[0][1, 4, 3, 17]
            arrays[1][0, 2, 5, 38] = value if is_spoiled and spoiled_g else arrays[1][0, 2, 5, 38]
            tensors = [to_device(queue, array, "float16") for array in arrays]
            results.append(
                to_numpy(
                    ops.conv2d_weight_grad(
                        *tensors, case.kernel, case.window, out_dtype="float32", kernel=ConvKernel.WINOGRAD
                    )
                )
            )
        reads = np.zeros(results[0].shape, dtype=bool)
        reads[:, 4] |= spoiled_x
        reads[2] |= spoiled_g
        assert not np.isfinite(results[1][reads]).any()
        np.testing.assert_array_equal(results[1][~reads], results[0][~reads])


def test_fewer_multiplications_of_a_batch_in_slices(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_stage, "_WORKSPACE_BYTES", 1500)
    monkeypatch.setattr(conv_winograd, "_STAGED_BYTES", 1500)
    images = 2 if simulated else 3
    check(queue, Case(images, 2, 3, (5, 6), (3, 3), pad=(1, 1)), ConvKernel.WINOGRAD)


def test_fewer_multiplications_of_integers_are_exact(queue: cl.CommandQueue, simulated: bool) -> None:
    """As far as they can be stored; but a sum of zero may be off by a rounding of its terms, which is no zero."""
    case = Case(1, 4, 3, (4, 6) if simulated else (9, 21), (3, 3), pad=(1, 1))
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-most, most + 1, array.shape) for most, array in zip((8, 4, 6), case.arrays(), strict=True))
    tensors = [to_device(queue, array, "float16") for array in (x, w, g)]
    kernel = ConvKernel.WINOGRAD
    y = ops.conv2d(tensors[0], tensors[1], case.window, out_dtype="float16", kernel=kernel)
    gx = ops.conv2d_input_grad(tensors[2], tensors[1], case.image, case.window, out_dtype="float16", kernel=kernel)
    for result, expected in ((y, forward(x, w, case)), (gx, input_grad(g, w, case))):
        got = to_numpy(result)
        np.testing.assert_array_equal(got[expected != 0], expected[expected != 0])
        assert np.abs(got[expected == 0]).max(initial=0) < 2e-4
    gw = ops.conv2d_weight_grad(tensors[0], tensors[2], case.kernel, case.window, out_dtype="float32", kernel=kernel)
    np.testing.assert_allclose(to_numpy(gw), weight_grad(x, g, case), rtol=0, atol=1e-3)


def test_fewer_multiplications_serve_16_bit_storage_on_cpus(queue: cl.CommandQueue) -> None:
    def kernels(case: Case, x_dtype: str = "float16", out_dtype: str = "float16") -> tuple[ConvKernel, ConvKernel]:
        x = bridge.empty(queue, (case.n, case.c, *case.image), x_dtype)
        w = bridge.empty(queue, (case.f, case.c, *case.kernel), "float16")
        out = bridge.empty(queue, (case.n, case.f, *case.window.output(case.image, case.kernel)), out_dtype)
        weights = ops.pack_weights(w, 1, transposed=False)
        pays = (
            conv_winograd.pays(x, weights, case.window, out),
            conv_winograd_grad.pays(x, out, case.kernel, case.window),
        )
        choices = [[ConvKernel.WINOGRAD] if is_faster else [] for is_faster in pays]
        first, second = (ops.kernel_for(None, x, w, case.kernel, case.window, choice) for choice in choices)
        return first, second

    is_cpu = capabilities(queue).is_cpu
    direct = ConvKernel.PACKED if is_cpu else ConvKernel.TILED
    winograd = ConvKernel.WINOGRAD if is_cpu else ConvKernel.TILED
    fitting = Case(128, 16, 16, (4, 4), (3, 3), pad=(1, 1))
    assert kernels(fitting) == (winograd, winograd)
    assert kernels(replace(fitting, n=63)) == (winograd, direct)
    strided = replace(fitting, image=(7, 8), stride=(2, 2))
    assert kernels(replace(strided, n=512)) == (winograd, winograd)
    assert kernels(replace(strided, n=256)) == (winograd, direct)
    assert kernels(replace(strided, n=255)) == (direct, direct)
    assert kernels(fitting, "float32") == kernels(fitting, "bfloat16", "float32") == (direct, direct)
    for change in (
        {"stride": (2, 1)}, {"stride": (2, 2), "pad": (0, 0), "n": 9999}, {"dilation": (1, 2)}, {"pad": (3, 3)},
        {"kernel": (1, 3)}, {"c": 3}, {"f": 15}, {"n": 31},
    ):  # fmt: skip
        assert kernels(replace(fitting, **change)) == (direct, direct)


def test_the_dot_product_serves_bfloat16_where_it_is_faster(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gemm_dot_bf16.works(queue):
        pytest.skip("no bfloat16 dot product here")
    case = Case(1, 2, 3, (9, 9), (3, 3), pad=(1, 1))
    x, w, g = (to_device(queue, a, "bfloat16") for a in case.arrays())
    half = to_device(queue, case.arrays()[1], "float16")
    shape = conv_geometry.forward(case.image, case.kernel, case.window)
    narrow = conv_geometry.forward((9, 5), case.kernel, case.window)
    for vendor, is_fast in (("AuthenticAMD", True), ("GenuineIntel", False), ("", False)):
        monkeypatch.setattr(gemm_dot_bf16, "host_cpu_vendor", lambda vendor=vendor: vendor)
        assert conv_dot_bf16.pays(x, w) == conv_dot_bf16.gradient_pays(x, g, shape) == is_fast
        assert not conv_dot_bf16.pays(x, half)
        assert not conv_dot_bf16.gradient_pays(x, g, narrow)
    monkeypatch.setattr(gemm_dot_bf16, "host_cpu_vendor", lambda: "AuthenticAMD")
    on_device = ops.on_device(queue, "bfloat16")
    assert "3x3 of stride 1 by Winograd's sums" in on_device
    assert "3x3 of stride 2 and others by packed panels and the processor's bfloat16 dot product" in on_device
    assert "3x3 of stride 1 and 3x3 of stride 2 by Winograd's sums" in ops.on_device(queue, "float16")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(gemm_dot_bf16, "works", lambda queue: False)
        with pytest.raises(ValueError, match=r"DOT_BF16.*no such instruction"):
            ops.conv2d(x, w, case.window, out_dtype="float32", kernel=ConvKernel.DOT_BF16)
    with pytest.raises(ValueError, match=r"DOT_BF16.*bfloat16 by float16"):
        ops.conv2d(x, half, case.window, out_dtype="float32", kernel=ConvKernel.DOT_BF16)
    with pytest.raises(ValueError, match=r"DOT_BF16.*bfloat16 by float16"):
        ops.conv2d_weight_grad(
            x, to_device(queue, case.arrays()[2], "float16"), case.kernel, case.window,
            out_dtype="float32", kernel=ConvKernel.DOT_BF16,
        )  # fmt: skip


@pytest.mark.slow
@KERNELS
def test_layers_of_a_resnet(queue: cl.CommandQueue, simulated: bool, kernel: ConvKernel) -> None:
    if simulated:
        pytest.skip("too large to simulate")
    for case in (
        Case(2, 3, 64, (56, 56), (7, 7), (2, 2), (3, 3)),
        Case(2, 64, 64, (28, 28), (3, 3), pad=(1, 1)),
        Case(2, 64, 128, (28, 28), (3, 3), (2, 2), (1, 1)),
        Case(2, 64, 128, (28, 28), (1, 1), (2, 2)),
        Case(3, 128, 70, (7, 7), (3, 3), pad=(1, 1)),
        Case(2, 16, 24, (15, 17), (5, 5), pad=(2, 2), groups=4),
    ):
        check(queue, case, kernel)


@pytest.mark.slow
def test_fewer_multiplications_in_layers_of_a_resnet(queue: cl.CommandQueue, simulated: bool) -> None:
    if simulated:
        pytest.skip("too large to simulate")
    check(queue, Case(2, 64, 64, (28, 28), (3, 3), pad=(1, 1)), ConvKernel.WINOGRAD)
    check(queue, Case(3, 128, 70, (7, 7), (3, 3), pad=(1, 1)), ConvKernel.WINOGRAD)
    check(queue, Case(2, 20, 150, (14, 14), (3, 3), pad=(1, 1), groups=2), ConvKernel.WINOGRAD, ("bfloat16",) * 4)


def test_shapes_that_do_not_fit(queue: cl.CommandQueue) -> None:
    x, w = to_device(queue, np.ones((1, 2, 3, 3))), to_device(queue, np.ones((4, 2, 5, 5)))
    with pytest.raises(ValueError, match="larger than the padded image"):
        ops.conv2d(x, w, Window(), out_dtype="float32")
    with pytest.raises(ValueError, match="do not fit"):
        ops.conv2d(x, w, Window(groups=2, pad=(2, 2)), out_dtype="float32")
    with pytest.raises(ValueError, match="WINOGRAD"):
        ops.conv2d(x, w, Window(pad=(2, 2)), out_dtype="float32", kernel=ConvKernel.WINOGRAD)
    with pytest.raises(ValueError, match="do not fit"):
        ops.conv2d_input_grad(x, w, (3, 3), Window(pad=(2, 2)), out_dtype="float32")
    for kernel in ConvKernel:
        grad = to_device(queue, np.ones((1, 4, 1, 300)), storage_of(kernel))
        with pytest.raises(ValueError, match=r"image \(5, 5\) do not fit"):
            ops.conv2d_input_grad(grad, w, (5, 5), Window(), out_dtype="float16", kernel=kernel)
    with pytest.raises(ValueError, match="do not fit"):
        ops.conv2d_weight_grad(x, x, (5, 5), Window(), out_dtype="float32")
