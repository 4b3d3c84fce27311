// gemm_dot_bf16.cl: products of bfloat16 matrices (gemm_pairs.clh) by the processor's dot product (dot_bf16_tile.clh). Up
// to twice the rate of gemm_packed.cl.
//
//   SUM_STEPS, BLOCK_A   as in gemm_pairs.clh

#define PARTS 1
#define IN_T bf16
#include "dot_bf16_tile.clh"

#define begin_tiles()
#define end_tiles()
#define AHEAD_BYTES 0
#define multiply_tile(a, a_row, a_step, b, sums, steps, rows, ahead) \
    multiply_rows(a, a_row, a_step, b, sums, steps, rows)
#include "gemm_pairs.clh"
