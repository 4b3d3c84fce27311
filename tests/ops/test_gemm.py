"""GEMM: every storage type, layout, engine, batch and epilogue against float64 of the stored values."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.opencl.device import capabilities
from clamp.ops.cast import cast
from clamp.ops.gemm import direct, dot_bf16, gemm, is_packed, pack_b, rounds_as_it_reads
from clamp.ops.gemm.problem import operand_a, operand_b
from tests.ops.gemm_reference import NN, NT, TN, TRANSPOSES, TT, Array, check, check_special_values, laid_out, random
from tests.reference import MIXTURES, STORAGE_DTYPES, to_device, to_numpy

pytestmark = pytest.mark.kernel

#: halfway cases, subnormals, what overflows in either 16-bit type
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 3 * 2**-26,
     6e-8, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 3.3953e38],
    np.float32,
)  # fmt: skip

ANY_TYPE_ENGINES = ("packed", "tiled")
ENGINES = pytest.mark.parametrize("engine", ["direct", *ANY_TYPE_ENGINES, "dot_bf16"])


@pytest.fixture(autouse=True)
def _engine_that_runs_here(request: pytest.FixtureRequest, queue: cl.CommandQueue) -> None:
    """Skips what needs an instruction that the processor lacks."""
    engine = request.node.callspec.params.get("engine") if hasattr(request.node, "callspec") else None
    if engine == "dot_bf16" and not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")


def storage_of(engine: str) -> str:
    """A type of 16 bits that an engine multiplies."""
    return "bfloat16" if engine == "dot_bf16" else "float16"


def alike(engine: str) -> tuple[str, str, str]:
    """That of both operands and the result."""
    return (storage_of(engine),) * 3


# ------------------------------------------------------------------------------------------- shapes, layouts


@ENGINES
@TRANSPOSES
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 40, 7), (40, 1, 16), (12, 32, 64), (13, 33, 17), (24, 65, 33)],
)
def test_shapes(queue: cl.CommandQueue, m: int, n: int, k: int, transposes: dict[str, bool], engine: str) -> None:
    check(queue, random(m, k), random(k, n), alike(engine), **transposes, engine=engine)


@ENGINES
@TRANSPOSES
def test_large_odd_shape(queue: cl.CommandQueue, simulated: bool, transposes: dict[str, bool], engine: str) -> None:
    m, n, k = (66, 18, 35) if simulated else (211, 613, 1031)
    check(queue, random(m, k), random(k, n), alike(engine), **transposes, engine=engine)


@ENGINES
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 255, 256, 257, 511, 512, 513, 1025])
def test_k_around_its_blocks(queue: cl.CommandQueue, simulated: bool, k: int, engine: str) -> None:
    if simulated and engine == "tiled":
        pytest.skip("the tiled engine has no such blocks, and is slow to simulate")
    types = ("bfloat16", "bfloat16", "float32")
    check(queue, random(13, k), random(k, 33), types, bias=(random(33), "float32"), relu=True, engine=engine)


@ENGINES
@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((0, 4), (4, 3), (0, 3)), ((3, 4), (4, 0), (3, 0)), ((0, 0), (0, 0), (0, 0)), ((0, 0), (0, 5), (0, 5)),
        ((0, 2, 3), (3, 4), (0, 2, 4)),
    ],
)  # fmt: skip
def test_empty_result(
    queue: cl.CommandQueue, a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...], engine: str
) -> None:
    assert check(queue, np.zeros(a), np.zeros(b), alike(engine), engine=engine).shape == shape


@ENGINES
def test_sum_of_nothing_is_the_epilogue(queue: cl.CommandQueue, engine: str) -> None:
    bias, types = (np.array([1.5, -2.0, 0.25]), "float16"), alike(engine)
    check(queue, np.zeros((2, 0)), np.zeros((0, 3)), types, engine=engine)
    check(queue, np.zeros((2, 2, 0)), np.zeros((2, 0, 3)), types, bias=bias, relu=True, engine=engine)


@pytest.mark.simulated_elsewhere
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    shared=st.sampled_from(["neither", "a", "b"]),
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(0, 40),
    transposes=st.sampled_from([NN, NT, TN, TT]),
    types=st.tuples(*[st.sampled_from(STORAGE_DTYPES)] * 3),
    engine=st.sampled_from(("direct", *ANY_TYPE_ENGINES)),
    relu=st.booleans(),
)
def test_any_problem(
    queue: cl.CommandQueue,
    simulated: bool,
    batch: tuple[int, ...],
    shared: str,
    m: int,
    n: int,
    k: int,
    transposes: dict[str, bool],
    types: tuple[str, str, str],
    engine: str,
    relu: bool,
) -> None:
    if simulated:
        m, n, k = m % 14 + 1, n % 18 + 1, k % 18
    if engine == "direct":  # which takes operands of one type
        types = (types[0], types[0], types[2])
    a = random(*(() if shared == "a" else batch), m, k)
    b = random(*(() if shared == "b" else batch), k, n, seed=1)
    check(queue, a, b, types, **transposes, relu=relu, engine=engine)


# ------------------------------------------------------------------------------- storage types and epilogues


@pytest.mark.parametrize("engine", ANY_TYPE_ENGINES)
@pytest.mark.parametrize(("a_type", "b_type", "out_dtype"), MIXTURES)
def test_every_mixture_of_storage_types(
    queue: cl.CommandQueue, a_type: str, b_type: str, out_dtype: str, engine: str
) -> None:
    a, b = random(13, 20), random(20, 48)
    check(queue, a, b, (a_type, b_type, out_dtype), transpose_a=True, engine=engine)


@pytest.mark.simulated_elsewhere
def test_products_alike_read_their_own_operands(queue: cl.CommandQueue) -> None:
    """What is prepared for the first of them serves the others."""
    for seed in range(3):
        a, b, bias = random(5, 7, seed=seed), random(7, 3, seed=seed), random(3, seed=seed)
        for relu in (False, True):
            check(queue, a, b, relu=relu)
            check(queue, a, b, bias=(bias, "float16"), relu=relu)
            check(queue, a, b, ("float32", "float32", "bfloat16"), transpose_a=True, bias=(bias, "float32"), relu=relu)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@TRANSPOSES
def test_small_products_have_the_bits_of_large_ones(
    queue: cl.CommandQueue, simulated: bool, dtype: str, transposes: dict[str, bool]
) -> None:
    """A network's numbers do not depend on which of its products are small."""
    m, n, k = (14, 20, 19) if simulated else (61, 90, 530)
    a, b = laid_out(queue, random(m, k), random(k, n), (dtype, dtype), **transposes)
    options: Any = {**transposes, "bias": to_device(queue, random(n), dtype)}
    for out_dtype in STORAGE_DTYPES:
        direct, packed = (gemm(a, b, **options, out_dtype=out_dtype, engine=name) for name in ("direct", "packed"))
        np.testing.assert_array_equal(direct.to_host(), packed.to_host())


