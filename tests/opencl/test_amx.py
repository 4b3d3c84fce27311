"""The matrix unit of x86 processors: its instructions in assembly and in plain C, and who may use them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import amx, device, trials
from clamp.opencl.device import capabilities
from tests.mutants import write_wrong
from tests.scripts import run_script
from tests.tools import go_without

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@DTYPES
def test_plain_c_computes_right(queue: cl.CommandQueue, dtype: str) -> None:
    assert amx.computes_right(dtype, queue, emulate=True)


def _numbers(kind: str) -> np.ndarray:
    """Bits of 2 x 2 parts of 32 x 64 numbers."""
    random = np.random.default_rng(7)
    bits = random.integers(0, 1 << 16, (2, 2, 32, 64), dtype=np.uint16)
    if kind == "subnormal results":  # numbers around 2^-63
        return bits & 0x81FF | 0x2000
    finite = bits & 0xBFFF  # below 2
    if kind == "some not finite":
        finite[..., :4, :] = bits[..., :4, :]
    return finite


@pytest.mark.parametrize("kind", ["some not finite", "finite", "subnormal results"])
def test_plain_c_has_the_bits_of_the_unit(amx_queue: cl.CommandQueue, kind: str) -> None:
    a, b = _numbers(kind)
    real, emulated = (amx.multiplied(amx_queue, a, b, "bfloat16", emulate=emulate) for emulate in (False, True))
    assert np.array_equal(np.isnan(real), np.isnan(emulated))
    same = real.view(np.uint32) == emulated.view(np.uint32)
    assert np.all(same | np.isnan(real))
    assert np.isfinite(real).any()


def test_a_round_that_measures_the_unit_is_16_products(amx_queue: cl.CommandQueue) -> None:
    """Of ones, four products to each of four tiles, after a first one."""
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    ones = cl.Buffer(amx_queue.context, flags, hostbuf=np.full(2048, 0x3F80, np.uint16))
    found = np.zeros(1, np.float32)
    sums = cl.Buffer(amx_queue.context, flags, hostbuf=found)
    amx._LIMIT(amx_queue, (1,), (1,), ones, sums, 3, PROBE_AMX_LIMIT=1, PARTS=1, DOT_F16=0, EMULATE=0)
    cl.enqueue_copy(amx_queue, found, sums)
    assert found == 32 * (1 + 3 * 4)


#: with tests of the unit
_FILES = [
    "tests/opencl/test_amx.py",
    "tests/ops/test_gemm_amx.py",
    "tests/ops/test_conv_amx.py",
    "tests/ops/test_attention_amx.py",
    "tests/test_training.py",
]


@pytest.mark.long
def test_assembly_is_tested_where_no_processor_knows_it(
    request: pytest.FixtureRequest, queue: cl.CommandQueue, tmp_path: Path
) -> None:
    """All that is to be tested where there is a unit, is, by a process in which `amx_trap.c` stands in for it."""
    if amx.is_listed("bfloat16") or not capabilities(queue).is_cpu:
        pytest.skip("needs a processor without AMX")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "clang-19"))), None)
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        go_without("needs Linux on x86-64 and a C compiler: apt install clang-19")
    trap = str(tmp_path / "amx_trap.so")
    source = str(Path(__file__).with_name("amx_trap.c"))
    subprocess.run([compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", trap, source], check=True)
    name = request.node.callspec.params["queue"]
    words = "-p", "no:cacheprovider", "-k", "unit and not PyTorch"
    printed = run_script(queue, "-m", "pytest", *words, *_FILES, CLAMP_TEST_DEVICES=name, LD_PRELOAD=trap)
    assert "skipped" not in printed, "the unit is not used there: it has computed wrong in its trial (amx.why_not)"
    assert " passed" in printed


#: What is wrong, and the pieces of source: one of both builds, of the unit alone, or of plain C alone.
MUTANTS = [
    ("sums are not cleared", "if (resume)", "if (1)", "the unit"),
    ("sums are never resumed", "if (resume)", "if (0)", "the unit"),
    ("the lower rows are the upper", "a1 = a0 + 16 * a_row;", "a1 = a0 + 15 * a_row;", "the unit"),
    ("the right columns are the left",
     "DOT(3, 5, 7) LOAD_B(7, base, 1)", "DOT(3, 5, 7) LOAD_B(7, base, 0)", "the unit"),
    ("a product of parts is missing",
     "LOW_A LOW_B BY_COLUMNS(b, FETCH_A)", "LOW_A LOAD_B(6, b, 0) LOAD_B(7, b, 1)", "the unit"),
    ("a register is loaded too early",
     "DOT(2, 5, 6) LOAD_B(6, base, 0)", "LOAD_B(6, base, 0) DOT(2, 5, 6)", "the unit"),
    ("b stays where it is", 'LINE("addq %[b_step], %[b]")', "", "the unit"),
    ("an instruction is dropped, as assemblers do with what they do not know",
     '"tdpbf16ps %%tmm" #b', '"tdpbf17ps %%tmm" #b', "the unit"),
    ("operands change places", '%%tmm" #b ", %%tmm" #a', '%%tmm" #a ", %%tmm" #b', "the unit"),
    ("tiles of sums change places", "X(1, 64) X(2, 2048)", "X(2, 64) X(1, 2048)", "the unit"),
    ("the lower rows are the upper, by addresses", "from1 = from + 16 * a_row,", "from1 = from,", "the unit"),
    ("sums are not cleared", "i < SUMS && !resume", "i < 0 && !resume", "plain C"),
    ("pairs are in the other order", "fma((float16)(a_even[k])", "fma((float16)(a_odd[k])", "plain C"),
    ("the right columns are the left", "b + tile % 2 * 64, b_row", "b, b_row", "plain C"),
    ("a product of parts is missing", "    four_dots(sums, a, a_row, b_low, b_row);", "", "plain C"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "build"), [pytest.param(*m[1:], id=f"{m[0]}, {m[3]}") for m in MUTANTS])
@pytest.mark.long
@pytest.mark.once
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, old: str, new: str, build: str
) -> None:
    if build == "the unit" and not capabilities(queue).amx:
        pytest.skip("needs a processor with AMX, and its tile registers")
    emulate = build == "plain C"
    assert amx.computes_right("bfloat16", queue, emulate=emulate)
    write_wrong(monkeypatch, amx.PROBE.file, old, new)
    assert not amx.computes_right("bfloat16", queue, emulate=emulate)


def _forbid(*args: object, **options: object) -> None:
    raise AssertionError("nobody should have asked")


@pytest.mark.parametrize(
    ("flags", "refusal", "verdict", "why"),
    [
        ({"amx_tile", "amx_int8"}, None, None, "does not list amx_bf16"),
        ({"amx_tile", "amx_bf16"}, "no tiles today", None, "no tiles today"),
        ({"amx_tile", "amx_bf16"}, "", {"bfloat16": "wrong numbers"}, "wrong numbers"),
        ({"amx_tile", "amx_bf16"}, "", {}, "could not be tried"),
        ({"amx_tile", "amx_bf16"}, "", {"bfloat16": trials.RIGHT}, ""),
    ],
)
def test_it_is_used_where_listed_granted_and_right(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, flags: set[str], refusal: str | None,
    verdict: dict[str, str] | None, why: str,
) -> None:  # fmt: skip
    """None: nobody may ask."""
    monkeypatch.setattr(amx, "host_cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(amx, "refusal_of_tiles", _forbid if refusal is None else lambda: refusal)
    begun = []
    monkeypatch.setattr(trials, "begin", lambda device, where: begun.append(where))
    monkeypatch.setattr(trials, "verdicts", _forbid if verdict is None else lambda *args, **options: verdict)
    reason = amx.why_not(queue.device, "bfloat16")
    assert why in reason
    assert bool(why) == bool(reason)
    found = device._probed(queue)
    assert bool(found.amx) == (found.is_cpu and not why)
    assert not found.amx_fp16
    assert len(begun) == (found.is_cpu and "amx_bf16" in flags)


_SMALL_STACK = """
import ctypes
import pyopencl as cl
import clamp
from clamp.opencl import amx
from clamp.opencl.device import capabilities

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0  # a driver has set up one of its own
print(bool(capabilities(queue).amx), amx.why_not(queue.device, "bfloat16"))
"""


def test_a_small_signal_stack_means_no_matrix_unit(amx_queue: cl.CommandQueue) -> None:
    printed = run_script(amx_queue, "-c", _SMALL_STACK)
    assert printed.startswith("False")
    assert "sigaltstack" in printed
