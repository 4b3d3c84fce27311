"""An engine that must be proved is used where the proof passed, and nowhere else: no device of the tests is a GPU, so
what the device can do is pretended, and the engine runs in plain C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import program
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import KernelBuildError
from clamp.ops.gemm import engines, gemm, mma, proof
from clamp.ops.gemm.mma import Plan
from tests.reference import HALF_DTYPES, to_device, to_numpy

_COMPUTE = mma.compute
_PLANS = (Plan(16, 32, 16, 2, (1, 1)), Plan(32, 16, 32, 3, (2, 1)))


@pytest.fixture(autouse=True)
def nothing_is_proved_yet() -> object:
    forget = proof.is_proved.cache_clear
    forget()
    yield
    forget()


@pytest.fixture
def sm_80(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> Capabilities:
    """Lets the queue's device pass for a GPU with matrix units; its engine runs in plain C."""
    device = replace(capabilities(queue), is_cpu=False, dot_bf16=False, compute_capability=(8, 0))
    for module in (engines, proof, mma):
        monkeypatch.setattr(module, "capabilities", lambda queue: device)
    monkeypatch.setattr(mma, "PLANS", _PLANS)
    monkeypatch.setattr(mma, "compute", partial(_COMPUTE, emulate=1))
    return device


def product(queue: cl.CommandQueue, dtype: str = "float16") -> Any:
    return gemm(to_device(queue, np.ones((3, 8)), dtype), to_device(queue, np.ones((8, 5)), dtype), out_dtype=dtype)


def test_a_gpu_on_which_the_proof_passes_uses_the_engine(
    queue: cl.CommandQueue, sm_80: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = program.built_programs()
    assert proof.proved(queue) == {"mma"}
    assert program.built_programs() == held, "the proof's programs are let go"
    for dtype in HALF_DTYPES:
        assert engines.usual(queue, dtype) is mma
        assert "products of " + dtype + ": mma kernel" in engines.on_device(queue, dtype)
        np.testing.assert_array_equal(to_numpy(product(queue, dtype)), np.full((3, 5), 8.0))
    assert engines.usual(queue, "float32").NAME == "tiled"
    monkeypatch.setattr(mma, "compute", _raise(AssertionError("the proof is made once")))
    assert engines.usual(queue, "float16") is mma


def _raise(error: BaseException) -> Callable[..., None]:
    def raises(*args: object, **options: object) -> None:
        raise error

    return raises


def _wrong(left: Any, right: Any, c: Any, *others: Any) -> None:
    """In one of the layouts one element is the next larger number."""
    _COMPUTE(left, right, c, *others, emulate=1)
    if left.stride_k != 1 and right.stride_k == 1:
        bits = np.empty(c.shape, np.uint32 if c.dtype == "float32" else np.uint16)
        cl.enqueue_copy(c.queue, bits, c.buffer)
        bits[-1, -1] += 1
        cl.enqueue_copy(c.queue, c.buffer, bits)


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(_raise(KernelBuildError("asm is refused")), id="does not build"),
        pytest.param(_raise(cl.RuntimeError("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES")), id="does not launch"),
        pytest.param(_raise(MemoryError()), id="something else"),
        pytest.param(lambda *args: None, id="writes nothing"),
        pytest.param(_wrong, id="one wrong number"),
    ],
)
def test_whatever_goes_wrong_in_the_proof_leaves_the_engine_out(
    queue: cl.CommandQueue, sm_80: Capabilities, monkeypatch: pytest.MonkeyPatch, compute: Callable[..., None]
) -> None:
    monkeypatch.setattr(mma, "compute", compute)
    assert proof.proved(queue) == frozenset()
    assert engines.usual(queue, "float16").NAME == "tiled"
    np.testing.assert_array_equal(to_numpy(product(queue)), np.full((3, 5), 8.0))


def test_a_context_that_is_not_to_be_had_leaves_the_engine_out(
    queue: cl.CommandQueue, sm_80: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof.cl, "Context", _raise(cl.MemoryError("clCreateContext failed: OUT_OF_HOST_MEMORY")))
    assert proof.proved(queue) == frozenset()


def test_other_devices_prove_nothing(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    if proof.may_work(capabilities(queue)):
        pytest.skip("a device with matrix units")
    monkeypatch.setattr(proof, "is_proved", _raise(AssertionError("proved")))
    assert proof.proved(queue) == frozenset()
    product(queue)
    with pytest.raises(ValueError, match=r"gemm: the engine mma does not compute float16 by float16.*NVIDIA GPU"):
        gemm(*[to_device(queue, np.ones((4, 4)), "float16")] * 2, out_dtype="float16", engine="mma")


def test_generations_before_the_instructions_are_not_tried() -> None:
    for number in ((7, 5), (0, 0)):
        assert not proof.may_work(_capable(number))
    for number in ((8, 0), (8, 6), (9, 0), (12, 0)):
        assert proof.may_work(_capable(number))


def _capable(number: tuple[int, int]) -> Capabilities:
    return Capabilities(False, 108, True, 4352, 49152, 1024, 1, False, False, compute_capability=number)


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
    chosen = mma._plan(m, n, matrices, 108)
    assert chosen is mma.PLANS[plan]
    assert mma._slices(chosen.tiles(m, n) * matrices, k, 108) == slices


def test_the_plans_fit_what_every_such_gpu_has() -> None:
    for plan in mma.PLANS:
        pipeline = plan.stages * (plan.rows + plan.columns) * plan.k * 2
        slabs = plan.warps[0] * plan.warps[1] * 16 * (plan.columns // plan.warps[1] + 8) * 4
        assert max(pipeline, slabs) <= 48 * 1024
        assert plan.threads <= 1024
