"""Two-dimensional convolution and its gradients: 16-bit or fp32 storage, fp32 sums, bias and relu in the store.

A convolution is computed as a matrix product whose right-hand operand is read from a staged copy of the source
(conv_stage.py), never written down (no im2col). The choice of the kernel is made here and nowhere else: on CPU devices
a register-blocked one over packed panels, on every other device tiles in local memory. Two more serve CPU devices: in
16-bit storage one that multiplies less for 3x3 kernels of stride 1 or 2 (conv_winograd.py); in bfloat16, but for stride
1, the processor's dot product, where it has a fast one (conv_dot_bf16.py). The input gradient, which is also the
transposed convolution, is such a product again; with a stride, one for each remainder of the input position
(conv_geometry.py). The weight gradient is a sum of outer products over the output positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops import conv_dot_bf16, conv_packed, conv_tiled, conv_winograd, conv_winograd_grad, gemm_dot_bf16
from clamp.ops.conv_geometry import Correlation, Pair, Window, forward, gradient, pair
from clamp.ops.conv_stage import Source, interleave, offsets, slices, stage
from clamp.ops.conv_weights import Weights
from clamp.ops.gemm_operands import Epilogue
from clamp.ops.reduce_to_shape import sum_channels


class ConvKernel(Enum):
    """Which kernel convolves."""

    WINOGRAD = "winograd"  # CPU devices: 3x3, stride 1 or 2
    DOT_BF16 = "dot_bf16"  # CPU devices with a bfloat16 dot product, all operands bfloat16
    PACKED = "packed"  # CPU devices
    TILED = "tiled"  # every device


#: each has correlate, WeightGradient and GRAD_SOURCE_DTYPE
_KERNELS: dict[ConvKernel, Any] = {
    ConvKernel.DOT_BF16: conv_dot_bf16,
    ConvKernel.PACKED: conv_packed,
    ConvKernel.TILED: conv_tiled,
}


def kernel_for(
    given: ConvKernel | None, x: Tensor, w: Tensor, extent: Pair, window: Window, paying: Sequence[ConvKernel]
) -> ConvKernel:
    """The kernel of a convolution or of a gradient: the given one, or the fastest of those that fit.

    Args:
        x, w: what it multiplies: source and weights, or what takes their places.
        paying: which of those that serve some CPU convolutions only are faster than `PACKED`, the fastest first.
    """
    if given is ConvKernel.DOT_BF16:
        _require(x.dtype == w.dtype == "bfloat16", f"no {given} for {x.dtype} by {w.dtype}: both must be bfloat16")
        _require(gemm_dot_bf16.works(x.queue), f"no {given} on {x.queue.device.name}, which has no such instruction")
    if given is ConvKernel.WINOGRAD:
        _require(conv_winograd.fits(extent, window), f"no {given} for a kernel of {extent} with {window}")
    if given is not None:
        return given
    if not capabilities(x.queue).is_cpu:
        return ConvKernel.TILED
    return next(iter(paying), ConvKernel.PACKED)


def _paying(window: Window, winograd_pays: bool, dot_pays: bool) -> list[ConvKernel]:
    """Those that are faster than `PACKED`, the fastest first."""
    choices = [(ConvKernel.WINOGRAD, winograd_pays), (ConvKernel.DOT_BF16, dot_pays)]
    paying = [kernel for kernel, pays in choices if pays]
    return paying if window.stride == (1, 1) else paying[::-1]


def _paying_for(x: Tensor, weights: Weights, window: Window, out: Tensor) -> list[ConvKernel]:
    """`_paying`, for a convolution or an input gradient."""
    return _paying(window, conv_winograd.pays(x, weights, window, out), conv_dot_bf16.pays(x, weights.tensor))


_IN_WORDS = {
    ConvKernel.WINOGRAD: "Winograd's sums, with fewer multiplications",
    ConvKernel.DOT_BF16: "packed panels and the processor's bfloat16 dot product",
    ConvKernel.PACKED: "packed panels for a register-blocked loop",
    ConvKernel.TILED: "tiles in local memory",
}


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """How convolutions of operands and results in one storage type run on the queue's device, in words."""
    kernels = {
        "3x3 of stride 1": _default_kernel(queue, dtype, (3, 3), Window(pad=(1, 1))),
        "3x3 of stride 2": _default_kernel(queue, dtype, (3, 3), Window((2, 2), (1, 1))),
        "others": _default_kernel(queue, dtype, (1, 1), Window()),
    }
    ways = {kernel: [name for name in kernels if kernels[name] is kernel] for kernel in kernels.values()}
    words = [f"{' and '.join(names)} by {_IN_WORDS[kernel]}" for kernel, names in ways.items()]
    return f"convolutions of {dtype}: {'; '.join(words) if len(ways) > 1 else _IN_WORDS[kernels['others']]}"


