"""What becomes of the kernels for matrix units on Intel's GPUs, seen without one: Intel's offline compiler makes
machine code of them. Matrix instructions must be in it, and no register, nor array, may go to memory.

The driver's own compiler may be another version of it: it is the proof on the device that decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clamp.opencl.program import Kernel, source
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm.matrix_units import DPAS_8, DPAS_16, MatrixUnit
from clamp.ops.gemm.plan import Plan
from tests.ops.test_matrix_units_ptx import Given, convolutions, output_of, products
from tests.tools import go_without

pytestmark = pytest.mark.slow

#: where .ci/run unpacks the compiler: to install it would register a driver, another OpenCL platform
_FOLDER = Path(os.environ.get("OCLOC_FOLDER", Path.home() / ".cache" / "clamp-ocloc"))
_LIBRARIES = _FOLDER / "usr" / "lib" / "x86_64-linux-gnu"
_DEVICES = {"dpas_8": "dg2", "dpas_16": "pvc"}
# Of the tokens that describe a kernel: the memory of a thread for registers, and for arrays.
_SCRATCH, _PRIVATE = 18, 38


@pytest.fixture(scope="module")
def ocloc() -> Path:
    found = _FOLDER / "usr" / "bin" / "ocloc"
    if not found.exists():
        go_without(
            f"no {found}: .ci/run says how to unpack Intel's offline compiler; OCLOC_FOLDER names another folder"
        )
    return found


@dataclass(frozen=True)
class Built:
    """Machine code of a kernel in words, and the bytes that a thread keeps in memory."""

    code: str
    in_memory: int

    @property
    def instructions(self) -> int:
        return len(re.findall(r"^.*\bdpas\.8x8\b", self.code, re.MULTILINE))


def run(ocloc: Path, *arguments: object) -> None:
    output_of("env", f"LD_LIBRARY_PATH={_LIBRARIES}", ocloc, *arguments)


def compiled(ocloc: Path, folder: Path, kernel: Kernel, device: str, macros: dict[str, Any]) -> Built:
    """The kernel for a device, which ocloc writes to files."""
    text = folder / kernel.file
    text.write_text(source("common.clh") + source(kernel.file))
    options = " ".join([*kernel.options, *(f"-D{name}={value}" for name, value in macros.items())])
    run(ocloc, "compile", "-file", text, "-device", device, "-out_dir", folder, "-options", options)
    (binary,) = folder.glob("*.bin")
    run(ocloc, "disasm", "-file", binary, "-device", device, "-dump", folder / "parts")
    tokens = (folder / "parts" / "PTM.txt").read_text()
    in_memory = word(tokens, _SCRATCH, 1) + word(tokens, _PRIVATE, 3)
    return Built((folder / "parts" / f"{kernel.name}_KernelHeap.asm").read_text(), in_memory)


def word(tokens: str, token: int, number: int) -> int:
    """A word of a token, whose bytes are printed in hexadecimal; 0 where a kernel has no such token."""
    found = re.search(rf"Token {token}\n\s*4 Size \d+\n\s*Hex ([0-9a-f ]+)", tokens)
    return 0 if found is None else int.from_bytes(bytes.fromhex(_padded(found[1]))[number * 4 :][:4], "little")


def _padded(bytes_in_hex: str) -> str:
    return "".join(byte.zfill(2) for byte in bytes_in_hex.split())


def least(plan: Plan) -> int:
    """Instructions of a sub-group for 16 steps of k, if no loop over blocks is left."""
    return 2 * (plan.rows // plan.warps[0] // 16) * (plan.columns // plan.warps[1] // plan.lanes)


@pytest.mark.parametrize(("unit", "kernel", "plan", "macros_for"), [*products(_DEVICES), *convolutions(_DEVICES)])
def test_matrix_instructions_and_no_spills(
    request: pytest.FixtureRequest, ocloc: Path, tmp_path: Path, unit: MatrixUnit | MatrixConv, kernel: Kernel,
    plan: Plan, macros_for: Callable[[], dict[str, Any]],
) -> None:  # fmt: skip
    macros = macros_for()
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    built = compiled(ocloc, tmp_path, kernel, _DEVICES[unit.NAME], macros)
    assert built.instructions >= least(plan) > 2
    assert built.in_memory == 0
    given.passed()


def test_a_plan_that_is_too_large_spills(ocloc: Path, tmp_path: Path) -> None:
    """The check above can fail: a sub-group keeps the sums of 32 rows in memory."""
    plan = Plan(128, 128, 32, 2, (4, 2), lanes=16)
    macros = next(iter(products([DPAS_16.NAME]))).values[3]() | plan.macros
    assert compiled(ocloc, tmp_path, DPAS_16.kernel, "pvc", macros).in_memory > 0


def test_sub_groups_of_another_size(ocloc: Path, tmp_path: Path) -> None:
    """Why 8 is tried before 16 (clamp/ops/gemm/matrix_units.py)."""
    for unit, device in ((DPAS_8, "pvc"), (DPAS_16, "dg2")):
        macros = next(iter(products([unit.NAME]))).values[3]()
        if unit is DPAS_8:
            with pytest.raises(AssertionError, match="subgroup size 8, which is unsupported"):
                compiled(ocloc, tmp_path, unit.kernel, device, macros)
        else:
            assert compiled(ocloc, tmp_path, unit.kernel, device, macros).instructions == 0
