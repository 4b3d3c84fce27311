"""The GEMM of CPU devices, register-blocked over panels of floats (kernels/gemm_packed.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.engine import always, on_cpus
from clamp.ops.gemm import panels
from clamp.ops.gemm.panels import Panels
from clamp.ops.gemm.plan import tile_of
from clamp.ops.gemm.problem import Epilogue, Matrix

NAME = "packed"
TAKES = "every product"
IN_WORDS = "panels packed for a register-blocked loop"
fits, pays = always, on_cpus

_GEMM = Kernel("gemm_packed.cl", "gemm")
_KC = 256  # steps between two visits to a tile: a panel of B, KC x 32 floats, fits a first-level cache


def pack(b: Matrix) -> Panels:
    """op(B) in panels of floats."""
    return panels.pack(b, tile_of(b.tensor.queue).columns)


def run(a_operand: Matrix, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    a = panels.pack(a_operand, tile_of(queue).rows)
    panels_a, panels_b, grid = panels.blocks(a, b, c)
    partial = c  # a kernel's pointer must point somewhere
    if a.steps > _KC:
        sums = grid[2] * a.count * a.width * b.count * b.width
        partial = bridge.empty(queue, (sums,), "float32")
    _GEMM(
        queue, grid, (1, 1, 1), a.tensor, b.tensor, c, epilogue.bias_or(c), partial,
        a.rows, b.rows, a.steps, a.stride_batch, b.stride_batch, panels_a, panels_b,
        *epilogue.types, *epilogue.flags, MR=a.width, NR=b.width, KC=_KC,
    )  # fmt: skip
