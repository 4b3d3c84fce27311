"""Matrix multiplication: 16-bit or fp32 storage, fp32 sums, bias and relu in the store.

Two kernels compute it. On CPU devices both operands are packed into panels for a register-blocked loop; every
other device gets tiles in local memory. The choice is made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import Capabilities, capabilities
from clamp.ops.gemm_operands import DTYPES, Epilogue, Operand, operand_a, operand_b
from clamp.ops.gemm_packed import Panels, multiply_packed, pack_columns
from clamp.program import get_kernel

_PER_ITEM = 4  # a work-item of the tiled kernel computes 4 x 4 elements of C
_TILE_K = 16


class GemmKernel(Enum):
    """Which kernel multiplies."""

    PACKED = "packed"
    TILED = "tiled"


@dataclass(frozen=True)
class PackedB:
    """The right-hand operand of `gemm`, ready for its kernel; made by `pack_b` and good for any number of calls.

    It holds the values that b had when it was packed (on devices whose kernel reads b in place, b itself).
    """

    kernel: GemmKernel
    operand: Operand
    panels: Panels | None


def gemm(
    a: Tensor,
    b: Tensor | PackedB,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: str,
    bias: Tensor | None = None,
    relu: bool = False,
    kernel: GemmKernel | None = None,
) -> Tensor:
    """``relu(op(a) @ op(b) + bias)``, summed in fp32 and rounded to ``out_dtype`` once, at the end.

    Args:
        a: (…, M, K), or (…, K, M) with ``transpose_a``; float32, float16 or bfloat16.
        b: (…, K, N), or (…, N, K) with ``transpose_b``; any of the three as well, or what `pack_b` returned. The
            leading dimensions of a and b are equal, or one of the two has none and serves the other's whole batch.
        out_dtype: storage type of the result.
        bias: (N,), read in its own storage type.
        relu: replaces negative results by zero; NaN stays.
        kernel: overrides the choice by device.

    Returns:
        Tensor (…, M, N). With K = 0 it is the epilogue of zeros.

    Raises:
        ValueError: shapes that do not fit, an unknown dtype, tensors of different queues.
    """
    if isinstance(b, PackedB) and (transpose_b or kernel not in (None, b.kernel)):
        raise ValueError("gemm: b is packed already; give transpose and kernel to pack_b instead")
    left = _matrix("gemm", "a", a, transpose_a, operand_a)
    right = b.operand if isinstance(b, PackedB) else _matrix("gemm", "b", b, transpose_b, operand_b)
    _check(left, right, out_dtype, bias)
    queue = bridge.require_same_queue("gemm", a, right.tensor, *([] if bias is None else [bias]))
    c = bridge.empty(queue, (*(left.batch or right.batch), left.rows, right.rows), out_dtype)
    if c.size == 0:
        return c
    if left.batch and not right.batch and not transpose_a:
        left = left.as_one_matrix()
    epilogue = Epilogue(out_dtype, bias, relu)
    packed = b if isinstance(b, PackedB) else _pack(right, kernel or default_kernel(queue))
    if packed.panels is None:
        _multiply_tiled(left, right, c, epilogue)
    else:
        multiply_packed(left, packed.panels, c, epilogue)
    return c


def pack_b(b: Tensor, *, transpose: bool = False, kernel: GemmKernel | None = None) -> PackedB:
    """Prepares ``b`` for repeated use in `gemm`: a weight in the steps of an RNN, say.

    Args:
        b: (…, K, N), or (…, N, K) with ``transpose``; float32, float16 or bfloat16.
        kernel: overrides the choice by device.

    Raises:
        ValueError: fewer than two dimensions, or an unknown dtype.
    """
    return _pack(_matrix("pack_b", "b", b, transpose, operand_b), kernel or default_kernel(b.queue))


def default_kernel(queue: cl.CommandQueue) -> GemmKernel:
    """The kernel for the queue's device."""
    return GemmKernel.PACKED if capabilities(queue).is_cpu else GemmKernel.TILED


def _pack(right: Operand, kernel: GemmKernel) -> PackedB:
    return PackedB(kernel, right, pack_columns(right) if kernel is GemmKernel.PACKED else None)


def _matrix(function: str, name: str, x: Tensor, transpose: bool, view: Callable[[Tensor, bool], Operand]) -> Operand:
    if len(x.shape) < 2:
        raise ValueError(f"{function}: {name} has shape {x.shape}, but a matrix needs two dimensions; reshape it")
    if x.dtype not in bridge.STORAGE:
        raise ValueError(f"{function}: {name} is {x.dtype}; cast it to one of {', '.join(DTYPES)}")
    return view(x, transpose)


def _check(left: Operand, right: Operand, out_dtype: str, bias: Tensor | None) -> None:
    shapes = f"op(a) {left.shape_a} @ op(b) {right.shape_b}"
    if left.k != right.k:
        raise ValueError(
            f"gemm: {shapes}: the inner dimensions {left.k} and {right.k} differ; transpose_a or transpose_b may help"
        )
    if left.batch and right.batch and left.batch != right.batch:
        raise ValueError(
            f"gemm: {shapes}: the leading dimensions {left.batch} and {right.batch} differ; "
            "expand one operand to the other's, or pass one matrix for the whole batch"
        )
    if out_dtype not in bridge.STORAGE:
        raise ValueError(f"gemm: out_dtype is {out_dtype!r}; it must be one of {', '.join(DTYPES)}")
    if bias is None:
        return
    if tuple(bias.shape) != (right.rows,):
        raise ValueError(f"gemm: {shapes}: bias has shape {tuple(bias.shape)}; it must be ({right.rows},)")
    if bias.dtype not in bridge.STORAGE:
        raise ValueError(f"gemm: bias is {bias.dtype}; cast it to one of {', '.join(DTYPES)}")


def _multiply_tiled(a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), with kernels/gemm_tiled.cl."""
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
