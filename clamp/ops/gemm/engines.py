"""The engines of matrix products, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops import engine
from clamp.ops.gemm import amx, direct, dot_bf16, matrix_units, packed, tiled
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem
from clamp.ops.verified import names_of_verified


class Packs(engine.Engine[Problem], Protocol):
    """A way to compute a product whose op(B) may take another form before."""

    def pack(self, b: Matrix) -> Any:
        """op(B) in that form: it pays to make it once for several products."""


class Runs(engine.Engine[Problem], Protocol):
    """A way to compute a product of an op(B) that is packed."""

    def run(self, a: Matrix, b: Any, c: Tensor, epilogue: Epilogue) -> None:
        """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""


class Binds(engine.Engine[Problem], Protocol):
    """A way to compute a product of operands as they lie, or of an op(B) that is packed, where it ``Packs``."""

    @property
    def ROUNDS(self) -> bool:
        """Returns whether it may round float32 operands as it reads."""

    def bind(
        self, a: Matrix, b: Any, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
    ) -> Callable[..., None]:
        """All products of operands that lie as these do, this thread's: called with the tensors a, b, c, which is not
        empty, bias, which is c where there is none, and b's copy, likewise.

        Args:
            reads: the 16-bit dtype that float32 operands are rounded to as they are read, where it ``ROUNDS``.
            copies: whether what b is rounded to is written to the copy.
        """


GemmEngine: TypeAlias = Runs | Binds

#: the first that fits and pays runs
ENGINES: tuple[GemmEngine, ...] = (amx, dot_bf16, direct, packed, *matrix_units.MATRIX_UNITS, tiled)

#: those of them that must be verified on a device
MATRIX_UNITS = matrix_units.MATRIX_UNITS

#: of these: `python -m clamp lists` finds kernels among a module's names, and here only products pass
KERNELS = tuple(unit.kernel for unit in MATRIX_UNITS)


def packs(engine: GemmEngine) -> TypeGuard[Packs]:
    """Returns whether it does. (To ask isinstance for a protocol takes as long as a launch.)"""
    return hasattr(engine, "pack")


def binds(engine: GemmEngine) -> TypeGuard[Binds]:
    """Returns whether it does; it runs otherwise."""
    return hasattr(engine, "bind")


def choose(problem: Problem, name: str | None = None) -> GemmEngine:
    """The engine of a product; the named one, if there is a name.

    Raises:
        ValueError: no engine has the name, or the problem does not fit it.
    """
    return engine.choose("gemm", ENGINES, problem, name)


def problem_on(
    queue: cl.CommandQueue, a_dtype: str, b_dtype: str, k: int, columns: int, rows: int | None = None, batches: int = 1,
    a_along_k: bool = False,
) -> Problem:  # fmt: skip
    """A product on the queue's device, with what this can do, and the engines that are verified there."""
    verified = names_of_verified(MATRIX_UNITS, queue)
    return Problem(a_dtype, b_dtype, k, columns, capabilities(queue), verified, rows, batches, a_along_k)


def usual(queue: cl.CommandQueue, dtype: str) -> GemmEngine:
    """The engine of large products of one storage type on the queue's device."""
    return choose(problem_on(queue, dtype, dtype, 1024, 1024))


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """Says in words by which engines products of a storage type run on the queue's device."""
    chosen = usual(queue, dtype)
    return f"products of {dtype}: {chosen.NAME} kernel, {chosen.IN_WORDS}"
