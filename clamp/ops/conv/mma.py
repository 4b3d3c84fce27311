"""Convolutions on the matrix units of NVIDIA's GPUs, by mma.sync (kernels/conv_mma.cl)."""

from __future__ import annotations

from clamp.opencl.program import Kernel
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm.mma import MMA as PRODUCTS
from clamp.ops.gemm.mma import MMA_K8 as PRODUCTS_K8
from clamp.ops.gemm.plan import Plan

CONV = Kernel("conv_mma.cl", "conv")
WEIGHT_GRAD = Kernel("conv_mma.cl", "weight_grad")

MMA = MatrixConv(
    NAME=PRODUCTS.NAME,
    IN_WORDS="images read in place and NVIDIA's matrix instruction mma.sync",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an NVIDIA GPU of compute capability 8.0 or later "
    "on which it computed a few small convolutions right",
    where=f"{__name__}:MMA",
    plans=(Plan(128, 128, 32, 2, (2, 4)), Plan(64, 64, 32, 3, (2, 2))),  # a table lies in local memory beside them
    unit=PRODUCTS,
    conv=CONV,
    weight_grad=WEIGHT_GRAD,
)

MMA_K8 = MatrixConv(
    NAME=PRODUCTS_K8.NAME,
    IN_WORDS="images read in place and NVIDIA's matrix instruction mma.sync, of half the k",
    TAKES="float16 by float16, on an NVIDIA GPU of compute capability 7.5 "
    "on which it computed a few small convolutions right",
    where=f"{__name__}:MMA_K8",
    plans=MMA.plans,
    unit=PRODUCTS_K8,
    conv=CONV,
    weight_grad=WEIGHT_GRAD,
)
