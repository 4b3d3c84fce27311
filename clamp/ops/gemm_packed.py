"""The packed, register-blocked GEMM for CPU devices (kernels/gemm_packed.cl)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import capabilities
from clamp.ops.gemm_operands import Epilogue, Operand
from clamp.program import get_kernel

_STEP_SPAN = 128  # steps that one work-item packs
_KC = 256  # steps of k between two visits to a tile: a panel of B, KC x 32 floats, fits a first-level cache
_BLOCK_ROWS, _BLOCK_COLUMNS = 96, 256  # of C, for one work-item: with KC they fit a second-level cache
_BLOCKS_PER_CORE = 8  # work-items that a core should get, so that the last ones even out


@dataclass(frozen=True)
class Tile:
    """The part of C held in registers: ``rows`` panels of A by ``columns`` panels of B."""

    rows: int
    columns: int


_TILE_32_REGISTERS = Tile(12, 32)  # of 16 floats: AVX-512
_TILE_16_REGISTERS = Tile(6, 16)  # of 8 floats: AVX2; also 32 of 4: NEON


def tile_of(queue: cl.CommandQueue) -> Tile:
    """The register tile for the queue's device."""
    return _TILE_32_REGISTERS if capabilities(queue).float_vector_width >= 16 else _TILE_16_REGISTERS


@dataclass(frozen=True)
class Panels:
    """An operand copied into panels of ``width`` rows, each (k, width) floats, zero beyond the matrix.

    Attributes:
        data: the panels, matrix after matrix.
        width: rows of a panel.
        rows, k, batch: as in `Operand`.
    """

    data: Tensor
    width: int
    rows: int
    k: int
    batch: tuple[int, ...]

    @property
    def count(self) -> int:
        """Panels of one matrix."""
        return -(-self.rows // self.width)

    @property
    def stride_batch(self) -> int:
        """Elements from one matrix's panels to the next's; 0 where one matrix serves a whole batch."""
        return self.count * self.width * self.k if self.batch else 0


def pack_columns(b: Operand) -> Panels:
    """op(B) in panels for the device's register tile."""
    return _pack(b, tile_of(b.tensor.queue).columns)


def multiply_packed(a: Operand, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    _multiply(_pack(a, tile_of(queue).rows), b, c, epilogue)


def _pack(x: Operand, width: int) -> Panels:
    queue = x.tensor.queue
    count, batches = -(-x.rows // width), prod(x.batch)
    data = bridge.empty(queue, (max(batches * count * width * x.k, 1),), "float32")
    if x.tensor.size > 0:
        kernel = get_kernel(
            queue, "gemm_pack.cl", "pack", "ppqqqqq", SRC_T=x.storage, WIDTH=width, STEP_SPAN=_STEP_SPAN, PAIRS=0
        )
        kernel(
            queue, (count, -(-x.k // _STEP_SPAN), batches), (1, 1, 1), x.tensor.buffer, data.buffer,
            x.rows, x.k, x.stride_row, x.stride_k, x.stride_batch,
        )  # fmt: skip
    return Panels(data, width, x.rows, x.k, x.batch)


def _multiply(a: Panels, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    queue = c.queue
    batches = c.size // (a.rows * b.rows)
    block_a, block_b = _block(a, b, batches, capabilities(queue).compute_units)
    # One block of k leaves no sums behind; a kernel's pointer must point somewhere all the same.
    sums = batches * a.count * a.width * b.count * b.width if a.k > _KC else 1
    partial = bridge.empty(queue, (sums,), "float32")
    bias = c if epilogue.bias is None else epilogue.bias
    kernel = get_kernel(
        queue, "gemm_packed.cl", "gemm", "pppppqqqqquuii", MR=a.width, NR=b.width, KC=_KC, **epilogue.macros
    )
    kernel(
        queue, (-(-a.count // block_a), -(-b.count // block_b), batches), (1, 1, 1),
        a.data.buffer, b.data.buffer, c.buffer, bias.buffer, partial.buffer,
        a.rows, b.rows, a.k, a.stride_batch, b.stride_batch, block_a, block_b,
        epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


def _block(a: Panels, b: Panels, batches: int, cores: int) -> tuple[int, int]:
    """Panels of A and of B whose product one work-item computes: what fits the cache, less for small matrices."""
    block_a = min(_BLOCK_ROWS // a.width, a.count)
    block_b = min(_BLOCK_COLUMNS // b.width, b.count)

    def blocks() -> int:
        return -(-a.count // block_a) * -(-b.count // block_b) * batches

    while blocks() < _BLOCKS_PER_CORE * cores and block_a * block_b > 1:
        if block_b > 1 and block_b * b.width >= block_a * a.width:
            block_b = -(-block_b // 2)
        else:
            block_a = -(-block_a // 2)
    return block_a, block_b
