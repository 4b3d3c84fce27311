"""Convolutions: all engines, every geometry and storage type, against float64 of the stored values."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import conv as ops
from clamp.ops.conv import amx, engines, stage, tiled
from clamp.ops.engine import always
from tests.ops.conv_reference import BFLOAT16_ENGINES, Case, check, forward, storage_of
from tests.reference import STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

Array = npt.NDArray[Any]
ENGINES = pytest.mark.parametrize("engine", ["amx", "amx_in_plain_c", "dot_bf16", "packed", "tiled"])


@pytest.fixture(autouse=True)
def _engine_that_runs_here(
    request: pytest.FixtureRequest, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips what needs an instruction that the processor lacks."""
    engine = request.node.callspec.params.get("engine") if hasattr(request.node, "callspec") else None
    if engine in ("amx", "dot_bf16") and not getattr(capabilities(queue), engine):
        pytest.skip("the processor has no such instruction")
    if engine == "amx_in_plain_c":
        monkeypatch.setattr(engines, "ENGINES", (AmxInPlainC(),))


class AmxInPlainC:
    """The engine of the matrix unit without one."""

    NAME, TAKES, IN_WORDS = "amx_in_plain_c", amx.TAKES, amx.IN_WORDS
    fits = pays = staticmethod(always)
    convolve = staticmethod(partial(amx.convolve, emulate=True))
    weight_gradient = staticmethod(partial(amx.weight_gradient, emulate=True))


CASES = {
    "1x1 of one pixel": Case(1, 1, 1, (1, 1), (1, 1)),
    "1x1": Case(2, 5, 13, (4, 9), (1, 1)),
    "3x3, padded": Case(2, 3, 5, (5, 7), (3, 3), pad=(1, 1)),
    "3x3, not padded, rows of 19": Case(1, 2, 13, (4, 21), (3, 3)),
    "rows of 37": Case(1, 1, 2, (3, 37), (3, 3), pad=(1, 1)),
    "stride 2": Case(2, 3, 4, (7, 9), (3, 3), (2, 2), (1, 1)),
    "stride 2, rows of 40": Case(1, 1, 3, (3, 80), (3, 3), (2, 2), (1, 1)),
    "stride 2 of an even image": Case(1, 2, 3, (6, 8), (4, 4), (2, 2), (1, 1)),
    "1x1, stride 2": Case(2, 3, 4, (5, 6), (1, 1), (2, 2)),
    "stride larger than the kernel": Case(1, 2, 3, (11, 13), (2, 3), (5, 4), (0, 1)),
    "dilation": Case(1, 2, 3, (9, 8), (3, 2), pad=(2, 1), dilation=(2, 3)),
    "stride 4, dilation 2": Case(1, 2, 2, (13, 11), (3, 3), (4, 4), (3, 2), (2, 2)),
    "stride 3, dilation 2": Case(1, 1, 2, (10, 11), (3, 3), (3, 3), (1, 2), (2, 2)),
    "kernel larger than the image": Case(2, 2, 3, (2, 3), (5, 5), pad=(2, 2)),
    "padding of more than 16": Case(1, 2, 2, (2, 18), (1, 2), pad=(1, 20)),
    "padding of more than 16, stride 2": Case(1, 1, 2, (2, 7), (2, 3), (1, 2), (0, 35)),
    "padding larger than the kernel": Case(1, 1, 2, (3, 3), (2, 2), pad=(3, 4)),
    "oblong": Case(1, 3, 2, (8, 5), (1, 5), (2, 1), (0, 2)),
    "one pixel left": Case(3, 4, 5, (3, 3), (3, 3)),
    "groups": Case(2, 3, 4, (5, 6), (3, 3), (1, 1), (1, 1), groups=3),
    "groups, stride 2": Case(1, 1, 2, (6, 5), (3, 3), (2, 2), (1, 1), groups=2),
    "depthwise": Case(1, 1, 1, (5, 5), (3, 3), pad=(1, 1), groups=7),
}


SIMULATED = [CASES["1x1"], CASES["stride 4, dilation 2"], CASES["padding larger than the kernel"]]


@ENGINES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_geometries(queue: cl.CommandQueue, simulated: bool, case: Case, engine: str) -> None:
    if simulated and engine in ("tiled", "amx_in_plain_c") and case not in SIMULATED:
        pytest.skip("slow to simulate; the geometry is the same in all engines")
    check(queue, case, engine)


@ENGINES
@pytest.mark.parametrize("x_dtype", sweep(STORAGE_DTYPES))
def test_storage_types(queue: cl.CommandQueue, simulated: bool, x_dtype: str, engine: str) -> None:
    others = {
        "float32": ("float16", "bfloat16"),
        "float16": ("bfloat16", "float32"),
        "bfloat16": ("float32", "float16"),
    }
    w_dtype, out_dtype = others[x_dtype]
    if engine in BFLOAT16_ENGINES:
        x_dtype = w_dtype = "bfloat16"
    case = Case(1, 1, 2, (3, 5), (3, 3), pad=(1, 1)) if simulated else Case(2, 2, 5, (5, 18), (3, 3), pad=(1, 1))
    grad_dtype = w_dtype if engine in BFLOAT16_ENGINES else out_dtype
    check(queue, case, engine, (x_dtype, w_dtype, grad_dtype, out_dtype), with_bias=False)
    if not simulated:  # slow there; geometries are of one type as well
        check(queue, case, engine, (x_dtype,) * 4)


