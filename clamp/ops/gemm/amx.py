"""The GEMM of 16-bit matrices on the matrix unit of x86 processors, AMX (kernels/gemm_amx.cl).

bfloat16 is multiplied as it is, and so is float16 where the unit can (AMX-FP16); elsewhere a float16 is two bfloat16,
exactly, and four products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pyopencl as cl

from clamp import bridge
from clamp.bridge import STORAGE, Tensor
from clamp.opencl import amx
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel, KernelBuildError
from clamp.ops.gemm.packed import Panels
from clamp.ops.gemm.pairs import PairUnit, Product, has_enough, packed
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem

NAME = "amx"
TAKES = "float16 by float16 or bfloat16 by bfloat16, on an x86 processor whose matrix unit (AMX) computes right"
IN_WORDS = "the processor's matrix unit"
ROUNDS = True

_PACK, _GEMM = Kernel("gemm_amx.cl", "pack"), Kernel("gemm_amx.cl", "gemm")


@dataclass(frozen=True)
class Unit(PairUnit):
    """The matrix unit's way to multiply a type."""

    emulate: bool = False
    pack: ClassVar[Kernel] = _PACK
    gemm: ClassVar[Kernel] = _GEMM
    sum_steps: ClassVar[int] = 32

    @property
    def macros(self) -> dict[str, Any]:
        is_half = self.dtype == "float16" and self.parts == 1
        return {"PARTS": self.parts, "DOT_F16": int(is_half), "EMULATE": int(self.emulate)}

    @property
    def gemm_macros(self) -> dict[str, Any]:
        return {**self.macros, "IN_T": STORAGE[self.dtype], **super().gemm_macros}


def unit_of(device: Capabilities, dtype: str, emulate: bool = False) -> Unit:
    """Returns the way in which a device multiplies a type; if ``emulate``, in plain C."""
    return Unit(dtype, 2 if dtype == "float16" and not device.amx_fp16 else 1, emulate)


def multiplies(device: Capabilities, first: str, second: str) -> bool:
    """Returns whether two types are one 16-bit type that the device's matrix unit multiplies."""
    if first != second or first not in bridge.HALF_DTYPES:
        return False
    return bool(device.amx or (first == "float16" and device.amx_fp16))


def fits(problem: Problem) -> bool:
    """Returns whether both operands are of a 16-bit type that the device's matrix unit multiplies."""
    return multiplies(problem.device, problem.a_dtype, problem.b_dtype)


def pays(problem: Problem) -> bool:
    """Returns whether there is enough to multiply."""
    return has_enough(problem, unit_of(problem.device, problem.a_dtype).parts)


def expect(queue: cl.CommandQueue, problem: Problem) -> None:
    """Builds the kernels of a product, if it would only wait for a trial otherwise."""
    dtype = problem.a_dtype
    if dtype == problem.b_dtype and dtype in bridge.HALF_DTYPES and amx.is_being_tried(queue.device) and pays(problem):
        with suppress(KernelBuildError):  # the trial will say so
            unit = unit_of(problem.device, dtype)
            unit.gemm.on(queue, **unit.gemm_macros)


def pack(b: Matrix) -> Panels:
    """op(B) in panels."""
    return packed(b, unit_of(capabilities(b.tensor.queue), b.tensor.dtype))


def bind(
    a: Matrix, b: Matrix | Panels, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
) -> Callable[..., None]:
    """Products of operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
    return Product(a, b, c, epilogue, unit_of(capabilities(c.queue), reads or a.tensor.dtype), copies)
