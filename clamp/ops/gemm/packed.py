"""The GEMM of CPU devices, register-blocked over panels of floats (kernels/gemm_packed.cl)."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.engine import always, on_cpus
from clamp.ops.gemm import panels
from clamp.ops.gemm.panels import Panels, blocks_of
from clamp.ops.gemm.problem import Epilogue, Operand

NAME = "packed"
TAKES = "every product"
IN_WORDS = "panels packed for a register-blocked loop"
fits, pays = always, on_cpus

_GEMM = Kernel("gemm_packed.cl", "gemm")
_KC = 256  # steps between two visits to a tile: a panel of B, KC x 32 floats, fits a first-level cache


@dataclass(frozen=True)
class Tile:
    """The part of C held in registers."""

    rows: int
    columns: int


_TILE_AVX512 = Tile(12, 32)  # 24 sums in 32 registers of 16 floats
_TILE_NARROW = Tile(6, 16)  # 12 sums in 16 registers of 8 floats (AVX2), 24 in 32 of 4 (NEON)


def tile_of(queue: cl.CommandQueue) -> Tile:
    """The register tile for the queue's device."""
    return _TILE_AVX512 if capabilities(queue).float_vector_width >= 16 else _TILE_NARROW


def pack(b: Operand) -> Panels:
    """op(B) in panels of floats."""
    return panels.pack(b, tile_of(b.tensor.queue).columns)


def run(a_operand: Operand, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    a = panels.pack(a_operand, tile_of(queue).rows)
    blocks = blocks_of(a, b, c)
    partial = c  # a kernel's pointer must point somewhere
    if a.steps > _KC:
        sums = blocks.grid[2] * a.count * a.width * b.count * b.width
        partial = bridge.empty(queue, (sums,), "float32")
    _GEMM(
        queue, blocks.grid, (1, 1, 1), a.tensor, b.tensor, c, epilogue.bias_or(c), partial,
        a.rows, b.rows, a.steps, a.stride_batch, b.stride_batch, blocks.panels_a, blocks.panels_b, *epilogue.flags,
        MR=a.width, NR=b.width, KC=_KC, **epilogue.macros,
    )  # fmt: skip
