"""The plans of the tiled engine against float64 of the stored values; what a device takes is in values.

test_gemm.py has what the engine promises by its own choice of a plan, test_matrix_units.py what each plan does.
"""

from __future__ import annotations

from itertools import product

import pyopencl as cl
import pytest

from clamp.opencl.device import Capabilities
from clamp.ops.gemm import engines, tiled
from clamp.ops.gemm.plan import best_plan
from clamp.ops.gemm.tiled import PLANS, SquarePlan, plans_of
from tests.ops.gemm_reference import TRANSPOSES, by_plan, check, random
from tests.ops.test_engines import CPU, GPU
from tests.reference import STORAGE_DTYPES
from tests.sweep import sweep

pytestmark = pytest.mark.once


# -------------------------------------------------------------------------------------------- shapes and layouts


@pytest.mark.kernel
@TRANSPOSES
@pytest.mark.parametrize(
    ("a_type", "b_type", "extent"),  # rows of whole pieces of 16 bytes; any rows
    sweep(product(STORAGE_DTYPES, STORAGE_DTYPES, (40, 37)), lambda n: n == 17),
)
def test_types_and_layouts(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, a_type: str, b_type: str, extent: int,
    transposes: dict[str, bool],
) -> None:  # fmt: skip
    a, b = random(extent, extent + 8), random(extent + 8, extent - 16, seed=1)
    check(queue, a, b, (a_type, b_type, "float32"), engine=by_plan(monkeypatch, tiled, PLANS[3]), **transposes)


@pytest.mark.unsimulated
@pytest.mark.kernel
@pytest.mark.parametrize("plan", sweep(PLANS[:3], lambda n: n == 2), ids=str)
def test_unrolled_as_on_gpus(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, plan: SquarePlan) -> None:
    monkeypatch.setattr(tiled, "capabilities", lambda queue: GPU)
    m, n, k = plan.rows + 3, plan.columns + 8, plan.k + 8
    check(
        queue, random(m, k), random(k, n), ("float16", "float32", "bfloat16"), engine=by_plan(monkeypatch, tiled, plan)
    )


@pytest.mark.unsimulated
@pytest.mark.kernel
def test_slices_of_a_thin_gradient(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "capabilities", lambda queue: GPU)
    taken = []
    bind = tiled.in_tiles.bind
    monkeypatch.setattr(tiled.in_tiles, "bind", lambda *args: (taken.append(args[-2:]), bind(*args))[1])
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
