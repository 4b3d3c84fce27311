"""Every op of the conformance table that multiplies matrices, by the engines for GPUs' matrix units, in plain C."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyopencl as cl
import pytest

from clamp.casting.owned import OWNED
from clamp.cli.kernels import reached
from clamp.ops.gemm import engines
from clamp.ops.gemm.engines import MATRIX_UNITS
from clamp.ops.gemm.matrix_units import DTYPES, MatrixUnit
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Problem
from tests.conformance import test_conformance
from tests.conformance.table import Case, Op

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

amp_dtype = test_conformance.amp_dtype
_LATE = 2  # copies to local memory arrive as late as they may (kernels/async_copy.clh)
_PLANS = {"mma": Plan(16, 32, 16, 2, (1, 1)), "wgmma": Plan(64, 64, 64, 3, (4, 1))}
_OF_FLOATS = {"netcl.autograd.info_nce_loss"}  # which multiplies two 16-bit matrices in some cases only
_CALLS = [call for call in test_conformance._calls() if "gemm_mma.cl" in reached(OWNED[call.values[1].name]).files]


@dataclass(frozen=True)
class _Emulated(MatrixUnit):
    """A unit that takes every product of its types, in plain C, and counts them."""

    ran: Any = None

    def fits(self, problem: Problem) -> bool:
        return problem.a_dtype == problem.b_dtype and problem.a_dtype in DTYPES

    def run(self, *product: Any) -> None:
        self.ran.append(product)
        self.compute(*product, self.plans[0], emulate=_LATE)


@pytest.mark.parametrize("unit", MATRIX_UNITS, ids=lambda unit: unit.NAME)
@pytest.mark.parametrize(("amp_dtype", "op", "case", "storage"), _CALLS, indirect=["amp_dtype"])
def test_op(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str, unit: MatrixUnit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ran: list[Any] = []
    emulated = _Emulated(**vars(replace(unit, plans=(_PLANS[unit.NAME],))), ran=ran)
    monkeypatch.setattr(engines, "ENGINES", (emulated, *engines.ENGINES))
    test_conformance.test_op(queue, amp_dtype, op, case, storage, monkeypatch)
    assert ran or op.name in _OF_FLOATS
