"""The plans of the tiled engine, each against float64 of the stored values; what a device takes is in values.

test_gemm.py has what the engine promises by its own choice of a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.device import Capabilities
from clamp.ops.engine import always
from clamp.ops.gemm import engines, gemm, tiled
from clamp.ops.gemm.plan import best_plan
from clamp.ops.gemm.tiled import PLANS, SquarePlan, plans_of
from tests.ops.gemm_reference import TRANSPOSES, check, random, stored
from tests.ops.test_engines import CPU, GPU
from tests.reference import STORAGE_DTYPES, assert_close, to_device
from tests.sweep import sweep

pytestmark = pytest.mark.once

_SMALL = PLANS[3]
#: of a plan's tile, more or fewer: whole tiles; rows of whole pieces of 16 bytes; any rows; less than a tile
SHAPES = (
    lambda plan: (plan.rows, plan.columns, plan.k * 3),
    lambda plan: (plan.rows + 8, plan.columns + 16, plan.k * 2 + 8),
    lambda plan: (plan.rows - 1, plan.columns + 3, plan.k + 5),
    lambda plan: (plan.rows + 1, 1, plan.k * 4 + 3),
    lambda plan: (1, plan.columns + 5, 1),
    lambda plan: (7, 5, 3),
)

By = Callable[..., str]


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> By:
    """Makes gemm know an engine of one plan, and returns its name."""

    def make(plan: SquarePlan, slices: int = 1) -> str:
        run = partial(tiled.compute, plan=plan, slices=slices)
        words = {"NAME": "planned", "TAKES": "anything", "IN_WORDS": "by a plan"}
        engine = SimpleNamespace(**words, fits=always, pays=always, pack=tiled.pack, run=run)
        monkeypatch.setattr(engines, "ENGINES", (engine,))
        return "planned"

    return make


def skip_what_is_too_large(plan: SquarePlan, simulated: bool) -> None:
    if simulated and plan.rows > _SMALL.rows:
        pytest.skip("too slow to simulate")


# -------------------------------------------------------------------------------------------- shapes and layouts


@pytest.mark.kernel
@TRANSPOSES
@pytest.mark.parametrize(
    ("plan", "number"), sweep(product(PLANS, range(len(SHAPES))), lambda n: n in (13, 18, 26)), ids=str
)
def test_shapes(
    queue: cl.CommandQueue,
    simulated: bool,
    by: By,
    plan: SquarePlan,
    number: int,
    transpose_a: bool,
    transpose_b: bool,
) -> None:
    skip_what_is_too_large(plan, simulated)
    m, n, k = SHAPES[number](plan)
    types = STORAGE_DTYPES[number % 3], STORAGE_DTYPES[(number + transpose_a) % 3], "float32"
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check(queue, random(m, k), random(k, n), types, engine=by(plan), **transposes)


@pytest.mark.kernel
@TRANSPOSES
@pytest.mark.parametrize(
    ("a_type", "b_type", "extent"),  # rows of whole pieces of 16 bytes; any rows
    sweep(product(STORAGE_DTYPES, STORAGE_DTYPES, (40, 37)), lambda n: n == 17),
)
def test_types_and_layouts(
    queue: cl.CommandQueue, by: By, a_type: str, b_type: str, extent: int, transpose_a: bool, transpose_b: bool
) -> None:
    a, b = random(extent, extent + 8), random(extent + 8, extent - 16, seed=1)
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check(queue, a, b, (a_type, b_type, "float32"), engine=by(_SMALL), **transposes)


@pytest.mark.kernel
@pytest.mark.parametrize("plan", sweep(PLANS[:3], lambda n: n == 2), ids=str)
def test_unrolled_as_on_gpus(
    queue: cl.CommandQueue, simulated: bool, by: By, monkeypatch: pytest.MonkeyPatch, plan: SquarePlan
) -> None:
    skip_what_is_too_large(plan, simulated)
    monkeypatch.setattr(tiled, "capabilities", lambda queue: GPU)
    m, n, k = plan.rows + 3, plan.columns + 8, plan.k + 8
    check(queue, random(m, k), random(k, n), ("float16", "float32", "bfloat16"), engine=by(plan))


@pytest.mark.kernel
def test_more_bands_of_tiles_than_one(queue: cl.CommandQueue, by: By) -> None:
    check(queue, random(_SMALL.rows * 10 + 1, 8), random(8, _SMALL.columns * 3), engine=by(_SMALL))


@pytest.mark.kernel
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (2, 3, 0)])
def test_empty(queue: cl.CommandQueue, by: By, m: int, n: int, k: int) -> None:
    bias = random(n), "float16"
    for slices in (1, 3):
        result = check(queue, np.zeros((m, k)), np.zeros((k, n)), bias=bias, relu=True, engine=by(_SMALL, slices))
        assert result.shape == (m, n)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("batches", "slices", "transpose_a", "transpose_b"),
    sweep(product(["both", "a", "b"], [1, 2], [0, 1], [0, 1]), lambda n: n in (6, 9, 19)),
)
def test_batches(
    queue: cl.CommandQueue, by: By, batches: str, slices: int, transpose_a: bool, transpose_b: bool
) -> None:
    a = random(*(() if batches == "b" else (2, 2)), 13, 40)
    b = random(*(() if batches == "a" else (2, 2)), 40, 35, seed=1)
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check(queue, a, b, bias=(random(35), "float32"), engine=by(_SMALL, slices), **transposes)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("k", "slices", "transpose_a", "transpose_b"),
    sweep([(k, slices, a, b) for k, slices in ((65, 3), (96, 3), (40, 9)) for a in (0, 1) for b in (0, 1)]),
)
def test_slices_of_k(queue: cl.CommandQueue, by: By, transpose_a: bool, transpose_b: bool, k: int, slices: int) -> None:
    check(
        queue, random(16, k), random(k, 33), ("bfloat16", "float32", "float16"), bias=(random(33), "bfloat16"),
        relu=True, engine=by(_SMALL, slices), transpose_a=transpose_a, transpose_b=transpose_b,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- epilogues, numbers


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("out_dtype", "bias_type"), sweep(product(STORAGE_DTYPES, STORAGE_DTYPES), lambda n: n in (1, 6))
)
@pytest.mark.parametrize("n", [40, 45], ids=["four columns", "one column"])
def test_epilogue(queue: cl.CommandQueue, by: By, out_dtype: str, bias_type: str, n: int) -> None:
    for relu, slices in ((False, 1), (True, 1), (True, 2)):
        check(
            queue, random(18, 24), random(24, n), ("float16", "float16", out_dtype), bias=(random(n) * 5, bias_type),
            relu=relu, engine=by(_SMALL, slices),
        )  # fmt: skip


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("dtype", "n"), sweep(product(STORAGE_DTYPES, [32, 35]), lambda n: n in (1, 4)))
def test_special_values_go_where_numpy_puts_them(queue: cl.CommandQueue, by: By, dtype: str, n: int) -> None:
    """Rows and columns beyond a matrix, where a tile is not whole, must not bring in what is there."""
    a, b = random(15, 19), random(19, n, seed=1)
    a[2, 3], a[5, 0], a[14, 18], a[7, 7] = np.inf, np.nan, -np.inf, -0.0
    b[4, 6], b[18, n - 1], b[3, 8], b[9, 0] = np.nan, np.inf, 0.0, 6e-8
    x, y = stored(a, dtype), stored(b, dtype)
    result = gemm(to_device(queue, a, dtype), to_device(queue, b, dtype), out_dtype=dtype, engine=by(_SMALL))
    magnitude = np.nan_to_num(np.abs(x), posinf=0) @ np.nan_to_num(np.abs(y), posinf=0)
    assert_close(result, x @ y, slack=19 * 2.0**-24 * magnitude)


@pytest.mark.kernel
@pytest.mark.parametrize("slices", [1, 4])
def test_repeats_bit_for_bit(queue: cl.CommandQueue, by: By, slices: int) -> None:
    engine = by(_SMALL, slices)
    a, b = to_device(queue, random(17, 72), "float16"), to_device(queue, random(72, 24), "float16")
    first = gemm(a, b, out_dtype="float32", engine=engine).to_host()
    for _ in range(2):
        np.testing.assert_array_equal(gemm(a, b, out_dtype="float32", engine=engine).to_host(), first)


@pytest.mark.kernel
def test_slices_of_a_thin_gradient(queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if simulated:
        pytest.skip("too slow to simulate")
    monkeypatch.setattr(tiled, "capabilities", lambda queue: GPU)
    taken = []
    launch = tiled.in_tiles.compute
    monkeypatch.setattr(tiled.in_tiles, "compute", lambda *args: (taken.append(args[-2:]), launch(*args)))
    check(queue, random(10, 2000), random(2000, 20), transpose_a=True, engine="tiled")
    assert taken == [(PLANS[2], 7)], "by the smallest tile, in slices of 256 steps at least"


# -------------------------------------------------------------------------------------------- devices and plans


def with_limits(max_work_group: int, local_memory_bytes: int) -> Capabilities:
    return Capabilities(**{**vars(GPU), "max_work_group": max_work_group, "local_memory_bytes": local_memory_bytes})


@pytest.mark.parametrize(
    ("max_work_group", "kilobytes", "plans"),
    [
        (1024, 64, PLANS[:3]), (256, 32, PLANS[:3]), (256, 16, PLANS[1:3]), (255, 64, PLANS[1:3]), (64, 8, PLANS[2:3]),
        (63, 64, PLANS[3:4]), (15, 64, PLANS[4:5]), (4, 2, PLANS[4:5]), (3, 64, PLANS[5:]), (1, 2, PLANS[5:]),
    ],
)  # fmt: skip
def test_plans_are_as_large_as_the_device_takes(
    max_work_group: int, kilobytes: int, plans: tuple[SquarePlan, ...]
) -> None:
    assert plans_of(with_limits(max_work_group, kilobytes * 1024)) == plans


@pytest.mark.parametrize(
    ("m", "n", "plan"), [(4096, 4096, 0), (512, 512, 1), (64, 8192, 1), (8, 4096, 2), (30, 30, 2), (256, 128, 2)]
)
def test_large_products_get_large_tiles(m: int, n: int, plan: int) -> None:
    assert best_plan(plans_of(GPU), m, n, 1, GPU.compute_units) == PLANS[plan]


def test_plans_say_what_they_are() -> None:
    assert str(PLANS[0]) == "128x128x16, 256 work-items"
    assert [plan.local_memory_bytes // 1024 for plan in PLANS] == [32, 16, 8, 4, 2, 2]


@pytest.mark.kernel
@pytest.mark.parametrize(("max_work_group", "kilobytes"), sweep([(1, 16), (4, 2), (64, 16), (256, 32)]))
def test_any_device_computes(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, max_work_group: int, kilobytes: int
) -> None:
    device = with_limits(max_work_group, kilobytes * 1024)
    monkeypatch.setattr(tiled, "capabilities", lambda queue: Capabilities(**{**vars(device), "is_cpu": True}))
    size = 20 if simulated else 140
    check(queue, random(size, 24), random(24, size + 3), engine="tiled")


def test_no_cpu_chooses_it() -> None:
    for dtypes in product(STORAGE_DTYPES, STORAGE_DTYPES):
        assert engines.choose(engines.Problem(*dtypes, 300, 70, CPU)) is not tiled
