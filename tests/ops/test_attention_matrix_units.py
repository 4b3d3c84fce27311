"""Attention on matrix units against float64 of the stored values: in plain C on any device (EMULATE), by the
instructions where the device has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import trials
from clamp.opencl.device import capabilities
from clamp.ops import attention as ops
from clamp.ops import verified
from clamp.ops.attention.matrix_units import MMA
from clamp.ops.attention.problem import Problem
from clamp.ops.gemm.plan import Plan
from tests.ops import test_attention
from tests.ops.test_attention import check, normal, rounded
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, to_device, to_numpy
from tests.sweep import sweep

pytestmark = [pytest.mark.kernel, pytest.mark.once]

INSTRUCTIONS, AT_ONCE, LATE = 0, 1, 2  # when copies to local memory arrive (kernels/async_copy.clh)
SMALL = Plan(32, 32, 128, 2, (2, 1))
ONE_WARP = Plan(16, 32, 128, 2, (1, 1))  # for the simulator


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


def by_plan(patch: pytest.MonkeyPatch, plan: Plan = SMALL, copies: int = LATE) -> None:
    """Makes attention know an emulated engine only."""
    engine = replace(MMA, NAME="emulated", plans=(plan,), emulate=copies)
    patch.setattr(ops, "ENGINES", (engine,))
    patch.setattr(ops, "names_of_verified", lambda *_: frozenset({engine.NAME}))


@pytest.fixture
def emulate(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    make = partial(by_plan, monkeypatch, copies=INSTRUCTIONS if MMA.may_work(capabilities(queue)) else LATE)
    make()
    return make


def check_half(
    queue: cl.CommandQueue, shape: tuple[int, ...], dtype: str, causal: bool, *, scale: float | None = None,
    out_dtypes: tuple[str, ...] = ("float32",) * 4,
) -> None:  # fmt: skip
    """Attention of normal numbers and its gradients."""
    tensors, (out, *grads) = normal(queue, sum(shape), shape, *[dtype] * 4), out_dtypes
    check(tensors, causal, scale, out, tuple(grads), rounded(dtype))


@pytest.mark.parametrize(("dtype", "causal"), sweep([("float16", True), ("bfloat16", False)]))
def test_several_steps_and_groups(
    queue: cl.CommandQueue, simulated: bool, emulate: Callable[..., None], dtype: str, causal: bool
) -> None:
    if simulated:
        emulate(ONE_WARP)
    check_half(queue, (1, 1, 17, 5) if simulated else (1, 2, 71, 24), dtype, causal)


@pytest.mark.unsimulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, "float16"), (16, "bfloat16"), (24, "float16"), (64, "bfloat16"), (80, "bfloat16"), (128, "float16")],
)
def test_shapes(queue: cl.CommandQueue, emulate: Callable[..., None], width: int, dtype: str) -> None:
    for copies in (AT_ONCE, LATE) if width in (24, 80) else (LATE,):
        emulate(copies=copies)
        for length, causal in ((1, True), (17, False), (64, False), (65, True), (97, False)):
            check_half(queue, (1, 2, length, width), dtype, causal)


@pytest.mark.unsimulated
@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "dtype"), [*zip(MMA.plans, HALF_DTYPES, strict=True)], ids=str)
def test_plans_of_gpus(queue: cl.CommandQueue, plan: Plan, dtype: str) -> None:
    """The trials themselves, in plain C."""
    engine = replace(MMA, emulate=AT_ONCE)
    assert all(engine.computes(plan, queue, *case) for case in engine.cases(plan) if case[0] == dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("number", range(3))
def test_storage_types(queue: cl.CommandQueue, emulate: Callable[..., None], number: int, dtype: str) -> None:
    types = STORAGE_DTYPES[number:] + STORAGE_DTYPES[:number]
    check_half(queue, (1, 1, 18, 5), dtype, True, scale=-0.3, out_dtypes=(*types, types[0]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_special_values(queue: cl.CommandQueue, emulate: Callable[..., None], dtype: str) -> None:
    test_attention.test_rows_of_nothing_but_minus_infinity_and_nans(queue, "emulated")
    if dtype == "float16":
        test_attention.test_large_scores(queue, "emulated", dtype)
    # What a query with a NaN adds to gradients reaches those that it sees (and keys of its block, as 0 times NaN).
    q, k, v, g = (np.ones((1, 1, 40, 3)) for _ in range(4))
    q[0, 0, 35] = np.nan
    found = test_attention.computed([to_device(queue, x, dtype) for x in (q, k, v, g)], True, None, dtype, (dtype,) * 3)
    dq, dk, dv = (to_numpy(x)[0, 0, :, 0] for x in found[2:])
    np.testing.assert_array_equal(np.isnan(dq), np.arange(40) == 35)
    np.testing.assert_array_equal(np.isnan(dv), np.arange(40) <= 35)
    assert np.isnan(dk[:36]).all()


@pytest.mark.slow
def test_a_query_without_keys_has_no_gradient(queue: cl.CommandQueue, emulate: Callable[..., None]) -> None:
    test_attention.check_a_query_without_keys(queue, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0**-20, 2.0**-8, 6e4])
def test_slopes_of_scores_neither_overflow_nor_vanish_in_float16(
    queue: cl.CommandQueue, emulate: Callable[..., None], size: float
) -> None:
    """Gradients that float16 just holds, and slopes of scores that it would not; first small ones, and first large."""
    q, k, v, g = normal(queue, 7, (1, 1, 70, 16), *["float16"] * 4)
    for falling in (False, True):
        sizes = size * 4.0 ** -(np.arange(70) // 16)[:: 1 if falling else -1]
        grad = to_device(queue, np.sign(to_numpy(g)) * sizes[:, None], "float16")
        check([q, k, v, grad], False, None, "float32", ("float32",) * 3, rounded("float16"))


@pytest.mark.slow
def test_infinite_slopes_are_not_hidden(queue: cl.CommandQueue, emulate: Callable[..., None]) -> None:
    q, k, v, g = (to_numpy(x) for x in normal(queue, 8, (1, 1, 40, 16), *["float16"] * 4))
    g[0, 0, 7, 3] = np.inf
    tensors = [to_device(queue, x, "float16") for x in (q, k, v, g)]
    _, _, dq, dk, dv = test_attention.computed(tensors, False, None, "float16", ("float16",) * 3)
    np.testing.assert_array_equal(np.isfinite(to_numpy(dq)).all(-1)[0, 0], np.arange(40) != 7)
    assert not np.isfinite(to_numpy(dk)).any()
    np.testing.assert_array_equal(np.isfinite(to_numpy(dv)).all((0, 1, 2)), np.arange(16) != 3)


@pytest.mark.slow
def test_the_same_input_gives_the_same_bits(
    queue: cl.CommandQueue, simulated: bool, emulate: Callable[..., None]
) -> None:
    test_attention.test_the_same_input_gives_the_same_bits(queue, simulated, "emulated")


def test_what_is_not_of_one_16_bit_type_or_wide_is_left_to_another_engine(queue: cl.CommandQueue) -> None:
    def fits(storage: tuple[str, ...], width: int = 128, verified: frozenset[str] = frozenset({"mma"})) -> bool:
        return MMA.fits(Problem(2, 3, width, True, 1.0, storage, capabilities(queue), verified))

    assert fits(("f16",) * 3)
    assert fits(("bf16",) * 4)
    assert not fits(("f16",) * 3, width=129)
    assert not fits(("f32",) * 3)
    assert not fits(("f16", "f16", "f16", "f32")), "the gradient of a float32 result"
    assert not fits(("f16", "bf16", "f16"))
    assert not fits(("f16",) * 3, verified=frozenset())


@pytest.mark.parametrize(("wrong", "used"), [((), True), ((0,), False), ((1,), False)])
def test_it_is_used_where_each_of_its_plans_is_proved(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...], used: bool
) -> None:
    verdicts = {str(plan): "wrong" if n in wrong else trials.RIGHT for n, plan in enumerate(MMA.plans)}
    device = replace(capabilities(queue), is_cpu=False, compute_capability=(8, 6))
    monkeypatch.setattr(verified, "capabilities", lambda queue: device)
    monkeypatch.setattr(trials, "verdicts", lambda *_, **__: verdicts)
    assert MMA.is_verified(queue) is used
    assert ("mma.sync" in ops.on_device(queue, "float16")) is used
    assert "mma.sync" not in ops.on_device(queue, "float32")
