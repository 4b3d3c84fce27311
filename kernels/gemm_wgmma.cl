// gemm_wgmma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by wgmma on the matrix units of NVIDIA's
// Hopper (compute capability 9.0).
//
//   A, B --copy--> tiles --wgmma (wgmma_step.clh)--> sums --> C                  pictures in matrix_product_kernel.clh
//
//   the macros of matrix_product_kernel.clh

#include "wgmma_step.clh"
#include "matrix_product_kernel.clh"
