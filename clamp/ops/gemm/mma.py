"""The GEMM of NVIDIA's GPUs on their matrix units, mma.sync (kernels/gemm_mma.cl).

It is used only where it is proved (proof.py). The same kernel in plain C (``emulate``) runs on any device, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm.problem import Epilogue, Operand, Problem

NAME = "mma"
TAKES = (
    "float16 by float16 and bfloat16 by bfloat16, on an NVIDIA GPU of compute capability 8.0 or later "
    "on which it computed a few small products right"
)
IN_WORDS = "tiles in local memory and NVIDIA's matrix instruction mma.sync"
pays = always

DTYPES = ("float16", "bfloat16")

_GEMM = Kernel("gemm_mma.cl", "gemm")
_ADD_SLICES = Kernel("gemm_slices.cl", "add_slices")
_LEAST_SLICE = 256  # steps of k, so that adding the slices is little beside summing them (not measured)
_ADDERS = 256  # work-items of a group that adds slices


@dataclass(frozen=True)
class Plan:
    """How a product is cut up.

    Attributes:
        rows, columns, k: the tile of C of a work-group, and the steps of k in local memory at a time.
        stages: how many such steps local memory holds.
        warps: of a work-group, by rows and columns of C.
    """

    rows: int
    columns: int
    k: int
    stages: int
    warps: tuple[int, int]

    @property
    def threads(self) -> int:
        """Work-items of a work-group."""
        return 32 * self.warps[0] * self.warps[1]

    @property
    def macros(self) -> dict[str, int]:
        """The plan, for the kernel."""
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "TILE_K": self.k, "STAGES": self.stages,
            "WARPS_M": self.warps[0], "WARPS_N": self.warps[1],
        }  # fmt: skip

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a matrix."""
        return -(-rows // self.rows) * -(-columns // self.columns)


#: the largest first: it reads each operand the fewest times; 48 KB of local memory, which every such device has
PLANS = (Plan(128, 128, 32, 3, (2, 4)), Plan(64, 64, 32, 4, (2, 2)))


def fits(problem: Problem) -> bool:
    """Whether the operands are of one 16-bit type, and the engine is proved on the device."""
    return NAME in problem.proved and problem.a_dtype == problem.b_dtype and problem.a_dtype in DTYPES


def pack(b: Operand) -> Operand:
    """op(B) as it is: it is read in place."""
    return b


def run(a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
    units = capabilities(c.queue).compute_units
    matrices = c.size // (a.rows * b.rows)
    plan = _plan(a.rows, b.rows, matrices, units)
    compute(a, b, c, epilogue, plan, _slices(plan.tiles(a.rows, b.rows) * matrices, a.k, units))


def _plan(rows: int, columns: int, matrices: int, units: int) -> Plan:
    """The largest that gives every compute unit a tile, if tiles are more than half full; otherwise the smallest."""
    for plan in PLANS:
        is_full = rows > plan.rows // 2 and columns > plan.columns // 2
        if is_full and plan.tiles(rows, columns) * matrices >= units:
            return plan
    return PLANS[-1]


def _slices(tiles: int, k: int, units: int) -> int:
    """Into how many slices to cut k: several for a C of few tiles, the gradient of a small weight, say."""
    return max(1, min(units // tiles, k // _LEAST_SLICE))


def compute(
    a: Operand, b: Operand, c: Tensor, epilogue: Epilogue, plan: Plan, slices: int = 1, *, emulate: int = 0
) -> None:
    """As `run`, by a given plan.

    Args:
        slices: at most so many parts of k are summed by themselves, in float32, and then added in their order.
        emulate: 0 on NVIDIA's GPUs; 1 and 2 in plain C, as kernels/async_copy.clh says.
    """
    slice_k = max(-(-a.k // (slices * plan.k)), 1) * plan.k
    slices = max(-(-a.k // slice_k), 1)
    if slices == 1:
        _launch(a, b, c, epilogue, plan, slice_k, slices, emulate)
        return
    queue, elements = c.queue, a.rows * b.rows
    partial = bridge.empty(queue, (slices * c.size,), "float32")
    _launch(a, b, partial, Epilogue("float32"), plan, slice_k, slices, emulate)
    _ADD_SLICES(
        queue, (-(-elements // _ADDERS) * _ADDERS, c.size // elements), (_ADDERS, 1), partial, c,
        epilogue.bias_or(c), elements, b.rows, slices, *epilogue.flags, **epilogue.macros,
    )  # fmt: skip


def _launch(
    a: Operand, b: Operand, c: Tensor, epilogue: Epilogue, plan: Plan, slice_k: int, slices: int, emulate: int
) -> None:
    lines_a, lines_b = _Lines(a), _Lines(b)
    groups = plan.tiles(a.rows, b.rows) * (c.size // (a.rows * b.rows))
    is_full = a.rows % plan.rows == b.rows % plan.columns == a.k % slice_k == 0
    _GEMM(
        c.queue, (groups * plan.threads,), (plan.threads,), a.tensor, b.tensor, c, epilogue.bias_or(c),
        a.rows, b.rows, a.k, lines_a.pitch, a.stride_batch, lines_b.pitch, b.stride_batch, slice_k, slices,
        *epilogue.flags, IN_T=a.storage, A_K_MAJOR=int(lines_a.k_major), B_K_MAJOR=int(lines_b.k_major),
        A_ALIGNED=int(lines_a.aligned), B_ALIGNED=int(lines_b.aligned), FULL=int(is_full), EMULATE=emulate,
        **plan.macros, **epilogue.macros,
    )  # fmt: skip


class _Lines:
    """How an operand lies in memory: in lines that run along k (``k_major``), or along its rows."""

    def __init__(self, x: Operand) -> None:
        self.k_major = x.stride_k == 1
        self.pitch = x.stride_row if self.k_major else x.stride_k
        self.aligned = self.pitch % 8 == x.stride_batch % 8 == 0  # to 16 bytes: memory of its own always begins so
