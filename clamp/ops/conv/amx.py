"""The convolution of 16-bit numbers on the matrix unit of x86 processors (kernels/conv_amx.cl, conv_amx_grad.cl)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv import winograd
from clamp.ops.conv.geometry import PARTIAL_FLOATS, Correlation, deal
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import interleave
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm.amx import multiplies, unit_of
from clamp.ops.gemm.problem import Epilogue

NAME = "amx"
TAKES = "float16 by float16 or bfloat16 by bfloat16, on an x86 processor whose matrix unit (AMX) computes right"
IN_WORDS = "the processor's matrix unit"

_CONV = Kernel("conv_amx.cl", "conv")
_PACK = Kernel("conv_amx_weights.cl", "pack_weights")
_WEIGHT_GRAD = Kernel("conv_amx_grad.cl", "weight_grad", "-")
_FINISH = Kernel("conv_amx_grad.cl", "weight_grad_finish", "- OUT")
_SIDE = 32  # sums in both directions, and numbers of a step
_RUNS = 8  # of positions that are computed together
_STEPS = 20  # of a panel of weights that are read so often
_STAGED_WORDS = 2**16  # of a block of the source: a quarter of a megabyte, in a second-level cache with panels and sums
_ITEMS_PER_CORE = 4  # each has a workspace of its own; of a weight gradient, partial sums to add up, too
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def fits(problem: Problem) -> bool:
    """Returns whether both operands are of a 16-bit type that the matrix unit multiplies, in one part or in two."""
    return multiplies(problem.device, *problem.dtypes)


def pays(problem: Problem) -> bool:
    """Returns whether the channels that are summed over fill half of a step, or both sides of a weight gradient a
    quarter of a tile. Of a float16 in two parts there are four products: Winograd's sums are as fast."""
    if problem.dtypes[0] == "float16" and not problem.device.amx_fp16 and winograd.fits(problem):
        return False
    if problem.gradient == "weights":
        return min(problem.channels, problem.features) >= _SIDE // 4
    return (problem.features if problem.gradient else problem.channels) >= _SIDE // 2


