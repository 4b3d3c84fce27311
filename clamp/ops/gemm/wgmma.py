"""The GEMM of NVIDIA's Hopper on its matrix units, by wgmma (kernels/gemm_wgmma.cl)."""

from __future__ import annotations

from clamp.opencl.program import Kernel
from clamp.opencl.ptx import with_marked_instructions
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan

GEMM = Kernel("gemm_wgmma.cl", "gemm", finish=with_marked_instructions)

WGMMA = MatrixUnit(
    NAME="wgmma",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an NVIDIA GPU of compute capability 9.0 "
    "on which it computed a few small products right",
    IN_WORDS="tiles in local memory and the matrix instruction wgmma of NVIDIA's Hopper",
    where=f"{__name__}:WGMMA",
    kernel=GEMM,
    plans=(
        Plan(
            128, 256, 64, 4, (8, 1), aligned=True
        ),  # 192 KB, of 227 that a processor has: the driver may give them or not
        Plan(128, 128, 64, 4, (8, 1)),
        Plan(64, 64, 64, 3, (4, 1)),  # 48 KB, which it gives
    ),
    is_for=lambda device: device.compute_capability == (9, 0),  # no later processor has it
    more=(
        Plan(128, 256, 64, 3, (8, 1), aligned=True),
        Plan(256, 128, 64, 4, (16, 1)),
        Plan(128, 128, 64, 3, (8, 1)),  # 96 KB: a processor holds two such work-groups
        Plan(128, 64, 64, 4, (8, 1)),
        Plan(64, 128, 64, 4, (4, 1)),
    ),
)
