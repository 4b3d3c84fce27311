"""What becomes of the kernels that memory bounds on NVIDIA's GPUs, seen without one (test_matrix_units_ptx.py says
how): they load and store 16 bytes at a time, nothing is on a stack, and registers.json has what they take.

The programs are those that clamp's functions build for such a GPU: they are called, but nothing is launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import device
from clamp.opencl.program import Kernel
from clamp.ops import norm_phases, norm_planes, norm_planes_backward
from clamp.ops.norm_sets import RELU
from tests.ops.test_engines import GPU
from tests.ops.test_matrix_units_ptx import Tools, allow, compiled, output_of, tools
from tests.reference import to_device

__all__ = ["tools"]  # a fixture

pytestmark = pytest.mark.slow

H100 = replace(GPU, compute_units=132, compute_capability=(9, 0))
PROCESSORS = ("sm_80", "sm_90")

Built = list[tuple[Kernel, dict[str, Any]]]


def built_by(queue: cl.CommandQueue, compute: Callable[[cl.CommandQueue], object]) -> Built:
    """The kernels that a function launches on a large GPU, each with its macros."""
    built: Built = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device._capabilities, queue.device.int_ptr, H100)
        patch.setattr(Kernel, "__call__", lambda self, *args, **macros: built.append((self, macros)))
        compute(queue)
    return built


def _tensor(queue: cl.CommandQueue, *shape: int, dtype: str = "float16") -> Any:
    return to_device(queue, np.ones(shape), dtype)


def _batch_norm(queue: cl.CommandQueue) -> None:
    x, one = _tensor(queue, 8, 64, 32, 32), _tensor(queue, 64, dtype="float32")
    statistics = one, one
    norm_planes.batch_norm(x, one, one, *statistics, momentum=0.1, eps=1e-5, out_dtype="float16", activation=RELU)
    norm_planes_backward.batch_norm_backward(x, one, one, x, *statistics, eps=1e-5, dx_dtype="float16", activation=RELU)


def _group_norm(queue: cl.CommandQueue) -> None:
    x, one = _tensor(queue, 2, 8, 32, 32, dtype="float32"), _tensor(queue, 8, dtype="float32")
    mean = _tensor(queue, 2, 4, dtype="float32")
    norm_planes.group_norm(x, one, one, 4, eps=1e-5, out_dtype="float32")
    norm_planes_backward.group_norm_backward(
        x, one, x, mean, mean, 4, eps=1e-5, dx_dtype="float32", dgamma_dtype=None, dbeta_dtype=None
    )


#: what is called, kernels that it launches, and the registers that a work-item of each may take at most
CASES = [
    (_batch_norm, norm_phases.PLANES_MOMENTS, 96),
    (_batch_norm, norm_phases.PLANES_NORMALIZE, 96),
    (_batch_norm, norm_phases.GRADIENT_SUMS, 96),
    (_batch_norm, norm_phases.PLANES_GRADIENT, 96),
    (_group_norm, norm_phases.PLANES_MOMENTS, 96),
    (_group_norm, norm_phases.PLANES_NORMALIZE, 96),
    (_group_norm, norm_phases.GRADIENT_SUMS, 96),
    (_group_norm, norm_phases.PLANES_GRADIENT, 96),
]


#: kernels that write a few sums
SUMS = (norm_phases.PLANES_MOMENTS, norm_phases.GRADIENT_SUMS)


@pytest.mark.parametrize(
    ("compute", "kernel", "most"),
    [pytest.param(*case, id=f"{case[0].__name__.strip('_')}-{case[1].name}") for case in CASES],
)
def test_wide_moves_without_a_stack(
    queue: cl.CommandQueue, tools: Tools, tmp_path: Path, compute: Callable[[cl.CommandQueue], object], kernel: Kernel,
    most: int,
) -> None:  # fmt: skip
    macros = next(macros for built, macros in built_by(queue, compute) if built == kernel)
    words = " ".join(f"{name}={value}" for name, value in sorted(macros.items()))
    for processor in PROCESSORS:
        binary = tmp_path / "kernel.cubin"
        ptx = compiled(tools, tmp_path, kernel, processor, macros)
        said = output_of(tools.ptxas, "-v", "-O3", f"-arch={processor}", "-o", binary, "-e", kernel.name, ptx)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        registers = int(re.findall(r"Used (\d+) registers", said)[0])
        code = output_of(tools.cuobjdump, "-sass", "-fun", kernel.name, binary)
        assert registers <= most
        allow(f"{kernel.file} {kernel.name}, {words}", processor, registers)
        assert "LDG.E.128" in code
        if kernel not in SUMS:
            assert "STG.E.128" in code
