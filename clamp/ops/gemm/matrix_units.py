"""Products on a GPU's matrix units: what the engines have in common that run kernels/matrix_product_kernel.clh.

They differ in the instruction, and in their plans. Each is used only by plans that are proved on the device (proof.py).
The same kernels in plain C (``emulate``) run on any device, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm import in_tiles
from clamp.ops.gemm.in_tiles import Launch, Lines
from clamp.ops.gemm.plan import Plan, best_plan, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue, Operand, Problem
from clamp.ops.gemm.proof import computes_right
from clamp.ops.proved import Proved

DTYPES = ("float16", "bfloat16")


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
        aligned = Lines.of(a).aligned and Lines.of(b).aligned
        plans = [plan for plan in self.proved_plans(c.queue) if aligned or not plan.aligned]
        plan = best_plan(plans, a.rows, b.rows, matrices, units)
        self.compute(a, b, c, epilogue, plan, slices_of(tiles_of(plan, a.rows, b.rows) * matrices, a.k, units))

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
        in_tiles.compute(partial(self._launch, emulate), a, b, c, epilogue, plan, slices)

    def _launch(self, emulate: int, launch: Launch) -> None:
        kernel = replace(self.kernel, finish=None) if emulate else self.kernel
        launch(kernel, IN_T=launch.a.storage, FULL=int(launch.is_full), EMULATE=emulate, **dict(self.options))
