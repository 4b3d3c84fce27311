// gemm_wmma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by v_wmma on the matrix units of AMD's RDNA
// GPUs (gfx11 and gfx12).
//
//   A, B --copy--> tiles --v_wmma (wmma_step.clh)--> sums --> C       pictures in matrix_product_kernel.clh
//
//   RDNA, and the macros of matrix_product_kernel.clh

#include "wmma_step.clh"
#include "matrix_product_kernel.clh"
