"""The GEMM of GPUs without matrix units that can be used: tiles in local memory (kernels/gemm_tiled.cl)."""

from __future__ import annotations

from collections.abc import Callable

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.launches import Launch
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm import in_tiles
from clamp.ops.gemm.in_tiles import TileRun
from clamp.ops.gemm.plan import SquarePlan, best_plan, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue, Matrix, unpacked

NAME = "tiled"
TAKES = "every product"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here
PACKS = ROUNDS = False
pack = unpacked

GEMM = Kernel("gemm_tiled.cl", "gemm")
_WAVE = 64  # work-items that a GPU runs in step; fewer in a work-group leave some of its lanes idle


#: the largest first; the last is for a work-group of one, in 2 KB of local memory
PLANS = (
    SquarePlan(16, 8), SquarePlan(8, 8), SquarePlan(8, 4), SquarePlan(4, 4), SquarePlan(2, 4), SquarePlan(1, 8),
)  # fmt: skip


def run(a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    bind(a, b, c, epilogue)(a.tensor, b.tensor, c, epilogue.bias_or(c), c)


def bind(
    a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
) -> Callable[..., None]:
    """`run` for operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
    device = capabilities(c.queue)
    matrices = c.size // (a.rows * b.rows)
    plan = best_plan(plans_of(device), a.rows, b.rows, matrices, device.compute_units)
    slices = slices_of(tiles_of(plan, a.rows, b.rows) * matrices, a.k, device.compute_units)
    return in_tiles.bind(_launch, a, b, c, epilogue, plan, slices)


def plans_of(device: Capabilities) -> tuple[SquarePlan, ...]:
    """The plans that the device takes and whose tiles its local memory holds; the largest, if all leave lanes idle."""
    fitting = [plan for plan in PLANS if _takes(device, plan)] or [PLANS[-1]]
    return tuple(plan for plan in fitting if plan.threads >= _WAVE) or (fitting[0],)


def _takes(device: Capabilities, plan: SquarePlan) -> bool:
    return plan.threads <= device.max_work_group and plan.local_memory_bytes <= device.local_memory_bytes


def compute(a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: SquarePlan, slices: int = 1) -> None:
    """As `run`, by a given plan; at most so many slices of k are summed by themselves."""
    in_tiles.bind(_launch, a, b, c, epilogue, plan, slices)(a.tensor, b.tensor, c, epilogue.bias_or(c), c)


def _launch(tiles: TileRun) -> Launch:
    unrolled = int(not capabilities(tiles.queue).is_cpu)
    return tiles.bind(GEMM, A_T=tiles.a.storage, B_T=tiles.b.storage, UNROLLED=unrolled)
