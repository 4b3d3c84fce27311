"""The GEMM of Intel's GPUs on their matrix units, by dpas (kernels/gemm_dpas.cl).

No query of pyopencl's tells the size of sub-groups that a GPU multiplies matrices in. So both sizes are tried wherever
there is the extension, 8 first: GPUs that run 16 refuse to compile 8, while those that run 8 compile 16, slowly.
"""

from __future__ import annotations

from dataclasses import replace

from clamp.opencl.program import Kernel
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan

#: half as many threads of twice the registers: their sums would not fit otherwise
LARGE_REGISTERS = ("-cl-intel-256-GRF-per-thread",)
GEMM = Kernel("gemm_dpas.cl", "gemm", options=LARGE_REGISTERS)

DPAS_8 = MatrixUnit(
    NAME="dpas_8",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an Intel GPU with "
    "cl_intel_subgroup_matrix_multiply_accumulate and sub-groups of 8 on which it computed a few small products right",
    IN_WORDS="tiles in local memory and Intel's matrix instruction dpas, in sub-groups of 8",
    where=f"{__name__}:DPAS_8",
    kernel=GEMM,
    # One block of rows a sub-group: loops over several are not unrolled, and sums that they number are kept in memory.
    plans=(Plan(128, 128, 32, 2, (8, 4), lanes=8), Plan(64, 64, 32, 2, (4, 4), lanes=8)),
    is_for=lambda device: device.dpas,
    options=(("SUB_GROUP", 8),),
)

DPAS_16 = replace(
    DPAS_8,
    NAME="dpas_16",
    TAKES=DPAS_8.TAKES.replace("groups of 8", "groups of 16"),
    IN_WORDS=DPAS_8.IN_WORDS.replace("groups of 8", "groups of 16"),
    where=f"{__name__}:DPAS_16",
    plans=(Plan(128, 128, 32, 2, (8, 2), lanes=16), Plan(64, 64, 32, 2, (4, 2), lanes=16)),
    options=(("SUB_GROUP", 16),),
)
