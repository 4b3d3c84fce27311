"""Convolutions on matrix units against float64 of the stored values: in plain C on any device (EMULATE), by the
instructions where the device has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import conv as ops
from clamp.ops.conv import engines, matrix_units
from clamp.ops.conv.engines import MATRIX_UNITS
from clamp.ops.conv.geometry import Window
from clamp.ops.conv.matrix_units import MMA, MMA_K8, WGMMA, MatrixConv
from clamp.ops.conv.problem import Problem
from clamp.ops.gemm.plan import Plan
from tests.ops.conv_reference import Case, check
from tests.ops.test_conv import (
    CASES,
    infinities_and_nan_stay_where_they_are,
    weights_whose_sums_do_not_read_an_infinity_stay_finite,
)
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, to_device
from tests.sweep import sweep

pytestmark = [pytest.mark.kernel, pytest.mark.once]

INSTRUCTIONS, AT_ONCE, LATE = 0, 1, 2  # when copies to local memory arrive (kernels/matrix_product.clh)
_PLANS = {
    "mma": Plan(32, 32, 16, 2, (1, 1)),
    "wgmma": Plan(64, 64, 64, 3, (4, 1)),
    "wmma_rdna3": Plan(32, 32, 16, 2, (1, 1)),
    "wmma_rdna4": Plan(32, 32, 16, 2, (1, 1)),
    "dpas_8": Plan(32, 32, 16, 2, (1, 1), lanes=8),
    "dpas_16": Plan(32, 32, 16, 2, (1, 1), lanes=16),
}


#: in plain C mma is the same for each kind of processor
UNITS = {unit.NAME: unit for unit in MATRIX_UNITS if unit is not MMA_K8}
_NVIDIA = MMA, WGMMA
_OFTEN = [
    pytest.param(unit, marks=[] if unit in _NVIDIA else pytest.mark.slow, id=unit.NAME) for unit in UNITS.values()
]


@pytest.fixture(params=_OFTEN)
def unit(request: pytest.FixtureRequest) -> MatrixConv:
    found: MatrixConv = request.param
    return found


def by_plan(patch: pytest.MonkeyPatch, unit: MatrixConv, slices: int = 1, copies: int = LATE) -> str:
    """Makes convolutions know an emulated engine, of a small plan, and returns its name."""
    engine = replace(unit, NAME="emulated", emulate=copies)
    patch.setattr(engines, "ENGINES", (engine,))
    patch.setattr(engines, "names_of_verified", lambda *_: frozenset({engine.NAME}))
    patch.setattr(MatrixConv, "verified_plans", lambda *_: (_PLANS[unit.NAME],))
    patch.setattr(matrix_units, "slices_of", lambda *_: slices)
    return engine.NAME


@pytest.fixture
def emulate(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, unit: MatrixConv) -> Callable[..., str]:
    usual = INSTRUCTIONS if unit.may_work(capabilities(queue)) else LATE
    return partial(by_plan, monkeypatch, unit, copies=usual)


@pytest.mark.parametrize("name", sweep(CASES, lambda n: n % 4 == 2))
def test_geometries(queue: cl.CommandQueue, simulated: bool, emulate: Callable[..., str], name: str) -> None:
    if simulated and name != "stride 4, dilation 2":
        pytest.skip("slow to simulate")
    check(queue, CASES[name], emulate())


@pytest.mark.parametrize("out_dtype", STORAGE_DTYPES)
def test_storage_types(queue: cl.CommandQueue, emulate: Callable[..., str], out_dtype: str) -> None:
    dtype = next(x for x in HALF_DTYPES if x != out_dtype)
    case = Case(1, 2, 3, (3, 8), (3, 3), pad=(1, 1))
    check(queue, case, emulate(copies=AT_ONCE), (dtype, dtype, dtype, out_dtype))


@pytest.mark.parametrize("features", sweep([1, 8, 31, 33, 65], lambda n: n == 1))
def test_numbers_of_channels(
    queue: cl.CommandQueue, simulated: bool, emulate: Callable[..., str], unit: MatrixConv, features: int
) -> None:
    if simulated and unit is WGMMA:
        pytest.skip("slow to simulate; storage types are")
    if not simulated:  # slow there
        check(queue, Case(2, features, features, (3, 6), (3, 3), pad=(1, 1), groups=2), emulate())
    check(queue, Case(2, features, 9, (4, 8), (1, 1), groups=2), emulate())


@pytest.mark.unsimulated
@pytest.mark.parametrize("slices", sweep([3, 9], lambda n: n == 0))
def test_slices_of_positions(
    queue: cl.CommandQueue, emulate: Callable[..., str], unit: MatrixConv, slices: int
) -> None:
    check(queue, Case(3, 2, 5, (9, 11), (3, 3), pad=(1, 1), groups=2), emulate(slices=slices))


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4)])
def test_nothing_to_sum(queue: cl.CommandQueue, emulate: Callable[..., str], shape: tuple[int, ...]) -> None:
    n, c, h, w = shape
    check(queue, Case(n, c, 3, (h, w), (3, 3), pad=(2, 2)), emulate())


@pytest.mark.unsimulated
@pytest.mark.slow
def test_plans_of_gpus(queue: cl.CommandQueue, unit: MatrixConv) -> None:
    """The trials themselves, in plain C."""
    for number, plan in enumerate(unit.plans):
        if plan.local_memory_bytes <= capabilities(queue).local_memory_bytes:
            dtypes = HALF_DTYPES if unit is MMA else HALF_DTYPES[number % 2 :][:1]
            engine = replace(unit, emulate=AT_ONCE)
            some = [case for case in engine.cases(plan) if case[0] in dtypes]
            assert all(engine.computes(plan, queue, *case) for case in some), plan


@pytest.mark.simulated_elsewhere
def test_infinities_and_nan_stay_where_they_are(queue: cl.CommandQueue, emulate: Callable[..., str]) -> None:
    infinities_and_nan_stay_where_they_are(queue, emulate(), "bfloat16")


@pytest.mark.simulated_elsewhere
def test_weights_whose_sums_do_not_read_an_infinity_stay_finite(
    queue: cl.CommandQueue, emulate: Callable[..., str]
) -> None:
    weights_whose_sums_do_not_read_an_infinity_stay_finite(queue, emulate())


def test_what_32_bits_do_not_count_is_left_to_another_engine(queue: cl.CommandQueue, unit: MatrixConv) -> None:
    def problem(images: int) -> Problem:
        shape, window = (16, 16, 3, 3), ops.Window(pad=(1, 1))
        device = capabilities(queue)
        return Problem("", HALF_DTYPES[:1] * 2, "float32", images, (1024, 1024), shape, window, device, {unit.NAME})

    assert unit.fits(problem(2047 - 1))
    assert not unit.fits(problem(2048))


def test_an_image_without_rows_has_an_empty_gradient(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    by_plan(monkeypatch, MMA)
    grad, w = (to_device(queue, np.ones(shape), "float16") for shape in ((2, 3, 2, 6), (3, 2, 3, 3)))
    assert ops.conv2d_input_grad(grad, w, (0, 4), Window(pad=(2, 2)), out_dtype="float32").shape == (2, 2, 0, 4)