@TRANSPOSES
@pytest.mark.parametrize("reads", STORAGE_DTYPES[1:])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 1), (1, 1)), ((40, 16), (16, 1)), ((1, 7), (7, 40)), ((13, 300), (300, 10)), ((24, 33), (33, 65)),
        ((37, 17), (17, 32)), ((64, 257), (257, 47)), ((5, 0), (0, 3)), ((0, 4), (4, 3)), ((3, 13, 10), (3, 10, 35)),
        ((3, 13, 10), (10, 35)), ((13, 10), (3, 10, 35)),
    ],
    ids=str,
)  # fmt: skip
def test_float32_is_rounded_as_it_is_read(
    queue: cl.CommandQueue, simulated: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]], reads: str,
    transposes: dict[str, bool],
) -> None:  # fmt: skip
    """Product and copy have the bits of a cast before it, special values included."""
    a, b = shapes
    if simulated and a[-2] * a[-1] * b[-1] > 25_000:
        pytest.skip("slow to simulate")
    left, right = random(*a), random(*b, seed=1)
    for values in (left, right):  # beside those that become inf times 0, and nan
        values.flat[::7] = np.resize(SPECIAL, values.flat[::7].shape)
    x, y = laid_out(queue, left, right, ("float32", "float32"), **transposes)
    if len(a) == len(b) == 2:
        assert rounds_as_it_reads(x, y, reads, **transposes) == capabilities(queue).is_cpu
    narrow_x, narrow_y = cast(x, reads), cast(y, reads)
    expected = to_numpy(gemm(narrow_x, narrow_y, out_dtype="float32", engine="direct", **transposes))
    for first, second in ((x, y), (x, narrow_y), (narrow_x, y)):
        wanted = second is y and not transposes["transpose_b"] and len(b) == 2
        copy = to_device(queue, np.full(b, 7.0), reads) if wanted else None
        result = gemm(first, second, out_dtype="float32", engine="direct", reads=reads, b_copy=copy, **transposes)
        np.testing.assert_array_equal(to_numpy(result), expected)
        if copy is not None:
            np.testing.assert_array_equal(to_numpy(copy), to_numpy(narrow_y))


