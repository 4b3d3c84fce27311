"""The GEMM of every device but CPUs: tiles in local memory (kernels/gemm_tiled.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm.problem import Epilogue, Operand

NAME = "tiled"
TAKES = "every product"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here

_GEMM = Kernel("gemm_tiled.cl", "gemm")
_PER_ITEM = 4  # a work-item computes 4 x 4 elements of C
_TILE_K = 16


def pack(b: Operand) -> Operand:
    """op(B) as it is: it is read in place."""
    return b


def run(a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    side = _tiled_side(capabilities(c.queue))
    tile = side * _PER_ITEM
    groups = -(-b.rows // tile), -(-a.rows // tile)
    _GEMM(
        c.queue, (groups[0] * side, groups[1] * side, c.size // (a.rows * b.rows)), (side, side, 1),
        a.tensor, b.tensor, c, epilogue.bias_or(c), a.rows, b.rows, a.k,
        a.stride_row, a.stride_k, a.stride_batch, b.stride_row, b.stride_k, b.stride_batch, *epilogue.flags,
        A_T=a.storage, B_T=b.storage, SIDE=side, PER_ITEM=_PER_ITEM, TILE_K=_TILE_K, **epilogue.macros,
    )  # fmt: skip


def _tiled_side(device: Capabilities) -> int:
    """The largest work-group, SIDE x SIDE, that the device takes and whose tiles its local memory holds."""
    for side in (16, 8, 4, 2):
        local_bytes = 2 * _TILE_K * (side * _PER_ITEM + 1) * 4
        if side * side <= device.max_work_group and local_bytes <= device.local_memory_bytes:
            return side
    return 1
