"""Convolutions in numpy's float64, and what clamp's kernels are held against it with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp.bridge import Tensor
from clamp.ops import conv as ops
from clamp.ops.conv import Window
from tests.reference import assert_close, quantize, to_device, to_numpy

Array = npt.NDArray[Any]


#: those that multiply no other type; `amx_in_plain_c` computes the bits of `amx` on any device
BFLOAT16_ENGINES = ("dot_bf16", "amx", "amx_in_plain_c")


def storage_of(engine: str) -> str:
    """The storage type that most tests of an engine use."""
    return "bfloat16" if engine in BFLOAT16_ENGINES else "float16"


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


def patches(x: Array, case: Case) -> Array:
    """x's windows, (n, groups, c * KH * KW, OH * OW)."""
    (ph, pw), (sh, sw), (dh, dw) = case.pad, case.stride, case.dilation
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    oh, ow = case.window.output(case.image, case.kernel)
    taps = [
        padded[:, :, i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw]
        for i in range(case.kernel[0])
        for j in range(case.kernel[1])
    ]
    stacked = np.stack(taps, axis=2)
    return stacked.reshape(len(x), case.groups, case.c * len(taps), oh * ow)


# What is not finite makes NaN of products with zero, as it must.
@np.errstate(invalid="ignore")
def forward(x: Array, w: Array, case: Case) -> Array:
    out = w.reshape(case.groups, case.f, w[0].size) @ patches(x, case)
    return out.reshape(len(x), case.groups * case.f, *case.window.output(case.image, case.kernel))


@np.errstate(invalid="ignore")
def weight_grad(x: Array, g: Array, case: Case) -> Array:
    g = g.reshape(len(g), case.groups, case.f, g.shape[2] * g.shape[3])
    each = g @ np.swapaxes(patches(x, case), -1, -2)
    return each.sum(0).reshape(case.groups * case.f, case.c, *case.kernel)


@np.errstate(invalid="ignore")
def input_grad(g: Array, w: Array, case: Case) -> Array:
    (ph, pw), (sh, sw), (dh, dw) = case.pad, case.stride, case.dilation
    (h, wd), (oh, ow) = case.image, g.shape[2:]
    g = g.reshape(len(g), case.groups, case.f, oh * ow)
    w = w.reshape(case.groups, case.f, case.c, *case.kernel)
    padded = np.zeros((len(g), case.groups * case.c, h + 2 * ph, wd + 2 * pw))
    for i in range(case.kernel[0]):
        for j in range(case.kernel[1]):
            part = (np.swapaxes(w[..., i, j], -1, -2) @ g).reshape(len(g), case.groups * case.c, oh, ow)
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
    engine: str,
    dtypes: tuple[str, str, str, str] | None = None,
    *,
    with_bias: bool = True,
) -> None:
    """Forward and all gradients of a case; storage types of x, w, the gradient and what is computed. An engine whose
    launches are bound has them for other tensors, too."""
    for values in (case.arrays(), [-array for array in case.arrays()])[: 2 if engine == "emulated" else 1]:
        _check(queue, case, values, engine, dtypes, with_bias=with_bias)


def _check(
    queue: cl.CommandQueue,
    case: Case,
    values: Any,
    engine: str,
    dtypes: tuple[str, str, str, str] | None,
    *,
    with_bias: bool,
) -> None:
    dtypes = dtypes or (storage_of(engine),) * 4
    out_dtype = dtypes[3]
    x, w, g = (quantize(a, d).astype(np.float64) for a, d in zip(values, dtypes, strict=False))
    tensors = [to_device(queue, a, d) for a, d in zip((x, w, g), dtypes, strict=False)]
    options: Any = {"out_dtype": out_dtype, "engine": engine}
    # Winograd's sums of multiples of elements: some roundings more, of the largest in a tile.
    is_winograd = engine == "winograd"
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
    if options["engine"] == "winograd":
        nearby_x, nearby_g = largest_nearby(x, 3 * case.stride[0]), largest_nearby(g, 3)
        magnitude = 3 * weight_grad(nearby_x, nearby_g, case)
    assert_close(gw, weight_grad(x, g, case), slack=slack(magnitude, terms))