@pytest.mark.parametrize("engine", ANY_TYPE_ENGINES)
def test_other_engines_take_what_has_been_cast(queue: cl.CommandQueue, engine: str) -> None:
    a, b = (to_device(queue, random(3, 3, seed=seed)) for seed in range(2))
    with pytest.raises(ValueError, match="cast a and b to float16 first"):
        gemm(a, b, out_dtype="float16", engine=engine, reads="float16")


@ENGINES
@pytest.mark.parametrize("bias_type", STORAGE_DTYPES)
@pytest.mark.parametrize("out_dtype", STORAGE_DTYPES)
def test_epilogue(queue: cl.CommandQueue, out_dtype: str, bias_type: str, engine: str) -> None:
    bias = (random(45) * 5, bias_type)
    for relu in (False, True):
        types = (*alike(engine)[:2], out_dtype)
        check(queue, random(14, 9), random(9, 45), types, bias=bias, relu=relu, engine=engine)


@ENGINES
def test_rounds_once_after_the_epilogue(queue: cl.CommandQueue, engine: str) -> None:
    # 2049 is no half: rounded before the bias is added the result would be 2047 or 2049, not 2048.
    a, b = (to_device(queue, x, storage_of(engine)) for x in ([[1.0, 1.0]], [[2048.0], [1.0]]))
    bias = to_device(queue, [-1.0])
    assert to_numpy(gemm(a, b, bias=bias, out_dtype="float16", engine=engine)) == 2048.0


# --------------------------------------------------------------------------------------------------- batches


@ENGINES
@TRANSPOSES
@pytest.mark.parametrize("batches", ["both", "a", "b"])
def test_batches(queue: cl.CommandQueue, batches: str, transposes: dict[str, bool], engine: str) -> None:
    a = random(*(() if batches == "b" else (2, 3)), 13, 10)
    b = random(*(() if batches == "a" else (2, 3)), 10, 35, seed=1)
    check(queue, a, b, alike(engine), bias=(random(35), "float32"), engine=engine, **transposes)


@pytest.mark.parametrize(("engine", "k"), [("packed", 300), ("dot_bf16", 4200)])
def test_batch_crosses_k_blocks(queue: cl.CommandQueue, engine: str, k: int) -> None:
    check(queue, random(3, 13, k), random(3, k, 33, seed=1), alike(engine), engine=engine)


