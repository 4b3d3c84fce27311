"""An engine that must be verified is used where its trials passed, and nowhere else: no device of the tests is a GPU,
so what the device can do is pretended, and the engine runs in plain C, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import program, trials
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import KernelBuildError
from clamp.ops import verified
from clamp.ops.gemm import engines, gemm, matrix_units, tiled
from clamp.ops.gemm.engines import MATRIX_UNITS
from clamp.ops.gemm.matrix_units import DPAS_8, DPAS_16, MMA, RDNA3, RDNA4, WGMMA, MatrixUnit
from clamp.ops.gemm.plan import Plan, best_plan, slices_of, tiles_of
from clamp.ops.verified import names_of_verified
from tests.reference import HALF_DTYPES, to_device, to_numpy

_LARGE, _SMALL = Plan(32, 16, 32, 3, (2, 1)), Plan(16, 32, 16, 2, (1, 1))


@dataclass(frozen=True)
class _Pretended(MatrixUnit):
    """An engine that does something else before."""

    instead: Callable[..., None] | None = None

    def bind_by(self, *product: Any) -> Callable[..., None]:
        if self.instead is not None:
            self.instead(*product)
        return super().bind_by(*product)


def pass_for_a_gpu(queue: cl.CommandQueue, patch: pytest.MonkeyPatch, unit: MatrixUnit) -> None:
    """Lets the queue's device pass for a GPU that has this matrix unit, whose trials run in this process."""
    device = replace(capabilities(queue), is_cpu=False, dot_bf16=False, compute_capability=(8, 0))
    for module in (engines, matrix_units, verified):
        patch.setattr(module, "capabilities", lambda queue: device)
    patch.setattr(engines, "ENGINES", (unit, tiled))
    patch.setattr(engines, "MATRIX_UNITS", (unit,))
    patch.setattr(trials, "_verdicts", {})
    patch.setattr(trials, "resolve_name", {x.where: x for x in (unit, unit.candidates)}.__getitem__)
    patch.setattr(trials, "_tried", tried_here)
    patch.setattr(trials, "begin", lambda *_: None)


def tried_here(device: cl.Device, where: str, names: Sequence[str]) -> dict[str, str]:
    found = trials.tried_here(device, trials.resolve_name(where), names)
    return {name: verdict for name, verdict in found if verdict is not None}


@pytest.fixture
def pretend(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MatrixUnit]:
    """Makes the device pass for such a GPU; what its engine does instead may be given."""
    monkeypatch.setenv("CLAMP_CACHE_DIR", "off")

    def make(instead: Callable[..., None] | None = None) -> MatrixUnit:
        unit = _Pretended(**vars(replace(MMA, plans=(_LARGE, _SMALL), emulate=1)), instead=instead)
        pass_for_a_gpu(queue, monkeypatch, unit)
        return unit

    return make


def product(queue: cl.CommandQueue, dtype: str = "float16") -> Any:
    return gemm(to_device(queue, np.ones((3, 8)), dtype), to_device(queue, np.ones((8, 5)), dtype), out_dtype=dtype)


