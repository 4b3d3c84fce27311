"""The GEMM of whoever wants to see one: a loop for each element of the result (kernels/gemm_plain.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

NAME = "plain"
TAKES = "float16 by float16"
IN_WORDS = "an element at a time"
pays = always  # it is slow; but a test wants to see that it runs

_GEMM = Kernel("gemm_plain.cl", "gemm")


def fits(problem: Problem) -> bool:
    """Whether both matrices are float16."""
    return problem.a_dtype == problem.b_dtype == "float16"


def pack(b: Matrix) -> Matrix:
    """op(B) as it is: it is read in place."""
    return b


def run(a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    _GEMM(
        c.queue, (b.rows, a.rows, c.size // (a.rows * b.rows)), (1, 1, 1), a.tensor, b.tensor, c, epilogue.bias_or(c),
        a.k, a.stride_row, a.stride_k, a.stride_batch, b.stride_row, b.stride_k, b.stride_batch, *epilogue.flags,
        A_T=a.storage, B_T=b.storage, **epilogue.macros,
    )  # fmt: skip
