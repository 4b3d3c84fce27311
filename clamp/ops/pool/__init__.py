"""Max and average pooling of NCHW tensors without padding, and their gradients."""

from __future__ import annotations

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.arguments import require_gradient
from clamp.ops.cast import cast
from clamp.ops.engine import all_in_words, choose
from clamp.ops.pool import elements, pairs, rows
from clamp.ops.pool.problem import PoolEngine, problem_of
from clamp.ops.reduce import expand, reduce_sum

ENGINES: tuple[PoolEngine, ...] = (pairs, rows, elements)


def max_pool2d(x: Tensor, kernel_size: int, stride: int, *, out_dtype: str, engine: str | None = None) -> Tensor:
    """The largest element of every window; NaN if there is one among them.

    Returns:
        (N, C, (H - kernel_size) // stride + 1, (W - kernel_size) // stride + 1)
    """
    dtypes = (x.dtype, x.dtype)  # maxima are moved as they are, and cast afterwards
    problem, shape = problem_of(tuple(x.shape), kernel_size, stride, dtypes, capabilities(x.queue), is_max=True)
    y = bridge.empty(x.queue, shape, x.dtype)
    if y.size:
        choose("pool2d", ENGINES, problem, engine).forward(problem, x, y)
    return cast(y, out_dtype)


def max_pool2d_backward(
    x: Tensor, grad: Tensor, kernel_size: int, stride: int, *, out_dtype: str, engine: str | None = None
) -> Tensor:
    """Gradient of ``max_pool2d``: each window's goes to its first largest element, found again in x."""
    problem, shape = problem_of(
        tuple(x.shape), kernel_size, stride, (x.dtype, out_dtype), capabilities(x.queue), is_max=True, is_gradient=True
    )
    require_gradient("max_pool2d", grad, shape)
    dx = bridge.empty(x.queue, x.shape, out_dtype)
    if dx.size:
        choose("pool2d", ENGINES, problem, engine).max_backward(problem, x, grad, dx)
    return dx


def avg_pool2d(x: Tensor, kernel_size: int, stride: int, *, out_dtype: str, engine: str | None = None) -> Tensor:
    """The mean of every window, summed in fp32; a window that is a whole plane needs no engine."""
    dtypes = (x.dtype, out_dtype)
    problem, shape = problem_of(tuple(x.shape), kernel_size, stride, dtypes, capabilities(x.queue), is_max=False)
    if problem.size == problem.height == problem.width:
        return global_avg_pool2d(x, out_dtype=out_dtype)
    y = bridge.empty(x.queue, shape, out_dtype)
    if y.size:
        choose("pool2d", ENGINES, problem, engine).forward(problem, x, y)
    return y


def avg_pool2d_backward(
    shape: tuple[int, ...], grad: Tensor, kernel_size: int, stride: int, *, out_dtype: str
) -> Tensor:
    """Gradient of ``avg_pool2d`` of an input of this shape: every element gets its share from all windows it is in."""
    problem, out_shape = problem_of(
        shape, kernel_size, stride, (grad.dtype, out_dtype), capabilities(grad.queue), is_max=False, is_gradient=True
    )
    require_gradient("avg_pool2d", grad, out_shape)
    dx = bridge.empty(grad.queue, shape, out_dtype)
    if dx.size:
        choose("pool2d", ENGINES, problem).avg_backward(problem, grad, dx)
    return dx


def global_avg_pool2d(x: Tensor, *, out_dtype: str) -> Tensor:
    """The mean of every plane, summed in fp32: (N, C, H, W) -> (N, C, 1, 1)."""
    n, c, area = _planes(tuple(x.shape))
    rows = bridge.view(x, (n * c, area))
    return bridge.view(reduce_sum(rows, 1, out_dtype=out_dtype, divisor=float(area)), (n, c, 1, 1))


def global_avg_pool2d_backward(shape: tuple[int, ...], grad: Tensor, *, out_dtype: str) -> Tensor:
    """Gradient of ``global_avg_pool2d`` of a tensor of this shape."""
    n, c, area = _planes(shape)
    require_gradient("global_avg_pool2d", grad, (n, c, 1, 1))
    return bridge.view(expand(grad, (n * c, area), 1, out_dtype=out_dtype, divisor=float(area)), shape)


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 4 or shape[2] * shape[3] == 0:
        raise ValueError(f"global_avg_pool2d takes a tensor of shape (N, C, H, W) with H, W > 0, got {shape}")
    return shape[0], shape[1], shape[2] * shape[3]


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """Says in words by which engines pooling with common windows runs on the queue's device."""
    chosen = {}
    for size, stride in ((2, 2), (3, 2)):
        dtypes, device = (dtype, dtype), capabilities(queue)
        problem, _ = problem_of((64, 64, 32, 32), size, stride, dtypes, device, is_max=True)
        chosen[f"{size}x{size} of stride {stride}"] = choose("pool2d", ENGINES, problem)
    return f"pooling: {all_in_words(chosen)}"
