"""Convolutions with fewer multiplications (Winograd's), against float64 of the stored values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import conv as ops
from clamp.ops.conv import Window, stage, winograd
from tests.ops.conv_reference import Case, check, forward, input_grad, largest_nearby, slack, weight_grad
from tests.reference import assert_close, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

CASES = {
    "one output": Case(1, 1, 1, (3, 3), (3, 3)),
    "one column of tiles": Case(2, 3, 5, (5, 2), (3, 3), pad=(1, 1)),
    "odd rows and columns": Case(2, 3, 4, (5, 7), (3, 3), pad=(1, 1)),
    "not padded, rows of more than 16 tiles": Case(1, 2, 11, (5, 39), (3, 3)),
    "rows of 32 tiles": Case(1, 1, 2, (6, 64), (3, 3), pad=(1, 1)),
    "rows of 33 tiles, the last of one column": Case(1, 1, 7, (4, 65), (3, 3), pad=(1, 1)),
    "padded by 2": Case(2, 2, 6, (4, 6), (3, 3), pad=(2, 0)),
    "groups": Case(2, 3, 4, (5, 6), (3, 3), pad=(1, 2), groups=3),
    "more sums than rest at a time": Case(1, 2, 100, (3, 4), (3, 3), pad=(1, 1)),
    "more tiles than are multiplied at a time": Case(7, 2, 3, (10, 9), (3, 3), pad=(1, 1)),
    "more images than work-items": Case(70, 1, 2, (9, 8), (3, 3), pad=(1, 1)),
    "stride 2": Case(2, 3, 5, (7, 9), (3, 3), (2, 2), (1, 1)),
    "stride 2, one pixel": Case(3, 2, 1, (1, 1), (3, 3), (2, 2), (1, 1)),
    "stride 2, even rows and columns": Case(2, 2, 7, (10, 18), (3, 3), (2, 2), (1, 1)),
    "rows of 6 tiles": Case(3, 5, 4, (9, 22), (3, 3), pad=(1, 1)),
    "stride 2, rows of 18 tiles": Case(1, 2, 29, (4, 137), (3, 3), (2, 2), (1, 1)),
    "stride 2, groups": Case(2, 3, 4, (5, 6), (3, 3), (2, 2), (1, 1), groups=3),
    "stride 2, no channel": Case(2, 0, 3, (4, 4), (3, 3), (2, 2), (1, 1)),
    "no channel": Case(2, 0, 3, (4, 4), (3, 3), pad=(1, 1)),
    "no image": Case(0, 2, 3, (4, 4), (3, 3), pad=(1, 1)),
    "no row": Case(2, 2, 3, (0, 4), (3, 3), pad=(2, 1)),
}
SIMULATED = [
    "one column of tiles",
    "not padded, rows of more than 16 tiles",
    "groups",
    "no channel",
    "stride 2",
    "stride 2, groups",
]


@pytest.mark.parametrize("name", CASES)
def test_geometries(queue: cl.CommandQueue, simulated: bool, name: str) -> None:
    if simulated and name not in SIMULATED:
        pytest.skip("slow to simulate")
    check(queue, CASES[name], "winograd")


@pytest.mark.unsimulated  # slow to simulate; storage types are those of the other kernels
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), sweep([("float16", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")])
)
def test_storage_types(queue: cl.CommandQueue, x_dtype: str, w_dtype: str) -> None:
    case = Case(2, 131, 14, (3, 19), (3, 3), pad=(1, 1))
    other = {"float16": "bfloat16", "bfloat16": "float16"}[x_dtype]
    check(queue, case, "winograd", (x_dtype, w_dtype, x_dtype, x_dtype))
    check(queue, dataclasses.replace(case, c=19), "winograd", (x_dtype, w_dtype, x_dtype, other), with_bias=False)


@pytest.mark.parametrize(("x_dtype", "out_dtype"), [("float32", "float16"), ("bfloat16", "float32")])
def test_is_not_for_float32(queue: cl.CommandQueue, x_dtype: str, out_dtype: str) -> None:
    x, w = to_device(queue, np.ones((1, 2, 5, 5)), x_dtype), to_device(queue, np.ones((2, 2, 3, 3)), "float16")
    with pytest.raises(ValueError, match=f"winograd.*{x_dtype} by float16 to {out_dtype}.*reads and stores 16 bits"):
        ops.conv2d(x, w, Window(), out_dtype=out_dtype, engine="winograd")


def test_channels_in_blocks(queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of more output channels than rest at a time, over more input channels than are multiplied at a time."""
    monkeypatch.setattr(winograd, "_PANEL_FLOATS", 128)
    case = Case(1, 19, 27 if simulated else 53, (2, 5), (3, 3), pad=(1, 1))
    check(queue, case, "winograd")
    x, w, _ = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    x[0, 11, 1, 2] = np.inf
    y = ops.conv2d(
        to_device(queue, x, "float16"), to_device(queue, w, "float16"), case.window,
        out_dtype="float16", engine="winograd",
    )  # fmt: skip
    assert_close(y, forward(x, w, case), slack=slack(forward(np.minimum(np.abs(x), 9), np.abs(w), case), w[0].size))


