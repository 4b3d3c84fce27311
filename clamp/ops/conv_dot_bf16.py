"""The convolution of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/conv_dot_bf16.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel
from clamp.ops import gemm_dot_bf16
from clamp.ops.conv_geometry import Correlation
from clamp.ops.conv_packed import divide, launch
from clamp.ops.conv_stage import Source
from clamp.ops.conv_weights import PanelLayout, Weights
from clamp.ops.gemm_operands import Epilogue

_ROWS, _COLUMNS = 12, 32  # of the register tile
_LAYOUT = PanelLayout(width=_ROWS, short=8, block=384, pairs=True)
_STEPS = 256  # pairs of positions that a weight gradient reads at a time
_WORK_WORDS = 16 * 2**20  # of workspaces, of which each work-item of a weight gradient has one
_MIN_ROW = 6  # positions: 4 take 1.6 times as long as in conv_packed.py, 7 take 0.6 times
_CHUNKS_PER_CORE = 4  # of positions, of a weight gradient: they are alike, and each has partial sums to add up

#: what `weight_grad` reads
GRAD_SOURCE_DTYPE: str | None = "bfloat16"


def pays(x: Tensor, w: Tensor) -> bool:
    """Whether these kernels take a convolution's operands, and are the fastest for them."""
    return x.dtype == w.dtype == "bfloat16" and gemm_dot_bf16.pays_off(x.queue)


def gradient_pays(x: Tensor, grad: Tensor, shape: Correlation) -> bool:
    """The same for a weight gradient, whose pairs must not end where they have hardly begun."""
    return pays(x, grad) and shape.row[0] >= _MIN_ROW


def correlate(source: Source, weights: Weights, out: Tensor, begin: int, out_image: int, epilogue: Epilogue) -> None:
    """Writes a correlation, through the epilogue, into ``out`` from element ``begin`` on."""
    launch("conv_dot_bf16.cl", {}, _COLUMNS, _LAYOUT, source, weights, out, begin, out_image, epilogue)


class WeightGradient:
    """A weight gradient as it adds up, slice by slice of the batch."""

    def __init__(self, first: Source, rows: int, out: Tensor) -> None:
        self._out, self._rows = out, rows
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
        queue, shape, division = grad.queue, source.shape, self._division
        grid = (-(-self._panels_k // division.each_k), division.chunks, source.groups)
        work = bridge.empty(queue, (grid[0] * grid[1] * grid[2] * self._words,), "float32")
        kernel = get_kernel(
            queue, "conv_dot_bf16_grad.cl", "weight_grad", "pppppqqqqqqqqqqqquuuqqi", WEIGHT_GRAD=1, STEPS=_STEPS
        )
        kernel(
            queue, grid, (1, 1, 1), source.tensor.buffer, source.offsets.buffer, grad.buffer, self._partial.buffer,
            work.buffer, begin, source.columns, self._rows, source.offsets.steps, shape.positions, *shape.row,
            source.groups * source.group_size, source.group_size, source.groups * self._rows * shape.positions,
            source.tensor.size, grad.size, self._tall + self._short, self._tall, division.each_k, division.each,
            division.block, self._accumulate,
        )  # fmt: skip
        self._accumulate = True

    def finish(self, source: Source) -> None:
        """Writes the sum."""
        kernel = get_kernel(
            self._out.queue, "conv_dot_bf16_grad.cl", "weight_grad_finish", "ppqqqu",
            WEIGHT_GRAD_FINISH=1, OUT_T=bridge.STORAGE[self._out.dtype],
        )  # fmt: skip
        kernel(
            self._out.queue, (self._panels_k, -(-self._rows // _ROWS), source.groups), (1, 1, 1),
            self._partial.buffer, self._out.buffer, self._rows, source.offsets.steps, self._padded,
            self._division.chunks,
        )  # fmt: skip