@pytest.mark.unsimulated  # slow to simulate; other tests have panels of both heights
@ENGINES
@pytest.mark.parametrize("features", [*range(1, 14), 16, 20, 28])
def test_numbers_of_channels(queue: cl.CommandQueue, features: int, engine: str) -> None:
    """Panels of weights are of two heights: every remainder, forward and in the input gradient."""
    check(queue, Case(2, features, features, (3, 6), (3, 3), pad=(1, 1), groups=2), engine)


@ENGINES
def test_sums_of_several_blocks(queue: cl.CommandQueue, simulated: bool, engine: str) -> None:
    if simulated and engine == "tiled":
        pytest.skip("the tiled engine has no such blocks, and is slow to simulate")
    channels = 33 if simulated else 131
    dtypes = ("bfloat16",) * 4 if engine in BFLOAT16_ENGINES else ("float32",) * 4
    check(queue, Case(1, channels, 14, (2, 9), (3, 3), pad=(1, 1)), engine, dtypes)


@pytest.mark.unsimulated
@ENGINES
def test_positions_of_several_blocks(queue: cl.CommandQueue, engine: str) -> None:
    check(queue, Case(2, 2, 3, (31, 47), (3, 3), pad=(1, 1)), engine)
    check(queue, Case(3, 9, 13, (29, 29), (1, 1)), engine)


@pytest.mark.unsimulated
def test_as_if_there_were_too_many_positions_for_32_bits(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stage, tiled):
        monkeypatch.setattr(module, "index_type", lambda largest: "ulong")
    check(queue, Case(2, 1, 2, (5, 6), (3, 3), (2, 2), (1, 1)), "tiled")


@pytest.mark.parametrize("engine", ["dot_bf16", "packed", "tiled"])
def test_a_batch_in_slices(
    queue: cl.CommandQueue, simulated: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_WORKSPACE_BYTES", 1 if simulated else 1500)
    if simulated:
        check(queue, Case(2, 1, 2, (3, 4), (3, 3), (2, 2), (1, 1)), engine)
        return
    check(queue, Case(3, 2, 3, (5, 6), (3, 3), (2, 2), (1, 1)), engine)
    check(queue, Case(3, 1, 2, (5, 6), (3, 3), pad=(1, 1), groups=2), engine)


@ENGINES
@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4)])
def test_nothing_to_sum(queue: cl.CommandQueue, shape: tuple[int, ...], engine: str) -> None:
    n, c, h, w = shape
    case = Case(n, c, 3, (h, w), (3, 3), pad=(2, 2))
    check(queue, case, engine)


@ENGINES
def test_infinities_and_nan_stay_where_they_are(queue: cl.CommandQueue, engine: str) -> None:
    infinities_and_nan_stay_where_they_are(queue, engine, storage_of(engine))


def infinities_and_nan_stay_where_they_are(queue: cl.CommandQueue, engine: str, dtype: str) -> None:
    case = Case(1, 1, 1, (3, 40), (3, 3), pad=(1, 1))
    x, w, _ = case.arrays()
    x[0, 0, 0, 0], x[0, 0, 2, 20], x[0, 0, 1, 39] = np.inf, np.nan, -np.inf
    w = np.abs(w)
    tensors = to_device(queue, x, dtype), to_device(queue, w, dtype)
    y = ops.conv2d(*tensors, case.window, out_dtype=dtype, relu=True, engine=engine)
    expected = forward(*(quantize(a, dtype).astype(np.float64) for a in (x, w)), case)  # type: ignore[call-arg]
    expected = np.where(np.isnan(expected), np.nan, np.maximum(expected, 0))
    assert_close(y, expected, slack=1e-3)
    assert np.isnan(to_numpy(y)).sum() == 6


@ENGINES
def test_weights_whose_sums_do_not_read_an_infinity_stay_finite(queue: cl.CommandQueue, engine: str) -> None:
    weights_whose_sums_do_not_read_an_infinity_stay_finite(queue, engine)


def weights_whose_sums_do_not_read_an_infinity_stay_finite(queue: cl.CommandQueue, engine: str) -> None:
    """Rows of five outputs: what lies behind them in memory belongs to other weights, or to the next row."""
    case = Case(1, 1, 1, (3, 7), (3, 3))
    x, _, g = case.arrays()
    x[0, 0, 1, 5] = np.inf
    tensors = [to_device(queue, a, storage_of(engine)) for a in (x, g)]
    gw = to_numpy(ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", engine=engine))
    np.testing.assert_array_equal(np.isfinite(gw[0, 0]), [[True] * 3, [True, False, False], [True] * 3])


@ENGINES
def test_repeatable(queue: cl.CommandQueue, simulated: bool, engine: str) -> None:
    case = Case(2, 1 if simulated else 3, 2 if simulated else 5, (9, 11), (3, 3), (2, 2), (1, 1))
    x, _, g = case.arrays()
    tensors = to_device(queue, x, storage_of(engine)), to_device(queue, g, storage_of(engine))
    runs = [
        to_numpy(ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", engine=engine))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.unsimulated
@pytest.mark.slow
@ENGINES
def test_layers_of_a_resnet(queue: cl.CommandQueue, engine: str) -> None:
    for case in (
        Case(2, 3, 64, (56, 56), (7, 7), (2, 2), (3, 3)),
        Case(2, 64, 64, (28, 28), (3, 3), pad=(1, 1)),
        Case(2, 64, 128, (28, 28), (3, 3), (2, 2), (1, 1)),
        Case(2, 64, 128, (28, 28), (1, 1), (2, 2)),
        Case(3, 128, 70, (7, 7), (3, 3), pad=(1, 1)),
        Case(2, 16, 24, (15, 17), (5, 5), pad=(2, 2), groups=4),
    ):
        check(queue, case, engine)
