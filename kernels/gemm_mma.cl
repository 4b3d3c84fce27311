// gemm_mma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by mma.sync on the matrix units of NVIDIA's
// GPUs (compute capability 8.0 and later).
//
//   A, B --copy--> tiles --ldmatrix, mma.sync (mma_step.clh)--> sums --> C       pictures in matrix_product_kernel.clh
//
//   the macros of matrix_product_kernel.clh

#include "mma_step.clh"
#include "matrix_product_kernel.clh"
