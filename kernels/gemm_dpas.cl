// gemm_dpas.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by dpas on the matrix units of Intel's
// GPUs (Xe HPC, Xe HPG and Xe2).
//
//   A, B --copy--> tiles --dpas (dpas_step.clh)--> sums --> C       pictures in matrix_product_kernel.clh
//
//   SUB_GROUP, and the macros of matrix_product_kernel.clh

#include "dpas_step.clh"
#include "matrix_product_kernel.clh"
