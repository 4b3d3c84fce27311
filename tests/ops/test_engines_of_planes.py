"""Which engine runs: the choice is made of plain values, so that no device is needed to test it for all of them."""

from __future__ import annotations

import dataclasses

import pytest

from clamp.opencl.device import Capabilities
from clamp.ops import attention, depthwise, pool
from clamp.ops.attention import problem as of_attention
from clamp.ops.depthwise import problem as of_depthwise
from clamp.ops.engine import all_in_words, choose
from clamp.ops.pool.problem import problem_of as pooling

CPU = Capabilities(True, 8, True, 4096, 32768, 4096, 8, dot_bf16=False, fast_dot_bf16=False)
GPU = dataclasses.replace(CPU, is_cpu=False, compute_units=80, max_work_group=1024, float_vector_width=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "length", "width"), [(1, 1, 1), (96, 1024, 64), (8, 77, 300)])
def test_attention(heads: int, length: int, width: int, causal: bool) -> None:
    for storage in ("f32", "f16", "bf16"):
        for device, name in ((CPU, "blocked"), (GPU, "tiled")):
            problem = of_attention.Problem(heads, length, width, causal, 0.1, (storage, storage, "f32"), device)
            assert name == choose("attention", attention.ENGINES, problem).NAME


def depthwise_problem(shape: tuple[int, ...], kernel: tuple[int, int], stride: int, pad: int) -> of_depthwise.Problem:
    out = ((extent + 2 * pad - size) // stride + 1 for extent, size in zip(shape[2:], kernel, strict=True))
    return of_depthwise.Problem(*shape, *out, *kernel, stride, pad, False, ("f16", "f32"), CPU)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "pad", "forward", "backward"),
    [
        ((8, 64, 56, 56), (3, 3), 1, 1, "columns", "columns"),
        ((8, 64, 56, 56), (3, 3), 1, 3, "tiles", "tiles"),  # padding as wide as the filter
        ((8, 64, 56, 56), (5, 5), 1, 2, "columns", "tiles"),
        ((8, 64, 56, 56), (7, 7), 1, 3, "columns", "tiles"),
        ((8, 64, 56, 56), (3, 5), 1, 1, "tiles", "tiles"),
        ((8, 64, 56, 56), (3, 3), 2, 1, "tiles", "tiles"),
        ((8, 64, 56, 56), (3, 3), 3, 1, "elements", "elements"),
        ((8, 64, 56, 56), (8, 8), 1, 0, "tiles", "tiles"),
        ((8, 64, 56, 56), (9, 9), 1, 4, "elements", "elements"),
        ((1, 7, 56, 56), (3, 3), 1, 1, "tiles", "tiles"),  # fewer planes than cores
        ((1, 8, 56, 56), (3, 3), 1, 1, "columns", "columns"),
        ((1, 64, 362, 363), (3, 3), 1, 1, "tiles", "tiles"),  # planes too large for a cache
        ((1, 64, 362, 362), (3, 3), 1, 1, "columns", "columns"),
        ((1, 64, 40, 100_000), (3, 3), 1, 1, "tiles", "tiles"),
    ],
)
def test_depthwise(
    shape: tuple[int, ...], kernel: tuple[int, int], stride: int, pad: int, forward: str, backward: str
) -> None:
    problem = depthwise_problem(shape, kernel, stride, pad)
    assert forward == choose("depthwise_conv2d", depthwise.ENGINES, problem).NAME
    assert (
        backward == choose("depthwise_conv2d", depthwise.ENGINES, dataclasses.replace(problem, is_gradient=True)).NAME
    )
    for is_gradient in (False, True):
        elsewhere = dataclasses.replace(problem, is_gradient=is_gradient, device=GPU)
        assert choose("depthwise_conv2d", depthwise.ENGINES, elsewhere).NAME == "elements"


@pytest.mark.parametrize(
    ("plane", "size", "stride", "results", "maxima", "means"),
    [
        ((32, 32), 2, 2, "pairs", "pairs", "pairs"),
        ((32, 30), 2, 2, "rows", "rows", "rows"),  # fewer than 16 windows in a row
        ((32, 33), 2, 2, "rows", "rows", "rows"),  # a column in no window
        ((112, 112), 3, 2, "rows", "rows", "rows"),
        ((7, 7), 3, 1, "rows", "rows", "rows"),
        ((128, 128), 33, 1, "rows", "elements", "rows"),
        ((64, 4096), 3, 60, "elements", "elements", "rows"),
        ((8, 4096), 3, 2, "rows", "rows", "rows"),
    ],
)
def test_pool(plane: tuple[int, int], size: int, stride: int, results: str, maxima: str, means: str) -> None:
    for is_max, is_gradient, name in (
        (True, False, results), (False, False, results), (True, True, maxima), (False, True, means)
    ):  # fmt: skip
        for device, expected in ((CPU, name), (GPU, "elements")):
            problem, _ = pooling(
                (2, 3, *plane), size, stride, ("float16", "float16"), device, is_max=is_max, is_gradient=is_gradient
            )
            assert expected == choose("pool2d", pool.ENGINES, problem).NAME, (is_max, is_gradient)


def test_maxima_of_words_of_another_width_are_not_moved_in_pairs() -> None:
    for dtypes, name in (
        (("float16", "bfloat16"), "pairs"), (("float32", "float32"), "pairs"), (("float32", "float16"), "rows")
    ):  # fmt: skip
        problem, _ = pooling((1, 1, 32, 32), 2, 2, dtypes, CPU, is_max=True, is_gradient=True)
        assert name == choose("pool2d", pool.ENGINES, problem).NAME
        problem, _ = pooling((1, 1, 32, 32), 2, 2, dtypes, CPU, is_max=False, is_gradient=True)
        assert choose("pool2d", pool.ENGINES, problem).NAME == "pairs"


def test_a_caller_may_name_an_engine_that_fits() -> None:
    problem = depthwise_problem((8, 64, 56, 56), (3, 3), 1, 1)
    for engine in depthwise.ENGINES:
        assert choose("depthwise_conv2d", depthwise.ENGINES, problem, engine.NAME) is engine
    with pytest.raises(ValueError, match=r"columns does not compute Problem\(.*stride=2.*takes stride 1"):
        choose("depthwise_conv2d", depthwise.ENGINES, dataclasses.replace(problem, stride=2), "columns")
    with pytest.raises(ValueError, match="called 'column'; there are columns, tiles, elements"):
        choose("depthwise_conv2d", depthwise.ENGINES, problem, "column")


def test_engines_in_words() -> None:
    pairs, rows, elements = pool.ENGINES
    assert all_in_words({"these": pairs, "those": pairs}) == pairs.IN_WORDS
    words = all_in_words({"these": rows, "others": elements, "those": rows})
    assert words == f"these and those by {rows.IN_WORDS}; others by {elements.IN_WORDS}"
