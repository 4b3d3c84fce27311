"""The GEMM of GPUs without matrix units that can be used: tiles in local memory (kernels/gemm_tiled.cl)."""

from __future__ import annotations

from collections.abc import Callable

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm import in_tiles
from clamp.ops.gemm.plan import SquarePlan, best_plan, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue, Matrix

NAME = "tiled"
TAKES = "every product"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here
ROUNDS = False

GEMM = Kernel("gemm_tiled.cl", "gemm")
_WAVE = 64  # work-items that a GPU runs in step; fewer in a work-group leave some of its lanes idle


#: the largest first; the last is for a work-group of one, in 2 KB of local memory
PLANS = (
    SquarePlan(16, 8), SquarePlan(8, 8), SquarePlan(8, 4), SquarePlan(4, 4), SquarePlan(2, 4), SquarePlan(1, 8),
)  # fmt: skip


def bind(
    a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
) -> Callable[..., None]:
    """Products of operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
    device = capabilities(c.queue)
    matrices = c.size // (a.rows * b.rows)
    plan = best_plan(plans_of(device), a.rows, b.rows, matrices, device.compute_units)
    slices = slices_of(tiles_of(plan, a.rows, b.rows) * matrices, a.k, device.compute_units)
    return _bind_by(a, b, c, epilogue, plan, slices)


def plans_of(device: Capabilities) -> tuple[SquarePlan, ...]:
    """The plans that the device takes and whose tiles its local memory holds; the largest, if all leave lanes idle."""
    fitting = [plan for plan in PLANS if _takes(device, plan)] or [PLANS[-1]]
    return tuple(plan for plan in fitting if plan.threads >= _WAVE) or (fitting[0],)


def _takes(device: Capabilities, plan: SquarePlan) -> bool:
    return plan.threads <= device.max_work_group and plan.local_memory_bytes <= device.local_memory_bytes


def compute(a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: SquarePlan, slices: int = 1) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty, by a given plan; at most so many
    slices of k are summed by themselves."""
    _bind_by(a, b, c, epilogue, plan, slices)(a.tensor, b.tensor, c, epilogue.bias_or(c), c)


def _bind_by(a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: SquarePlan, slices: int) -> Callable[..., None]:
    macros = {"A_T": a.storage, "B_T": b.storage, "UNROLLED": int(not capabilities(c.queue).is_cpu)}
    return in_tiles.bind(GEMM, macros, a, b, c, epilogue, plan, slices)
