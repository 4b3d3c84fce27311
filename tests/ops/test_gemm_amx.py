"""Products on the matrix unit of x86 processors: in plain C on every device, and where there is one, its own bits."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl.amx import refusal_of_tiles
from clamp.opencl.device import capabilities
from clamp.opencl.program import KernelBuildError
from clamp.ops.cast import cast
from clamp.ops.engine import always
from clamp.ops.gemm import amx, gemm, pack_b, pairs, rounds_as_it_reads
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b
from tests.launches import forget_prepared_launches
from tests.mutants import write_wrong
from tests.ops.gemm_reference import NN, NT, TN, TRANSPOSES, TT, check, laid_out, random, stored
from tests.reference import assert_close, to_device, to_numpy
from tests.scripts import run_script
from tests.sweep import sweep

F16, BF16 = "float16", "bfloat16"
PLAIN_C = {BF16: amx.Unit(BF16, 1, emulate=True), F16: amx.Unit(F16, 2, emulate=True)}
FP16_UNIT = amx.Unit(F16, 1, emulate=True)  # of processors that multiply float16 as it is
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16])
UNITS = {"bfloat16": amx.Unit(BF16, 1), "float16 in two parts": amx.Unit(F16, 2), "float16": amx.Unit(F16, 1)}

#: Shapes of op(a) and op(b): whole tiles; odd edges; one matrix for a batch, either way; no k; two blocks of k.
SHAPES = {
    "whole tiles": ((64, 64), (64, 96)),
    "odd edges": ((37, 45), (45, 70)),
    "one element": ((1, 1), (1, 1)),
    "few rows of a": ((3, 64), (64, 96)),
    "a batch": ((2, 33, 20), (2, 20, 40)),
    "a batch of whole tiles": ((2, 32, 32), (2, 32, 64)),
    "one a for a batch of whole tiles": ((32, 64), (2, 64, 32)),
    "one b for a batch": ((2, 3, 40), (40, 33)),
    "one a for a batch": ((33, 40), (2, 40, 17)),
    "no k": ((5, 0), (0, 7)),
    "more rows than a block has": ((300, 40), (40, 33)),
    "long sums": ((260, 1100), (1100, 40)),  # of bfloat16 a panel of rows more than a block has if it packs no b
}
_blocks, _pack_in_turn = pairs._blocks, pairs._pack_in_turn
_SLOW_TO_SIMULATE = {"more rows than a block has", "long sums", "whole tiles", "one a for a batch of whole tiles"}


@pytest.fixture
def in_plain_c(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the engine compute in plain C, and pack b in its blocks where it may, or always before."""

    def use(units: dict[str, amx.Unit] = PLAIN_C, in_turn: bool = True) -> None:
        monkeypatch.setattr(amx, "unit_of", lambda device, dtype: units[dtype])
        monkeypatch.setattr(amx, "fits", always)
        monkeypatch.setattr(pairs, "_blocks", lambda a, b, *given: _blocks(a, b, 1, 0, *given[2:]))
        monkeypatch.setattr(pairs, "_pack_in_turn", _pack_in_turn if in_turn else lambda *given: False)
        forget_prepared_launches(monkeypatch)

    return use


