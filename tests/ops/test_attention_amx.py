"""Attention on the matrix unit of processors: in plain C on any device, and by the unit where there is one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import attention as ops
from clamp.ops.attention import amx, blocked
from clamp.ops.engine import always
from tests.mutants import write_wrong
from tests.ops.test_attention import check, check_rows_of_nothing_but_minus_infinity_and_nans, computed, normal
from tests.ops.test_attention_matrix_units import rounded
from tests.reference import assert_same, to_device, to_numpy

pytestmark = pytest.mark.kernel

BFLOAT16 = ("bfloat16",) * 4
SHAPES = [(1, 1, 1, 1), (2, 3, 37, 7), (1, 2, 64, 64), (1, 1, 131, 33), (1, 1, 300, 40)]


class Always:
    """The engine for every shape, in plain C if it is to ``emulate`` the unit."""

    NAME, TAKES, IN_WORDS = "always", amx.TAKES, amx.IN_WORDS
    fits = pays = staticmethod(always)

    def __init__(self, emulate: bool) -> None:
        self.forward, self.backward = partial(amx.forward, emulate=emulate), partial(amx.backward, emulate=emulate)


@pytest.fixture(params=["the unit", "plain C"])
def engine(request: pytest.FixtureRequest, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes attention know this engine only."""
    if request.param == "the unit" and not capabilities(queue).amx:
        pytest.skip("the processor has no such instruction")
    monkeypatch.setattr(ops, "ENGINES", (Always(request.param == "plain C"),))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(queue: cl.CommandQueue, simulated: bool, shape: tuple[int, ...], causal: bool) -> None:
    if simulated and shape != (2, 3, 37, 7):
        pytest.skip("slow to simulate")
    shape = (1, 1, *shape[2:]) if simulated else shape
    check(normal(queue, 3, shape, *BFLOAT16), causal, None, "float32", ("float32",) * 3, rounded("two parts"))


@pytest.mark.unsimulated
@pytest.mark.usefixtures("engine")
def test_storage_types(queue: cl.CommandQueue) -> None:
    grads = ("bfloat16", "float32", "float16")
    check(normal(queue, 4, (1, 2, 18, 5), *BFLOAT16), True, -0.3, "bfloat16", grads, rounded("two parts"))


@pytest.mark.unsimulated
@pytest.mark.usefixtures("engine")
def test_many_heads_share_work_items(queue: cl.CommandQueue) -> None:
    tensors = normal(queue, 4, (3, 50, 3, 4), *BFLOAT16)
    check(tensors, True, None, "float32", ("float32",) * 3, rounded("two parts"))


@pytest.mark.unsimulated
@pytest.mark.usefixtures("engine")
def test_rows_of_nothing_but_minus_infinity_and_nans(queue: cl.CommandQueue) -> None:
    check_rows_of_nothing_but_minus_infinity_and_nans(queue, "bfloat16")


@pytest.mark.unsimulated
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_reaches_the_same_gradients(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, which: int, value: float
) -> None:
    """As in register tiles: rows that pad a tile have no part in it."""
    arrays = [np.abs(to_numpy(x)) for x in normal(queue, 5, (1, 2, 3, 4), *BFLOAT16)]
    arrays[which][0, 1, 1, 2] = value
    tensors = [to_device(queue, x, "bfloat16") for x in arrays]
    found = computed(tensors)
    monkeypatch.setattr(ops, "ENGINES", (blocked,))
    assert_same(*([np.isfinite(to_numpy(x)) for x in (out, *grads)] for out, _, *grads in (found, computed(tensors))))


@pytest.mark.unsimulated
@pytest.mark.usefixtures("engine")
def test_slopes_beyond_floats_are_infinite(queue: cl.CommandQueue) -> None:
    ones = np.ones((1, 1, 2, 4))
    arrays = ones * 1e-19, ones * 1e-18, ones * [[[[40], [1]]]], ones * 40
    *_, dk, _ = computed([to_device(queue, x, "bfloat16") for x in arrays], scale=1e37)
    np.testing.assert_array_equal(to_numpy(dk), ones * [[[[np.inf], [-np.inf]]]])


def test_the_unit_has_the_bits_of_plain_c(amx_queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, found = normal(amx_queue, 6, (1, 3, 150, 40), *BFLOAT16), []
    for emulate in (False, True):
        monkeypatch.setattr(ops, "ENGINES", (Always(emulate),))
        found.append([to_numpy(x).view(np.uint32) for x in computed(tensors, True)])
    assert_same(*found)


#: what is wrong, and the pieces of the kernel's source
MUTANTS = [
    ("the second part is missing", "sums, steps, 1);", "sums, 1, resume);"),
    ("results are not rescaled", "LOAD_ANY(float16, r) * rescale", "LOAD_ANY(float16, r)"),
    ("keys beyond the last count", "(int)T - 1)", "(int)T)"),
    ("later keys count", "(int)(first + (row))", "(int)(first + (row) + 1)"),
    ("rows that pad a tile have a part in it", "is_real = row < inside", "is_real = true"),
    ("pairs of rows change places", "low | convert_uint16(LOAD_ANY(ushort16, s + pitch)) << 16",
     "low << 16 | convert_uint16(LOAD_ANY(ushort16, s + pitch))"),
    ("keys of the second block are the first's", "d / SIDE * panel + key0 / SIDE * SUMS / 2", "d / SIDE * panel"),
    ("an infinite part has a rest", "(high & 0x7fffffffu) == 0x7f800000u", "high == 1"),
]  # fmt: skip


@pytest.mark.unsimulated
@pytest.mark.parametrize(("old", "new"), [pytest.param(*mutant[1:], id=mutant[0]) for mutant in MUTANTS])
@pytest.mark.long
@pytest.mark.once
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    write_wrong(monkeypatch, "attention_amx.cl", old, new)
    monkeypatch.setattr(ops, "ENGINES", (Always(True),))

    def is_right() -> None:
        for causal in (False, True):
            tensors = normal(queue, 3, (1, 1, 131, 33), *BFLOAT16)
            check(tensors, causal, None, "float32", ("float32",) * 3, rounded("two parts"))
        for which in (0, 2, 3):
            test_what_is_not_finite_reaches_the_same_gradients(queue, monkeypatch, which, np.inf)
            monkeypatch.setattr(ops, "ENGINES", (Always(True),))
        test_slopes_beyond_floats_are_infinite(queue)

    with pytest.raises(AssertionError):
        is_right()
