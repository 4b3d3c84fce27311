"""The convolution of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/conv_dot_bf16.cl)."""

from __future__ import annotations

from functools import partial

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv import direct
from clamp.ops.conv.geometry import divide
from clamp.ops.conv.packed import multiply_panels
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.gemm.problem import Epilogue

NAME = "dot_bf16"
TAKES = "bfloat16 by bfloat16, on a processor whose dot product of them works (others have no such instruction)"
IN_WORDS = "packed panels and the processor's bfloat16 dot product"

_CONV = Kernel("conv_dot_bf16.cl", "conv")
_WEIGHT_GRAD = Kernel("conv_dot_bf16_grad.cl", "weight_grad")
_FINISH = Kernel("conv_dot_bf16_grad.cl", "weight_grad_finish")
_ROWS, _COLUMNS = 12, 32  # of the register tile
_LAYOUT = PanelLayout(width=_ROWS, short=8, block=384, pairs=True)
_STEPS = 256  # pairs of positions that a weight gradient reads at a time
_WORK_WORDS = 16 * 2**20  # of workspaces, of which each work-item of a weight gradient has one
_MIN_ROW = 6  # positions: 4 take 1.6 times as long as in packed.py, 7 take 0.6 times
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up


def fits(problem: Problem) -> bool:
    """Returns whether the device has the instruction, and both operands are stored for it."""
    return problem.dtypes == ("bfloat16", "bfloat16") and bool(problem.device.dot_bf16)


def pays(problem: Problem) -> bool:
    """Whether the instruction is fast; and a weight gradient's pairs do not end where they have hardly begun."""
    wide = problem.gradient != "weights" or problem.forward.row[0] >= _MIN_ROW
    return problem.device.fast_dot_bf16 and wide


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    direct.convolve(_correlate, problem, x, weights, out, epilogue)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``."""
    direct.weight_gradient(partial(_Bf16Sum, out=out), problem, x, grad, "bfloat16")
    return None


def _correlate(source: Source, weights: Weights, target: Target) -> None:
    multiply_panels(_CONV, _COLUMNS, _LAYOUT, source, weights, target)


class _Bf16Sum:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, first: Source, out: Tensor) -> None:
        rows = out.shape[0] // first.groups
        self._out, self._rows, self._steps, self._groups = out, rows, first.offsets.steps, first.groups
        self._panels_k = -(-first.offsets.steps // _COLUMNS)
        self._tall, self._short = _LAYOUT.heights(rows)
        self._padded = _LAYOUT.padded(rows)
        floats = first.groups * self._panels_k * self._padded * _COLUMNS
        self._words = (_STEPS + 16) * (_COLUMNS + self._padded)  # of a work-item: what it packs
        items = _CHUNKS_PER_CORE * capabilities(out.queue).compute_units
        items = max(1, min(items, _WORK_WORDS // self._words))
        self._division = divide(items, first.groups, first.columns, 2 * _STEPS, self._panels_k, floats)
        self._partial = bridge.empty(out.queue, (self._division.chunks * floats,), "float32")
        self._accumulate = False

    def add(self, source: Source, grad: Tensor, begin: int) -> None:
        """Adds the images of ``source``, whose output gradients are in ``grad`` from element ``begin`` on."""
        queue, division = grad.queue, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, source.groups)
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * self._words,), "float32")
        _WEIGHT_GRAD(
            queue, grid, (1, 1, 1), source.tensor, source.offsets, grad, self._partial, work,
            begin, *source.sizes(self._rows), source.groups * self._rows * source.shape.positions, source.tensor.size,
            grad.size, self._tall + self._short, self._tall, division.each_k, division.each, division.block,
            self._accumulate, WEIGHT_GRAD=1, STEPS=_STEPS,
        )  # fmt: skip
        self._accumulate = True

    def finish(self) -> None:
        """Writes the sum."""
        _FINISH(
            self._out.queue, (self._panels_k, -(-self._rows // _ROWS), self._groups), (1, 1, 1), self._partial,
            self._out, self._rows, self._steps, self._padded, self._division.chunks,
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype],
        )  # fmt: skip