@pytest.mark.slow
@pytest.mark.once
def test_a_gpu_on_which_the_trials_pass_uses_the_engine(
    queue: cl.CommandQueue, pretend: Callable[..., MatrixUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, held = pretend(), program.built_programs()
    assert names_of_verified(engines.MATRIX_UNITS, queue) == {"mma"}
    assert unit.verified_plans(queue) == (_LARGE, _SMALL)
    assert program.built_programs() == held, "the programs of the trials are let go"
    for dtype in HALF_DTYPES:
        assert engines.usual(queue, dtype) is unit
        assert "products of " + dtype + ": mma kernel" in engines.on_device(queue, dtype)
        np.testing.assert_array_equal(to_numpy(product(queue, dtype)), np.full((3, 5), 8.0))
    assert engines.usual(queue, "float32") is tiled
    monkeypatch.setattr(trials, "_tried", _raise(AssertionError("it is tried once")))
    assert engines.usual(queue, "float16") is unit


def _raise(error: BaseException) -> Callable[..., None]:
    def raises(*args: object, **options: object) -> None:
        raise error

    return raises


def _refuse_the_large(left: Any, right: Any, c: Any, epilogue: Any, plan: Plan, *others: Any) -> None:
    if plan is _LARGE:
        raise cl.RuntimeError("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES")


@pytest.mark.once
def test_a_plan_that_fails_leaves_the_others(queue: cl.CommandQueue, pretend: Callable[..., MatrixUnit]) -> None:
    unit = pretend(_refuse_the_large)
    assert unit.verdicts(queue)[str(_LARGE)] == "RuntimeError: clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES"
    assert unit.verified_plans(queue) == (_SMALL,)
    np.testing.assert_array_equal(to_numpy(product(queue)), np.full((3, 5), 8.0))


def _compute_wrong(left: Any, right: Any, *others: Any) -> None:
    """In one of the layouts one element of an operand is the next larger number."""
    if left.stride_k != 1 and right.stride_k == 1:
        bits = np.empty(right.tensor.shape, np.uint16)
        cl.enqueue_copy(right.tensor.queue, bits, right.tensor.buffer)
        bits[-1, -1] += 1
        cl.enqueue_copy(right.tensor.queue, right.tensor.buffer, bits)


def _flush_subnormals(left: Any, *others: Any) -> None:
    """Takes halves that are subnormal for zero."""
    if left.storage == "f16":
        bits = np.empty(left.tensor.shape, np.uint16)
        cl.enqueue_copy(left.tensor.queue, bits, left.tensor.buffer)
        bits[bits & 0x7C00 == 0] = 0
        cl.enqueue_copy(left.tensor.queue, left.tensor.buffer, bits)


#: what fails in the trials: the engine's own work, or what is replaced
FAILS: dict[str, Callable[..., None] | tuple[Any, str, Callable[..., None]]] = {
    "does not build": _raise(KernelBuildError("asm is refused")),
    "does not launch": _raise(cl.RuntimeError("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES")),
    "something else": _raise(MemoryError()),
    "one wrong number": _compute_wrong,
    "subnormals are zero": _flush_subnormals,
    "writes nothing": (_Pretended, "compute", lambda self, *product: None),
    "no context": (trials.cl, "Context", _raise(cl.MemoryError("clCreateContext failed: OUT_OF_HOST_MEMORY"))),
}


@pytest.mark.parametrize("what", FAILS)
@pytest.mark.once
def test_whatever_goes_wrong_in_the_trials_leaves_the_engine_out(
    queue: cl.CommandQueue, pretend: Callable[..., MatrixUnit], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fails = FAILS[what]
    pretend(None if isinstance(fails, tuple) else fails)
    with monkeypatch.context() as patch:
        if isinstance(fails, tuple):
            patch.setattr(*fails)
        assert names_of_verified(engines.MATRIX_UNITS, queue) == frozenset()
    assert engines.usual(queue, "float16") is tiled
    np.testing.assert_array_equal(to_numpy(product(queue)), np.full((3, 5), 8.0))


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(unit, id=unit.NAME, marks=pytest.mark.slow if unit in (RDNA3, RDNA4, DPAS_8, DPAS_16) else [])
        for unit in MATRIX_UNITS
    ],
)
def test_the_instructions_themselves_are_refused_by_other_devices(queue: cl.CommandQueue, unit: MatrixUnit) -> None:
    """In a process of its own: what a compiler makes of them is nobody's promise."""
    if capabilities(queue).instructions:
        pytest.skip("a GPU with matrix instructions")
    names = [str(plan) for plan in unit.plans[-1:]]
    found = trials._tried(queue.device, unit.where, names)
    assert found.keys() == set(names)
    assert trials.RIGHT not in found.values()


def test_other_devices_prove_nothing(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    if MMA.may_work(capabilities(queue)):
        pytest.skip("a device with matrix units")
    monkeypatch.setattr(trials, "verdicts", _raise(AssertionError("tried")))
    assert names_of_verified(engines.MATRIX_UNITS, queue) == frozenset()
    product(queue)
    with pytest.raises(ValueError, match=r"gemm: the engine mma does not compute float16 by float16.*NVIDIA GPU"):
        gemm(*[to_device(queue, np.ones((4, 4)), "float16")] * 2, out_dtype="float16", engine="mma")


def test_other_generations_are_not_tried() -> None:
    for unit, without, those_with in (
        (MMA, ((7, 5), (0, 0)), ((8, 0), (8, 6), (9, 0), (12, 0))),
        (WGMMA, ((8, 9), (10, 0), (12, 0), (0, 0)), ((9, 0),)),
        (RDNA3, ((9, 0), (10, 3), (12, 0), (0, 0)), ((11, 0), (11, 5))),
        (RDNA4, ((11, 5), (12, 5), (0, 0)), ((12, 0),)),
    ):
        kind = "gfx" if unit in (RDNA3, RDNA4) else "compute_capability"
        assert not any(unit.may_work(_capable({kind: number})) for number in without)
        assert all(unit.may_work(_capable({kind: number})) for number in those_with)


def test_where_intel_lists_its_instruction_both_sizes_of_sub_groups_are_tried() -> None:
    for unit in (DPAS_8, DPAS_16):
        assert unit.may_work(_capable({"dpas": True}))
        assert not unit.may_work(_capable({}))
    assert MATRIX_UNITS.index(DPAS_8) < MATRIX_UNITS.index(DPAS_16), "a GPU of 8 takes 16 as well, slowly"


def _capable(numbers: dict[str, Any]) -> Capabilities:
    return Capabilities(False, 108, True, 4352, 49152, 1024, 1, False, False, **numbers)


@pytest.mark.parametrize(
    ("shape", "matrices", "plan", "slices"),
    [
        ((8192, 8192, 8192), 1, 0, 1),
        ((1408, 1408, 64), 1, 0, 1),
        ((1280, 1280, 64), 1, 1, 1),
        ((65, 2**16, 64), 1, 0, 1),
        ((64, 2**16, 64), 1, 1, 1),
        ((64, 64, 4096), 1, 1, 16),
        ((64, 64, 4096), 64, 1, 1),
        ((128, 128, 511), 1, 1, 1),
        ((128, 128, 512), 1, 1, 2),
        ((1, 1, 2**20), 1, 1, 108),
        ((5, 5, 0), 1, 1, 1),
    ],
)
def test_the_plan_is_a_matter_of_extents(shape: tuple[int, int, int], matrices: int, plan: int, slices: int) -> None:
    m, n, k = shape
    chosen = best_plan(MMA.plans, m, n, matrices, 108)
    assert chosen is MMA.plans[plan]
    assert slices_of(tiles_of(chosen, m, n) * matrices, k, 108) == slices


def test_the_last_plan_fits_what_every_such_gpu_has() -> None:
    for unit in MATRIX_UNITS:
        assert unit.plans[-1].local_memory_bytes <= 48 * 1024
        assert all(plan.threads <= 1024 for plan in unit.plans)
        assert len({str(plan) for plan in unit.plans}) == len(unit.plans), "verdicts go by names"
