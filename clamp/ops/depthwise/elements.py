"""Any depthwise convolution on any device (the *_elements kernels of kernels/depthwise_forward.cl and _backward.cl)."""

from __future__ import annotations

from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.depthwise.problem import Problem
from clamp.ops.engine import always
from clamp.ops.launch import group_macros, launch, span_for

FORWARD = Kernel("depthwise_forward.cl", "forward_elements", "X W B Y")
INPUT_GRADIENT = Kernel("depthwise_backward.cl", "input_gradient_elements", "G W DX")
WEIGHT_GRADIENT = Kernel("depthwise_backward.cl", "weight_gradient_elements", "X G")

NAME = "elements"
TAKES = "every convolution"
IN_WORDS = "sums element by element"
fits = pays = always

_GROUP_GPU = 256


def forward(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Writes the result over y."""
    _launch(FORWARD, problem, (x, w, w if bias is None else bias, y), BIAS=int(bias is not None))


def backward(
    problem: Problem, x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool
) -> Tensor | None:
    """Writes dx, if there is one; returns partial sums of the weight's gradient, if wanted."""
    if dx is not None:
        _launch(INPUT_GRADIENT, problem, (grad, w, dx))
    if not with_weight:
        return None
    images, parts = problem.parts(problem.images, problem.channels * problem.taps)
    sums = bridge.empty(x.queue, (parts, problem.channels, problem.taps), "float32")
    largest = 1 << (problem.device.max_work_group.bit_length() - 1)
    group = 1 if problem.device.is_cpu else min(_GROUP_GPU, largest)
    WEIGHT_GRADIENT(
        x.queue, (prod(sums.shape) * group,), (group,),
        x, grad, sums, problem.images, images, *problem.extents, problem.stride, **group_macros(x.queue, group),
    )  # fmt: skip
    return sums


def _launch(kernel: Kernel, problem: Problem, tensors: tuple[Tensor, ...], **macros: object) -> None:
    """Runs a kernel that writes each element of the last tensor."""
    out = tensors[-1]
    span = span_for(out.queue, out.size) if problem.device.is_cpu else 1
    sizes = launch(out.queue, -(-out.size // span))
    kernel(out.queue, *sizes, *tensors, out.size, span, *problem.extents, problem.stride, **macros)
