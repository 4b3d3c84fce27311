"""The depthwise convolution of CPU devices with stride 1, down whole planes (kernels/depthwise_columns_*.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.depthwise.problem import Problem, both_gradients
from clamp.ops.launch import plan_rows

FORWARD = Kernel("depthwise_columns_forward.cl", "forward_columns", "X W B Y")
GRADIENT = Kernel("depthwise_columns_backward.cl", "gradient_columns", "X G W DX")

NAME = "columns"
TAKES = "stride 1, square filters of side 3, 5 or 7 that are wider than the padding"
IN_WORDS = "whole planes in registers (stride 1, sides of 3, 5, 7)"

_FILTERS = (3, 5, 7)  # sizes whose sums fit into registers
_FILTERS_GRADIENT = (3,)  # those of gradients, which have a sum for each tap besides
_PLANES_PER_CORE = 1  # fewest planes for each core; fewer are cut into tiles
_PLANE = 2**17  # elements of the largest plane; of larger ones the caches hold too little


def fits(problem: Problem) -> bool:
    """With stride 1 and a square filter of some sizes, wider than the padding."""
    sizes = _FILTERS_GRADIENT if problem.is_gradient else _FILTERS
    is_square = problem.kernel_height == problem.kernel_width in sizes
    return problem.stride == 1 and is_square and problem.pad < problem.kernel_width and problem.width > 0


def pays(problem: Problem) -> bool:
    """On CPU devices, with small planes, enough for every core."""
    is_small = problem.height * problem.width <= _PLANE
    are_many = problem.images * problem.channels >= _PLANES_PER_CORE * problem.device.compute_units
    return problem.device.is_cpu and is_small and are_many


def forward(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Writes the result over y."""
    planes = problem.images * problem.channels
    each = plan_rows(x.queue, planes, problem.out_height * problem.out_width).each
    FORWARD(
        x.queue, (-(-planes // each),), (1,), x, w, w if bias is None else bias, y, x.size, planes, each,
        *problem.extents[:5], KERNEL=problem.kernel_width, PAD=problem.pad, BIAS=int(bias is not None),
    )  # fmt: skip


def backward(
    problem: Problem, x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool
) -> Tensor | None:
    """Writes dx, if there is one; returns partial sums of the weight's gradient, if wanted."""
    return both_gradients(
        GRADIENT, problem, x, w, grad, dx, with_weight, problem.images, problem.extents[:5],
        KERNEL=problem.kernel_width, PAD=problem.pad,
    )  # fmt: skip
