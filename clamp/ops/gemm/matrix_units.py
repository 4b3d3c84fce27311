"""Products on a GPU's matrix units: what the engines have in common that run kernels/matrix_product_kernel.clh.

They differ in the instruction, and in their plans: the table at the end. Each is used only by plans that are verified
on the device: a driver may refuse inline PTX, compile it to something else, or lack the local memory that it promised.
Whatever goes wrong in a trial (clamp/opencl/trials.py), a small product compared with numpy's, means that its plan is
not used; nobody hears of it but `python -m clamp doctor`. The same kernels in plain C (``emulate``) run on any device,
for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.opencl.ptx import with_marked_instructions
from clamp.ops.gemm import in_tiles, tuning
from clamp.ops.gemm.in_tiles import Lines
from clamp.ops.gemm.plan import Plan, best_plan, cut, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue, Matrix, Problem, operand_a, operand_b
from clamp.ops.verified import DeviceMatrix, Verified

DTYPES = ("float16", "bfloat16")
_SMALL = 2.0**-16  # a subnormal half: instructions that take it for zero are not used

Case = tuple[str, tuple[bool, bool], tuple[int, int, int]]


@dataclass(frozen=True)
class MatrixUnit(Verified):
    """An engine of products: a matrix instruction, and the kernel that computes by it.

    The largest of its plans reads each operand the fewest times.
    """

    kernel: Kernel  # whose macros and arguments are those of matrix_product_kernel.clh
    dtypes: tuple[str, ...] = DTYPES  # storage types of its operands
    options: tuple[tuple[str, int], ...] = ()  # macros of the kernel, for the kind of processor
    more: tuple[Plan, ...] = ()  # other plans, which `python -m clamp tune` tries and measures
    ROUNDS: ClassVar[bool] = False

    def fits(self, problem: Problem) -> bool:
        """Returns whether the operands are of one 16-bit type, and the engine is verified on the device."""
        return self.NAME in problem.verified and problem.a_dtype == problem.b_dtype and problem.a_dtype in self.dtypes

    def bind(
        self, a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, reads: str | None = None, copies: bool = False
    ) -> Callable[..., None]:
        """Products of operands that lie as these do; see `clamp.ops.gemm.engines.Binds`."""
        plan = self.tuned_plan(a, b, c) or self.usual_plan(a, b, c)
        return self.bind_by(a, b, c, epilogue, plan, self.slices(plan, a, b, c))

    def usual_plan(self, a: Matrix, b: Matrix, c: Tensor) -> Plan:
        """The plan of a product by its extents."""
        units = capabilities(c.queue).compute_units
        plans = _taking(self.verified_plans(c.queue), a, b)
        return best_plan(plans, a.rows, b.rows, c.size // (a.rows * b.rows), units)

    def tuned_plan(self, a: Matrix, b: Matrix, c: Tensor) -> Plan | None:
        """The plan that was the fastest for such products, where that was measured (tuning.py); of one matrix only."""
        winners = tuning.tuned(c.queue.device, self.where, self.trial_key).winners
        if not winners or c.size != a.rows * b.rows:
            return None
        name = winners.get(tuning.size_class(layout_of(a, b), a.rows, b.rows, a.k))
        if name is None:
            return None
        return next((plan for plan in _taking(self.measurable_plans(c.queue), a, b) if str(plan) == name), None)

    def slices(self, plan: Plan, a: Matrix, b: Matrix, c: Tensor) -> int:
        """Into how many slices a plan cuts the k of a product."""
        tiles = tiles_of(plan, a.rows, b.rows) * (c.size // (a.rows * b.rows))
        return slices_of(tiles, a.k, capabilities(c.queue).compute_units)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""
        return (self.kernel,)

    @property
    def candidates(self) -> MatrixUnit:
        """The same by the plans that only tuning chooses, which are tried by themselves: they take a driver's time."""
        return replace(self, plans=self.more, more=(), where=f"{self.where}.candidates")

    def measurable_plans(self, queue: cl.CommandQueue) -> Iterator[Plan]:
        """The plans that tuning chooses among: all that are verified."""
        yield from self.verified_plans(queue)
        yield from self.candidates.verified_plans(queue) if self.more else ()

    def cases(self, plan: Plan) -> Iterator[Case]:
        """Small products, of each type and layout."""
        return cases(plan, self.plans.index(plan), self.dtypes)

    def computes(self, plan: Plan, queue: cl.CommandQueue, *case: Any) -> bool:
        """Returns whether one of them comes out right by a plan."""
        dtype, transposes, (m, n, k) = case
        numbers = np.random.default_rng(0)
        a, b = numbers.integers(-1, 2, (m, k)) * _SMALL, numbers.integers(-1, 2, (k, n))  # exact sums in every type
        out_dtype = dtype if transposes[0] == transposes[1] else "float32"
        c: Any = DeviceMatrix.like(queue, np.full((m, n), 99), out_dtype)
        left: Any = DeviceMatrix.like(queue, a.T if transposes[0] else a, dtype)
        right: Any = DeviceMatrix.like(queue, b.T if transposes[1] else b, dtype)
        self.compute(operand_a(left, transposes[0]), operand_b(right, transposes[1]), c, Epilogue(out_dtype), plan)
        return np.array_equal(c.to_host(), a @ b)

    def compute(self, a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: Plan, slices: int = 1) -> None:
        """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty, by a given plan (see
        `bind_by`)."""
        self.bind_by(a, b, c, epilogue, plan, slices)(a.tensor, b.tensor, c, epilogue.bias_or(c), c)

    def bind_by(
        self, a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: Plan, slices: int = 1
    ) -> Callable[..., None]:
        """As `bind`, by a given plan.

        Args:
            slices: at most so many parts of k are summed by themselves, in float32, and then added in their order.
        """
        slice_k, _ = cut(a.k, slices, plan.k)
        # whether every tile lies inside of the matrices, at every step
        is_full = a.k > 0 and a.rows % plan.rows == b.rows % plan.columns == a.k % slice_k == 0
        macros = {"IN_T": a.storage, "FULL": int(is_full), "EMULATE": self.emulate, **dict(self.options)}
        kernel = self.kernel.in_plain_c if self.emulate else self.kernel
        return in_tiles.bind(kernel, macros, a, b, c, epilogue, plan, slices)


