"""The convolution of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/conv_dot_bf16.cl)."""

from __future__ import annotations

from functools import partial
from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import divide
from clamp.ops.conv.packed import multiply_panels
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import convolve_staged, slices, staged
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.gemm.problem import Epilogue

NAME = "dot_bf16"
TAKES = "bfloat16 by bfloat16, on a processor whose dot product of them works (others have no such instruction)"
IN_WORDS = "packed panels and the processor's bfloat16 dot product"

_CONV = Kernel("conv_dot_bf16.cl", "conv")
_WEIGHT_GRAD = Kernel("conv_dot_bf16_grad.cl", "weight_grad", "-")
_FINISH = Kernel("conv_dot_bf16_grad.cl", "weight_grad_finish", "- OUT")
_ROWS, _COLUMNS = 12, 32  # of the register tile
_LAYOUT = PanelLayout(width=_ROWS, short=8, block=384, pairs=True)
_STEPS = 256  # pairs of positions that a weight gradient reads at a time
_WORK_WORDS = 16 * 2**20  # of workspaces, of which each work-item of a weight gradient has one
# Positions of a row, and features: shorter rows take longer than in packed.py where few panels of gradients are
# multiplied by what is packed (1.1 times with 64 features, 0.6 times with 256)
_MIN_ROW, _MANY_FEATURES = 6, 256
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up


def fits(problem: Problem) -> bool:
    """Returns whether the device has the instruction, and both operands are stored for it."""
    return problem.dtypes == ("bfloat16", "bfloat16") and bool(problem.device.dot_bf16)


def pays(problem: Problem) -> bool:
    """Returns whether the instruction is fast; and a weight gradient's pairs do not end where they have hardly
    begun, or are multiplied often."""
    if problem.gradient != "weights":
        return problem.device.fast_dot_bf16
    row = problem.forward.row[0]
    return problem.device.fast_dot_bf16 and (row >= _MIN_ROW or (row > 1 and problem.features >= _MANY_FEATURES))


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    convolve_staged(partial(multiply_panels, _CONV, _COLUMNS, _LAYOUT, {}), problem, x, weights, out, epilogue)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``."""
    queue, shape, groups, rows = x.queue, problem.forward, problem.window.groups, problem.features
    steps = problem.channels * shape.taps
    panels_k = -(-steps // _COLUMNS)
    tall, short = _LAYOUT.heights(rows)
    padded = _LAYOUT.padded(rows)
    floats = groups * panels_k * padded * _COLUMNS
    words = (_STEPS + 16) * (_COLUMNS + padded)  # of a work-item: what it packs
    items = max(1, min(_CHUNKS_PER_CORE * capabilities(queue).compute_units, _WORK_WORDS // words))
    image = groups * rows * shape.positions  # elements of an image of gradients
    parts = slices(x, shape, x.dtype)
    columns = parts[0][1] * shape.positions
    division = divide(items, groups, columns, 2 * _STEPS, panels_k, floats)
    sums = bridge.empty(queue, (division.chunks * floats,), "float32")
    grid = (-(-panels_k // division.each_k), division.chunks, groups)
    work = bridge.empty(queue, (prod(grid) * words,), "float32")
    for first, (source,) in staged(x, parts, [shape], x.dtype, groups, problem.channels):
        _WEIGHT_GRAD(
            queue, grid, (1, 1, 1), source.tensor, source.offsets, grad, sums, work, first * image,
            *source.sizes(rows), image, source.tensor.size, grad.size, tall + short, tall, division.each_k,
            division.each, division.block, first > 0, STEPS=_STEPS,
        )  # fmt: skip
    _FINISH(queue, (panels_k, -(-rows // _ROWS), groups), (1, 1, 1), sums, out, rows, steps, padded, division.chunks)
    return None
