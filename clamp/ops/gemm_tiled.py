"""The GEMM of every device but CPUs: tiles in local memory (kernels/gemm_tiled.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import get_kernel
from clamp.ops.gemm_operands import Epilogue, Operand

_PER_ITEM = 4  # a work-item computes 4 x 4 elements of C
_TILE_K = 16


def pack_columns(b: Operand) -> Operand:
    """op(B) as `multiply` takes it: in place."""
    return b


def multiply(a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    side = _tiled_side(capabilities(queue))
    tile = side * _PER_ITEM
    kernel = get_kernel(
        queue, "gemm_tiled.cl", "gemm", "ppppqqqqqqqqqii",
        A_T=a.storage, B_T=b.storage, SIDE=side, PER_ITEM=_PER_ITEM, TILE_K=_TILE_K, **epilogue.macros,
    )  # fmt: skip
    bias = c if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    kernel(
        queue, (-(-b.rows // tile) * side, -(-a.rows // tile) * side, c.size // (a.rows * b.rows)), (side, side, 1),
        a.tensor.buffer, b.tensor.buffer, c.buffer, bias.buffer, a.rows, b.rows, a.k,
        a.stride_row, a.stride_k, a.stride_batch, b.stride_row, b.stride_k, b.stride_batch,
        epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


def _tiled_side(device: Capabilities) -> int:
    """The largest work-group, SIDE x SIDE, that the device takes and whose tiles its local memory holds."""
    for side in (16, 8, 4, 2):
        local_bytes = 2 * _TILE_K * (side * _PER_ITEM + 1) * 4
        if side * side <= device.max_work_group and local_bytes <= device.local_memory_bytes:
            return side
    return 1
