"""What becomes of the tiled engine's kernel on GPUs, seen without one: clang and NVIDIA's assembler make machine code
of it, clang alone AMD's. Whole pieces of 16 bytes are loaded, and nothing may spill.

What a driver's own compiler makes of the same text may differ.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clamp.opencl.program import Kernel, source
from clamp.ops.gemm import tiled
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b
from clamp.ops.gemm.tiled import PLANS, SquarePlan
from tests.ops.test_engines import GPU
from tests.ops.test_matrix_units_ptx import REGISTERS, Given, Tools, compiled, output_of, tools

__all__ = ["tools"]  # a fixture

pytestmark = pytest.mark.slow

_AMD_LIBRARY = Path(os.environ.get("LIBCLC_AMD", "/usr/lib/clc/amdgcn--amdhsa.bc"))
#: of GPUs: the smaller plans are for devices that no compiler here makes code for
GPU_PLANS = PLANS[:3]
CASES = pytest.mark.parametrize(
    ("plan", "dtypes", "transposes", "aligned"),
    [
        pytest.param(plan, dtypes, transposes, aligned, id=f"{plan.rows}-{'-'.join(dtypes)}-{transposes}-{aligned}")
        for plan, dtypes, transposes, aligned in product(
            GPU_PLANS,
            [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")],
            ["NN", "NT", "TN"],
            [True, False],
        )
        if transposes == "NN" or aligned
    ],
)


def macros_of(plan: SquarePlan, dtypes: tuple[str, str], transposes: str, aligned: bool) -> dict[str, Any]:
    """What the engine builds its kernel with for a product."""
    m, n, k = (256, 512, 128) if aligned else (255, 511, 127)
    built: dict[str, Any] = {}

    def matrix(dtype: str, *extents: int) -> SimpleNamespace:
        return SimpleNamespace(shape=extents, dtype=dtype, queue=None, size=m * n, buffer=None)

    transpose_a, transpose_b = transposes[0] == "T", transposes[1] == "T"
    left = operand_a(matrix(dtypes[0], *((k, m) if transpose_a else (m, k))), transpose_a)
    right = operand_b(matrix(dtypes[1], *((n, k) if transpose_b else (k, n))), transpose_b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "bind", lambda *args, **macros: built.update(macros) or (lambda *args: None))
        patch.setattr(tiled, "capabilities", lambda queue: GPU)
        tiled.compute(left, right, matrix(dtypes[0], m, n), Epilogue(dtypes[0]), plan)
    assert built["A_ALIGNED"] == built["B_ALIGNED"] == int(aligned)
    return built


def amd_assembly(tools: Tools, folder: Path, kernel: Kernel, processor: str, macros: dict[str, Any]) -> str:
    """What clang makes of a kernel for one of AMD's GPUs; it keeps nothing in memory that it could in registers."""
    if not _AMD_LIBRARY.exists():
        pytest.skip(f"no {_AMD_LIBRARY}: apt install libclc-19")
    if "amdgcn" not in output_of(tools.clang, "--print-targets"):
        pytest.skip("this clang knows no AMD GPU")
    text, assembly = folder / kernel.file, folder / "kernel.s"
    text.write_text(source("common.clh") + source(kernel.file))
    options = [f"-D{name}={value}" for name, value in macros.items()]
    options += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(_AMD_LIBRARY), f"-mcpu={processor}", "-nogpulib"]
    target = ["-target", "amdgcn-amd-amdhsa", "-cl-std=CL1.2", "-O3", "-w", "-S"]
    output_of(tools.clang, "-x", "cl", *target, *options, "-o", assembly, text)
    code = assembly.read_text()
    assert set(re.findall(r"\.vgpr_spill_count: *(\d+)", code)) == {"0"}
    assert set(re.findall(r"\.private_segment_fixed_size: *(\d+)", code)) == {"0"}
    return code


def wide_loads(plan: SquarePlan, dtypes: tuple[str, str]) -> int:
    """Loads of 16 bytes that bring a work-item's part of both tiles."""
    bytes_of_k = sum({"float32": 4}.get(dtype, 2) for dtype in dtypes)
    return plan.rows * plan.k * bytes_of_k // 16 // plan.threads


@CASES
def test_on_nvidia(
    request: pytest.FixtureRequest, tools: Tools, tmp_path: Path, plan: SquarePlan, dtypes: tuple[str, str],
    transposes: str, aligned: bool,
) -> None:  # fmt: skip
    macros = macros_of(plan, dtypes, transposes, aligned)
    given = Given(request.node, tiled.GEMM, macros)
    if given.was_looked_at():
        return
    ptx = compiled(tools, tmp_path, tiled.GEMM, "sm_80", macros)
    binary = tmp_path / "kernel.cubin"
    words = output_of(tools.ptxas, "-v", "-O3", "-arch=sm_80", "-o", binary, ptx)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in words
    registers = int(re.findall(r"Used (\d+) registers", words)[0])
    assert plan.threads * registers <= REGISTERS
    code = output_of(tools.cuobjdump, "-sass", binary)
    assert code.count("LDG.E.128") == (wide_loads(plan, dtypes) if aligned else 0)
    assert code.count("LDS.128") == code.count("LDS") == 2 * plan.k * plan.per_item // 4
    assert code.count("FFMA") >= plan.k * plan.per_item**2
    assert code.count("BAR.SYNC") == 1
    given.passed()
    print(f"{registers} registers")


@CASES
@pytest.mark.parametrize("processor", ["gfx1100", "gfx1200"])
def test_on_amd(
    request: pytest.FixtureRequest, tools: Tools, tmp_path: Path, processor: str, plan: SquarePlan,
    dtypes: tuple[str, str], transposes: str, aligned: bool,
) -> None:  # fmt: skip
    macros = macros_of(plan, dtypes, transposes, aligned)
    given = Given(request.node, tiled.GEMM, macros)
    if given.was_looked_at():
        return
    code = amd_assembly(tools, tmp_path, tiled.GEMM, processor, macros)
    if aligned:  # strides of elements that are fetched one by one may be kept in lanes of a vector register
        assert re.findall(r"\.sgpr_spill_count: *(\d+)", code) == ["0"]
    assert code.count("global_load_b128") == (wide_loads(plan, dtypes) if aligned else 0)
    assert code.count("ds_load_b128") == 2 * plan.k * plan.per_item // 4
    given.passed()
    print(f"{re.findall(r'vgpr_count: *([0-9]+)', code)[0]} registers")


def test_a_plan_that_is_too_large_spills(request: pytest.FixtureRequest, tools: Tools, tmp_path: Path) -> None:
    """The check above can fail: elements fetched one by one by a work-item alone do not fit its registers."""
    macros = macros_of(replace(PLANS[-1], k=64), ("float32", "float32"), "NN", aligned=False)
    given = Given(request.node, tiled.GEMM, macros)
    if given.was_looked_at():
        return
    ptx = compiled(tools, tmp_path, tiled.GEMM, "sm_80", macros)
    words = output_of(tools.ptxas, "-v", "-O3", "-arch=sm_80", "-o", tmp_path / "kernel.cubin", ptx)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" not in words
    given.passed()
