"""What becomes of gemm_mma.cl on NVIDIA's GPUs, seen without one: clang makes PTX of it, as a driver does, and NVIDIA's
assembler machine code. Matrix instructions must be in it, and nothing may spill.

What a driver's own compiler makes of the same text may differ: it is the proof on the device that decides.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clamp.opencl.program import source
from clamp.ops.gemm import mma, proof
from clamp.ops.gemm.mma import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b

pytestmark = pytest.mark.slow

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
REGISTERS = 65536  # of a multiprocessor
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
        pytest.skip(
            f"no {', '.join(missing)}: apt install clang-19 libclc-19; "
            "pip install nvidia-cuda-nvcc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return Tools(str(found["clang"]), str(found["ptxas"]), str(found["cuobjdump"]))


def output_of(*command: object) -> str:
    """What a command prints."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, "PATH": _PATH}
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def macros_of(plan: Plan, dtype: str, transposes: tuple[bool, bool], shape: tuple[int, int, int]) -> dict[str, Any]:
    """What the engine builds its kernel with for a product of one shape."""
    m, n, k = shape
    built: dict[str, Any] = {}

    def matrix(*extents: int) -> SimpleNamespace:
        return SimpleNamespace(shape=extents, dtype=dtype, queue=None, size=m * n)

    left = operand_a(matrix(k, m) if transposes[0] else matrix(m, k), transposes[0])
    right = operand_b(matrix(n, k) if transposes[1] else matrix(k, n), transposes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mma, "_GEMM", lambda *args, **macros: built.update(macros))
        mma.compute(left, right, matrix(m, n), Epilogue(dtype), plan)
    return built


def compiled(tools: Tools, folder: Path, macros: dict[str, Any]) -> Path:
    """PTX of the kernel. clang has no NVIDIA driver's options, so that some are its internal ones."""
    text, ptx = folder / "gemm_mma.cl", folder / "gemm_mma.ptx"
    text.write_text(source("common.clh") + source("gemm_mma.cl"))
    target = ["-target", "nvptx64-unknown-nvidiacl"]
    for internal in ("-target-cpu", "sm_80", "-target-feature", "+ptx81", "-mlink-builtin-bitcode", _LIBRARY):
        target += ["-Xclang", str(internal)]
    options = [f"-D{name}={value}" for name, value in macros.items()]
    output_of(tools.clang, "-x", "cl", "-cl-std=CL1.2", *target, "-O3", "-w", "-S", "-o", ptx, *options, text)
    return ptx


@pytest.mark.parametrize(("plan", "dtype", "transposes", "shape"), [pytest.param(*case) for case in proof._cases()])
def test_matrix_instructions_and_no_spills(
    tools: Tools, tmp_path: Path, plan: Plan, dtype: str, transposes: tuple[bool, bool], shape: tuple[int, int, int]
) -> None:
    macros = macros_of(plan, dtype, transposes, shape)
    ptx, binary = compiled(tools, tmp_path, macros), tmp_path / "gemm_mma.cubin"
    products = plan.rows * plan.columns * plan.k // (plan.threads // 32 * 16 * 8 * 16)  # of a warp in a step
    assert ptx.read_text().count("mma.sync.aligned.m16n8k16") == products
    for architecture in ARCHITECTURES:
        words = output_of(tools.ptxas, "-v", "-O3", f"-arch={architecture}", "-o", binary, ptx)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in words
        registers = int(re.findall(r"Used (\d+) registers", words)[0])
        assert 2 * plan.threads * registers <= REGISTERS, "two work-groups share a multiprocessor"
        code = output_of(tools.cuobjdump, "-sass", binary)
        assert code.count("HMMA.16816.F32") >= products
        assert code.count("LDSM") >= products // 4  # one fetches a block of A, or of B for two products
        assert ("LDGSTS" in code) == bool(macros["A_ALIGNED"])
        print(f"{architecture}: {registers} registers, {code.count('HMMA')} HMMA, {code.count('LDGSTS')} LDGSTS")
