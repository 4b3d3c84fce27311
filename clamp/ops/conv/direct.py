"""Convolutions as matrix products whose right-hand operand is read from a staged copy of the source, never written down
(no im2col): what the engines that multiply term by term have in common. Each has kernels of its own for the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    for first, sources in _sources(x, shapes, problem, channels, x.dtype, out, by_rows=by_rows):
        begin = 0
        for source in sources:
            out_image = weights.groups * weights.rows * source.shape.positions
            correlate(source, weights, Target(phases, begin + first * out_image, out_image, epilogue))
            begin += problem.images * out_image
    if phases is not out:
        interleave(phases, out, remainders, by_rows=by_rows)


def gradient_sources(
    problem: Problem, x: Tensor, grad: Tensor, dtype: str, *, by_rows: bool = True
) -> Iterator[tuple[Source, int]]:
    """Yields what a gradient by the weights reads of x, one slice of the batch after the other, and at which element of
    ``grad`` the slice's output gradients begin: the first at 0.

    Args:
        dtype: storage type of the sources.
        by_rows: as in `convolve`.
    """
    for first, (source,) in _sources(x, (problem.forward,), problem, problem.channels, dtype, x, by_rows=by_rows):
        yield source, first * grad.shape[1] * source.shape.positions


def _sources(
    x: Tensor, shapes: Sequence[Correlation], problem: Problem, channels: int, dtype: str, stand_in: Tensor,
    *, by_rows: bool,
) -> Iterator[tuple[int, list[Source]]]:  # fmt: skip
    """The first image of each slice of a batch, with what the correlations read of the slice: all one staged source,
    or the stand-in where x has no elements (a kernel's pointer must point somewhere)."""
    tables = [offsets(x.queue.context, shape, channels) for shape in shapes]
    for first, images in slices(x, shapes[0], dtype):
        staged = stage(x, shapes[0], first, images, dtype, by_rows=by_rows) if x.size else stand_in
        groups, pairs = problem.window.groups, zip(shapes, tables, strict=True)
        yield first, [Source(staged, shape, table, images, groups, channels) for shape, table in pairs]
