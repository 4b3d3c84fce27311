"""What becomes of the kernels for matrix units on NVIDIA's GPUs, seen without one: clang makes PTX of them, as a driver
does, and NVIDIA's assembler machine code. Matrix instructions must be in it, and nothing may spill.

What a driver's own compiler makes of the same text may differ: it is the proof on the device that decides.

registers.json has the registers of each kernel by the versions of the tools that .ci/run installs. A change may lower
them, not raise them: ``CLAMP_WRITE_REGISTERS=1`` writes the table anew, for a diff to be looked at.

looked_at.json has a digest of what each test was given when it passed so: text, macros, the test itself. What is the
same to the letter is not compiled again, but where CLAMP_TEST_SLOW is 3.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from clamp.bridge import STORAGE
from clamp.opencl.program import Kernel, source
from clamp.ops import attention
from clamp.ops.attention.matrix_units import MatrixAttention
from clamp.ops.attention.problem import Problem
from clamp.ops.conv import engines as conv
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm import engines as gemm
from clamp.ops.gemm.matrix_units import Case, MatrixUnit, cases
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b
from tests.tools import go_without

pytestmark = pytest.mark.slow

REGISTERS = 65536  # of a multiprocessor
_TABLE = Path(__file__).with_name("registers.json")
_LOOKED_AT = Path(__file__).with_name("looked_at.json")
_LIBRARY = Path(os.environ.get("LIBCLC", "/usr/lib/clc/nvptx64--nvidiacl.bc"))
_FOLDERS = [str(folder) for folder in Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")]  # pip puts tools there
_PATH = os.pathsep.join([*_FOLDERS, os.environ.get("PATH", "")])


@dataclass(frozen=True)
class Tools:
    """Paths of the compiler, the assembler and the disassembler."""

    clang: str
    ptxas: str
    cuobjdump: str


@pytest.fixture(scope="module")
def tools() -> Tools:
    found = {name: shutil.which(os.environ.get(name.upper(), name), path=_PATH) for name in ("ptxas", "cuobjdump")}
    found["clang"] = os.environ.get("CLANG") or shutil.which("clang-19") or shutil.which("clang")
    found[str(_LIBRARY)] = _LIBRARY if _LIBRARY.exists() else None
    if missing := [name for name, path in found.items() if path is None]:
        go_without(
            f"no {', '.join(missing)}: apt install clang-19 libclc-19; "
            "pip install --no-deps nvidia-cuda-nvcc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return Tools(str(found["clang"]), str(found["ptxas"]), str(found["cuobjdump"]))


def output_of(*command: object) -> str:
    """What a command prints."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, "PATH": _PATH}
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout + done.stderr


def _read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return table


def _is_written() -> bool:
    return os.environ.get("CLAMP_WRITE_REGISTERS") == "1"


