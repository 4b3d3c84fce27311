// gemm_pack.cl: copies op(A) or op(B) into the panels that the GEMM kernels for CPU devices read.
//
//      op(A), rows walk down              panels, one after the other
//
//           k ->                          [rows/width][K][width], float
//      +---------------+   width rows     +-----------------------+
//      |    panel 0    |  ------------->  | k = 0  | k = 1  | ... |
//      +---------------+                  +-----------------------+
//      |    panel 1    |                  | k = 0  | k = 1  | ... |
//      +---------------+                  +-----------------------+
//
// For op(B) a "row" is a column of B. What lies beyond the matrix, the last panel's missing rows, is zero.
//
//   STEP_SPAN    steps of k that a work-item packs
//   SRC_T        storage type of the matrix
//
// `width` is 6, 12, 16 or 32. Strides are in elements of the matrix; a batch stride of 0 goes with a batch of one.

#include "gemm_panels.clh"

// Work-item (panel, block of STEP_SPAN steps, batch).
__kernel ONE_WORK_ITEM void pack(
    __global const STORAGE(SRC_T) *restrict src, __global float *restrict panels, const ulong rows, const ulong K,
    const ulong stride_row, const ulong stride_k, const ulong stride_batch, const uint width) {
    const size_t row = get_global_id(0) * (size_t)width, begin = get_global_id(1) * STEP_SPAN;
    matrix s = src + get_global_id(2) * stride_batch + row * stride_row;
    panel d = panels + (get_global_id(2) * get_global_size(0) + get_global_id(0)) * width * K;
    pack_panel(s, d, width, rows - row, stride_row, stride_k, begin, min(begin + STEP_SPAN, (size_t)K));
}
