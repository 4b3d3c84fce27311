"""Depthwise convolution of NCHW tensors and its gradients: one filter a channel, any stride and padding."""

from __future__ import annotations

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.arguments import require_gradient
from clamp.ops.depthwise import columns, elements, tiles
from clamp.ops.depthwise.problem import DepthwiseEngine, Problem, problem_of
from clamp.ops.engine import all_in_words, choose
from clamp.ops.reduce_to_shape import sum_axis

ENGINES: tuple[DepthwiseEngine, ...] = (columns, tiles, elements)


def depthwise_conv2d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, stride: int = 1, pad: int = 0, *, out_dtype: str
) -> Tensor:
    """Each channel of x (N, C, H, W) convolved with its own filter of w (C, 1, KH, KW), plus bias (C,)."""
    problem = problem_of(x, w, stride, pad, is_gradient=False)
    if bias is not None and bias.size != problem.channels:
        raise ValueError(f"depthwise_conv2d: the bias must have shape ({problem.channels},), got {bias.shape}")
    y = bridge.empty(x.queue, problem.out_shape, out_dtype)
    if y.size:
        choose("depthwise_conv2d", ENGINES, problem).forward(problem, x, w, bias, y)
    return y


def gradients(
    x: Tensor, w: Tensor, grad: Tensor, stride: int = 1, pad: int = 0, *,
    dx_dtype: str | None = None, dw_dtype: str | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients by x and w. On CPU devices both come from one pass over x and grad."""
    problem = problem_of(x, w, stride, pad, is_gradient=True)
    require_gradient("depthwise_conv2d", grad, problem.out_shape)
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    if x.size == 0 or (dx_dtype is None and dw_dtype is None):
        return dx, None if dw_dtype is None else bridge.zeros(x.queue, w.shape, dw_dtype)
    sums = choose("depthwise_conv2d", ENGINES, problem).backward(problem, x, w, grad, dx, dw_dtype is not None)
    if sums is None or dw_dtype is None:
        return dx, None
    parts = sums.shape[0]
    if parts > 1 or sums.dtype != dw_dtype:  # else all that would be left to do is a copy, a tenth of the whole
        sums = sum_axis(sums, 1, parts, sums.size // parts, dw_dtype)
    return dx, bridge.view(sums, w.shape)


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """Says in words by which engines depthwise convolutions with filters of 3 x 3 run on the queue's device."""
    storage, device = bridge.STORAGE[dtype], capabilities(queue)
    problems = {
        f"stride {stride}": Problem(64, 64, 16, 16, -(-16 // stride), -(-16 // stride), 3, 3, stride, 1, False,
                                    (storage, storage), device)
        for stride in (1, 2, 3)
    }  # fmt: skip
    chosen = {name: choose("depthwise_conv2d", ENGINES, problem) for name, problem in problems.items()}
    return f"depthwise 3x3: {all_in_words(chosen)}"
