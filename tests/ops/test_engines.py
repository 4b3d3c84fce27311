"""Which engine computes what: chosen by values, so that asking needs no device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clamp.opencl.device import Capabilities
from clamp.ops import attention, depthwise, pool, verified
from clamp.ops.attention import problem as of_attention
from clamp.ops.conv import Window
from clamp.ops.conv import engines as conv
from clamp.ops.conv.problem import Problem as Convolution
from clamp.ops.depthwise import problem as of_depthwise
from clamp.ops.engine import all_in_words, choose
from clamp.ops.gemm import engines as gemm
from clamp.ops.gemm.problem import Problem as Product
from clamp.ops.pool.problem import problem_of as pooling

GPU = Capabilities(
    is_cpu=False, compute_units=32, half_storage=True, max_parameter_bytes=4096, local_memory_bytes=2**15,
    max_work_group=1024, float_vector_width=1, dot_bf16=False, fast_dot_bf16=False,
)  # fmt: skip
CPU = replace(GPU, is_cpu=True, float_vector_width=16)
SLOW_DOT = replace(CPU, dot_bf16=True)
FAST_DOT = replace(CPU, dot_bf16=True, fast_dot_bf16=True)
SM_80 = replace(GPU, compute_capability=(8, 0))

F32, F16, BF16 = "float32", "float16", "bfloat16"


@pytest.mark.parametrize(("k", "columns"), [(1, 1), (300, 70), (4096, 4096)])
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "with_fast_dot"),
    [
        (F32, F32, "packed"), (F16, F16, "packed"), (F16, BF16, "packed"), (BF16, F32, "packed"),
        (BF16, BF16, "dot_bf16"),
    ],
)  # fmt: skip
def test_products(a_dtype: str, b_dtype: str, k: int, columns: int, with_fast_dot: str) -> None:
    for device, name in ((GPU, "tiled"), (CPU, "packed"), (SLOW_DOT, "packed"), (FAST_DOT, with_fast_dot)):
        assert name == gemm.choose(Product(a_dtype, b_dtype, k, columns, device)).NAME


@pytest.mark.parametrize(
    ("rows", "dtypes", "on_cpu"),
    [
        (64, (F16, F16), "direct"), (64, (BF16, BF16), "direct"), (64, (F16, F32), "packed"),
        (4096, (F16, F16), "packed"),
    ],
)  # fmt: skip
def test_small_products(rows: int, dtypes: tuple[str, str], on_cpu: str) -> None:
    for device, name in ((GPU, "tiled"), (CPU, on_cpu)):
        assert name == gemm.choose(Product(*dtypes, 256, 256, device, rows=rows)).NAME


@pytest.mark.parametrize(
    ("columns", "k", "along", "on_cpu"),
    [(64, 256, True, "direct"), (65, 256, True, "packed"), (64, 255, True, "packed"), (64, 256, False, "packed")],
)
def test_products_of_few_columns_are_packed_by_who_multiplies(columns: int, k: int, along: bool, on_cpu: str) -> None:
    for dtype, device, name in (
        (F32, CPU, on_cpu),
        (F16, CPU, on_cpu),
        (F16, GPU, "tiled"),
        (BF16, FAST_DOT, "dot_bf16"),
    ):
        product = Product(dtype, dtype, k, columns, device, rows=2**14, a_along_k=along)
        assert name == gemm.choose(product).NAME


@pytest.mark.parametrize(
    ("dtype", "parts", "device"),
    [
        (BF16, 1, replace(CPU, amx=True)), (F16, 2, replace(CPU, amx=True)), (F16, 1, replace(CPU, amx_fp16=True)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rows", "batches"), [(160, 1), (80, 2)])
def test_packing_launches_pay_for_enough_to_multiply(
    dtype: str, parts: int, device: Capabilities, rows: int, batches: int
) -> None:
    def chosen(rows: int | None) -> str:
        return gemm.choose(Product(dtype, dtype, 128, 128, device, rows=rows, batches=batches)).NAME

    assert (chosen(rows * parts), chosen(rows * parts + 1), chosen(None)) == ("direct", "amx", "amx")


@pytest.mark.parametrize(("rows", "batches"), [(160, 1), (80, 2)])
def test_the_dot_product_pays_for_enough_to_multiply_in_one_launch(rows: int, batches: int) -> None:
    def chosen(rows: int | None, launches: int | None, device: Capabilities = FAST_DOT) -> str:
        product = Product(BF16, BF16, 128, 128, device, rows=rows, batches=batches, pair_launches=launches)
        return gemm.choose(product).NAME

    assert (chosen(rows, 1), chosen(rows + 1, 1), chosen(None, None)) == ("direct", "dot_bf16", "dot_bf16")
    assert chosen(rows + 1, 2) == chosen(rows + 1, None) == chosen(rows + 1, 1, SLOW_DOT) == "direct"
    assert chosen(2**10 + 1, 3) == "dot_bf16"


@pytest.mark.parametrize("a_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("b_dtype", [F32, F16, BF16])
def test_products_on_matrix_units(a_dtype: str, b_dtype: str) -> None:
    def chosen(device: Capabilities, *verified: str) -> str:
        return gemm.choose(Product(a_dtype, b_dtype, 300, 70, device, frozenset(verified))).NAME

    assert chosen(SM_80) == chosen(SM_80, "another") == "tiled"
    assert chosen(SM_80, "mma") == ("mma" if a_dtype == b_dtype != F32 else "tiled")


def convolution(gradient: str, dtypes: tuple[str, str, str], device: Capabilities, **changes: Any) -> Convolution:
    """A convolution, or its gradient, of 16 channels; storage types of the two that are multiplied, and of the result.

    Args:
        changes: (n, c, f, image, kernel, stride, pad, dilation), where they are others.
    """
    case: dict[str, Any] = {"n": 128, "c": 16, "f": 16, "image": (4, 4), "kernel": (3, 3), "pad": (1, 1)} | changes
    window = Window(case.get("stride", (1, 1)), case["pad"], case.get("dilation", (1, 1)))
    weights = (case["f"], case["c"], *case["kernel"])
    return Convolution(gradient, dtypes[:2], dtypes[2], case["n"], case["image"], weights, window, device)


STRIDED = {"c": 48, "f": 48, "image": (7, 8), "stride": (2, 2)}
HALVES, BRAINS = (F16,) * 3, (BF16,) * 3


@pytest.mark.parametrize(
    ("changes", "dtypes", "on_cpu", "with_fast_dot"),
    [  # engines of the convolution, of its input's gradient where that has another, and of its weights'
        ({}, HALVES, "winograd winograd", ""),
        ({}, BRAINS, "winograd winograd", "dot_bf16 winograd"),
        ({"n": 384}, BRAINS, "winograd winograd", "winograd winograd"),
        ({"n": 383}, BRAINS, "winograd winograd", "dot_bf16 winograd"),
        ({"image": (4, 6)}, (BF16, BF16, F32), "packed winograd", "dot_bf16 winograd"),
        ({"n": 63}, HALVES, "winograd packed", ""),
        ({"n": 63}, BRAINS, "winograd packed", "dot_bf16 packed"),
        ({"n": 63, "f": 256}, BRAINS, "winograd packed", "dot_bf16 dot_bf16"),
        ({"n": 63, "f": 255}, BRAINS, "winograd packed", "dot_bf16 packed"),
        ({"n": 999, "f": 256, "image": (1, 1)}, BRAINS, "winograd packed", "dot_bf16 packed"),
        ({"n": 999, "image": (2, 2)}, HALVES, "winograd packed", ""),
        ({"n": 999, "image": (2, 3)}, HALVES, "winograd winograd", ""),
        ({"n": 63, "image": (6, 6)}, BRAINS, "winograd winograd", "dot_bf16 winograd"),
        ({"n": 15, "image": (6, 6)}, BRAINS, "winograd packed", "dot_bf16 dot_bf16"),
        ({"n": 31}, HALVES, "packed packed", ""),
        ({"n": 31}, BRAINS, "packed packed", "dot_bf16 packed"),
        (STRIDED | {"n": 512}, HALVES, "winograd winograd", ""),
        (STRIDED | {"n": 512}, BRAINS, "winograd winograd", "dot_bf16 winograd"),
        (STRIDED | {"n": 512, "image": (14, 14)}, BRAINS, "winograd winograd", "dot_bf16 dot_bf16"),
        (STRIDED | {"n": 512, "c": 47}, HALVES, "winograd packed", ""),
        (STRIDED | {"n": 512, "f": 47}, HALVES, "winograd packed", ""),
        (STRIDED | {"n": 288}, HALVES, "winograd packed", ""),
        (STRIDED | {"n": 256}, HALVES, "packed winograd packed", ""),
        (STRIDED | {"n": 255}, HALVES, "packed packed", ""),
        (STRIDED | {"n": 512, "c": 256, "f": 128}, HALVES, "packed winograd packed", ""),
        (STRIDED | {"n": 512, "c": 256, "f": 257}, HALVES, "packed packed", ""),
        ({}, (F32, F16, F16), "packed packed", ""),
        ({}, (BF16, F32, F32), "packed packed", ""),
        ({"kernel": (1, 1), "pad": (0, 0)}, BRAINS, "packed packed", "dot_bf16 dot_bf16"),
        ({"kernel": (1, 1), "pad": (0, 0)}, (BF16, F16, BF16), "packed packed", ""),
        ({"stride": (2, 1)}, HALVES, "packed packed", ""),
        ({"stride": (2, 2), "pad": (0, 0), "n": 9999}, HALVES, "packed packed", ""),
        ({"dilation": (1, 2)}, HALVES, "packed packed", ""),
        ({"pad": (3, 3)}, HALVES, "packed packed", ""),
        ({"kernel": (1, 3)}, HALVES, "packed packed", ""),
        ({"c": 3}, HALVES, "packed packed", ""),
        ({"f": 15}, HALVES, "packed packed", ""),
    ],
)
def test_convolutions(changes: dict[str, Any], dtypes: tuple[str, str, str], on_cpu: str, with_fast_dot: str) -> None:
    devices = (GPU, "tiled tiled"), (CPU, on_cpu), (SLOW_DOT, on_cpu), (FAST_DOT, with_fast_dot or on_cpu)
    for device, names in devices:
        forward, *inputs, weights = names.split()
        wanted = {"": forward, "input": inputs[0] if inputs else forward, "weights": weights}
        assert wanted == {by: conv.choose(convolution(by, dtypes, device, **changes)).NAME for by in wanted}


def test_an_engine_that_is_named_must_fit() -> None:
    with pytest.raises(
        ValueError,
        match="gemm: no engine is called 'nonesuch'; there are amx, dot_bf16, direct, packed, wgmma, mma, mma_k8, ",
    ):
        gemm.choose(Product(F16, F16, 3, 4, FAST_DOT), "nonesuch")
    with pytest.raises(ValueError, match=r"gemm: the engine dot_bf16 does not.*on a processor whose dot product"):
        gemm.choose(Product(BF16, BF16, 3, 4, CPU), "dot_bf16")
    with pytest.raises(ValueError, match=r"gemm.*float16 by bfloat16.*a_dtype"):
        gemm.choose(Product(F16, BF16, 3, 4, FAST_DOT), "dot_bf16")
    with pytest.raises(ValueError, match=r"dot_bf16.*no such instruction"):
        conv.choose(convolution("", BRAINS, CPU), "dot_bf16")
    for gradient in ("", "weights"):
        with pytest.raises(ValueError, match=r"dot_bf16.*bfloat16 by float16"):
            conv.choose(convolution(gradient, (BF16, F16, F32), FAST_DOT), "dot_bf16")
    assert gemm.choose(Product(BF16, BF16, 3, 4, SLOW_DOT), "dot_bf16").NAME == "dot_bf16"
    assert conv.choose(convolution("", BRAINS, GPU), "winograd").NAME == "winograd"


def test_the_choice_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(module: Any, dtype: str, device: Capabilities) -> str:
        monkeypatch.setattr(module, "capabilities", lambda queue: device)
        monkeypatch.setattr(verified, "capabilities", lambda queue: device)
        return str(module.on_device(None, dtype))

    assert words(gemm, F16, GPU) == "products of float16: tiled kernel, tiles in local memory"
    assert "the processor's bfloat16 dot product" in words(gemm, BF16, FAST_DOT)
    assert words(conv, F16, GPU) == "convolutions of float16: tiles in local memory"
    both = "3x3 of stride 1 and 3x3 of stride 2 by Winograd's sums"
    assert both in words(conv, F16, FAST_DOT)
    assert both in words(conv, BF16, SLOW_DOT)
    brains = words(conv, BF16, FAST_DOT)
    assert "3x3 of stride 1 by Winograd's sums" in brains
    assert "3x3 of stride 2 and others by packed panels and the processor's bfloat16 dot product" in brains


# ---------------------------------------------------------------------------------------------- planes and heads

EIGHT_CORES = replace(CPU, compute_units=8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "length", "width"), [(1, 1, 1), (96, 1024, 64), (8, 77, 300)])
def test_attention(heads: int, length: int, width: int, causal: bool) -> None:
    for storage in ("f32", "f16", "bf16"):
        for device, name in ((EIGHT_CORES, "blocked"), (GPU, "tiled")):
            problem = of_attention.Problem(heads, length, width, causal, 0.1, (storage, storage, "f32"), device)
            assert name == choose("attention", attention.ENGINES, problem).NAME


def depthwise_problem(shape: tuple[int, ...], kernel: tuple[int, int], stride: int, pad: int) -> of_depthwise.Problem:
    out = ((extent + 2 * pad - size) // stride + 1 for extent, size in zip(shape[2:], kernel, strict=True))
    return of_depthwise.Problem(*shape, *out, *kernel, stride, pad, False, ("f16", "f32"), EIGHT_CORES)  # type: ignore[call-arg]


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
    assert backward == choose("depthwise_conv2d", depthwise.ENGINES, replace(problem, is_gradient=True)).NAME
    for is_gradient in (False, True):
        elsewhere = replace(problem, is_gradient=is_gradient, device=GPU)
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
        for device, expected in ((EIGHT_CORES, name), (GPU, "elements")):
            problem, _ = pooling(
                (2, 3, *plane), size, stride, ("float16", "float16"), device, is_max=is_max, is_gradient=is_gradient
            )
            assert expected == choose("pool2d", pool.ENGINES, problem).NAME, (is_max, is_gradient)


def test_maxima_of_words_of_another_width_are_not_moved_in_pairs() -> None:
    for dtypes, name in (
        (("float16", "bfloat16"), "pairs"), (("float32", "float32"), "pairs"), (("float32", "float16"), "rows")
    ):  # fmt: skip
        problem, _ = pooling((1, 1, 32, 32), 2, 2, dtypes, EIGHT_CORES, is_max=True, is_gradient=True)
        assert name == choose("pool2d", pool.ENGINES, problem).NAME
        problem, _ = pooling((1, 1, 32, 32), 2, 2, dtypes, EIGHT_CORES, is_max=False, is_gradient=True)
        assert choose("pool2d", pool.ENGINES, problem).NAME == "pairs"


def test_every_engine_may_be_named_where_it_fits() -> None:
    problem = depthwise_problem((8, 64, 56, 56), (3, 3), 1, 1)
    for engine in depthwise.ENGINES:
        assert choose("depthwise_conv2d", depthwise.ENGINES, problem, engine.NAME) is engine


def test_engines_in_words() -> None:
    pairs, rows, elements = pool.ENGINES
    assert all_in_words({"these": pairs, "those": pairs}) == pairs.IN_WORDS
    words = all_in_words({"these": rows, "others": elements, "those": rows})
    assert words == f"these and those by {rows.IN_WORDS}; others by {elements.IN_WORDS}"
