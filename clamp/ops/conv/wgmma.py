"""Convolutions on the matrix units of NVIDIA's Hopper, by wgmma (kernels/conv_wgmma.cl)."""

from __future__ import annotations

from clamp.opencl.program import Kernel
from clamp.opencl.ptx import with_marked_instructions
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.wgmma import WGMMA as PRODUCTS

CONV = Kernel("conv_wgmma.cl", "conv", finish=with_marked_instructions)
WEIGHT_GRAD = Kernel("conv_wgmma.cl", "weight_grad", finish=with_marked_instructions)

WGMMA = MatrixConv(
    NAME=PRODUCTS.NAME,
    IN_WORDS="images read in place and the matrix instruction wgmma of NVIDIA's Hopper",
    TAKES="float16 by float16 and bfloat16 by bfloat16, on an NVIDIA GPU of compute capability 9.0 "
    "on which it computed a few small convolutions right",
    where=f"{__name__}:WGMMA",
    plans=(Plan(128, 128, 64, 3, (8, 1)), Plan(64, 64, 64, 3, (4, 1))),  # a table lies in local memory beside them
    unit=PRODUCTS,
    conv=CONV,
    weight_grad=WEIGHT_GRAD,
)
