"""Pooling on CPU devices with windows of 2 x 2 that cover every element once (kernels/pool_2x2.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.cast import cast
from clamp.ops.engine import on_cpus
from clamp.ops.launch import plan_rows
from clamp.ops.pool.problem import Problem

MAX = Kernel("pool_2x2.cl", "max_pool_2x2", "X")
MAX_BACKWARD = Kernel("pool_2x2.cl", "max_pool_2x2_backward", "X")
AVG = Kernel("pool_2x2.cl", "avg_pool_2x2", "X Y")
AVG_BACKWARD = Kernel("pool_2x2.cl", "avg_pool_2x2_backward", "G DX")

NAME = "pairs"
TAKES = "2x2 windows side by side"
IN_WORDS = "pairs of rows (2x2 windows side by side)"
pays = on_cpus


def fits(problem: Problem) -> bool:
    """Windows that cover every element once, at least 16 in a row; maxima are moved between words of one width."""
    covers_all = (problem.height, problem.width) == (2 * problem.out_height, 2 * problem.out_width)
    are_pairs = problem.size == problem.stride == 2 and covers_all and problem.out_width >= 16
    widths = {storage == "f32" for storage in problem.storage}
    return are_pairs and (len(widths) == 1 or not problem.is_max)


def forward(problem: Problem, x: Tensor, y: Tensor) -> None:
    """Writes the maxima or means over y."""
    _launch(MAX if problem.is_max else AVG, problem, x, y)


def max_backward(problem: Problem, x: Tensor, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the maxima over dx."""
    _launch(MAX_BACKWARD, problem, x, cast(grad, dx.dtype), dx)


def avg_backward(problem: Problem, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the means over dx."""
    _launch(AVG_BACKWARD, problem, grad, dx)


def _launch(kernel: Kernel, problem: Problem, *tensors: Tensor) -> None:
    queue, pairs = tensors[0].queue, problem.planes * problem.out_height
    plan = plan_rows(queue, pairs, 4 * problem.out_width)
    kernel(queue, (plan.groups,), (1,), *tensors, pairs, plan.each, problem.out_width)