@DTYPES
@TRANSPOSES
@pytest.mark.parametrize("in_turn", [True, False], ids=["b packed in turn", "b packed before"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_products_are_right(
    queue: cl.CommandQueue, simulated: bool, in_plain_c: Callable[..., None], dtype: str, shapes: Any,
    transposes: dict[str, bool], in_turn: bool,
) -> None:  # fmt: skip
    if simulated and shapes in [SHAPES[name] for name in _SLOW_TO_SIMULATE]:
        pytest.skip("the simulator would take minutes")
    in_plain_c(in_turn=in_turn)
    a, b = random(*shapes[0]), random(*shapes[1], seed=1)
    check(queue, a, b, (dtype, dtype, "float32"), engine="amx", **transposes)


@pytest.mark.parametrize(("panels", "all_rows"), [(1, True), (2, True), (3, True), (16, True), (17, True), (18, False)])
def test_a_batch_of_a_few_rows_more_has_blocks_of_the_same_kind(panels: int, all_rows: bool) -> None:
    """Others would need kernels that the first batch has not compiled."""
    for panels_b in (8, 32):
        block_a, block_b = pairs._blocks(panels, panels_b, 1, 2, 16, True)
        assert (block_a == panels) == all_rows
        assert -(-panels // block_a) * -(-panels_b // block_b) >= 8


@pytest.mark.parametrize("transposed", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize("out_dtype", [F16, BF16, "float32"])
@DTYPES
def test_epilogues_and_packed_operands(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], dtype: str, out_dtype: str, transposed: bool
) -> None:
    in_plain_c()
    k, n = (32, 64) if transposed else (45, 70)
    a, b, bias = random(37, k), random(k, n, seed=1), random(n, seed=2)
    options = {"bias": (bias, F16), "relu": True, "engine": "amx", "transpose_b": transposed}
    plain = check(queue, a, b, (dtype, dtype, out_dtype), **options)
    packed = pack_b(to_device(queue, b, dtype), engine="amx")
    again = gemm(to_device(queue, a, dtype), packed, out_dtype=out_dtype, bias=to_device(queue, bias, F16), relu=True)
    np.testing.assert_array_equal(to_numpy(plain), to_numpy(again))


def test_panels_of_the_other_type_are_not_taken_for_known_ones(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_plain_c()
    monkeypatch.setattr(amx, "fits", lambda problem: problem.a_dtype == problem.b_dtype)
    a, b = to_device(queue, random(64, 64), F16), random(64, 96, seed=1)
    of_halves, others = (pack_b(to_device(queue, b, dtype), engine="amx") for dtype in (F16, BF16))
    gemm(a, of_halves, out_dtype="float32")
    with pytest.raises(ValueError, match="amx does not compute"):
        gemm(a, others, out_dtype="float32")


def test_float16_as_it_is(queue: cl.CommandQueue, in_plain_c: Callable[..., None]) -> None:
    in_plain_c({F16: FP16_UNIT})
    a, b = random(37, 45), random(45, 40, seed=1)
    a[3] *= 2.0**-20  # subnormal halves count
    for transposed in (False, True):
        check(queue, a, b, (F16, F16, "float32"), engine="amx", transpose_a=transposed, transpose_b=transposed)


def test_rows_in_the_same_lines_of_a_cache_are_packed_for_many_columns(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_plain_c(in_turn=False)
    a, b = to_device(queue, random(64, 64), BF16), to_device(queue, random(64, 96, seed=1), BF16)
    results, packed = [], []
    pack = pairs._Packing.__call__
    monkeypatch.setattr(pairs._Packing, "__call__", lambda self, *given: packed.append(self) or pack(self, *given))
    for way, many in ((4096, 96), (128, 97), (128, 96)):
        monkeypatch.setattr(pairs, "_CACHE_WAY", way)
        monkeypatch.setattr(pairs, "_MANY_COLUMNS", many)
        forget_prepared_launches(monkeypatch)
        results.append(to_numpy(gemm(a, b, out_dtype="float32", engine="amx")))
    assert len(packed) == 1 + 1 + 2
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def _special(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = random(70, 45), random(45, 40, seed=1)
    a[2, 3], a[5, 0], a[14, 18], a[40, 7] = np.inf, np.nan, -np.inf, -0.0
    b[4, 6], b[18, 34], b[3, 8], b[9, 0], b[3, 9] = np.nan, np.inf, 0.0, 6e-8 if dtype == F16 else 1e-30, -np.inf
    return a, b


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@DTYPES
@pytest.mark.parametrize("packed", [False, True], ids=["b as it lies", "b packed"])
def test_special_values(queue: cl.CommandQueue, in_plain_c: Callable[..., None], dtype: str, packed: bool) -> None:
    in_plain_c()
    a, b = _special(dtype)
    x, y = stored(a, dtype), stored(b, dtype)
    magnitude = np.nan_to_num(np.abs(x), posinf=0) @ np.nan_to_num(np.abs(y), posinf=0)
    right = to_device(queue, b, dtype)
    result = gemm(
        to_device(queue, a, dtype), pack_b(right, engine="amx") if packed else right, out_dtype="float32",
        **{} if packed else {"engine": "amx"},
    )  # fmt: skip
    assert_close(result, x @ y, slack=46 * 2.0**-24 * magnitude)


@pytest.mark.parametrize(("engine", "dtype"), [("amx", BF16), ("amx", F16), ("dot_bf16", BF16)])
@pytest.mark.parametrize("shape", [(45, 70), (64, 64), (64, 640)])
@pytest.mark.parametrize("rows", [37, 128])
def test_a_weight_is_rounded_as_it_is_read(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], engine: str, dtype: str, shape: tuple[int, int], rows: int
) -> None:
    """Product and copy have the bits of a cast before."""
    if engine == "dot_bf16" and not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")
    in_plain_c()
    a, b = to_device(queue, random(rows, shape[0])), to_device(queue, random(*shape, seed=1))
    copy = to_device(queue, np.zeros(shape), dtype)
    read = gemm(a, b, out_dtype="float32", engine=engine, reads=dtype, b_copy=copy)
    cast_before = gemm(cast(a, dtype), cast(b, dtype), out_dtype="float32", engine=engine)
    np.testing.assert_array_equal(to_numpy(read), to_numpy(cast_before))
    np.testing.assert_array_equal(to_numpy(copy), to_numpy(cast(b, dtype)))


@pytest.mark.unsimulated
def test_long_sums_of_one_sign_lose_no_bits(queue: cl.CommandQueue, in_plain_c: Callable[..., None]) -> None:
    """In one running sum of 8,192 the error would be 2^-21.4 of it."""
    in_plain_c()
    a, b = np.abs(random(8, 8192)), np.abs(random(8192, 16, seed=1))
    result = gemm(to_device(queue, a, F16), to_device(queue, b, F16), out_dtype="float32", engine="amx")
    exact = stored(a, F16) @ stored(b, F16)
    error = np.sqrt(np.mean(((to_numpy(result) - exact) / exact) ** 2))
    assert error < 2.0**-22.5


# ------------------------------------------------------------------------------------------- where there is the unit


def _bits(result: Tensor) -> np.ndarray:
    return np.nan_to_num(to_numpy(result), nan=12345.0)


_CASES = product(UNITS, ["whole tiles", "odd edges", "a batch", "long sums", "special"], ["NN", "NT", "TN", "TT"])


@pytest.mark.parametrize(("unit", "case", "layout"), sweep(_CASES, lambda n: n % 7 == 0))  # each value is met
def test_plain_c_has_the_bits_of_the_unit(
    amx_queue: cl.CommandQueue, in_plain_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch, unit: str, case: str,
    layout: str,
) -> None:  # fmt: skip
    """And the unit repeats them, from panels too."""
    if unit == "float16" and not capabilities(amx_queue).amx_fp16:
        pytest.skip("the unit does not multiply float16 as it is")
    monkeypatch.setattr(amx, "unit_of", lambda device, dtype: UNITS[unit])
    forget_prepared_launches(monkeypatch)
    dtype, shapes = UNITS[unit].dtype, SHAPES.get(case)
    transposes = {"NN": NN, "NT": NT, "TN": TN, "TT": TT}[layout]
    a, b = _special(dtype) if shapes is None else (random(*shapes[0]), random(*shapes[1], seed=1))
    left, right = laid_out(amx_queue, a, b, (dtype, dtype), **transposes)
    transpose_a, transpose_b = transposes.values()
    first, again = (_bits(gemm(left, right, out_dtype="float32", engine="amx", **transposes)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    packed = pack_b(right, transpose=transpose_b, engine="amx")
    np.testing.assert_array_equal(first, _bits(gemm(left, packed, transpose_a=transpose_a, out_dtype="float32")))
    in_plain_c({dtype: replace(UNITS[unit], emulate=True)})
    emulated = gemm(cast(left, dtype), right, out_dtype="float32", engine="amx", **transposes)
    launch = amx.bind(operand_a(left, transpose_a), operand_b(right, transpose_b), emulated, Epilogue("float32"))
    launch(left, right, emulated, emulated, emulated)
    np.testing.assert_array_equal(first, _bits(emulated))


# --------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Case:
    """A product that a mutant must get wrong."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str = BF16
    transposes: dict[str, bool] = field(default_factory=lambda: NN)
    special: bool = False
    in_turn: bool = True

    def check(self, queue: cl.CommandQueue) -> None:
        a, b = random(*self.shapes[0]), random(*self.shapes[1], seed=1)
        if self.special:
            a[1, 0] = np.inf
        with np.errstate(invalid="ignore"):
            check(queue, a, b, (self.dtype, self.dtype, "float32"), engine="amx", **self.transposes)


_WHOLE, _LONG = Case(SHAPES["whole tiles"]), Case(SHAPES["long sums"])
_TURNED, _HALVES = Case(SHAPES["odd edges"], BF16, TT), Case(SHAPES["whole tiles"], F16, NT)

#: What is wrong, the piece of source and what replaces it, and a product that shows it.
MUTANTS = [
    ("pairs are in the wrong order",
     "(convert_uint16(x) | convert_uint16(y) << 16)", "(convert_uint16(y) | convert_uint16(x) << 16)", _WHOLE),
    ("a tail of k is not masked", "bits_before(r + first * width, end - first, width)",
     "bits_at(r + first * width, width)", Case(SHAPES["odd edges"], special=True)),
    ("a tail of k together is not masked", "next < depth ? rows : 0", "rows",
     Case(SHAPES["a batch"], BF16, TN)),
    ("tiles are not turned", "if (by_k == is_b) transpose", "if (by_k != is_b) transpose", _TURNED),
    ("the upper part is the lower", "UPPER_HALVES(x.high, y.high)", "UPPER_HALVES(x.low, y.low)", _HALVES),
    ("sums that are not finite are not mended", "if (!any(is_odd)) return;", "return;",
     Case(((33, 40), (40, 17)), F16, special=True)),
    ("the first block of k is forgotten", "+ LOAD_PRIVATE(float16, total + i)", "", _LONG),
    ("all of a batch have the first b", "B += batch * b_batch;", "B += 0;", Case(SHAPES["a batch"], in_turn=False)),
    ("all of a batch pack the first b", "B += batch * b_batch;", "B += b_width ? 0 : batch * b_batch;",
     Case(SHAPES["a batch"])),
    ("a block packs its first panel again", "q * SIDE, t + s", "first_b * SIDE, t + s", _WHOLE),
    ("the second block of k is packed from the first", "q * SIDE, t + s", "q * SIDE, s", _LONG),
    ("a tile of columns by rows is not turned", "if (transposed) transpose_sums(sums);", "",
     Case(SHAPES["few rows of a"], BF16, NT)),
    ("quarters of it stay where they are", "quarter == 1 ? 16 * SIDE : at", "at",
     Case(SHAPES["few rows of a"], BF16, NT)),
    ("the second panel of b is the first", "B + (q * steps + t)", "B + (first_b * steps + t)",
     Case(SHAPES["whole tiles"], in_turn=False)),
]  # fmt: skip


@pytest.mark.unsimulated  # what is wrong shows on any device
@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("old", "new", "case"), [pytest.param(*mutant[1:], id=mutant[0]) for mutant in MUTANTS])
@pytest.mark.long
@pytest.mark.once
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch, old: str,
    new: str, case: Case,
) -> None:  # fmt: skip
    in_plain_c(in_turn=case.in_turn)
    case.check(queue)
    write_wrong(monkeypatch, "gemm_amx.cl", old, new)
    with pytest.raises(AssertionError, match="differ"):
        case.check(queue)


# ------------------------------------------------------------------------------------ memory, threads and processes


def multiply_before_guards() -> None:
    """Products of matrices that end where memory ends, compared with numpy's; run in a process of its own."""
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    numbers = np.random.default_rng(5)
    for turn in range(24):
        m, n, k = (int(x) for x in numbers.integers(1, 100, 3))
        dtype, transposed = (BF16, F16)[turn % 2], (bool(turn & 2), bool(turn & 4))
        a, b = numbers.integers(-3, 4, (m, k)), numbers.integers(-3, 4, (k, n))
        c = _guarded(queue, np.zeros((m, n)), "float32")
        left = operand_a(_guarded(queue, a.T if transposed[0] else a, dtype), transposed[0])
        right = operand_b(_guarded(queue, b.T if transposed[1] else b, dtype), transposed[1])
        unit = amx.unit_of(capabilities(queue), dtype) if capabilities(queue).amx else PLAIN_C[dtype]
        for matrix in (right, amx.packed(right, unit)):
            launch = pairs.Product(left, matrix, c, Epilogue("float32"), unit)
            launch(left.tensor, matrix.tensor, c, c, c)
            found = np.empty((m, n), np.float32)
            cl.enqueue_copy(queue, found, c.buffer)
            assert np.array_equal(found, a @ b), (m, n, k, dtype, transposed)
    print("all", "there" if refusal_of_tiles() == "" else "in plain C")


def _guarded(queue: cl.CommandQueue, values: np.ndarray, dtype: str) -> Any:
    """A matrix whose last byte is the last that may be touched."""
    host = values.astype(np.float32)
    if dtype != "float32":
        host = (
            host.astype(np.float16).view(np.uint16) if dtype == F16 else (host.view(np.uint32) >> 16).astype(np.uint16)
        )
    size = -(-host.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    guard = ctypes.c_void_p(view.ctypes.data + size)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    place = view[size - host.nbytes : size].view(host.dtype).reshape(host.shape)
    place[...] = host
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
    buffer = cl.Buffer(queue.context, flags, hostbuf=place)
    return SimpleNamespace(
        queue=queue, context=queue.context, buffer=buffer, shape=host.shape, dtype=dtype, size=host.size, kept=memory
    )


@pytest.mark.slow
def test_the_unit_touches_nothing_beyond_the_matrices(queue: cl.CommandQueue) -> None:
    if not capabilities(queue).is_cpu or sys.platform != "linux":
        pytest.skip("memory of the host's, which its kernel guards")
    assert "all" in run_script(queue, "-c", f"from {__name__} import multiply_before_guards as run; run()")


_TORCH = """
try:
    import torch
except ImportError:
    print("no torch")
    raise SystemExit
"""

_BESIDE_OTHERS = """
import os, sys, threading
import numpy as np
import pyopencl as cl
from clamp.bridge import Tensor
from clamp.ops.cast import cast
from clamp.ops.gemm import amx, gemm

context = cl.create_some_context(interactive=False)
whole = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float32)
right = whole @ whole

def multiply(times, failed):
    own = cl.Context(context.devices)  # netcl's pool hands what one queue still uses to the others of its context
    queue = cl.CommandQueue(own)
    x = cast(Tensor.from_host(queue, whole), "bfloat16")
    for _ in range(times):
        if not np.array_equal(gemm(x, x, out_dtype="float32", engine="amx").to_host(), right):
            failed.append(1)

waiting, failed = threading.Event(), []
early = threading.Thread(target=lambda: (waiting.wait(), multiply(50, failed)))  # before anybody asks for tiles
early.start()
multiply(1, failed)
late = [threading.Thread(target=multiply, args=(50, failed)) for _ in range(2)]
if "torch" in sys.modules:
    y = torch.tensor(whole, dtype=torch.bfloat16)
    def others():
        for _ in range(200):
            if not np.array_equal((y @ y).float().numpy(), torch.tensor(right).bfloat16().float().numpy()):
                failed.append(2)
    late.append(threading.Thread(target=others))
waiting.set()
for thread in late: thread.start()
for thread in [early, *late]: thread.join()
print("wrong" if failed else "right")
"""

_REFUSED = """
import ctypes
import numpy as np
import pyopencl as cl
from clamp.bridge import Tensor
from clamp.ops.cast import cast
from clamp.ops.gemm import gemm
from clamp.ops.gemm.engines import usual

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
whole = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float32)
x = cast(Tensor.from_host(queue, whole), "bfloat16")
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
assert np.array_equal(gemm(x, x, out_dtype="float32").to_host(), whole @ whole)
print(usual(queue, "bfloat16").NAME)
"""


@pytest.mark.parametrize("other", ["", _TORCH], ids=["threads", "threads and PyTorch's products"])
def test_threads_have_a_unit_of_their_own(amx_queue: cl.CommandQueue, other: str) -> None:
    printed = run_script(amx_queue, "-c", other + _BESIDE_OTHERS)
    if "no torch" in printed:
        pytest.skip("needs PyTorch")
    assert printed.strip() == "right"


@pytest.mark.parametrize(("is_tried", "compiles"), [(True, True), (True, False), (False, True)])
def test_its_kernels_are_built_while_it_is_tried(
    queue: cl.CommandQueue, in_plain_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_tried: bool,
    compiles: bool,
) -> None:  # fmt: skip
    done: list[str] = []

    def on(_: cl.CommandQueue, **macros: Any) -> None:
        done.append(f"built for {macros['IN_T']}")
        if not compiles:
            raise KernelBuildError

    in_plain_c()
    monkeypatch.setattr(amx.amx, "is_being_tried", lambda _: is_tried)
    monkeypatch.setattr(amx.Unit, "gemm", SimpleNamespace(on=on))
    monkeypatch.setattr(amx, "fits", lambda _: done.append("waited") is None)
    x = to_device(queue, np.ones((160, 160), np.float32))
    assert rounds_as_it_reads(x, x, BF16)
    assert done == ["built for bf16", "waited"][not is_tried :]


def test_where_the_unit_is_refused_another_engine_multiplies(amx_queue: cl.CommandQueue) -> None:
    assert run_script(amx_queue, "-c", _REFUSED).strip() not in ("", "amx")


_FORKED = """
import os, sys
import clamp
from clamp.opencl.processor import refusal_of_tiles
from clamp.opencl import processor
import ctypes

def granted():
    mask = ctypes.c_ulong(0)
    ctypes.CDLL(None).syscall(ctypes.c_long(158), ctypes.c_ulong(0x1022), ctypes.byref(mask))
    return bool(mask.value >> 18 & 1)

if len(sys.argv) > 1:
    print(granted(), refusal_of_tiles() == "", flush=True)
    raise SystemExit
assert not granted() and refusal_of_tiles() == ""
if os.fork() == 0:
    print(granted(), flush=True)
    os.execv(sys.executable, [sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], "again"])
os.wait()
"""


def test_a_fork_keeps_the_unit_and_a_new_program_asks_anew(amx_queue: cl.CommandQueue) -> None:
    assert run_script(amx_queue, "-c", _FORKED).split() == ["True", "False", "True"]
