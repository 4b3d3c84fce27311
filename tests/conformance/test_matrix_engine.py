"""Every op of the conformance table that multiplies matrices, by the engine for GPUs' matrix units, in plain C."""

from __future__ import annotations

from typing import Any

import pyopencl as cl
import pytest

from clamp.casting.owned import OWNED
from clamp.cli.kernels import reached
from clamp.ops.gemm import engines, mma
from clamp.ops.gemm.mma import Plan
from clamp.ops.gemm.problem import Problem
from tests.conformance import test_conformance
from tests.conformance.table import Case, Op

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

amp_dtype = test_conformance.amp_dtype
_LATE = 2  # copies to local memory arrive as late as they may (kernels/async_copy.clh)
_PLAN = Plan(16, 32, 16, 2, (1, 1))
_OF_FLOATS = {"netcl.autograd.info_nce_loss"}  # which multiplies two 16-bit matrices in some cases only
_CALLS = [call for call in test_conformance._calls() if "gemm_mma.cl" in reached(OWNED[call.values[1].name]).files]


@pytest.mark.parametrize(("amp_dtype", "op", "case", "storage"), _CALLS, indirect=["amp_dtype"])
def test_op(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def fits(problem: Problem) -> bool:
        return problem.a_dtype == problem.b_dtype and problem.a_dtype in mma.DTYPES

    def run(*product: Any) -> None:
        ran.append(product)
        mma.compute(*product, _PLAN, emulate=_LATE)

    monkeypatch.setattr(mma, "fits", fits)
    monkeypatch.setattr(mma, "run", run)
    monkeypatch.setattr(engines, "ENGINES", (mma, *engines.ENGINES))
    test_conformance.test_op(queue, amp_dtype, op, case, storage, monkeypatch)
    assert ran or op.name in _OF_FLOATS
