"""The GEMM of CPU devices, register-blocked over panels of floats (kernels/gemm_packed.cl); and operands copied into
panels, in the order in which a CPU's inner loop reads them (kernels/gemm_pack.cl)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.engine import always, on_cpus
from clamp.ops.gemm.plan import blocks_of, tile_of
from clamp.ops.gemm.problem import Epilogue, Matrix

NAME = "packed"
TAKES = "every product"
IN_WORDS = "panels packed for a register-blocked loop"
fits, pays = always, on_cpus

_PACK, _GEMM = Kernel("gemm_pack.cl", "pack", "SRC"), Kernel("gemm_packed.cl", "gemm")
_KC = 256  # steps between two visits to a tile: a panel of B, KC x 32 floats, fits a first-level cache
_STEP_SPAN = 128  # steps that one work-item packs
_BLOCK_ROWS, _BLOCK_COLUMNS = 96, 256  # of C, for one work-item: what its panels need fits a second-level cache
_BLOCKS_PER_CORE = 8  # work-items that a core should get, so that the last ones even out


@dataclass(frozen=True)
class Panels:
    """An operand in panels of ``width`` rows, each of ``steps`` x ``width`` 32-bit elements, zero beyond the matrix."""

    tensor: Tensor  # the panels, matrix after matrix
    batch: tuple[int, ...]
    rows: int
    k: int  # batch, rows, k: as in `Matrix`
    steps: int  # elements of a row: k floats, or pairs of 16-bit numbers
    width: int  # rows of a panel

    @property
    def count(self) -> int:
        """Panels of one matrix."""
        return -(-self.rows // self.width)

    @property
    def stride_batch(self) -> int:
        """Elements from one matrix's panels to the next's; 0 where one matrix serves a whole batch."""
        return self.count * self.width * self.steps if self.batch else 0


def into_panels(x: Matrix, width: int) -> Panels:
    """Copies an operand into panels of floats."""
    queue = x.tensor.queue
    count, batches = -(-x.rows // width), prod(x.batch)
    steps = max(x.k, 1)
    shape = (batches * count * width * steps,)
    if x.tensor.size == 0:  # the sum of nothing, for kernels that take at least one step: a step of zeros
        return Panels(bridge.zeros(queue, shape, "float32"), x.batch, x.rows, x.k, steps, width)
    panels = bridge.empty(queue, shape, "float32")
    _PACK(
        queue, (count, -(-steps // _STEP_SPAN), batches), (1, 1, 1), x.tensor, panels,
        x.rows, x.k, x.stride_row, x.stride_k, x.stride_batch, width,
        STEP_SPAN=_STEP_SPAN,
    )  # fmt: skip
    return Panels(panels, x.batch, x.rows, x.k, steps, width)


def blocks(a: Panels, b: Panels, c: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Panels of A and of B that a work-item multiplies, as many as its cache holds; and the work-items."""
    most = _BLOCK_ROWS // a.width, _BLOCK_COLUMNS // b.width
    enough = _BLOCKS_PER_CORE * capabilities(c.queue).compute_units
    return blocks_of((a.count, b.count), most, (a.width, b.width), c.size // (a.rows * b.rows), enough)


def pack(b: Matrix) -> Panels:
    """op(B) in panels of floats."""
    return into_panels(b, tile_of(b.tensor.queue).columns)


def run(a_operand: Matrix, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    a = into_panels(a_operand, tile_of(queue).rows)
    panels_a, panels_b, grid = blocks(a, b, c)
    partial = c  # a kernel's pointer must point somewhere
    if a.steps > _KC:
        sums = grid[2] * a.count * a.width * b.count * b.width
        partial = bridge.empty(queue, (sums,), "float32")
    _GEMM(
        queue, grid, (1, 1, 1), a.tensor, b.tensor, c, epilogue.bias_or(c), partial,
        a.rows, b.rows, a.steps, a.stride_batch, b.stride_batch, panels_a, panels_b,
        *epilogue.types, *epilogue.flags, MR=a.width, NR=b.width, KC=_KC,
    )  # fmt: skip