def _default_kernel(queue: cl.CommandQueue, dtype: str, extent: Pair, window: Window) -> ConvKernel:
    """The kernel of a convolution of many channels and positions."""
    image, weight = (bridge.empty(queue, shape, dtype) for shape in ((64, 16, 16, 16), (16, 16, *extent)))
    out = bridge.empty(queue, (64, 16, *window.output((16, 16), extent)), dtype)
    paying = _paying_for(image, pack_weights(weight, 1, transposed=False), window, out)
    return kernel_for(None, image, weight, extent, window, paying)


def pack_weights(w: Tensor, groups: int, *, transposed: bool) -> Weights:
    """Prepares weights (F, C / groups, KH, KW) for any number of calls of `conv2d`, or, transposed, of
    `conv2d_input_grad`. The panels are made when they are first needed."""
    return Weights(w, groups, transposed)


def conv2d(
    x: Tensor,
    w: Tensor | Weights,
    window: Window,
    *,
    out_dtype: str,
    bias: Tensor | None = None,
    relu: bool = False,
    kernel: ConvKernel | None = None,
) -> Tensor:
    """``relu(x * w + bias)``, summed in fp32 and rounded to ``out_dtype`` once, at the end.

    Args:
        x: (N, C, H, W); float32, float16 or bfloat16.
        w: (F, C / groups, KH, KW), any of the three as well, or what `pack_weights` returned.
        out_dtype: storage type of the result.
        bias: (F,), read in its own storage type.
        relu: replaces negative results by zero; NaN stays.
        kernel: overrides the choice by device.

    Returns:
        Tensor (N, F, OH, OW), of the size that ``window.output`` gives.

    Raises:
        ValueError: shapes that do not fit.
    """
    weights = w if isinstance(w, Weights) else pack_weights(w, window.groups, transposed=False)
    features, channels, *extent = weights.tensor.shape
    _require(x.shape[1] == channels * window.groups, f"x {x.shape} and w {weights.tensor.shape} do not fit")
    image, size = pair(x.shape[2:]), window.output(pair(x.shape[2:]), pair(extent))
    _require(min(size) > 0, f"the kernel {tuple(extent)} is larger than the padded image {tuple(image)}")
    out = bridge.empty(x.queue, (x.shape[0], features, *size), out_dtype)
    kernel = kernel_for(kernel, x, weights.tensor, pair(extent), window, _paying_for(x, weights, window, out))
    if kernel is ConvKernel.WINOGRAD:
        conv_winograd.convolve(x, weights, window, out, Epilogue(out_dtype, bias, relu))
        return out
    _correlate(x, [(forward(image, pair(extent), window), 0)], weights, out, Epilogue(out_dtype, bias, relu), kernel)
    return out


def conv2d_input_grad(
    grad: Tensor,
    w: Tensor | Weights,
    image: Pair,
    window: Window,
    *,
    out_dtype: str,
    bias: Tensor | None = None,
    kernel: ConvKernel | None = None,
) -> Tensor:
    """Gradient of a convolution with respect to its input: also the transposed convolution of ``grad``.

    Args:
        grad: (N, F, OH, OW); float32, float16 or bfloat16.
        w: (F, C / groups, KH, KW), or what `pack_weights` returned with ``transposed``.
        image: (H, W) of the input.
        out_dtype: storage type of the result.
        bias: (C,), added to the result: the bias of a transposed convolution.
        kernel: overrides the choice by device.

    Returns:
        Tensor (N, C, H, W).

    Raises:
        ValueError: shapes that do not fit.
    """
    weights = w if isinstance(w, Weights) else pack_weights(w, window.groups, transposed=True)
    features, channels, *extent = weights.tensor.shape
    fits = grad.shape[1] == features and pair(grad.shape[2:]) == window.output(image, pair(extent))
    _require(fits, f"the gradient {grad.shape}, w {weights.tensor.shape} and image {image} do not fit with {window}")
    channels *= window.groups
    out = bridge.empty(grad.queue, (grad.shape[0], channels, *image), out_dtype)
    kernel = kernel_for(kernel, grad, weights.tensor, pair(extent), window, _paying_for(grad, weights, window, out))
    if kernel is ConvKernel.WINOGRAD:
        conv_winograd.convolve(grad, weights, window, out, Epilogue(out_dtype, bias))
        return out
    shapes, remainders = gradient(pair(image), pair(grad.shape[2:]), pair(extent), window)
    parts, begin = [], 0
    for shape in shapes:
        parts.append((shape, begin))
        begin += grad.shape[0] * channels * shape.positions
    phases = out if len(parts) <= 1 else bridge.empty(grad.queue, out.shape, out_dtype)
    _correlate(grad, parts, weights, phases, Epilogue(out_dtype, bias), kernel)
    if phases is not out and out.size:
        interleave(phases, out, remainders, by_rows=kernel is not ConvKernel.TILED)
    return out


