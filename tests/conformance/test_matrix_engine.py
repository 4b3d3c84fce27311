"""Every op of the conformance table that multiplies matrices, convolves or attends, by matrix units, in plain C."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyopencl as cl
import pytest

from clamp.casting.registry import OWNED
from clamp.cli.lists import reached
from clamp.ops import attention
from clamp.ops.attention.matrix_units import MatrixAttention
from clamp.ops.conv import engines as conv
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm import engines as gemm
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan
from tests.conformance import test_conformance
from tests.conformance.table import Case, Op

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.slow]

amp_on, amp_dtype = test_conformance.amp_on, test_conformance.amp_dtype
_LATE = 2  # copies to local memory arrive as late as they may (kernels/matrix_product.clh)
_PLANS = {
    "mma": Plan(16, 32, 16, 2, (1, 1)),
    "wgmma": Plan(64, 64, 64, 3, (4, 1)),
    "wmma_rdna3": Plan(16, 32, 16, 2, (1, 1)),
    "dpas_16": Plan(16, 32, 16, 2, (1, 1), lanes=16),
}
# They multiply two 16-bit matrices in some cases only; or depthwise, by kernels of its own.
_NOT_ALWAYS = {
    "netcl.autograd.info_nce_loss",
    "netcl.autograd.depthwise_conv2d",
    "netcl.ops.depthwise.depthwise_conv2d",
}
_ATTENTION_PLAN = Plan(32, 32, 128, 2, (2, 1))
# Weights and slopes are rounded to 16 bits; the table counts 2^-24 of sums, and of a gradient's largest element.
_ATTENTION_ROUNDING = {"float16": 2.0**13, "bfloat16": 2.0**16}


class _Emulated:
    """A unit that takes every problem of its types, in plain C, and counts them."""

    def __init__(self, unit: MatrixUnit | MatrixConv | MatrixAttention, ran: list[Any]) -> None:
        self._unit, self._ran = replace(unit, emulate=_LATE), ran
        self._plan = _ATTENTION_PLAN if isinstance(unit, MatrixAttention) else _PLANS[unit.NAME]
        self.NAME, self.TAKES, self.IN_WORDS, self.pays = unit.NAME, unit.TAKES, unit.IN_WORDS, unit.pays
        self.pack = lambda b: b

    def fits(self, problem: Any) -> bool:
        return self._unit.fits(replace(problem, verified=frozenset({self.NAME})))

    def run(self, *product: Any) -> None:
        self._compute(self._unit.compute, *product, self._plan)

    def convolve(self, problem: Any, x: Any, weights: Any, out: Any, epilogue: Any) -> None:
        launch = self._compute(self._unit.bind, problem, x, weights, out, epilogue, self._plan)
        launch(x, weights.tensor, out, epilogue.bias_or(out))

    def weight_gradient(self, problem: Any, x: Any, grad: Any, out: Any, _: str | None) -> None:
        self._compute(self._unit.bind_weight_gradient, problem, x, grad, out, self._plan)(x, grad, out)

    def forward(self, *problem: Any) -> None:
        self._compute(self._unit.forward, *problem, self._plan)

    def backward(self, *problem: Any) -> None:
        self._compute(self._unit.backward, *problem, self._plan)

    def _compute(self, compute: Any, *args: Any) -> Any:
        self._ran.append(args)
        return compute(*args)


_ALL_CALLS = test_conformance._calls()
_FILES = {name: reached(OWNED[name]).files for name in {call.values[1].name for call in _ALL_CALLS}}
_CALLS = [
    pytest.param(*call.values, kind, number, marks=call.marks, id=f"{call.id}-{unit.NAME}")
    for kind, units in (("gemm", gemm.MATRIX_UNITS), ("conv", conv.MATRIX_UNITS), ("attention", attention.MATRIX_UNITS))
    for number, unit in enumerate(units)
    if unit.NAME in _PLANS
    for call in _ALL_CALLS
    if f"{kind}_mma.cl" in _FILES[call.values[1].name]
]


@pytest.mark.parametrize(("amp_dtype", "op", "case", "storage", "kind", "number"), _CALLS, indirect=["amp_dtype"])
def test_op(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str, kind: str, number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engines: Any = {"gemm": gemm, "conv": conv, "attention": attention}[kind]
    if kind == "attention":
        rounding = _ATTENTION_ROUNDING[amp_dtype]
        op = replace(op, slack=op.slack + rounding / 17, cancels=op.cancels + rounding)  # of 17 terms at least
    ran: list[Any] = []
    emulated = _Emulated(engines.MATRIX_UNITS[number], ran)
    monkeypatch.setattr(engines, "ENGINES", (emulated, *engines.ENGINES))
    test_conformance.test_op(queue, amp_dtype, op, case, storage, monkeypatch)
    assert ran or op.name in _NOT_ALWAYS
