"""The engines of matrix products, and how one is chosen."""

from __future__ import annotations

from typing import Any, Protocol

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.ops import engine
from clamp.ops.gemm import dot_bf16, packed, tiled
from clamp.ops.gemm.problem import Epilogue, Operand, Problem


class Engine(engine.Engine[Problem], Protocol):
    """A way to compute a product."""

    def pack(self, b: Operand) -> Any:
        """op(B) as `run` takes it: its panels, or B itself if it is read in place."""

    def run(self, a: Operand, b: Any, c: Tensor, epilogue: Epilogue) -> None:
        """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""


#: the first that fits and pays runs
ENGINES: tuple[Engine, ...] = (dot_bf16, packed, tiled)


def choose(problem: Problem, name: str | None = None) -> Engine:
    """The engine of a product; the named one, if there is a name.

    Raises:
        ValueError: no engine has the name, or the problem does not fit it.
    """
    return engine.choose("gemm", ENGINES, problem, name)


def usual(device: Capabilities, dtype: str) -> Engine:
    """The engine of large products of one storage type."""
    return choose(Problem(dtype, dtype, 1024, 1024, device))


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """How products of a storage type run on the queue's device, in words."""
    chosen = usual(capabilities(queue), dtype)
    return f"products of {dtype}: {chosen.NAME} kernel, {chosen.IN_WORDS}"