def _write(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


class Given:
    """What a test looks at: a kernel's text, macros, what finishes it, and the test itself, by a digest."""

    def __init__(self, test: pytest.Item, kernel: Kernel, macros: dict[str, Any]) -> None:
        code = [inspect.getmodule(x) for x in (output_of, test.function, kernel.finish) if x is not None]  # type: ignore[attr-defined]
        texts = [source("common.clh"), source(kernel.file), *(inspect.getsource(module) for module in code)]
        named = sorted((name, str(value)) for name, value in macros.items())
        self._name = f"{test.path.stem}::{test.name}"
        self._digest = sha256(repr((kernel.name, kernel.options, named, texts)).encode()).hexdigest()[:16]

    def was_looked_at(self) -> bool:
        """Whether the test has passed on the very same, so that it would see nothing new."""
        anew = _is_written() or os.environ.get("CLAMP_TEST_SLOW") == "3"
        return not anew and _read(_LOOKED_AT).get(self._name) == self._digest

    def passed(self) -> None:
        if _is_written():
            _write(_LOOKED_AT, _read(_LOOKED_AT) | {self._name: self._digest})


def allow(kernel: str, processor: str, registers: int) -> None:
    """Fails if a kernel takes more registers than the table says, or is not in it."""
    table: dict[str, dict[str, int]] = _read(_TABLE)
    if _is_written():
        table.setdefault(kernel, {})[processor] = registers
        _write(_TABLE, table)
    assert registers <= table[kernel][processor], f"{kernel} takes {registers} registers on {processor}"


def allow_registers(kernel: Kernel, macros: dict[str, Any], processor: str, registers: int) -> None:
    """As `allow`, of a kernel that is built with some macros."""
    allow(f"{kernel.file} {kernel.name}, {_words(macros)}", processor, registers)


def _words(macros: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(macros.items()) if name != "EMULATE")


def macros_of(unit: MatrixUnit, plan: Plan, case: Case) -> dict[str, Any]:
    """What the engine builds its kernel with for a product."""
    dtype, transposes, (m, n, k) = case
    built: dict[str, Any] = {}

    def matrix(*extents: int) -> SimpleNamespace:
        return SimpleNamespace(shape=extents, dtype=dtype, queue=None, size=m * n, buffer=None)

    left = operand_a(matrix(k, m) if transposes[0] else matrix(m, k), transposes[0])
    right = operand_b(matrix(n, k) if transposes[1] else matrix(k, n), transposes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "bind", lambda *args, **macros: built.update(macros) or (lambda *args: None))
        unit.compute(left, right, matrix(m, n), Epilogue(dtype), plan)
    return built


def compiled(tools: Tools, folder: Path, kernel: Kernel, processor: str, macros: dict[str, Any]) -> Path:
    """PTX of the kernel, finished. clang has no NVIDIA driver's options, so that some are its internal ones."""
    text, ptx = folder / kernel.file, folder / "kernel.ptx"
    text.write_text(source("common.clh") + source(kernel.file))
    target = ["-target", "nvptx64-unknown-nvidiacl"]
    for internal in ("-target-cpu", processor, "-target-feature", "+ptx81", "-mlink-builtin-bitcode", _LIBRARY):
        target += ["-Xclang", str(internal)]
    options = [f"-D{name}={value}" for name, value in macros.items()]
    output_of(tools.clang, "-x", "cl", "-cl-std=CL1.2", *target, "-O3", "-w", "-S", "-o", ptx, *options, text)
    if kernel.finish is not None:
        ptx.write_bytes(kernel.finish(ptx.read_bytes()))
    # Memory beyond 48 KB a driver adds at the launch; the assembler has to be told that somebody will.
    if (inside := re.search(r"\.shared .*pool\[\d+\];", ptx.read_text())) is not None:
        outside = ".extern " + re.sub(r"\[\d+\]", "[]", inside[0])
        ptx.write_text(ptx.read_text().replace(inside[0], "").replace(".visible .entry", f"{outside}\n.visible .entry"))
    return ptx


@dataclass(frozen=True)
class Expected:
    """What an instruction is called in PTX and in machine code, and how many a warp has in a step."""

    processors: tuple[str, ...]
    in_ptx: str
    in_code: str
    k: int = 16

    def some(self, test: pytest.Item) -> tuple[str, ...]:
        """Processors on which a test looks: one, so that any is some test's, or all where CLAMP_TEST_SLOW is 3."""
        turn = crc32(test.name.encode()) % len(self.processors)
        return self.processors if os.environ.get("CLAMP_TEST_SLOW") == "3" else self.processors[turn : turn + 1]

    def count(self, plan: Plan) -> int:
        """Of a warp, in a step."""
        k_steps = plan.k // self.k
        if self.in_code == "HGMMA":  # a warp group's, of all columns
            return k_steps
        return k_steps * (plan.rows // plan.warps[0] // 16) * (plan.columns // plan.warps[1] // 8)


EXPECTED = {
    "mma": Expected(("sm_80", "sm_90", "sm_120"), "mma.sync.aligned.m16n8k16", "HMMA.16816.F32"),
    "mma_k8": Expected(("sm_75",), "mma.sync.aligned.m16n8k8", "HMMA.1688.F32", k=8),
    "wgmma": Expected(("sm_90a",), "wgmma.mma_async.sync.aligned.m64n", "HGMMA"),
}


def products(names: Container[str]) -> Iterator[Any]:
    """The named units' plans, with the macros of their trials."""
    for unit in (unit for unit in gemm.MATRIX_UNITS if unit.NAME in names):
        for number, plan in enumerate(unit.plans):
            for case in cases(plan, number, unit.dtypes):
                macros = partial(macros_of, unit, plan, case)
                yield pytest.param(unit, unit.kernel, plan, macros, id=f"{unit.NAME}-{plan}-{case}")


def convolutions(names: Container[str]) -> Iterator[Any]:
    """The named units' plans, with whatever is gathered and whatever is copied."""
    for unit in (unit for unit in conv.MATRIX_UNITS if unit.NAME in names):
        kinds = (
            (unit.conv, {"CONV": 1, "TABLE": 0, "A_ALIGNED": 1}),
            (unit.conv, {"CONV": 1, "TABLE": 1, "A_ALIGNED": 0}),
            (unit.weight_grad, {"WEIGHT_GRAD": 1, "A_ALIGNED": 1}),
            (unit.weight_grad, {"WEIGHT_GRAD": 1, "A_ALIGNED": 0}),
        )
        for plan, (kernel, kind) in product(unit.plans, kinds):
            types = {"IN_T": STORAGE[unit.unit.dtypes[-1]], "OUT_T": "f16", "BIAS_T": "f32", "FULL": 0, "EMULATE": 0}
            options = dict(unit.unit.options)
            name = f"{unit.NAME}-{plan}-{kernel.name}-{kind['A_ALIGNED']}"
            macros = partial(dict, **types, **kind, **plan.macros, **options)
            yield pytest.param(unit, kernel, plan, macros, id=name)


def assembled(tools: Tools, ptx: Path, processor: str, kernel: Kernel, macros: dict[str, Any]) -> tuple[str, int]:
    """Machine code of the PTX, in which nothing spills, and its registers, which the table allows."""
    binary = ptx.with_suffix(".cubin")
    words = output_of(tools.ptxas, "-v", "-O3", f"-arch={processor}", "-o", binary, ptx)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in words
    assert "serialized" not in words
    registers = int(re.findall(r"Used (\d+) registers", words)[0])
    allow_registers(kernel, macros, processor, registers)
    return output_of(tools.cuobjdump, "-sass", binary), registers


def test_a_compiler_whose_pointers_are_generic_takes_them(tools: Tools, tmp_path: Path) -> None:
    """NVIDIA's does, by default, and takes array parameters for private memory alone (580.159)."""
    kinds = {case.values[1]: case.values[3] for case in (*products(EXPECTED), *convolutions(EXPECTED))}
    for kernel, macros_for in kinds.items():
        text = tmp_path / kernel.file
        text.write_text(source("common.clh") + source(kernel.file))
        options = [f"-D{name}={value}" for name, value in macros_for().items()]
        target = ["-x", "cl", "-cl-std=CL2.0", "-target", "nvptx64-unknown-nvidiacl", "-Xclang", "-target-cpu"]
        output_of(tools.clang, *target, "-Xclang", "sm_90", "-fsyntax-only", "-w", *options, text)


@pytest.mark.parametrize(("unit", "kernel", "plan", "macros_for"), [*products(EXPECTED), *convolutions(EXPECTED)])
def test_matrix_instructions_and_no_spills(
    request: pytest.FixtureRequest,
    tools: Tools,
    tmp_path: Path,
    unit: MatrixUnit | MatrixConv,
    kernel: Kernel,
    plan: Plan,
    macros_for: Callable[[], dict[str, Any]],
) -> None:
    macros, expected = macros_for(), EXPECTED[unit.NAME]
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    ptx = compiled(tools, tmp_path, kernel, expected.processors[0].rstrip("a"), macros)
    assert ptx.read_text().count(expected.in_ptx) == expected.count(plan)
    for processor in expected.some(request.node):
        code, registers = assembled(tools, ptx, processor, kernel, macros)
        shared = 2 if plan.local_memory_bytes <= 48 * 1024 and "gemm" in kernel.file else 1
        assert shared * plan.threads * registers <= REGISTERS, f"{shared} work-groups share a multiprocessor"
        assert code.count(expected.in_code) >= expected.count(plan)
        assert ("LDGSTS" in code) == bool(macros["A_ALIGNED"] and unit.NAME != "mma_k8")
    given.passed()


def kernels_of(unit: MatrixAttention, plan: Plan, dtype: str, width: int) -> dict[Kernel, dict[str, Any]]:
    """What the engine builds for attention of some width, and with which macros."""
    built: dict[Kernel, dict[str, Any]] = {}

    def on(kernel: Kernel, _: Any, *dtypes: str, **macros: Any) -> Callable[..., None]:
        built[kernel] = kernel.macros(dtypes, macros)
        return lambda *args: None

    x: Any = SimpleNamespace(dtype=dtype, queue=None)
    device: Any = None
    problem = Problem(2, 100, width, True, 1.0, (STORAGE[dtype],) * 4, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "on", on)
        unit.forward(problem, x, x, x, x, x, plan)
        unit.backward(problem, x, x, x, x, x, (x, x, x), plan, x)
    return built


@pytest.mark.parametrize(("dtype", "less"), [("bfloat16", 0), ("float16", 3)], ids=["16 bytes", "elements"])
@pytest.mark.parametrize(
    ("unit", "plan"),
    [pytest.param(unit, plan, id=f"{unit.NAME}-{plan}") for unit in attention.MATRIX_UNITS for plan in unit.plans],
)
@pytest.mark.parametrize(("name", "products"), [("forward", 2), ("delta", 2), ("backward_q", 3), ("backward_kv", 4)])
def test_attention(
    request: pytest.FixtureRequest, tools: Tools, tmp_path: Path, unit: MatrixAttention, plan: Plan, dtype: str,
    less: int, name: str, products: int,
) -> None:  # fmt: skip
    built, expected = kernels_of(unit, plan, dtype, plan.k - less), EXPECTED[unit.NAME]
    kernel, macros = next((kernel, macros) for kernel, macros in built.items() if kernel.name == f"attention_{name}")
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    count = products * macros["COLUMNS"] * macros["WIDTH"] // (16 * 8)  # of a warp's 16 rows, in a step
    ptx = compiled(tools, tmp_path, kernel, expected.processors[0], macros)
    assert ptx.read_text().count(expected.in_ptx) == count
    for processor in expected.some(request.node):
        code, registers = assembled(tools, ptx, processor, kernel, macros)
        assert 2 * plan.threads * registers <= REGISTERS, "two work-groups share a multiprocessor"
        assert code.count(expected.in_code) >= count
        assert ("LDGSTS" in code) == bool(macros["ALIGNED"])
    given.passed()