def convolve(
    problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue, *, emulate: bool = False
) -> None:
    """Writes a convolution or an input gradient over ``out``; if ``emulate``, by plain C, bit for bit the same."""
    if out.size == 0:
        return
    queue, groups, rows, images = out.queue, weights.groups, weights.rows, problem.images
    shapes, remainders = problem.correlations
    phases = out if len(shapes) == 1 else bridge.empty(queue, out.shape, out.dtype)
    channels = weights.channels if x.size else 0  # an image without pixels is all padding: sums of nothing
    blocks_k, panels = -(-channels // _SIDE), -(-rows // _SIDE)
    fair = -(-images // (_ITEMS_PER_CORE * capabilities(queue).compute_units))
    unit = unit_of(capabilities(x.queue), x.dtype, emulate)
    parts = unit.parts
    block = StagedBlock.of(shapes, fair, _STAGED_WORDS // max(1, parts * blocks_k * _SIDE // 2))
    bands = -(-max(shape.y.positions for shape in shapes) // block.rows)
    grid, _ = deal(queue, bands * -(-images // block.images), panels, groups, _ITEMS_PER_CORE)
    staged = block.images * block.plane * blocks_k + _SIDE  # rows: a run reads beyond them
    words = (_RUNS + parts - 1) * _SIDE**2 + staged * parts * _SIDE // 2
    work = bridge.empty(queue, (prod(grid) * words,), "float32")
    tables = _tables(queue.context, shapes, block, groups, rows, blocks_k, images, parts)
    _CONV(
        queue, grid, (1, 1, 1), _panels(weights, shapes, parts), x if x.size else out, *tables, phases,
        epilogue.bias_or(out), work, len(shapes), x.size, images, block.images, block.rows, bands, channels, rows,
        *block.staging, words,
        *epilogue.flags, RUNS=_RUNS, **unit.macros, **epilogue.macros,
    )  # fmt: skip
    if phases is not out:
        interleave(phases, out, remainders, by_rows=True)


def weight_gradient(
    problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None, *, emulate: bool = False
) -> Tensor | None:
    """Writes the gradient by the weights over ``out``; if ``emulate``, by plain C, bit for bit the same."""
    queue, shape, groups, images = out.queue, problem.forward, problem.window.groups, problem.images
    panels, blocks_k = -(-problem.features // _SIDE), -(-problem.channels // _SIDE)
    floats = groups * blocks_k * panels * shape.taps * _SIDE**2
    items = _ITEMS_PER_CORE * capabilities(queue).compute_units
    chunks = max(1, min(images, -(-items // groups), PARTIAL_FLOATS // floats))
    each = -(-images // chunks)
    chunks = -(-images // each)
    shares = max(1, min(blocks_k, items // (groups * chunks)))
    # A position takes a word for each of 32 input channels, and half a word for each output channel.
    unit = unit_of(capabilities(x.queue), x.dtype, emulate)
    parts = unit.parts
    block = StagedBlock.of([shape], each, _STAGED_WORDS // (parts * (_SIDE + panels * _SIDE // 2)), multiple=_SIDE)
    steps = block.images * -(-((block.rows - 1) * block.line(shape) + shape.x.positions) // _SIDE)
    staged = (block.images * block.plane + _SIDE) * _SIDE + steps * _SIDE**2
    words = 2 * -(-2 * steps // 8) * 8 + (block.plane + _SIDE) * _SIDE // 2  # offsets, lines
    words += parts * (_SIDE**2 + panels * steps * _SIDE**2 // 2 + staged)  # sums, gradients
    partial = bridge.empty(queue, (chunks * floats,), "float32")
    work = bridge.empty(queue, (shares * chunks * groups * words,), "float32")
    _WEIGHT_GRAD(
        queue, (shares, chunks, groups), (1, 1, 1), x, grad, _taps(queue.context, shape, block), partial, work,
        x.size, grad.size, images, each, block.images, problem.channels, problem.features, shape.taps,
        shape.y.positions, shape.x.positions, block.rows, block.line(shape), *block.staging, words // 2,
        EXPONENT=_EXPONENTS[x.dtype], **unit.macros,
    )  # fmt: skip
    _FINISH(
        queue, (panels, blocks_k, groups), (1, 1, 1), partial, out, problem.features, problem.channels, shape.taps,
        chunks, **{**unit.macros, "EMULATE": 1},
    )  # fmt: skip
    return None


@dataclass(frozen=True)
class StagedBlock:
    """Block that a work-item stages at a time.

    Attributes:
        images: so many whole ones,
        rows: or so many rows of the outputs of one.
        plane: positions of a staged channel of an image.
        staging: rows and columns of the source; those staged of each phase; and, in both directions, phases, stride and
            padding.
    """

    images: int
    rows: int
    plane: int
    staging: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Sequence[Correlation], images: int, positions: int, multiple: int = 16) -> StagedBlock:
        """A block of up to ``images`` images for correlations that read the same.

        Args:
            positions: not more of a channel, if that leaves a row.
            multiple: of which a plane has some.
        """
        y, x = shapes[0].y.staged, shapes[0].x.staged
        height = max(shape.y.positions for shape in shapes)
        reach = max(int(max(shape.y.lines(0, 1), default=0)) for shape in shapes)
        row = y.phases * x.phases * x.length
        rows = min(height, max(1, positions // row - reach))
        plane = -(-row * (rows + reach) // multiple) * multiple
        each = max(1, min(images, positions // plane)) if rows == height else 1
        phases = (y.phases, x.phases, y.stride, x.stride, y.pad, x.pad)
        return cls(each, rows, plane, (*shapes[0].source, rows + reach, x.length, *phases))

    def taps(self, shape: Correlation) -> npt.NDArray[np.int64]:
        """Returns the offset from a position, in elements, that each tap reads at."""
        _, _, rows, pitch, _, phases, *_ = self.staging
        return (shape.y.lines(phases * rows * pitch, pitch)[:, None] + shape.x.lines(rows * pitch, 1)).reshape(-1)

    def line(self, shape: Correlation) -> int:
        """Numbers of positions from a row to the next."""
        return shape.x.positions if shape.x.positions % _SIDE == 0 else self.staging[3]


_KEPT = 128  # of up to some 50 KB


@lru_cache(maxsize=_KEPT)
def _tables(
    context: cl.Context, shapes: tuple[Correlation, ...], block: StagedBlock, groups: int, rows: int, blocks_k: int,
    images: int, parts: int,
) -> tuple[cl.Buffer, cl.Buffer]:  # fmt: skip
    """Rows of the table of correlations, and how many bytes from a position each of their steps reads."""
    channels = np.arange(blocks_k, dtype=np.int64) * block.plane
    table, offsets, first, weights, out = [], [np.zeros(1, np.int64)], 1, 0, 0
    for shape in shapes:
        steps = blocks_k * shape.taps
        part = -(-steps // max(1, -(-steps // _STEPS)))
        offsets.append(2 * parts * _SIDE * (block.taps(shape)[:, None] + channels).reshape(-1))
        table.append((first, steps, part, shape.y.positions, shape.x.positions, block.line(shape), weights, out))
        first += steps
        weights += groups * -(-rows // _SIDE) * steps * parts * 2 * _SIDE**2
        out += images * groups * rows * shape.positions
    return _numbers(context, np.array(table)), _numbers(context, np.concatenate(offsets))


@lru_cache(maxsize=_KEPT)
def _taps(context: cl.Context, shape: Correlation, block: StagedBlock) -> cl.Buffer:
    """Returns the distance in positions that each tap reads at."""
    return _numbers(context, block.taps(shape))


def _numbers(context: cl.Context, numbers: npt.NDArray[np.int64]) -> cl.Buffer:
    """64 bits each, in device memory."""
    host = np.ascontiguousarray(numbers, np.uint64)
    return cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=host)


def _panels(weights: Weights, shapes: Sequence[Correlation], parts: int) -> Tensor:
    """The weights of the taps of all correlations, one after the other."""
    kind = (NAME, *((shape.y.taps, shape.x.taps) for shape in shapes))
    return weights.kept(kind, lambda: _pack(weights, shapes, parts))


def _pack(weights: Weights, shapes: Sequence[Correlation], parts: int) -> Tensor:
    w, grid = weights.tensor, (-(-weights.rows // _SIDE), -(-weights.channels // _SIDE), weights.groups)
    words = prod(grid) * parts * _SIDE**2 // 2  # of a tap
    panels = bridge.empty(w.queue, (words * max(1, sum(shape.taps for shape in shapes)),), "float32")
    begin = 0
    for shape in (shape for shape in shapes if shape.taps):
        places = weights.places(shape.y.taps, shape.x.taps)
        _PACK(w.queue, grid, (1, 1, 1), w, panels, begin, weights.rows, weights.channels, *places, PARTS=parts)
        begin += words * shape.taps
    return panels
