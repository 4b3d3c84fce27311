"""Products on a GPU's matrix units: what the engines have in common that run kernels/matrix_product_kernel.clh.

They differ in the instruction, and in their plans. Each is used only by plans that are proved on the device (proof.py).
The same kernels in plain C (``emulate``) run on any device, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.gemm import in_tiles, tuning
from clamp.ops.gemm.in_tiles import Launch, Lines
from clamp.ops.gemm.plan import Plan, best_plan, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue, Operand, Problem
from clamp.ops.gemm.proof import computes_right
from clamp.ops.proved import Proved

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class MatrixUnit(Proved):
    """An engine of products: a matrix instruction, and the kernel that computes by it.

    The largest of its plans reads each operand the fewest times.

    Attributes:
        kernel: whose macros and arguments are those of matrix_product_kernel.clh.
        is_for: whether a device is of a kind that has the instruction.
        dtypes: storage types of its operands.
        options: macros of the kernel, for the kind of processor.
        more: other plans, which `python -m clamp tune` tries and measures.
    """

    kernel: Kernel
    is_for: Callable[[Capabilities], bool]
    dtypes: tuple[str, ...] = DTYPES
    options: tuple[tuple[str, int], ...] = ()
    more: tuple[Plan, ...] = ()

    def fits(self, problem: Problem) -> bool:
        """Whether the operands are of one 16-bit type, and the engine is proved on the device."""
        return self.NAME in problem.proved and problem.a_dtype == problem.b_dtype and problem.a_dtype in self.dtypes

    def pack(self, b: Operand) -> Operand:
        """op(B) as it is: it is read in place."""
        return b

    def run(self, a: Operand, b: Operand, c: Tensor, epilogue: Epilogue) -> None:
        """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty."""
        plan = self.tuned_plan(a, b, c) or self.usual_plan(a, b, c)
        self.compute(a, b, c, epilogue, plan, self.slices(plan, a, b, c))

    def usual_plan(self, a: Operand, b: Operand, c: Tensor) -> Plan:
        """The plan of a product by its extents."""
        units = capabilities(c.queue).compute_units
        plans = _taking(self.proved_plans(c.queue), a, b)
        return best_plan(plans, a.rows, b.rows, c.size // (a.rows * b.rows), units)

    def tuned_plan(self, a: Operand, b: Operand, c: Tensor) -> Plan | None:
        """The plan that was the fastest for such products, where that was measured (tuning.py); of one matrix only."""
        winners = tuning.tuned(c.queue.device, self.where, self.trial_key).winners
        if not winners or c.size != a.rows * b.rows:
            return None
        name = winners.get(tuning.size_class(layout_of(a, b), a.rows, b.rows, a.k))
        if name is None:
            return None
        return next((plan for plan in _taking(self.measurable_plans(c.queue), a, b) if str(plan) == name), None)

    def slices(self, plan: Plan, a: Operand, b: Operand, c: Tensor) -> int:
        """Into how many slices a plan cuts the k of a product."""
        tiles = tiles_of(plan, a.rows, b.rows) * (c.size // (a.rows * b.rows))
        return slices_of(tiles, a.k, capabilities(c.queue).compute_units)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What it launches."""
        return (self.kernel,)

    def may_work(self, device: Capabilities) -> bool:
        """Whether the device is of a kind that has the instruction."""
        return self.is_for(device)

    @property
    def candidates(self) -> MatrixUnit:
        """The same by the plans that only tuning chooses, which are tried by themselves: they take a driver's time."""
        return replace(self, plans=self.more, more=(), where=f"{self.where}.candidates")

    def measurable_plans(self, queue: cl.CommandQueue) -> Iterator[Plan]:
        """The plans that tuning chooses among: all that are proved."""
        yield from self.proved_plans(queue)
        yield from self.candidates.proved_plans(queue) if self.more else ()

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
        kernel = self.kernel.in_plain_c if emulate else self.kernel
        launch(kernel, IN_T=launch.a.storage, FULL=int(launch.is_full), EMULATE=emulate, **dict(self.options))


def layout_of(a: Operand, b: Operand) -> str:
    """How two operands lie, ``"NT"``: T is transposed."""
    return ("N" if a.stride_k == 1 else "T") + ("T" if b.stride_k == 1 else "N")


def _taking(plans: Iterable[Plan], a: Operand, b: Operand) -> list[Plan]:
    """Those of some plans that take two operands as they lie."""
    aligned = Lines.of(a).aligned and Lines.of(b).aligned
    return [plan for plan in plans if aligned or not plan.aligned]
