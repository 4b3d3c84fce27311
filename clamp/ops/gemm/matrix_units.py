"""Products on a GPU's matrix units: what the engines have in common that run kernels/matrix_product_kernel.clh.

They differ in the instruction, and in their plans. Each is used only by plans that are proved on the device (proof.py).
The same kernels in plain C (``emulate``) run on any device, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm.plan import Plan, best_plan, slices_of
from clamp.ops.gemm.problem import Epilogue, Operand, Problem
from clamp.ops.gemm.proof import computes_right
from clamp.ops.proved import Proved

DTYPES = ("float16", "bfloat16")

_ADD_SLICES = Kernel("gemm_slices.cl", "add_slices")
_ADDERS = 256  # work-items of a group that adds slices


@dataclass(frozen=True)
class MatrixUnit(Proved):
    """An engine of products: a matrix instruction, and the kernel that computes by it.

    Attributes:
        NAME, TAKES, IN_WORDS: as every engine's.
        where: where the engine is found, for the process that tries it: "clamp.ops.gemm.mma:MMA".
        kernel: whose macros and arguments are those of matrix_product_kernel.clh.
        plans: the largest first: it reads each operand the fewest times.
        first, last: the compute capabilities that have the instruction.
        dtypes: storage types of its operands.
        options: macros of the kernel, for the kind of processor.
    """

    NAME: str
    TAKES: str
    IN_WORDS: str
    where: str
    kernel: Kernel
    plans: tuple[Plan, ...]
    first: tuple[int, int]
    last: tuple[int, int] = (99, 0)
    dtypes: tuple[str, ...] = DTYPES
    options: tuple[tuple[str, int], ...] = ()

    def fits(self, problem: Problem) -> bool:
        """Whether the operands are of one 16-bit type, and the engine is proved on the device."""
        return self.NAME in problem.proved and problem.a_dtype == problem.b_dtype and problem.a_dtype in self.dtypes

    def pays(self, problem: Problem) -> bool:
        """Wherever it is proved."""
        return True

    def pack(self, b: Operand) -> Operand:
        """op(B) as it is: it is read in place."""
        return b

    def run(self, a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
        """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
        units = capabilities(c.queue).compute_units
        matrices = c.size // (a.rows * b.rows)
        aligned = _Lines(a).aligned and _Lines(b).aligned
        plans = [plan for plan in self.proved_plans(c.queue) if aligned or not plan.aligned]
        plan = best_plan(plans, a.rows, b.rows, matrices, units)
        self.compute(a, b, c, epilogue, plan, slices_of(plan.tiles(a.rows, b.rows) * matrices, a.k, units))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What it launches."""
        return (self.kernel,)

    def may_work(self, device: Capabilities) -> bool:
        """Whether the device is of a kind that has the instruction."""
        return self.first <= device.compute_capability <= self.last

    def computes_right(self, plan: Plan, queue: cl.CommandQueue) -> bool:
        """Whether small products come out right by a plan."""
        return computes_right(self.compute, plan, self.plans.index(plan), queue, self.dtypes)

    def compute(
        self, a: Operand, b: Operand, c: Tensor, epilogue: Epilogue, plan: Plan, slices: int = 1, *, emulate: int = 0
    ) -> None:
        """As `run`, by a given plan.

        Args:
            slices: at most so many parts of k are summed by themselves, in float32, and then added in their order.
            emulate: 0 on GPUs with the instruction; 1 and 2 in plain C, as kernels/matrix_product.clh says.
        """
        slice_k = max(-(-a.k // (slices * plan.k)), 1) * plan.k
        slices = max(-(-a.k // slice_k), 1)
        if slices == 1:
            self._launch(a, b, c, epilogue, plan, slice_k, slices, emulate)
            return
        partial_sums = bridge.empty(c.queue, (slices * c.size,), "float32")
        self._launch(a, b, partial_sums, Epilogue("float32"), plan, slice_k, slices, emulate)
        add_slices(partial_sums, c, a.rows * b.rows, b.rows, slices, epilogue)

    def _launch(
        self, a: Operand, b: Operand, c: Tensor, epilogue: Epilogue, plan: Plan, slice_k: int, slices: int, emulate: int
    ) -> None:
        kernel = replace(self.kernel, finish=None) if emulate else self.kernel
        lines_a, lines_b = _Lines(a), _Lines(b)
        groups = plan.tiles(a.rows, b.rows) * (c.size // (a.rows * b.rows))
        is_full = a.k > 0 and a.rows % plan.rows == b.rows % plan.columns == a.k % slice_k == 0
        kernel(
            c.queue, (groups * plan.threads,), (plan.threads,), a.tensor, b.tensor, c, epilogue.bias_or(c),
            a.rows, b.rows, a.k, lines_a.pitch, a.stride_batch, lines_b.pitch, b.stride_batch, slice_k, slices,
            *epilogue.flags, IN_T=a.storage, A_K_MAJOR=int(lines_a.k_major), B_K_MAJOR=int(lines_b.k_major),
            A_ALIGNED=int(lines_a.aligned), B_ALIGNED=int(lines_b.aligned), FULL=int(is_full), EMULATE=emulate,
            **plan.macros, **epilogue.macros, **dict(self.options),
        )  # fmt: skip


def add_slices(partial_sums: Tensor, c: Tensor, elements: int, columns: int, slices: int, epilogue: Epilogue) -> None:
    """Adds each matrix's slices up in their order and writes them, through the epilogue, over c.

    Args:
        partial_sums: (matrices, slices, elements), float32.
        elements, columns: of a matrix.
    """
    _ADD_SLICES(
        c.queue, (-(-elements // _ADDERS) * _ADDERS, c.size // elements), (_ADDERS, 1), partial_sums, c,
        epilogue.bias_or(c), elements, columns, slices, *epilogue.flags, **epilogue.macros,
    )  # fmt: skip


class _Lines:
    """How an operand lies in memory: in lines that run along k (``k_major``), or along its rows."""

    def __init__(self, x: Operand) -> None:
        self.k_major = x.stride_k == 1
        self.pitch = x.stride_row if self.k_major else x.stride_k
        self.aligned = self.pitch % 8 == x.stride_batch % 8 == 0  # to 16 bytes: memory of its own always begins so
