"""The GEMM of NVIDIA's GPUs on their matrix units, by mma.sync (kernels/gemm_mma.cl)."""

from __future__ import annotations

from clamp.opencl.program import Kernel
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan

GEMM = Kernel("gemm_mma.cl", "gemm")

MMA = MatrixUnit(
    NAME="mma",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an NVIDIA GPU of compute capability 8.0 or later "
    "on which it computed a few small products right",
    IN_WORDS="tiles in local memory and NVIDIA's matrix instruction mma.sync",
    where=f"{__name__}:MMA",
    kernel=GEMM,
    plans=(Plan(128, 128, 32, 3, (2, 4)), Plan(64, 64, 32, 4, (2, 2))),  # in 48 KB, which every such device has
    is_for=lambda device: device.compute_capability >= (8, 0),
    more=(
        Plan(128, 256, 32, 3, (2, 4)),  # 72 KB and more: the driver may give them or not
        Plan(256, 128, 32, 3, (4, 2)),
        Plan(128, 128, 64, 3, (2, 4)),
        Plan(128, 128, 32, 3, (2, 2)),  # fewer loads, and all but one of a work-item's 255 registers
        Plan(128, 64, 32, 4, (2, 2)),
        Plan(64, 128, 32, 4, (2, 2)),
    ),
)

MMA_K8 = MatrixUnit(
    NAME="mma_k8",
    TAKES="float16 by float16, on an NVIDIA GPU of compute capability 7.5 "
    "on which it computed a few small products right",
    IN_WORDS="tiles in local memory and NVIDIA's matrix instruction mma.sync, of half the k",
    where=f"{__name__}:MMA_K8",
    kernel=GEMM,
    plans=(Plan(128, 64, 32, 2, (2, 2)), Plan(64, 64, 32, 2, (2, 2))),  # no copies go on that a third stage were for
    is_for=lambda device: device.compute_capability == (7, 5),
    dtypes=("float16",),
    options=(("TURING", 1),),
)
