"""What becomes of the kernels for matrix units on AMD's GPUs, seen without one: clang makes machine code of them, as a
driver does. Matrix instructions must be in it, for waves of 32, and nothing may spill.

The driver's own compiler and library may differ: it is the proof on the device that decides. registers.json is the
table of test_matrix_units_ptx.py.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clamp.opencl.program import Kernel, source
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm.matrix_units import RDNA3, MatrixUnit
from clamp.ops.gemm.plan import Plan
from tests.ops.test_matrix_units_ptx import Given, allow_registers, convolutions, output_of, products
from tests.tools import go_without

pytestmark = pytest.mark.slow

REGISTERS = 1536  # of 32 lanes, of one of a processor's four parts
_PROCESSORS = {"wmma_rdna3": "gfx1100", "wmma_rdna4": "gfx1200"}
_LIBRARY = Path(os.environ.get("LIBCLC_AMD", "/usr/lib/clc/amdgcn--amdhsa.bc"))


@pytest.fixture(scope="module")
def clang() -> str:
    found = os.environ.get("CLANG") or shutil.which("clang-19") or shutil.which("clang")
    if found is None or not _LIBRARY.exists():
        go_without(f"no clang, or no {_LIBRARY}: apt install clang-19 libclc-19")
    return found


def compiled(clang: str, folder: Path, kernel: Kernel, processor: str, macros: dict[str, Any]) -> str:
    """Machine code of the kernel, in words."""
    text, assembly = folder / kernel.file, folder / "kernel.s"
    text.write_text(source("common.clh") + source(kernel.file))
    target = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={processor}", "-nogpulib"]
    library = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", _LIBRARY]
    options = [f"-D{name}={value}" for name, value in macros.items()]
    output_of(clang, "-x", "cl", "-cl-std=CL1.2", *target, *library, "-O3", "-w", "-S", *options, "-o", assembly, text)
    return assembly.read_text()


def number(code: str, what: str) -> int:
    """A number that the assembly tells of its kernel."""
    return int(re.findall(rf"^ *\.{what}: *(\d+)", code, re.MULTILINE)[0])


def spilled(code: str) -> int:
    """Bytes of private memory, and registers that were put there."""
    return number(code, "private_segment_fixed_size") + number(code, "vgpr_spill_count")


@pytest.mark.parametrize(("unit", "kernel", "plan", "macros_for"), [*products(_PROCESSORS), *convolutions(_PROCESSORS)])
def test_matrix_instructions_and_no_spills(
    request: pytest.FixtureRequest, clang: str, tmp_path: Path, unit: MatrixUnit | MatrixConv, kernel: Kernel,
    plan: Plan, macros_for: Callable[[], dict[str, Any]],
) -> None:  # fmt: skip
    macros, processor = macros_for(), _PROCESSORS[unit.NAME]
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    code = compiled(clang, tmp_path, kernel, processor, macros)
    assert spilled(code) == 0
    assert number(code, "wavefront_size") == plan.lanes == 32
    blocks = (plan.rows // plan.warps[0] // 16) * (plan.columns // plan.warps[1] // 16)
    assert code.count("v_wmma_f32_16x16x16") == blocks, "a loop over k has them once"
    assert "global_load_b128" in code or not macros["A_ALIGNED"]
    registers = number(code, "vgpr_count")
    assert 2 * (plan.threads // 32) * registers <= 4 * REGISTERS, "two work-groups share a processor"
    allow_registers(kernel, macros, processor, registers)
    given.passed()


def test_a_plan_that_is_too_large_spills(clang: str, tmp_path: Path) -> None:
    """The check above can fail: a wave has no registers for a tile of 128 x 128."""
    plan = Plan(128, 128, 32, 2, (1, 1))
    macros = next(iter(products([RDNA3.NAME]))).values[3]() | plan.macros
    assert spilled(compiled(clang, tmp_path, RDNA3.kernel, "gfx1100", macros)) > 0
