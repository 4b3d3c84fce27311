"""The GEMM of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/gemm_dot_bf16.cl)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm import direct
from clamp.ops.gemm.packed import Panels
from clamp.ops.gemm.pairs import Blocking, PairUnit, Product, has_enough, packed
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

NAME = "dot_bf16"
TAKES = (
    "bfloat16 by bfloat16, on a processor whose dot product of them works; "
    "leave the engine to clamp, and give pack_b the storage type of a as a_dtype"
)
IN_WORDS = "packed panels and the processor's bfloat16 dot product"
ROUNDS = True

_PACK, _GEMM = Kernel("gemm_dot_bf16.cl", "pack"), Kernel("gemm_dot_bf16.cl", "gemm")


class _DotProduct(PairUnit):
    """The dot product of AVX512_BF16, which takes the panels that the matrix unit takes."""

    pack: ClassVar[Kernel] = _PACK
    gemm: ClassVar[Kernel] = _GEMM
    sum_steps: ClassVar[int] = 128
    in_turn_from: ClassVar[int] = 4


_UNIT = _DotProduct("bfloat16", 1)


def fits(problem: Problem) -> bool:
    """Returns whether the device has the instruction, and both operands are stored for it."""
    return problem.a_dtype == problem.b_dtype == "bfloat16" and bool(problem.device.dot_bf16)


def pays(problem: Problem) -> bool:
    """Returns whether the instruction is also faster than a float's multiply-add, and is not outweighed by launches
    that pack what `direct` reads as it lies."""
    if not problem.device.fast_dot_bf16:
        return False
    return not direct.is_small(problem) or (problem.pair_launches == 1 and has_enough(problem))


def launches(a: Matrix, b: Matrix, batches: int) -> int:
    """How many a product of operands that lie as these do takes."""
    return Blocking.of(a, b, batches, _UNIT, capabilities(b.tensor.queue).compute_units).launches


def pack(b: Matrix) -> Panels:
    """op(B) in panels of pairs."""
    return packed(b, _UNIT)


def bind(
    a: Matrix, b: Matrix | Panels, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
) -> Callable[..., None]:
    """Products of operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
    return Product(a, b, c, epilogue, _UNIT, copies)