@ENGINES
@pytest.mark.parametrize("n", [33, 96], ids=["edge", "whole tiles"])
@pytest.mark.parametrize("batches", ["both", "a", "b"])
def test_all_scratch_memory_is_written(
    queue: cl.CommandQueue, batches: str, n: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of a batch that rested in one another's place would leave their own unwritten; the sums come out wrong
    only where they are computed at the same time."""
    made: list[Tensor] = []
    empty = bridge.empty
    monkeypatch.setattr(bridge, "empty", lambda *args: [made.append(empty(*args)), made[-1]][1])
    a, b = random(*[3] * (batches != "b"), 13, 300), random(*[3] * (batches != "a"), 300, n, seed=1)
    check(queue, a, b, alike(engine), engine=engine)
    assert made
    for tensor in made:
        assert not np.isnan(to_numpy(tensor)).any()


@ENGINES
@pytest.mark.parametrize("transpose", [False, True])
def test_packed_b_serves_many_calls(queue: cl.CommandQueue, transpose: bool, engine: str) -> None:
    b, dtype = random(21, 37), storage_of(engine)
    packed = pack_b(to_device(queue, b.T if transpose else b, dtype), transpose=transpose, engine=engine)
    for m in (1, 30):
        a = to_device(queue, random(m, 21), dtype)
        expected = gemm(a, to_device(queue, b, dtype), out_dtype="float16", engine=engine)
        np.testing.assert_array_equal(gemm(a, packed, out_dtype="float16").to_host(), expected.to_host())


# ------------------------------------------------------------------------------------------ numbers, promises


def ones(queue: cl.CommandQueue, m: int, n: int, k: int, out_dtype: str, engine: str) -> Array:
    a, b = (to_device(queue, np.ones(shape), storage_of(engine)) for shape in ((m, k), (k, n)))
    return to_numpy(gemm(a, b, out_dtype=out_dtype, engine=engine))


@ENGINES
@pytest.mark.parametrize(
    ("k", "out_dtype", "expected"),
    [
        (4096, "float16", 4096), (65504, "float16", 65504), (65536, "float16", np.inf), (65536, "bfloat16", 65536),
        (65536, "float32", 65536),
    ],
)  # fmt: skip
def test_long_sums_are_exact(
    queue: cl.CommandQueue, simulated: bool, k: int, out_dtype: str, expected: float, engine: str
) -> None:
    if simulated and (k > 4096 or engine == "tiled"):
        pytest.skip("too long for the simulator")
    np.testing.assert_array_equal(ones(queue, 2, 3, k, out_dtype, engine), expected)


@ENGINES
def test_special_values_go_where_numpy_puts_them(queue: cl.CommandQueue, engine: str) -> None:
    check_special_values(queue, 35, alike(engine)[:2], engine)


@ENGINES
def test_half_subnormals_and_overflow(queue: cl.CommandQueue, engine: str) -> None:
    a = np.array([[2.0**-24, 0.0], [65504.0, 65504.0], [65504.0, -65504.0], [-65504.0, -65504.0], [-0.0, 0.0]])
    b = np.array([[1.0, 1024.0, 0.5], [1.0, 1024.0, 0.5]])
    for out_dtype in ("float16", "float32"):
        check(queue, a, b, (*alike(engine)[:2], out_dtype), engine=engine)


@ENGINES
@pytest.mark.parametrize("n", [3, 32], ids=["edge", "whole tile"])
def test_relu_keeps_nan_and_clips_minus_infinity(queue: cl.CommandQueue, n: int, engine: str) -> None:
    a = np.ones((12, 1))
    b = np.zeros((1, n))
    b[0, :3] = np.nan, -np.inf, np.inf
    x, y = to_device(queue, a, storage_of(engine)), to_device(queue, b, storage_of(engine))
    result = to_numpy(gemm(x, y, out_dtype="float16", relu=True, engine=engine))
    np.testing.assert_array_equal(result, np.broadcast_to(np.where(b == -np.inf, 0.0, b), (12, n)))


@ENGINES
def test_repeats_bit_for_bit(queue: cl.CommandQueue, simulated: bool, engine: str) -> None:
    m, n, k = (13, 33, 40) if simulated else (130, 290, 600)
    a, b = to_device(queue, random(m, k), storage_of(engine)), to_device(queue, random(k, n), storage_of(engine))
    first = gemm(a, b, out_dtype="float32", engine=engine).to_host()
    for _ in range(3):
        np.testing.assert_array_equal(gemm(a, b, out_dtype="float32", engine=engine).to_host(), first)


@pytest.mark.unsimulated
@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize(
    ("m", "n", "k", "transposes"),
    [(512, 512, 1024, NT), (997, 509, 1013, TN), (8, 2048, 4096, NN), (2048, 10, 300, TT)],
)
def test_full_size(queue: cl.CommandQueue, m: int, n: int, k: int, transposes: dict[str, bool], engine: str) -> None:
    check(queue, random(m, k), random(k, n), alike(engine), **transposes, engine=engine)


def test_integers_are_summed_exactly(queue: cl.CommandQueue) -> None:
    if not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")
    a, b = np.round(random(30, 65536) * 2), np.ones((65536, 3))
    x, y = to_device(queue, a, "bfloat16"), to_device(queue, b, "bfloat16")
    packed = pack_b(y, engine="dot_bf16")
    for _ in range(2):
        np.testing.assert_array_equal(to_numpy(gemm(x, packed, out_dtype="float32")), a @ b)


@pytest.mark.parametrize(("transposes", "launches"), [(NN, 1), (NT, 1), (TN, 2)])
def test_a_block_of_all_rows_packs_what_it_multiplies(
    queue: cl.CommandQueue, transposes: dict[str, bool], launches: int
) -> None:
    """A layer's product, its input gradient and its weight gradient: only rows across the lines of memory are packed
    before."""
    if not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")
    x, y = laid_out(queue, random(128, 256), random(256, 320, seed=1), ("bfloat16", "bfloat16"), **transposes)
    with counted_launches() as counted:
        gemm(x, y, **transposes, out_dtype="float32", engine="dot_bf16")
    assert len(counted) == launches


@pytest.mark.parametrize("transposes", [NN, NT, TN])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(("m", "k", "n"), [(128, 256, 320), (100, 256, 320), (128, 250, 320), (512, 128, 32)])
def test_small_products_take_one_launch_whichever_engine_pays(
    queue: cl.CommandQueue, m: int, k: int, n: int, batch: tuple[int, ...], transposes: dict[str, bool]
) -> None:
    if not capabilities(queue).fast_dot_bf16 or capabilities(queue).amx:
        pytest.skip("no bfloat16 dot product that is used here")
    types, count = ("bfloat16", "bfloat16"), prod(batch)
    x, y = laid_out(queue, random(*batch, m, k), random(*batch, k, n, seed=1), types, **transposes)
    engines = {"direct": "direct", "dot_bf16": "dot_bf16", "chosen": None}
    results, launches = {}, {}
    for name, engine in engines.items():
        with counted_launches() as counted:
            results[name] = to_numpy(gemm(x, y, **transposes, out_dtype="float32", engine=engine))
        launches[name] = len(counted)
    expected = dot_bf16.launches(
        operand_a(x, transposes["transpose_a"]), operand_b(y, transposes["transpose_b"]), count
    )
    pays = launches["dot_bf16"] == 1 and m * k * n * count > 5 * 2**19
    assert launches == {"direct": 1, "dot_bf16": expected, "chosen": 1}
    np.testing.assert_array_equal(results["chosen"], results["dot_bf16" if pays else "direct"])


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_of_few_columns_writes_no_panels(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, batch: tuple[int, ...]
) -> None:
    if not capabilities(queue).is_cpu:
        pytest.skip("panels are for CPUs")
    monkeypatch.setattr(direct, "_SMALL", 0)
    x, y = laid_out(queue, random(*batch, 101, 257), random(*batch, 257, 5, seed=1), ("float32", "float32"), **NN)
    with counted_launches() as counted:
        chosen = gemm(x, y, out_dtype="float32")
    assert len(counted) == 1
    assert not is_packed(x, y), "nor is a weight packed that is multiplied with again and again"
    np.testing.assert_array_equal(chosen.to_host(), gemm(x, y, out_dtype="float32", engine="packed").to_host())


def test_panels_of_bfloat16_pairs_serve_bfloat16_only(queue: cl.CommandQueue) -> None:
    if not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")
    a, b = to_device(queue, random(2, 3), "float16"), to_device(queue, random(3, 4), "bfloat16")
    with pytest.raises(ValueError, match=r"gemm.*float16 by bfloat16.*a_dtype"):
        gemm(a, pack_b(b, engine="dot_bf16"), out_dtype="float16")
    gemm(a, pack_b(b, a_dtype="float16"), out_dtype="float16")


# ---------------------------------------------------------------------------------------------------- errors


def test_tensors_of_two_queues_are_refused(queue: cl.CommandQueue) -> None:
    other = cl.CommandQueue(queue.context)
    with pytest.raises(ValueError, match=r"gemm.*different queues"):
        gemm(to_device(queue, np.ones((2, 2))), to_device(other, np.ones((2, 2))), out_dtype="float32")
