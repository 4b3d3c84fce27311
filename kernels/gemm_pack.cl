// gemm_pack.cl: copies op(A) or op(B) into the panels that the GEMM kernels for CPU devices read.
//
//      op(A), rows walk down              panels, one after the other            an element
//
//           k ->                          [rows/width][steps][width]             PAIRS 0: a float, step = k
//      +---------------+   width rows     +-----------------------+
//      |    panel 0    |  ------------->  | step 0 | step 1 | ... |              PAIRS 1: the bfloat16 of k = 2 step in
//      +---------------+                  +-----------------------+              the low and of k + 1 in the high half
//      |    panel 1    |                  | step 0 | step 1 | ... |              of a uint, for dot products of pairs
//      +---------------+                  +-----------------------+
//
// For op(B) a "row" is a column of B. What lies beyond the matrix (the last panel's missing rows, the last pair's odd
// k) is zero.
//
//   STEP_SPAN    steps that a work-item packs
//   SRC_T        storage type of the matrix; bf16 if PAIRS
//   PAIRS        0 or 1, see above
//
// `width` is 6, 12, 16 or 32. Strides are in elements of the matrix; a batch stride of 0 goes with a batch of one.

#if PAIRS != 0 && PAIRS != 1
#error "PAIRS must be 0 or 1"
#endif

#include "gemm_panels.clh"

// Work-item (panel, block of STEP_SPAN steps, batch).
__kernel ONE_WORK_ITEM void pack(
    __global const STORAGE(SRC_T) *restrict src, __global ELEMENT *restrict panels, const ulong rows, const ulong K,
    const ulong stride_row, const ulong stride_k, const ulong stride_batch, const uint width) {
    const size_t row = get_global_id(0) * (size_t)width, steps = (K + K_PER_STEP - 1) / K_PER_STEP;
    const size_t begin = get_global_id(1) * STEP_SPAN, end = min(begin + STEP_SPAN, steps);
    matrix s = src + get_global_id(2) * stride_batch + row * stride_row;
    panel d = panels + (get_global_id(2) * get_global_size(0) + get_global_id(0)) * width * steps;
    pack_panel(s, d, width, rows - row, K, stride_row, stride_k, begin, end);
}
