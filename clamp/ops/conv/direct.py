"""Convolutions as matrix products whose right-hand operand is read from a staged copy of the source, never written down
(no im2col): what the engines that multiply term by term have in common. Each has kernels of its own for the product."""

from __future__ import annotations

from collections.abc import Callable

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.conv.geometry import Correlation
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target, interleave, offsets, slices, stage
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm.problem import Epilogue

#: writes a correlation
Correlate = Callable[[Source, Weights, Target], None]


def convolve(
    correlate: Correlate, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue,
    *, by_rows: bool = True,
) -> None:  # fmt: skip
    """Writes a convolution or an input gradient over ``out``.

    Args:
        by_rows: whether a work-item copies rows, as suits a CPU, or one element.
    """
    if out.size == 0:
        return
    shapes, remainders = problem.correlations
    phases = out if len(shapes) == 1 else bridge.empty(out.queue, out.shape, out.dtype)
    channels = weights.channels if x.size else 0  # an image without pixels is all padding: sums of nothing
    tables = [offsets(x.queue.context, shape, channels) for shape in shapes]
    for first, images in slices(x, shapes[0], x.dtype):
        # All correlations read one staged source, or a stand-in: a kernel's pointer must point somewhere.
        staged = stage(x, shapes[0], first, images, x.dtype, by_rows=by_rows) if x.size else out
        begin = 0
        for shape, table in zip(shapes, tables, strict=True):
            source = Source(staged, shape, table, images, weights.groups, channels)
            out_image = weights.groups * weights.rows * shape.positions
            correlate(source, weights, Target(phases, begin + first * out_image, out_image, epilogue))
            begin += problem.images * out_image
    if phases is not out:
        interleave(phases, out, remainders, by_rows=by_rows)


def source_of(
    x: Tensor, problem: Problem, shape: Correlation, first: int, images: int, dtype: str, *, by_rows: bool = True
) -> Source:
    """Stages what the weight gradient reads of ``images`` images, from the first on.

    Args:
        dtype: storage type of the source.
        by_rows: as in `convolve`.
    """
    staged = stage(x, shape, first, images, dtype, by_rows=by_rows)
    table = offsets(x.queue.context, shape, problem.channels)
    return Source(staged, shape, table, images, problem.window.groups, problem.channels)
