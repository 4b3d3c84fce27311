"""The GEMM of small matrices on CPU devices, whose work-items pack what they read themselves (kernels/gemm_direct.cl).

It launches once where the engines of panels launch three times; of larger matrices it would pack every part several
times over, but for those with few columns: most of what is packed is op(A) then, once, by who multiplies it, and no
panels as large as op(A) are written.
"""

from __future__ import annotations

from collections.abc import Callable

from clamp.bridge import STORAGE, Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm.plan import blocks_of, tile_of
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

NAME = "direct"
TAKES = "operands of one storage type"
IN_WORDS = "one launch that packs what it reads"
ROUNDS = True

_GEMM = Kernel("gemm_direct.cl", "gemm")
_KC = 256  # steps packed at a time, as in packed.py: sums are the same, bit for bit
_ROWS, _COLUMNS = 48, 64  # of C, for one work-item: what it packs stays in a second-level cache
_BLOCKS_PER_CORE = 2
_COPY_A, _COPY_B = 1, 2  # which operand's 16-bit copy is written, as in gemm_direct.cl
_SMALL = 2**24  # multiply-adds: 256 cubed is faster so on PoCL and on Intel's runtime, 512 cubed is not


def fits(problem: Problem) -> bool:
    """Returns whether one program reads both operands."""
    return problem.a_dtype == problem.b_dtype


def pays(problem: Problem) -> bool:
    """Returns whether packing launches would take longer than packing some parts twice."""
    if not problem.device.is_cpu or problem.rows is None:
        return False
    # Fewer steps than one block has, of all rows, are packed and read again within the caches.
    return is_small(problem) or (problem.columns <= _COLUMNS and problem.k >= _KC and problem.a_along_k)


def is_small(problem: Problem) -> bool:
    """Returns whether launches take longer than whatever is packed twice."""
    return problem.rows is not None and problem.rows * problem.columns * problem.k <= _SMALL


def bind(
    a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
) -> Callable[..., None]:
    """Products of operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
    tile, swapped = tile_of(c.queue), b.rows == 1 < a.rows and epilogue.bias is None
    if swapped:  # a column is as wide as a tile otherwise
        a, b = b, a
    tiles = -(-a.rows // tile.rows), -(-b.rows // tile.columns)
    enough = _BLOCKS_PER_CORE * capabilities(c.queue).compute_units
    panels_a, panels_b, grid = blocks_of(
        tiles, (_ROWS // tile.rows, _COLUMNS // tile.columns), (tile.rows, tile.columns),
        c.size // (a.rows * b.rows), enough,
    )  # fmt: skip
    wide = [reads is not None and x.tensor.dtype == "float32" for x in (a, b)]
    launch = _GEMM.bind(
        c.queue, grid, (1, 1, 1), ..., ..., ..., ..., ..., a.rows, b.rows, a.k,
        a.stride_row, a.stride_k, a.stride_batch, b.stride_row, b.stride_k, b.stride_batch,
        panels_a, panels_b, *wide, (_COPY_A if swapped else _COPY_B) if copies else 0,
        *epilogue.types, *epilogue.flags,
        MR=tile.rows, NR=tile.columns, KC=_KC, ROWS=_ROWS, COLUMNS=_COLUMNS,
        SRC_T=STORAGE[reads or a.tensor.dtype],
    )  # fmt: skip

    def run(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, copy: Tensor) -> None:
        left, right = (b, a) if swapped else (a, b)
        launch(c.queue, left.buffer, right.buffer, c.buffer, bias.buffer, copy.buffer)

    return run
