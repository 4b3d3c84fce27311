"""Convolutions on the matrix unit of processors: what other engines do not have, its blocks, runs and panels."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import conv as ops
from clamp.ops.conv import amx, engines
from tests.mutants import write_wrong
from tests.ops.conv_reference import Case, check, weight_grad
from tests.ops.test_conv import CASES, AmxInPlainC, infinities_and_nan_stay_where_they_are
from tests.reference import HALF_DTYPES, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

Array = npt.NDArray[Any]
PLAIN_C = AmxInPlainC.NAME
SEVERAL = {
    "runs of several groups": Case(2, 3, 5, (21, 20), (3, 3), pad=(1, 1)),
    "rows of whole runs": Case(1, 5, 33, (5, 64), (3, 3), pad=(1, 1)),
    "steps of several parts": Case(1, 70, 3, (3, 5), (3, 3), pad=(1, 1)),
    "panels": Case(2, 33, 65, (4, 6), (3, 2)),
    "remainders of several heights": Case(3, 3, 34, (7, 10), (3, 3), (3, 2), (1, 1), groups=2),
    "remainders without taps": Case(2, 3, 4, (9, 7), (1, 1), (3, 2)),
}


@pytest.fixture
def in_plain_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ENGINES", (AmxInPlainC(),))


@pytest.mark.usefixtures("in_plain_c")
@pytest.mark.parametrize("words", [1, 600, 2**17])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_of_each(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, name: str, words: int
) -> None:
    """Blocks of one row, of some, and of whole images."""
    if simulated and (name, words) != ("remainders of several heights", 600):
        pytest.skip("slow to simulate")
    monkeypatch.setattr(amx, "_STAGED_WORDS", words)
    check(queue, SEVERAL[name], PLAIN_C)


@pytest.mark.unsimulated
@pytest.mark.usefixtures("in_plain_c")
@pytest.mark.parametrize("items", [1, 16])
def test_shares_of_work(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """One work-item for all, and more than there are images: panels are shared out, and channels of a gradient."""
    monkeypatch.setattr(amx, "_ITEMS_PER_CORE", items)
    check(queue, Case(3, 65, 40, (5, 6), (3, 3), pad=(1, 1)), PLAIN_C)


@pytest.mark.unsimulated
@pytest.mark.usefixtures("in_plain_c")
@pytest.mark.parametrize("name", ["panels", "remainders of several heights"])
def test_float16_in_two_parts(queue: cl.CommandQueue, name: str) -> None:
    check(queue, SEVERAL[name], PLAIN_C, ("float16", "float16", "float16", "float32"))


@pytest.mark.usefixtures("in_plain_c")
def test_float16_as_it_is(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataclasses.replace(capabilities(queue), amx_fp16=True)
    monkeypatch.setattr(amx, "capabilities", lambda queue: found)
    check(queue, CASES["stride 2"], PLAIN_C, ("float16",) * 4)


_TYPES = ["bfloat16", "float16 in two parts", "float16"]
_CASES = product(["rows of whole runs", "panels", "remainders of several heights"], [1.0, np.inf], _TYPES)


@pytest.mark.parametrize(("name", "value", "type_"), sweep(_CASES, lambda n: n % 5 == 0))  # each value is met
def test_the_unit_has_the_bits_of_plain_c(
    amx_queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, name: str, value: float, type_: str
) -> None:
    device = capabilities(amx_queue)
    if type_ == "float16" and not device.amx_fp16:
        pytest.skip("the unit does not multiply float16 as it is")
    monkeypatch.setattr(amx, "capabilities", lambda queue: dataclasses.replace(device, amx_fp16=type_ == "float16"))
    case = SEVERAL[name]
    arrays = case.arrays()
    arrays[0][0, 1, 2, 1] = arrays[2][0, 1, 1, 2] = value
    x, w, g = (to_device(amx_queue, array, type_.partition(" ")[0]) for array in arrays)

    def computed(engine: str) -> list[Array]:
        options: Any = {"out_dtype": "float32", "engine": engine}
        return [
            to_numpy(ops.conv2d(x, w, case.window, **options)),
            to_numpy(ops.conv2d_input_grad(g, w, case.image, case.window, **options)),
            to_numpy(ops.conv2d_weight_grad(x, g, case.kernel, case.window, **options)),
        ]

    by_unit = computed("amx")
    monkeypatch.setattr(engines, "ENGINES", (AmxInPlainC(),))
    for found, expected in zip(by_unit, computed(PLAIN_C), strict=True):
        np.testing.assert_array_equal(found, expected)  # which takes nan for nan
        assert np.isfinite(found).any()


@pytest.mark.usefixtures("in_plain_c")
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.simulated_elsewhere
def test_what_is_not_finite_reaches_the_weights_that_read_it(
    queue: cl.CommandQueue,
    monkeypatch: pytest.MonkeyPatch,
    simulated: bool,
    value: float,
    images: int,
    dtype: str,
) -> None:
    """Wherever it is: what lies between two rows of positions meets zeros, which would make a NaN of it."""
    case = Case(images, 2, 2, (4, 7), (2, 3))
    x, _, g = case.arrays()
    x, g = quantize(x, dtype).astype(np.float64), np.abs(quantize(g, dtype).astype(np.float64))
    monkeypatch.setattr(amx, "_STAGED_WORDS", 10**6 if images == 3 else 200)  # all rows, or one
    for y, z in [(0, 0), (2, 5)] if simulated else np.ndindex(case.image):
        with_it = x.copy()
        with_it[-1, 1, y, z] = value
        tensors = [to_device(queue, array, dtype) for array in (with_it, g)]
        found = ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", engine=PLAIN_C)
        expected = weight_grad(with_it, g, case)
        np.testing.assert_array_equal(np.isnan(to_numpy(found)), np.isnan(expected), str((y, z)))
        np.testing.assert_array_equal(np.isinf(to_numpy(found)), np.isinf(expected), str((y, z)))


#: what is wrong; the kernel's file, and the pieces of its source
MUTANTS = [
    ("padding on the right is not cleared", "conv_amx.cl", "clear_rows(to + right * ROW_WORDS, WS - right);", ""),
    ("nor in lines", "conv_amx_grad.cl", "clear(y, right, WS);", ""),
    ("every other channel is missing", "conv_amx.cl", "if (2 * c + 1 < count)", "if (0)"),
    ("pairs are of one channel", "conv_amx.cl", "LOAD_ANY(ushort16, s + channel)", "LOAD_ANY(ushort16, s)"),
    ("parts of a sum are not resumed", "conv_amx.cl", "c.steps - step), step > 0", "c.steps - step), 0"),
    ("a row's last sums are left out", "conv_amx.cl", "at + count);", "at + count - 1);"),
    ("rows count what lies between them", "conv_amx.cl", "v / line * width + q", "v"),
    ("blocks are not added up", "conv_amx_grad.cl", "resume ? LOAD16(f32, sum, i) + v : v", "v"),
    ("chunks are not added up", "conv_amx_grad.cl", "i < chunks", "i < 1"),
    ("taps an odd number away read the pairs before", "conv_amx_grad.cl", "* line + at + odd", "* line + at"),
    ("gradients keep what was between rows", "conv_amx_grad.cl", "clear(to, r * line + width, r", "clear(to, line, !r"),
    ("nothing is masked", "conv_amx_grad.cl", "finite = finite && all_finite(lines, plane + 32)", "finite = true"),
    ("lower parts of lines are the upper ones", "conv_amx.cl", "parts.low, to + p", "parts.high, to + p"),
    ("lower parts of weights are missing", "conv_amx_weights.cl", "to[512] = lower_bits(low) >> 16 |", "to[512] ="),
    ("lower parts of gradients are missing", "conv_amx_grad.cl", "as_uint16(wide - high)", "as_uint16(0 * wide)"),
    ("sums that are not finite stay", "conv_amx.cl", "if (!has_strange(", "if (1 || has_strange("),
    ("half of the pairs are masked", "conv_amx_grad.cl", "(v + 1) % line < width ?", "true ?"),
]  # fmt: skip


@pytest.mark.unsimulated
@pytest.mark.usefixtures("in_plain_c")
@pytest.mark.parametrize(("file", "old", "new"), [pytest.param(*mutant[1:], id=mutant[0]) for mutant in MUTANTS])
@pytest.mark.long
@pytest.mark.once
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str
) -> None:
    write_wrong(monkeypatch, file, old, new)
    monkeypatch.setattr(amx, "_STAGED_WORDS", 1500)

    def is_right() -> None:
        check(queue, Case(1, 3, 3, (4, 6), (3, 3)), PLAIN_C)
        check(queue, Case(9, 65, 3, (4, 6), (3, 3), pad=(1, 1)), PLAIN_C)
        check(queue, SEVERAL["panels"], PLAIN_C, ("float16", "float16", "float16", "float32"))
        for dtype in HALF_DTYPES:
            test_what_is_not_finite_reaches_the_weights_that_read_it(queue, monkeypatch, False, np.inf, 3, dtype)
            infinities_and_nan_stay_where_they_are(queue, PLAIN_C, dtype)

    with pytest.raises(AssertionError):
        is_right()
