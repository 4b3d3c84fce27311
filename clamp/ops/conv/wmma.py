"""Convolutions on the matrix units of AMD's RDNA GPUs, by v_wmma (kernels/conv_wmma.cl)."""

from __future__ import annotations

from dataclasses import replace

from clamp.opencl.program import Kernel
from clamp.ops.conv.matrix_units import MatrixConv
from clamp.ops.gemm import wmma as products

CONV = Kernel("conv_wmma.cl", "conv")
WEIGHT_GRAD = Kernel("conv_wmma.cl", "weight_grad")

RDNA3 = MatrixConv(
    NAME=products.RDNA3.NAME,
    IN_WORDS="images read in place and the matrix instruction v_wmma of AMD's RDNA 3",
    TAKES=products.RDNA3.TAKES.replace("products", "convolutions"),
    where=f"{__name__}:RDNA3",
    plans=products.RDNA3.plans,
    unit=products.RDNA3,
    conv=CONV,
    weight_grad=WEIGHT_GRAD,
)

RDNA4 = replace(
    RDNA3,
    NAME=products.RDNA4.NAME,
    IN_WORDS=RDNA3.IN_WORDS.replace("RDNA 3", "RDNA 4"),
    TAKES=products.RDNA4.TAKES.replace("products", "convolutions"),
    where=f"{__name__}:RDNA4",
    unit=products.RDNA4,
)
