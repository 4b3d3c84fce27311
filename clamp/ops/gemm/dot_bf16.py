"""The GEMM of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/gemm_dot_bf16.cl)."""

from __future__ import annotations

from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.gemm.packed import Panels, blocks, into_panels
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

NAME = "dot_bf16"
TAKES = (
    "bfloat16 by bfloat16, on a processor whose dot product of them works; "
    "leave the engine to clamp, and give pack_b the storage type of a as a_dtype"
)
IN_WORDS = "packed panels and the processor's bfloat16 dot product"

_GEMM = Kernel("gemm_dot_bf16.cl", "gemm")
_ROWS, _COLUMNS = 12, 32  # of the register tile
# pairs of k between two visits to a tile: as long a panel as 8 of A leave room for in a cache of 1 MB. Sums
# that go through memory cost more than a panel of B that the first level does not hold (3 to 8 % on a Zen 5).
_KC = 2048


def fits(problem: Problem) -> bool:
    """Returns whether the device has the instruction, and both operands are stored for it."""
    return problem.a_dtype == problem.b_dtype == "bfloat16" and bool(problem.device.dot_bf16)


def pays(problem: Problem) -> bool:
    """Returns whether the instruction is also faster than a float's multiply-add."""
    return problem.device.fast_dot_bf16


def pack(b: Matrix) -> Panels:
    """op(B) in panels of pairs."""
    return into_panels(b, _COLUMNS, pairs=True)


def run(a_operand: Matrix, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    queue = c.queue
    a = into_panels(a_operand, _ROWS, pairs=True)
    panels_a, panels_b, grid = blocks(a, b, c)
    slot_columns = panels_b if a.steps > _KC else 1
    slots = prod(grid) * panels_a * slot_columns
    sums = bridge.empty(queue, (slots * _ROWS * _COLUMNS,), "float32")
    _GEMM(
        queue, grid, (1, 1, 1), a.tensor, b.tensor, c, epilogue.bias_or(c), sums,
        a.rows, b.rows, a.steps, a.stride_batch, b.stride_batch, panels_a, panels_b, slot_columns,
        *epilogue.flags, KC=_KC, **epilogue.macros,
    )  # fmt: skip
