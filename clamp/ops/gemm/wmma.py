"""The GEMM of AMD's RDNA GPUs on their matrix units, by v_wmma (kernels/gemm_wmma.cl)."""

from __future__ import annotations

from dataclasses import replace

from clamp.opencl.program import Kernel
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan

GEMM = Kernel("gemm_wmma.cl", "gemm")

RDNA3 = MatrixUnit(
    NAME="wmma_rdna3",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an AMD GPU of RDNA 3 (gfx11) "
    "on which it computed a few small products right",
    IN_WORDS="tiles in local memory and the matrix instruction v_wmma of AMD's RDNA 3",
    where=f"{__name__}:RDNA3",
    kernel=GEMM,
    plans=(Plan(128, 128, 32, 2, (2, 4)), Plan(64, 64, 32, 2, (2, 2))),
    is_for=lambda device: device.gfx[0] == 11,
    options=(("RDNA", 3),),
    more=(Plan(128, 128, 32, 3, (2, 4)), Plan(128, 64, 32, 2, (2, 2)), Plan(64, 128, 32, 2, (2, 2))),
)

RDNA4 = replace(
    RDNA3,
    NAME="wmma_rdna4",
    TAKES=RDNA3.TAKES.replace("RDNA 3 (gfx11)", "RDNA 4 (gfx120)"),
    IN_WORDS=RDNA3.IN_WORDS.replace("RDNA 3", "RDNA 4"),
    where=f"{__name__}:RDNA4",
    is_for=lambda device: device.gfx == (12, 0),  # gfx125 is another family
    options=(("RDNA", 4),),
)
