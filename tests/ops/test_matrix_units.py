"""Products by a plan against float64 of the stored values: on matrix units, in plain C on any device (EMULATE), by the
instructions where the device has them; and by the tiled engine, of which test_gemm_tiled.py has the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.opencl.program import source
from clamp.ops.gemm import gemm, tiled
from clamp.ops.gemm.engines import MATRIX_UNITS
from clamp.ops.gemm.matrix_units import DPAS_8, DPAS_16, MMA, MMA_K8, RDNA3, RDNA4, WGMMA, MatrixUnit
from clamp.ops.gemm.plan import Plan
from tests.ops.gemm_reference import NN, TRANSPOSES, TT, by_plan, check, check_special_values, random
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, to_device, to_numpy
from tests.sweep import sweep

pytestmark = [pytest.mark.kernel, pytest.mark.once]

INSTRUCTIONS, AT_ONCE, LATE = 0, 1, 2  # and when copies to local memory arrive (kernels/async_copy.clh)
#: small ones: mma's have lines of 2, 4 and 8 pieces, whichever dimension these run along; wgmma's, several blocks
SMALL: dict[Any, tuple[Plan, ...]] = {
    MMA: (Plan(16, 32, 16, 2, (1, 1)), Plan(32, 64, 32, 3, (1, 2)), Plan(64, 32, 64, 4, (2, 1))),
    WGMMA: (Plan(64, 64, 64, 3, (4, 1)), Plan(64, 128, 64, 3, (4, 1)), Plan(128, 64, 64, 4, (8, 1))),
}
for other in (RDNA3, RDNA4, DPAS_8, DPAS_16):
    SMALL[other] = tuple(replace(plan, lanes=other.plans[0].lanes) for plan in SMALL[MMA])
SMALL[tiled] = tiled.PLANS[3], tiled.PLANS[1], tiled.PLANS[5]
#: of a plan's tile, more or fewer: whole tiles; rows of whole pieces of 16 bytes; any rows
SHAPES = (
    lambda plan: (plan.rows, plan.columns, plan.k * 3),
    lambda plan: (plan.rows + 8, plan.columns + 8, plan.k * 2 + 8),
    lambda plan: (8, 16, 24),
    lambda plan: (plan.rows - 1, plan.columns + 3, plan.k + 5),
    lambda plan: (plan.rows + 1, 1, plan.k * 4 + 3),
    lambda plan: (1, plan.columns + 5, 1),
    lambda plan: (7, 5, 3),
)
PLACES = Path(__file__).with_name("places.cl")

Emulate = Callable[..., str]


#: in plain C mma is the same for each kind of processor
UNITS = [*(unit for unit in MATRIX_UNITS if unit is not MMA_K8), tiled]
_OFTEN_USED = MMA, WGMMA, tiled
_OFTEN = [pytest.param(unit, marks=[] if unit in _OFTEN_USED else pytest.mark.slow, id=unit.NAME) for unit in UNITS]


@pytest.fixture(params=_OFTEN)
def unit(request: pytest.FixtureRequest) -> MatrixUnit:
    found: MatrixUnit = request.param
    return found


@pytest.fixture
def emulate(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, unit: MatrixUnit) -> Emulate:
    """Makes gemm know an emulated engine of a plan, and returns its name."""
    usual = INSTRUCTIONS if unit is tiled or unit.may_work(capabilities(queue)) else LATE

    def make(plan: Plan, slices: int = 1, *, copies: int = usual) -> str:
        return by_plan(monkeypatch, unit if unit is tiled else replace(unit, emulate=copies), plan, slices)

    return make


@pytest.fixture
def plans(unit: MatrixUnit, simulated: bool) -> tuple[Plan, ...]:
    return SMALL[unit][:1] if simulated else SMALL[unit]


@pytest.fixture
def plan(unit: MatrixUnit, simulated: bool) -> Plan:
    if simulated and unit is WGMMA:
        pytest.skip("slow to simulate; products in several steps are")
    return SMALL[unit][0]


def operands(unit: MatrixUnit, number: int) -> tuple[str, str]:
    """Storage types in turn: two of one of 16 bits; of the tiled engine any two."""
    if unit is tiled:
        return STORAGE_DTYPES[number % 3], STORAGE_DTYPES[number // 3 % 3]
    return (HALF_DTYPES[number % 2],) * 2


# -------------------------------------------------------------------------------------------- shapes and layouts


@TRANSPOSES
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("number", sweep(range(len(SHAPES)), lambda n: n == 1))
@pytest.mark.simulated_elsewhere
def test_shapes(
    queue: cl.CommandQueue, simulated: bool, unit: MatrixUnit, plans: tuple[Plan, ...], emulate: Emulate,
    transposes: dict[str, bool], which: int, number: int,
) -> None:  # fmt: skip
    plan = plans[which % len(plans)]
    m, n, k = (plan.rows, plan.columns + 8, plan.k + 8) if simulated else SHAPES[number](plan)
    types = (*operands(unit, number + transposes["transpose_a"]), "float32")
    check(queue, random(m, k), random(k, n), types, engine=emulate(plan), **transposes)


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit not in _OFTEN_USED], ids=lambda unit: unit.NAME)
@pytest.mark.parametrize(("transposes", "copies"), [(NN, LATE), (TT, AT_ONCE)], ids=["NN, late", "TT, at once"])
def test_other_makers_units(
    queue: cl.CommandQueue, simulated: bool, unit: MatrixUnit, emulate: Emulate, transposes: dict[str, bool],
    copies: int,
) -> None:  # fmt: skip
    """The little of them that is tried every day: operands along k, and across."""
    plan = SMALL[unit][0] if simulated else SMALL[unit][1]
    m, n, k = plan.rows + 5, plan.columns + 8, plan.k * 3 + 8
    types = ("bfloat16", "bfloat16", "float32")
    check(queue, random(m, k), random(k, n), types, engine=emulate(plan, copies=copies), **transposes)


@TRANSPOSES
@pytest.mark.parametrize("unit", _OFTEN[:-1], indirect=True)
@pytest.mark.parametrize("copies", [AT_ONCE, LATE], ids=["at once", "late"])
def test_many_steps_in_few_stages(
    queue: cl.CommandQueue, simulated: bool, plans: tuple[Plan, ...], emulate: Emulate, transposes: dict[str, bool],
    copies: int,
) -> None:  # fmt: skip
    plan = plans[-1]
    m, n, k = plan.rows, 8, plan.k * (plan.stages + (1 if simulated else 3)) - 8
    check(queue, random(m, k), random(k, n), engine=emulate(plan, copies=copies), **transposes)


@pytest.mark.unsimulated
@TRANSPOSES
@pytest.mark.parametrize("unit", _OFTEN[:-1], indirect=True)
@pytest.mark.parametrize("number", sweep(range(3), lambda n: n == 1))
def test_the_plans_of_gpus(
    queue: cl.CommandQueue, unit: MatrixUnit, emulate: Emulate, number: int, transposes: dict[str, bool]
) -> None:
    plan = unit.plans[number % len(unit.plans)]
    if plan.local_memory_bytes > capabilities(queue).local_memory_bytes:
        pytest.skip(f"the device has too little local memory for {plan}")
    m, n, k = plan.rows + 8, plan.columns + 8, plan.k * plan.stages + 8
    check(queue, random(m, k), random(k, n), engine=emulate(plan), **transposes)


def test_more_bands_of_tiles_than_one(queue: cl.CommandQueue, emulate: Emulate, plan: Plan) -> None:
    check(queue, random(plan.rows * 10 + 1, 8), random(8, plan.columns * 3), engine=emulate(plan))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (0, 0, 0), (0, 5, 0), (2, 3, 0)])
def test_empty(queue: cl.CommandQueue, emulate: Emulate, plan: Plan, m: int, n: int, k: int) -> None:
    bias = random(n), "float16"
    for slices in (1, 3):
        engine = emulate(plan, slices)
        assert check(queue, np.zeros((m, k)), np.zeros((k, n)), bias=bias, relu=True, engine=engine).shape == (m, n)


@TRANSPOSES
@pytest.mark.parametrize(("batches", "slices"), sweep(product(["both", "a", "b"], [1, 2]), lambda n: n in (1, 2)))
def test_batches(
    queue: cl.CommandQueue, emulate: Emulate, plan: Plan, batches: str, slices: int, transposes: dict[str, bool]
) -> None:
    a = random(*(() if batches == "b" else (2, 2)), 13, 40)
    b = random(*(() if batches == "a" else (2, 2)), 40, 35, seed=1)
    check(queue, a, b, bias=(random(35), "float32"), engine=emulate(plan, slices), **transposes)


@TRANSPOSES
@pytest.mark.parametrize(("k", "slices"), sweep([(65, 3), (96, 3), (40, 9)]))
def test_slices_of_k(
    queue: cl.CommandQueue, unit: MatrixUnit, emulate: Emulate, plan: Plan, transposes: dict[str, bool],
    k: int, slices: int,
) -> None:  # fmt: skip
    check(
        queue, random(16, k), random(k, 33), (*operands(unit, 5), "float16"), bias=(random(33), "bfloat16"),
        relu=True, engine=emulate(plan, slices), **transposes,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- epilogues, numbers


@pytest.mark.parametrize(
    ("out_dtype", "bias_type"), sweep(product(STORAGE_DTYPES, STORAGE_DTYPES), lambda n: n in (1, 5, 6))
)
@pytest.mark.parametrize("n", [40, 45], ids=["16 bytes", "elements"])
def test_epilogue(queue: cl.CommandQueue, emulate: Emulate, plan: Plan, out_dtype: str, bias_type: str, n: int) -> None:
    bias = (random(n) * 5, bias_type)
    for relu, slices in ((False, 1), (True, 1), (True, 2)):
        types = ("float16", "float16", out_dtype)
        check(queue, random(18, 24), random(24, n), types, bias=bias, relu=relu, engine=emulate(plan, slices))


def test_rounds_once_after_the_epilogue(queue: cl.CommandQueue, emulate: Emulate, plan: Plan) -> None:
    # 2049 is no half: rounded before the bias is added the result would be 2047 or 2049, not 2048.
    a, b = to_device(queue, [[1.0, 1.0]], "float16"), to_device(queue, [[2048.0], [1.0]], "float16")
    assert to_numpy(gemm(a, b, bias=to_device(queue, [-1.0]), out_dtype="float16", engine=emulate(plan))) == 2048.0


@pytest.mark.parametrize(("number", "n"), [(0, 35), (4, 32), (5, 35)])
def test_special_values_go_where_numpy_puts_them(
    queue: cl.CommandQueue, unit: MatrixUnit, emulate: Emulate, plan: Plan, number: int, n: int
) -> None:
    """Rows and columns beyond a matrix, where a tile is not whole, must not bring in what is there."""
    check_special_values(queue, n, operands(unit, number), emulate(plan))


@pytest.mark.parametrize("out_dtype", STORAGE_DTYPES)
def test_subnormals_and_overflow(queue: cl.CommandQueue, emulate: Emulate, plan: Plan, out_dtype: str) -> None:
    a = np.array([[2.0**-24, 0.0], [65504.0, 65504.0], [65504.0, -65504.0], [-65504.0, -65504.0], [-0.0, 0.0]])
    b = np.tile([1.0, 1024.0, 0.5, 1.0, 2.0, 1.0, 1.0, 0.0], (2, 1))
    check(queue, a, b, ("float16", "float16", out_dtype), engine=emulate(plan))


def test_relu_keeps_nan_and_clips_minus_infinity(queue: cl.CommandQueue, emulate: Emulate, plan: Plan) -> None:
    b = np.zeros((1, 8))
    b[0, :3] = np.nan, -np.inf, np.inf
    for dtype in HALF_DTYPES:
        x, y = to_device(queue, np.ones((12, 1)), dtype), to_device(queue, b, dtype)
        result = to_numpy(gemm(x, y, out_dtype=dtype, relu=True, engine=emulate(plan)))
        np.testing.assert_array_equal(result, np.broadcast_to(np.where(b == -np.inf, 0.0, b), (12, 8)))


@pytest.mark.parametrize("slices", [1, 4])
def test_repeats_bit_for_bit(queue: cl.CommandQueue, emulate: Emulate, plan: Plan, slices: int) -> None:
    engine = emulate(plan, slices)
    a, b = to_device(queue, random(17, 72), "float16"), to_device(queue, random(72, 24), "float16")
    first = gemm(a, b, out_dtype="float32", engine=engine).to_host()
    for _ in range(2):
        np.testing.assert_array_equal(gemm(a, b, out_dtype="float32", engine=engine).to_host(), first)


# ------------------------------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("pieces", [2, 4, 8, 16, 24])
def test_what_a_matrix_instruction_reads_lies_in_all_banks(queue: cl.CommandQueue, pieces: int) -> None:
    """Eight lines' pieces, 16 bytes each, in eight different eighths of the 32 banks; and no place is taken twice."""
    lines = 16
    parts = [source("common.clh"), source("async_copy.clh"), source("matrix_tile.clh"), PLACES.read_text("utf-8")]
    options = [f"-DPIECES={pieces}", "-DEMULATE=1", "-DHELD_GROUPS=1", "-DHELD_COPIES=1", "-DFULL=0", "-DUNROLL="]
    kernel = cl.Kernel(cl.Program(queue.context, "\n".join(parts)).build(options), "places")
    host = np.empty((lines, pieces), np.uint32)
    out = cl.Buffer(queue.context, cl.mem_flags.WRITE_ONLY, host.nbytes)
    kernel(queue, (lines,), (1,), out)
    cl.enqueue_copy(queue, host, out)
    assert sorted(host.flat) == list(range(lines * pieces))
    for eight in host.reshape(lines // 8, 8, pieces):
        assert (np.sort(eight % 8, axis=0) == np.arange(8)[:, None]).all()