def layout_of(a: Matrix, b: Matrix) -> str:
    """Returns the layout of two operands, ``"NT"``: T is transposed."""
    return ("N" if a.stride_k == 1 else "T") + ("T" if b.stride_k == 1 else "N")


def _taking(plans: Iterable[Plan], a: Matrix, b: Matrix) -> list[Plan]:
    """Those of some plans that take two operands as they lie."""
    aligned = Lines.of(a).aligned and Lines.of(b).aligned
    return [plan for plan in plans if aligned or not plan.aligned]


def cases(plan: Plan, number: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Types, transposes and shapes (M, N, K) of a plan's trial.

    Shapes are whole tiles, rows of whole pieces of 16 bytes, and any rows, if the plan takes them: each layout meets
    two of these.
    """
    for turn, (dtype, transposes) in enumerate(product(dtypes, product((False, True), (False, True)))):
        over = (0, 8, 8 if plan.aligned else 3)[(turn + number) % 3]
        yield dtype, transposes, (plan.rows + over, plan.columns + over, plan.k * plan.stages + over)


# ------------------------------------------------------------------------------------------- one entry an instruction

_RIGHT = "on which it computed a few small products right"
_BOTH = "float16 by float16 and bfloat16 by bfloat16, on"
_IN_TILES = "tiles in local memory and"

# NVIDIA's GPUs, by mma.sync
MMA = MatrixUnit(
    NAME="mma",
    TAKES=f"{_BOTH} an NVIDIA GPU of compute capability 8.0 or later {_RIGHT}",
    IN_WORDS=f"{_IN_TILES} NVIDIA's matrix instruction mma.sync",
    where=f"{__name__}:MMA",
    kernel=Kernel("gemm_mma.cl", "gemm"),
    plans=(Plan(128, 128, 32, 3, (2, 4)), Plan(64, 64, 32, 4, (2, 2))),  # in 48 KB, which every such device has
    may_work=lambda device: device.compute_capability >= (8, 0),
    more=(
        Plan(128, 256, 32, 3, (2, 4)),  # 72 KB and more: the driver may give them or not
        Plan(256, 128, 32, 3, (4, 2)),
        Plan(128, 128, 64, 3, (2, 4)),
        Plan(128, 128, 32, 3, (2, 2)),  # fewer loads, and all but one of a work-item's 255 registers
        Plan(128, 64, 32, 4, (2, 2)),
        Plan(64, 128, 32, 4, (2, 2)),
    ),
)
MMA_K8 = MatrixUnit(
    NAME="mma_k8",
    TAKES=f"float16 by float16, on an NVIDIA GPU of compute capability 7.5 {_RIGHT}",
    IN_WORDS=f"{MMA.IN_WORDS}, of half the k",
    where=f"{__name__}:MMA_K8",
    kernel=MMA.kernel,
    plans=(Plan(128, 64, 32, 2, (2, 2)), Plan(64, 64, 32, 2, (2, 2))),  # no copies go on that a third stage were for
    may_work=lambda device: device.compute_capability == (7, 5),
    dtypes=("float16",),
    options=(("TURING", 1),),
)

# NVIDIA's Hopper, by wgmma
WGMMA = MatrixUnit(
    NAME="wgmma",
    TAKES=f"{_BOTH} an NVIDIA GPU of compute capability 9.0 {_RIGHT}",
    IN_WORDS=f"{_IN_TILES} the matrix instruction wgmma of NVIDIA's Hopper",
    where=f"{__name__}:WGMMA",
    kernel=Kernel("gemm_wgmma.cl", "gemm", finish=with_marked_instructions),
    plans=(
        # 192 KB, of 227 that a processor has: the driver may give them or not
        Plan(128, 256, 64, 4, (8, 1), aligned=True),
        Plan(128, 128, 64, 4, (8, 1)),
        Plan(64, 64, 64, 3, (4, 1)),  # 48 KB, which it gives
    ),
    may_work=lambda device: device.compute_capability == (9, 0),  # no later processor has it
    more=(
        Plan(128, 256, 64, 3, (8, 1), aligned=True),
        Plan(256, 128, 64, 4, (16, 1)),
        Plan(128, 128, 64, 3, (8, 1)),  # 96 KB: a processor holds two such work-groups
        Plan(128, 64, 64, 4, (8, 1)),
        Plan(64, 128, 64, 4, (4, 1)),
    ),
)

# AMD's RDNA GPUs, by v_wmma
RDNA3 = MatrixUnit(
    NAME="wmma_rdna3",
    TAKES=f"{_BOTH} an AMD GPU of RDNA 3 (gfx11) {_RIGHT}",
    IN_WORDS=f"{_IN_TILES} the matrix instruction v_wmma of AMD's RDNA 3",
    where=f"{__name__}:RDNA3",
    kernel=Kernel("gemm_wmma.cl", "gemm"),
    plans=(Plan(128, 128, 32, 2, (2, 4)), Plan(64, 64, 32, 2, (2, 2))),
    may_work=lambda device: device.gfx[0] == 11,
    options=(("RDNA", 3),),
    more=(Plan(128, 128, 32, 3, (2, 4)), Plan(128, 64, 32, 2, (2, 2)), Plan(64, 128, 32, 2, (2, 2))),
)
RDNA4 = replace(
    RDNA3,
    NAME="wmma_rdna4",
    TAKES=RDNA3.TAKES.replace("RDNA 3 (gfx11)", "RDNA 4 (gfx120)"),
    IN_WORDS=RDNA3.IN_WORDS.replace("RDNA 3", "RDNA 4"),
    where=f"{__name__}:RDNA4",
    may_work=lambda device: device.gfx == (12, 0),  # gfx125 is another family
    options=(("RDNA", 4),),
)

# Intel's GPUs, by dpas. No query of pyopencl's tells the size of sub-groups that a GPU multiplies matrices in. So both
# sizes are tried wherever there is the extension, 8 first: GPUs that run 16 refuse to compile 8, while those that run 8
# compile 16, slowly.
DPAS_8 = MatrixUnit(
    NAME="dpas_8",
    TAKES=f"{_BOTH} an Intel GPU with cl_intel_subgroup_matrix_multiply_accumulate and sub-groups of 8 {_RIGHT}",
    IN_WORDS=f"{_IN_TILES} Intel's matrix instruction dpas, in sub-groups of 8",
    where=f"{__name__}:DPAS_8",
    # The option: half as many threads of twice the registers; their sums would not fit otherwise.
    kernel=Kernel("gemm_dpas.cl", "gemm", options=("-cl-intel-256-GRF-per-thread",)),
    # One block of rows a sub-group: loops over several are not unrolled, and sums that they number are kept in memory.
    plans=(Plan(128, 128, 32, 2, (8, 4), lanes=8), Plan(64, 64, 32, 2, (4, 4), lanes=8)),
    may_work=lambda device: device.dpas,
    options=(("SUB_GROUP", 8),),
)
DPAS_16 = replace(
    DPAS_8,
    NAME="dpas_16",
    TAKES=DPAS_8.TAKES.replace("groups of 8", "groups of 16"),
    IN_WORDS=DPAS_8.IN_WORDS.replace("groups of 8", "groups of 16"),
    where=f"{__name__}:DPAS_16",
    plans=(Plan(128, 128, 32, 2, (8, 2), lanes=16), Plan(64, 64, 32, 2, (4, 2), lanes=16)),
    options=(("SUB_GROUP", 16),),
)

#: in the order in which they are preferred
MATRIX_UNITS = (WGMMA, MMA, MMA_K8, RDNA3, RDNA4, DPAS_8, DPAS_16)
