"""Two-dimensional convolution and its gradients: 16-bit or fp32 storage, fp32 sums, bias and relu in the store.

On CPU devices a register-blocked kernel multiplies packed panels, on every other device tiles in local memory
(stage.py). More engines serve CPU devices: the matrix unit of those processors that have one (amx.py); in 16-bit
storage one that multiplies less for 3x3 kernels of stride 1 or 2 (winograd.py); in bfloat16, where that one does not
serve stride 1, the processor's dot product if it is fast (dot_bf16.py). The input gradient, which is also the
transposed convolution, is such a product again; with a stride, one for each remainder of the input position
(geometry.py). The weight gradient is a sum of outer products over the output positions.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Prepared
from clamp.ops.conv.engines import Computes, binds, choose, problem_on
from clamp.ops.conv.geometry import Pair, Window, pair
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.reduce_to_shape import sum_channels

#: by all that launches depend on besides the content of tensors: the result's shape, and what launches
_bound = Prepared(1024)


def pack_weights(w: Tensor, groups: int, *, transposed: bool) -> Weights:
    """Prepares weights (F, C / groups, KH, KW) for any number of calls of `conv2d`, or, transposed, of
    `conv2d_input_grad`. The panels are made when they are first needed."""
    return Weights(w, groups, transposed)


def conv2d(
    x: Tensor, w: Tensor | Weights, window: Window,
    *, out_dtype: str, bias: Tensor | None = None, relu: bool = False, engine: str | None = None,
) -> Tensor:  # fmt: skip
    """``relu(x * w + bias)``, of the size that ``window.output`` gives; NaN passes relu.

    Args:
        x: (N, C, H, W).
        w: (F, C / groups, KH, KW), or what `pack_weights` returned.
        bias: (F,), read in its own storage type.
    """
    weights = w if isinstance(w, Weights) else pack_weights(w, window.groups, transposed=False)
    return _convolved("", x, weights, None, window, out_dtype, bias, relu, engine)


def conv2d_input_grad(
    grad: Tensor, w: Tensor | Weights, image: Pair, window: Window,
    *, out_dtype: str, bias: Tensor | None = None, engine: str | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of a convolution with respect to its input: also the transposed convolution of ``grad``.

    Args:
        grad: (N, F, OH, OW).
        w: (F, C / groups, KH, KW), or what `pack_weights` returned with ``transposed``.
        image: (H, W) of the input.
        bias: (C,), added to the result: the bias of a transposed convolution.
    """
    weights = w if isinstance(w, Weights) else pack_weights(w, window.groups, transposed=True)
    return _convolved("input", grad, weights, pair(image), window, out_dtype, bias, False, engine)


def _convolved(
    gradient: str, x: Tensor, weights: Weights, image: Pair | None, window: Window, out_dtype: str,
    bias: Tensor | None, relu: bool, engine: str | None,
) -> Tensor:  # fmt: skip
    """A convolution of x; or an ``image``'s gradient, from the output's gradient x."""
    queue, w = x.queue, weights.tensor
    key = _key(gradient, x, w, image, window, out_dtype, bias, relu, engine)
    if (bound := _bound.known.get(key)) is not None:
        shape, run = bound
        out = bridge.empty(queue, shape, out_dtype)
        run(x, w, out, out if bias is None else bias)
        return out
    features, channels, *extent = w.shape
    if image is None:
        _require(x.shape[1] == channels * window.groups, f"x {x.shape} and w {w.shape} do not fit")
        image = pair(x.shape[2:])
        size = window.output(image, pair(extent))
        _require(min(size) > 0, f"the kernel {tuple(extent)} is larger than the padded image {image}")
        out = bridge.empty(queue, (x.shape[0], features, *size), out_dtype)
    else:
        fits = x.shape[1] == features and pair(x.shape[2:]) == window.output(image, pair(extent))
        _require(fits, f"the gradient {x.shape}, w {w.shape} and image {image} do not fit with {window}")
        out = bridge.empty(queue, (x.shape[0], channels * window.groups, *image), out_dtype)
    problem = problem_on(queue, gradient, (x.dtype, w.dtype), out_dtype, x.shape[0], image, tuple(w.shape), window)
    chosen, epilogue = choose(problem, engine), Epilogue(out_dtype, bias, relu)
    if binds(chosen):
        _, run = _bound.keep(key, (out.shape, chosen.bind(problem, x, weights, out, epilogue)))
        run(x, w, out, epilogue.bias_or(out))
    else:
        cast(Computes, chosen).convolve(problem, x, weights, out, epilogue)
    return out


def conv2d_weight_grad(
    x: Tensor, grad: Tensor, extent: Pair, window: Window, *, out_dtype: str, engine: str | None = None
) -> Tensor:
    """Gradient of a convolution with respect to its weights, (F, C / groups, KH, KW), in a fixed order.

    Args:
        x: (N, C, H, W), the input.
        grad: (N, F, OH, OW), the output's gradient.
        extent: (KH, KW).
    """
    return _parameter_grads(x, grad, extent, window, out_dtype, None, engine)[0]


def conv2d_parameter_grads(
    x: Tensor, grad: Tensor, extent: Pair, window: Window, *, out_dtype: str, bias_dtype: str, engine: str | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients by the weights, as `conv2d_weight_grad`, and by the bias, (F,), which costs hardly more."""
    weights, bias = _parameter_grads(x, grad, extent, window, out_dtype, bias_dtype, engine)
    return weights, sum_channels(grad, bias_dtype) if bias is None else bias


def _parameter_grads(
    x: Tensor, grad: Tensor, extent: Pair, window: Window, out_dtype: str, bias_dtype: str | None, engine: str | None
) -> tuple[Tensor, Tensor | None]:
    """The weights' gradient; and the bias's, if it is wanted and the kernel sums it on the way."""
    key = _key("weights", x, grad, pair(extent), window, out_dtype, None, False, engine)
    if (bound := _bound.known.get(key)) is not None:
        shape, run = bound
        out = bridge.empty(x.queue, shape, out_dtype)
        run(x, grad, out)
        return out, None
    channels, rows = x.shape[1] // window.groups, grad.shape[1] // window.groups
    size = window.output(pair(x.shape[2:]), extent)
    _require(grad.shape == (x.shape[0], rows * window.groups, *size), f"x {x.shape} and {grad.shape} do not fit")
    out_shape = (rows * window.groups, channels, *extent)
    if x.size * grad.size == 0:
        return bridge.zeros(x.queue, out_shape, out_dtype), None
    out = bridge.empty(x.queue, out_shape, out_dtype)
    image, dtypes = pair(x.shape[2:]), (x.dtype, grad.dtype)
    problem = problem_on(x.queue, "weights", dtypes, out_dtype, x.shape[0], image, out_shape, window)
    chosen = choose(problem, engine)
    if not binds(chosen):
        return out, cast(Computes, chosen).weight_gradient(problem, x, grad, out, bias_dtype)
    _, run = _bound.keep(key, (out.shape, chosen.bind_weight_gradient(problem, x, grad, out)))
    run(x, grad, out)
    return out, None


def _key(
    gradient: str, x: Tensor, second: Tensor, extents: Pair | None, window: Window, out_dtype: str,
    bias: Tensor | None, relu: bool, engine: str | None,
) -> tuple[Hashable, ...]:  # fmt: skip
    """All that launches depend on besides the content of tensors."""
    tensors = x.context.int_ptr, tuple(x.shape), x.dtype, tuple(second.shape), second.dtype
    return (gradient, *tensors, extents, window, out_dtype, None if bias is None else bias.dtype, relu, engine)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"conv2d: {message}")
