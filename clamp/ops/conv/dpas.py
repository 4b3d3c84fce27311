"""Convolutions on the matrix units of Intel's GPUs, by dpas (kernels/conv_dpas.cl)."""

from __future__ import annotations

from dataclasses import replace

from clamp.opencl.program import Kernel
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm import dpas as products

CONV = Kernel("conv_dpas.cl", "conv", options=products.LARGE_REGISTERS)
WEIGHT_GRAD = Kernel("conv_dpas.cl", "weight_grad", options=products.LARGE_REGISTERS)

DPAS_8 = MatrixConv(
    NAME=products.DPAS_8.NAME,
    IN_WORDS="images read in place and Intel's matrix instruction dpas, in sub-groups of 8",
    TAKES=products.DPAS_8.TAKES.replace("products", "convolutions"),
    where=f"{__name__}:DPAS_8",
    plans=products.DPAS_8.plans,
    unit=products.DPAS_8,
    conv=CONV,
    weight_grad=WEIGHT_GRAD,
)

DPAS_16 = replace(
    DPAS_8,
    NAME=products.DPAS_16.NAME,
    IN_WORDS=DPAS_8.IN_WORDS.replace("groups of 8", "groups of 16"),
    TAKES=products.DPAS_16.TAKES.replace("products", "convolutions"),
    where=f"{__name__}:DPAS_16",
    plans=products.DPAS_16.plans,
    unit=products.DPAS_16,
)
