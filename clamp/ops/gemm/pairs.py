"""Products of 16-bit matrices by pairs of k on processors, which the engines ``amx`` and ``dot_bf16`` share
(kernels/gemm_pairs.clh)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm.packed import Panels
from clamp.ops.gemm.plan import blocks_of
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

_SIDE, _K_STEP, _PART_BYTES = 32, 32, 2048  # as in pair_panels.clh
_PAIRS = _K_STEP // 2  # of k in a step: `Panels` counts pairs
_CACHE_WAY = 4096  # bytes after which addresses are of the same set of a first-level cache, of 12 lines
_MANY_COLUMNS = 2048
_BLOCK_A, _BLOCK_B = 8, 64  # panels of a work-item's block
_BLOCK_BYTES = 2**20  # of A's panels of a block, which are read again for each of B's: half of a second-level cache
_BLOCKS_PER_CORE = 4
# Multiply-adds of one part up to which launches are what counts: `direct` has one in place of three, and smaller tiles.
# No power of two, as extents are: a batch of a few rows more or less is multiplied by the same kernels.
_SMALL = 5 * 2**19
_STREAMED = 2**20  # bytes of a float32 result that is written past the caches


@dataclass(frozen=True)
class PairUnit:
    """A processor's way to multiply a type by pairs of k: in how many parts.

    Attributes:
        pack, gemm: its kernels.
        sum_steps: steps whose products are one sum.
        in_turn_from: 0: panels of B are packed one after the other along the lines of memory only; otherwise whichever
            way B lies, and from so many panels of A on rather than those of a smaller A.
    """

    dtype: str
    parts: int
    pack: ClassVar[Kernel]
    gemm: ClassVar[Kernel]
    sum_steps: ClassVar[int]
    in_turn_from: ClassVar[int] = 0

    @property
    def gemm_macros(self) -> dict[str, Any]:
        """What both kernels are built with."""
        return {"SUM_STEPS": self.sum_steps, "BLOCK_A": _BLOCK_A + 1}

    @property
    def step_bytes(self) -> int:
        return _PART_BYTES * self.parts


def has_enough(problem: Problem, parts: int = 1) -> bool:
    """Returns whether there is enough to multiply by pairs."""
    if problem.rows is None:
        return True
    return problem.batches * problem.rows * problem.columns * problem.k > _SMALL * parts


@dataclass(frozen=True)
class Blocking:
    """Tiles of a product in blocks, one for each work-item, and what is packed before.

    Tiles are of rows of op(A) by columns of op(B); or, where that leaves less to pack, of columns by rows, each
    transposed in the store. A block that has all rows may pack its columns itself, panel by panel, each of which stays
    in its core's cache.
    """

    swaps: bool  # whether the rows of tiles are columns of op(B)
    reads_rows: bool  # whether they are read where they lie
    packs_columns: bool  # whether blocks pack their columns themselves
    block: tuple[int, int]  # panels of rows and of columns
    grid: tuple[int, int, int]  # blocks by rows and columns, and matrices

    @classmethod
    def of(cls, a: Matrix, b: Matrix | Panels, batches: int, unit: PairUnit, cores: int) -> Blocking:
        """That of a product of so many matrices on so many cores."""
        steps, sums = _steps(a.k), _sum_bytes(a.k, unit)
        most_a = _BLOCK_A // unit.parts if steps > unit.sum_steps else max(_BLOCK_BYTES // sums, 1)
        swaps = isinstance(b, Matrix) and _packs_a_only(a, b, unit, most_a)
        rows, columns = (b, a) if swaps else (a, b)  # of the tiles
        assert isinstance(rows, Matrix)
        panels_a, panels_b = -(-rows.rows // _SIDE), -(-columns.rows // _SIDE)
        in_turn = isinstance(columns, Matrix) and _pack_in_turn(columns, batches, unit)
        block_a, block_b = _blocks(panels_a, panels_b, batches, cores, most_a, in_turn)
        grid = -(-panels_a // block_a), -(-panels_b // block_b), batches
        is_read = _is_read_in_place(rows, unit, columns.rows)
        return cls(swaps, is_read, in_turn and grid[0] == 1, (block_a, block_b), grid)

    @property
    def launches(self) -> int:
        """How many a product takes, where B is not packed before: one, and one for each operand that must be."""
        return 3 - self.reads_rows - self.packs_columns


class Product:
    """Products whose operands lie as these do, divided as `Blocking` says.

    Args:
        b: packed, or as it lies.
        copies: whether what b, float32, is rounded to is written to its copy.
    """

    def __init__(
        self, a: Matrix, b: Matrix | Panels, c: Tensor, epilogue: Epilogue, unit: PairUnit, copies: bool = False
    ) -> None:
        panel_bytes, batches = _steps(a.k) * unit.step_bytes, c.size // (a.rows * b.rows)
        blocking = Blocking.of(a, b, batches, unit, capabilities(c.queue).compute_units)
        self._swaps, grid = blocking.swaps, blocking.grid
        rows, columns = (b, a) if self._swaps else (a, b)
        assert isinstance(rows, Matrix)
        panels_a, panels_b = -(-rows.rows // _SIDE), -(-columns.rows // _SIDE)
        if blocking.reads_rows:
            self._pack_rows = None
            lines = 2 * rows.stride_row, 2 * _K_STEP, 2 * _SIDE * rows.stride_row, 2 * rows.stride_batch
        else:
            self._pack_rows = _Packing(rows, unit)
            lines = 2 * _K_STEP, unit.step_bytes, panel_bytes, panels_a * panel_bytes if rows.batch else 0
        self._pack_columns, self._own_panels = None, 0
        width, strides, copied = 0, (0, 0, panels_b * panel_bytes if columns.batch else 0), False
        if isinstance(columns, Matrix) and blocking.packs_columns:
            self._own_panels = prod(grid) * _sum_bytes(a.k, unit) // 4
            width, strides, copied = _width(columns), _strides(columns), copies
        elif isinstance(columns, Matrix):
            self._pack_columns = _Packing(columns, unit, copies, is_b=True)
        streamed = epilogue.out_dtype == "float32" and bridge.nbytes(c) >= _STREAMED and not any(epilogue.flags)
        self._gemm = unit.gemm.bind(
            c.queue, grid, (1, 1, 1), ..., ..., ..., ..., ..., ..., rows.rows, columns.rows, a.k, *lines, *strides,
            *blocking.block, width, copied, self._swaps, streamed, *epilogue.types, *epilogue.flags,
            **unit.gemm_macros,
        )  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, c: Tensor, bias: Tensor, copy: Tensor) -> None:
        rows, columns = (b, a) if self._swaps else (a, b)
        if self._pack_rows is not None:
            rows = self._pack_rows(rows, c)
        if self._pack_columns is not None:
            columns = self._pack_columns(columns, copy)
        panels = bridge.empty(c.queue, (self._own_panels,), "float32") if self._own_panels else c
        self._gemm(c.queue, rows.buffer, columns.buffer, c.buffer, bias.buffer, panels.buffer, copy.buffer)


class _Packing:
    """Copies operands that lie as this one does into panels."""

    def __init__(self, x: Matrix, unit: PairUnit, copies: bool = False, *, is_b: bool = False) -> None:
        queue = x.tensor.queue
        panels, steps, batches = -(-x.rows // _SIDE), _steps(x.k), prod(x.batch)
        self._shape = (batches * panels * steps * unit.step_bytes // 4,)
        enough = -(-8 * capabilities(queue).compute_units // batches)
        # Along the lines of memory: these are rows' k, or all rows of a step.
        by_steps = 1 if x.stride_k == 1 or (is_b and unit.in_turn_from and panels >= enough) else min(steps, enough)
        by_panels = min(panels, -(-enough // by_steps))
        by_steps = min(steps, -(-enough // by_panels))
        self._launch = unit.pack.bind(
            queue, (by_panels, by_steps, batches), (1, 1, 1), ..., ..., ..., x.rows, x.k, *_strides(x), _width(x),
            is_b, copies, **unit.gemm_macros,
        )  # fmt: skip

    def __call__(self, x: Tensor, copy: Tensor) -> Tensor:
        panels = bridge.empty(x.queue, self._shape, "float32")
        self._launch(x.queue, x.buffer, panels.buffer, copy.buffer)
        return panels


def packed(b: Matrix, unit: PairUnit) -> Panels:
    """op(B) in panels."""
    panels = _Packing(b, unit, is_b=True)(b.tensor, b.tensor)
    return Panels(panels, b.batch, b.rows, b.k, _steps(b.k) * _PAIRS, _SIDE)


def _steps(k: int) -> int:
    """Of so many k."""
    return max(-(-k // _K_STEP), 1)


def _sum_bytes(k: int, unit: PairUnit) -> int:
    """Bytes of a panel for one visit of a tile."""
    return min(_steps(k), unit.sum_steps) * unit.step_bytes


def _width(x: Matrix) -> int:
    """Bytes of an element."""
    return bridge.ITEMSIZE[bridge.canonical_dtype(x.tensor.dtype)]


def _strides(x: Matrix) -> tuple[int, int, int]:
    """From a row to the next, from a k, from a matrix, in bytes."""
    return _width(x) * x.stride_row, _width(x) * x.stride_k, _width(x) * x.stride_batch


def _is_read_in_place(a: Matrix, unit: PairUnit, columns: int) -> bool:
    """Returns whether tiles of op(A) are read where they are for a product of so many columns: whole ones, rows of k
    together, in one part; and unless all of a tile's rows share the few lines of one set of a first-level cache, which
    costs more than to pack them if there are many columns."""
    as_it_is = a.tensor.dtype == unit.dtype and unit.parts == 1
    whole = a.stride_k == 1 and a.rows % _SIDE == 0 and a.k % _K_STEP == 0 and a.k > 0
    return as_it_is and whole and (2 * a.stride_row % _CACHE_WAY > 0 or columns < _MANY_COLUMNS)


def _pack_in_turn(b: Matrix, batches: int, unit: PairUnit) -> bool:
    """Returns whether panels of op(B) may be packed one after the other for a product of so many matrices: each once,
    and along the lines of memory, or out of a cache, unless the unit gains by it as it is."""
    near = b.stride_k == 1 or bridge.nbytes(b.tensor) // batches <= _BLOCK_BYTES
    return prod(b.batch) == batches and (near or unit.in_turn_from > 0)


def _packs_a_only(a: Matrix, b: Matrix, unit: PairUnit, most_a: int) -> bool:
    """Returns whether op(A) is packed, and op(B) read where it is; of both of which that is true the smaller one is
    packed, unless a block of all rows of op(A), at most ``most_a`` panels, packs op(B) itself."""
    if not _is_read_in_place(b, unit, a.rows):
        return False
    if not _is_read_in_place(a, unit, b.rows):
        return True
    if unit.in_turn_from and prod(a.batch) == prod(b.batch) and unit.in_turn_from <= a.rows // _SIDE <= most_a + 1:
        return False
    return prod(a.batch) * a.rows < prod(b.batch) * b.rows


def _blocks(panels_a: int, panels_b: int, batches: int, cores: int, most_a: int, whole_rows: bool) -> tuple[int, int]:
    """Panels of A and of B of a work-item's block: so few that every core has some blocks; if that can be and is wanted
    (``whole_rows``), with all rows, one panel more than usual included: a batch of a few rows more is multiplied by the
    same kernels."""
    whole_rows = whole_rows and panels_a <= most_a + 1
    most, sides = (panels_a if whole_rows else most_a, _BLOCK_B), (0 if whole_rows else 1, 1)
    return blocks_of((panels_a, panels_b), most, sides, batches, _BLOCKS_PER_CORE * cores)[:2]
