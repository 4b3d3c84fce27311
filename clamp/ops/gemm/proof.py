"""What is tried of matrix units before they are used (clamp/opencl/proofs.py): small products, compared with numpy's.

A driver may refuse inline PTX, compile it to something else, or lack the local memory that it promised. Whatever goes
wrong in a trial means that its plan is not used; nobody hears of it but `python -m clamp doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pyopencl as cl

from clamp.ops.device_matrix import DeviceMatrix
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b

_SMALL = 2.0**-16  # a subnormal half: instructions that take it for zero are not used

Case = tuple[str, tuple[bool, bool], tuple[int, int, int]]


def cases(plan: Plan, number: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Types, transposes and shapes (M, N, K) of a plan's trial.

    Shapes are whole tiles, rows of whole pieces of 16 bytes, and any rows, if the plan takes them: each layout meets
    two of these.
    """
    for turn, (dtype, transposes) in enumerate(product(dtypes, product((False, True), (False, True)))):
        over = (0, 8, 8 if plan.aligned else 3)[(turn + number) % 3]
        yield dtype, transposes, (plan.rows + over, plan.columns + over, plan.k * plan.stages + over)


def computes_right(
    compute: Callable[..., None], plan: Plan, number: int, queue: cl.CommandQueue, dtypes: Sequence[str]
) -> bool:
    """Whether ``compute(a, b, c, epilogue, plan)`` computes a plan's cases."""
    return all(_computes(compute, plan, queue, *case) for case in cases(plan, number, dtypes))


def _computes(
    compute: Callable[..., None], plan: Plan, queue: cl.CommandQueue, dtype: str, transposes: tuple[bool, bool],
    shape: tuple[int, int, int],
) -> bool:  # fmt: skip
    m, n, k = shape
    numbers = np.random.default_rng(0)
    a, b = numbers.integers(-1, 2, (m, k)) * _SMALL, numbers.integers(-1, 2, (k, n))  # sums are exact in every type
    out_dtype = dtype if transposes[0] == transposes[1] else "float32"
    c = DeviceMatrix.like(queue, np.full((m, n), 99), out_dtype)
    left = operand_a(DeviceMatrix.like(queue, a.T if transposes[0] else a, dtype), transposes[0])
    right = operand_b(DeviceMatrix.like(queue, b.T if transposes[1] else b, dtype), transposes[1])
    compute(left, right, c, Epilogue(out_dtype), plan)
    return np.array_equal(c.to_host(), a @ b)