def conv2d_weight_grad(
    x: Tensor, grad: Tensor, extent: Pair, window: Window, *, out_dtype: str, kernel: ConvKernel | None = None
) -> Tensor:
    """Gradient of a convolution with respect to its weights, straight from fp32 sums, in a fixed order.

    Args:
        x: (N, C, H, W), the input; float32, float16 or bfloat16.
        grad: (N, F, OH, OW), the output's gradient; any of the three as well.
        extent: (KH, KW).
        out_dtype: storage type of the result.
        kernel: overrides the choice by device.

    Returns:
        Tensor (F, C / groups, KH, KW).

    Raises:
        ValueError: shapes that do not fit.
    """
    return _parameter_grads(x, grad, extent, window, out_dtype, None, kernel)[0]


def conv2d_parameter_grads(
    x: Tensor,
    grad: Tensor,
    extent: Pair,
    window: Window,
    *,
    out_dtype: str,
    bias_dtype: str,
    kernel: ConvKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the weights, as `conv2d_weight_grad`, and to the bias, which costs hardly more.

    Args:
        bias_dtype: storage type of the second.

    Returns:
        Tensors (F, C / groups, KH, KW) and (F,).
    """
    weights, bias = _parameter_grads(x, grad, extent, window, out_dtype, bias_dtype, kernel)
    return weights, sum_channels(grad, bias_dtype) if bias is None else bias


def _parameter_grads(
    x: Tensor,
    grad: Tensor,
    extent: Pair,
    window: Window,
    out_dtype: str,
    bias_dtype: str | None,
    kernel: ConvKernel | None,
) -> tuple[Tensor, Tensor | None]:
    """The weights' gradient; and the bias's, if it is wanted and the kernel sums it on the way."""
    channels, rows = x.shape[1] // window.groups, grad.shape[1] // window.groups
    size = window.output(pair(x.shape[2:]), extent)
    _require(grad.shape == (x.shape[0], rows * window.groups, *size), f"x {x.shape} and {grad.shape} do not fit")
    out_shape = (rows * window.groups, channels, *extent)
    if x.size * grad.size == 0:
        return bridge.zeros(x.queue, out_shape, out_dtype), None
    out = bridge.empty(x.queue, out_shape, out_dtype)
    shape = forward(pair(x.shape[2:]), pair(extent), window)
    winograd_pays = conv_winograd_grad.pays(x, grad, extent, window)
    paying = _paying(window, winograd_pays, conv_dot_bf16.gradient_pays(x, grad, shape))
    kernel = kernel_for(kernel, x, grad, extent, window, paying)
    if kernel is ConvKernel.WINOGRAD:
        conv_winograd_grad.weight_gradient(x, grad, window, out)
        return out, None
    module, by_rows = _KERNELS[kernel], kernel is not ConvKernel.TILED
    bias = None
    if bias_dtype is not None and kernel is ConvKernel.PACKED:
        bias = bridge.empty(x.queue, (grad.shape[1],), bias_dtype)
    begin = module.WeightGradient if bias is None else partial(module.WeightGradient, bias=bias)
    dtype = module.GRAD_SOURCE_DTYPE or x.dtype
    table = offsets(x.queue.context, shape, channels)
    total: Any = None
    for first, images in slices(x, shape, dtype):
        source = Source(
            stage(x, shape, first, images, dtype, by_rows=by_rows), shape, table, images, window.groups, channels
        )
        total = total or begin(source, rows, out)
        total.add(source, grad, first * grad.shape[1] * shape.positions)
    total.finish(source)
    return out, bias


def _correlate(
    x: Tensor,
    parts: list[tuple[Correlation, int]],
    weights: Weights,
    out: Tensor,
    epilogue: Epilogue,
    kernel: ConvKernel,
) -> None:
    """Writes correlations that read one staged source; each begins at its own element of ``out``."""
    if out.size == 0:
        return
    channels = weights.channels if x.size else 0  # an image without pixels is all padding: sums of nothing
    by_rows = kernel is not ConvKernel.TILED
    tables = [offsets(out.queue.context, shape, channels) for shape, _ in parts]
    for first, images in slices(x, parts[0][0], x.dtype):
        staged = stage(x, parts[0][0], first, images, x.dtype, by_rows=by_rows) if x.size else out
        for (shape, begin), table in zip(parts, tables, strict=True):
            source = Source(staged, shape, table, images, weights.groups, channels)
            out_image = weights.groups * weights.rows * shape.positions
            _KERNELS[kernel].correlate(source, weights, out, begin + first * out_image, out_image, epilogue)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"conv2d: {message}")