@pytest.mark.parametrize("place", [(0, 0), (2, 5), (3, 4), (6, 38)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_outputs_keep_to_what_they_read(
    queue: cl.CommandQueue, simulated: bool, value: float, place: tuple[int, int]
) -> None:
    """What is not finite reaches the outputs that read it, as numpy has them, and changes no bit of other tiles."""
    if simulated and (place != (3, 4) or value != np.inf):
        pytest.skip("slow to simulate")
    case = Case(1, 2, 3, (7, 39), (3, 3), pad=(1, 1))
    x, w, _ = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    spoiled = x.copy()
    spoiled[0, 1][place] = value
    bias = to_device(queue, np.array([1, -2, 3], np.float32))
    results = [
        ops.conv2d(
            to_device(queue, array, "float16"), to_device(queue, w, "float16"), case.window,
            bias=bias, out_dtype="float16", engine="winograd",
        )
        for array in (x, spoiled)
    ]  # fmt: skip
    expected = forward(spoiled, w, case) + np.array([1, -2, 3])[:, None, None]
    magnitude = forward(largest_nearby(x, 3), np.abs(w), case) + 3
    assert_close(results[1], expected, slack=3 * slack(magnitude, w[0].size))
    reads = np.zeros(case.image, dtype=bool)
    reads[max(0, place[0] - 1) : place[0] + 2, max(0, place[1] - 1) : place[1] + 2] = True
    tiles = np.add.reduceat(np.add.reduceat(reads, range(0, 7, 4), 0), range(0, 39, 4), 1) > 0
    others = ~tiles.repeat(4, 0).repeat(4, 1)[:7, :39]
    before, after = (to_numpy(result)[..., others] for result in results)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("place", [(0, 0), (2, 5), (3, 8), (4, 19)])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_outputs_of_stride_2_keep_to_what_they_read(
    queue: cl.CommandQueue, simulated: bool, value: float, place: tuple[int, int]
) -> None:
    if simulated and (place != (3, 8) or value != np.inf):
        pytest.skip("slow to simulate")
    case = Case(1, 2, 3, (9, 39), (3, 3), (2, 2), (1, 1))
    x, w, g = (quantize(array, "float16").astype(np.float64) for array in case.arrays())
    options: Any = {"out_dtype": "float16", "engine": "winograd"}
    x_magnitude, g_magnitude = (np.abs(array).max() * np.abs(w).sum((1, 2, 3)).max() for array in (x, g))
    x[0, 1][2 * place[0], 2 * place[1]] = g[0, 1][place] = value
    tensors = [to_device(queue, array, "float16") for array in (x, w, g)]
    y = ops.conv2d(tensors[0], tensors[1], case.window, **options)
    assert_close(y, forward(x, w, case), slack=3 * slack(x_magnitude, w[0].size))
    gx = ops.conv2d_input_grad(tensors[2], tensors[1], case.image, case.window, **options)
    assert_close(gx, input_grad(g, w, case), slack=3 * slack(g_magnitude, w.size))


@pytest.mark.unsimulated
def test_overflow(queue: cl.CommandQueue) -> None:
    """Where nothing is finite, on more tiles than are transformed at a time; and where only adding elements up would
    overflow."""
    case = Case(2, 3, 2, (9, 75), (3, 3), pad=(1, 1))
    x, w, _ = (quantize(array, "bfloat16").astype(np.float64) for array in case.arrays())
    options: Any = {"out_dtype": "bfloat16", "engine": "winograd", "relu": True}
    x[np.abs(x) > 1.5] *= 2.0**123
    y = ops.conv2d(to_device(queue, x, "bfloat16"), to_device(queue, w, "bfloat16"), case.window, **options)
    expected = np.maximum(forward(x, w, case), 0)
    assert np.isfinite(expected).all()
    assert expected.max() > 2.0**123
    assert_close(y, expected, slack=3 * slack(forward(largest_nearby(x, 3), np.abs(w), case), w[0].size))
    y = ops.conv2d(
        to_device(queue, np.full(x.shape, np.nan), "bfloat16"), to_device(queue, w, "bfloat16"), case.window, **options
    )
    assert np.isnan(to_numpy(y).astype(np.float32)).all()


@pytest.mark.unsimulated
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_gradients_of_other_channels_stay_finite(queue: cl.CommandQueue, value: float) -> None:
    """What is not finite shows in every filter that reads it, and changes no bit of the others."""
    case = Case(2, 7, 5, (6, 39), (3, 3), pad=(1, 1))
    x, _, g = case.arrays()
    for spoiled_x, spoiled_g in ((True, False), (False, True)):
        results = []
        for is_spoiled in (False, True):
            arrays = x.copy(), g.copy()
            arrays[0][1, 4, 3, 17] = value if is_spoiled and spoiled_x else arrays[0][1, 4, 3, 17]
            arrays[1][0, 2, 5, 38] = value if is_spoiled and spoiled_g else arrays[1][0, 2, 5, 38]
            tensors = [to_device(queue, array, "float16") for array in arrays]
            results.append(
                to_numpy(
                    ops.conv2d_weight_grad(*tensors, case.kernel, case.window, out_dtype="float32", engine="winograd")
                )
            )
        reads = np.zeros(results[0].shape, dtype=bool)
        reads[:, 4] |= spoiled_x
        reads[2] |= spoiled_g
        assert not np.isfinite(results[1][reads]).any()
        np.testing.assert_array_equal(results[1][~reads], results[0][~reads])


def test_a_batch_in_slices(queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_WORKSPACE_BYTES", 1500)
    monkeypatch.setattr(winograd, "_STAGED_BYTES", 1500)
    images = 2 if simulated else 3
    check(queue, Case(images, 2, 3, (5, 6), (3, 3), pad=(1, 1)), "winograd")


def test_integers_are_exact(queue: cl.CommandQueue, simulated: bool) -> None:
    """As far as they can be stored; but a sum of zero may be off by a rounding of its terms, which is no zero."""
    case = Case(1, 4, 3, (4, 6) if simulated else (9, 21), (3, 3), pad=(1, 1))
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-most, most + 1, array.shape) for most, array in zip((8, 4, 6), case.arrays(), strict=True))
    tensors = [to_device(queue, array, "float16") for array in (x, w, g)]
    engine = "winograd"
    y = ops.conv2d(tensors[0], tensors[1], case.window, out_dtype="float16", engine=engine)
    gx = ops.conv2d_input_grad(tensors[2], tensors[1], case.image, case.window, out_dtype="float16", engine=engine)
    for result, expected in ((y, forward(x, w, case)), (gx, input_grad(g, w, case))):
        got = to_numpy(result)
        np.testing.assert_array_equal(got[expected != 0], expected[expected != 0])
        assert np.abs(got[expected == 0]).max(initial=0) < 2e-4
    gw = ops.conv2d_weight_grad(tensors[0], tensors[2], case.kernel, case.window, out_dtype="float32", engine=engine)
    np.testing.assert_allclose(to_numpy(gw), weight_grad(x, g, case), rtol=0, atol=1e-3)


@pytest.mark.unsimulated
@pytest.mark.slow
def test_layers_of_a_resnet(queue: cl.CommandQueue) -> None:
    check(queue, Case(2, 64, 64, (28, 28), (3, 3), pad=(1, 1)), "winograd")
    check(queue, Case(3, 128, 70, (7, 7), (3, 3), pad=(1, 1)), "winograd")
    check(queue, Case(2, 20, 150, (14, 14), (3, 3), pad=(1, 1), groups=2), "winograd", ("bfloat16",) * 4)
