// gemm_direct.cl: C = epilogue(op(A) op(B)) for CPU devices, of matrices so small that a launch costs as much as the
// product: one launch, whose work-items pack what they read themselves.
//
//       op(B)      +----+----+            private memory of a work-item       for each KC steps of k
//                  | q0 | q1 |
//       op(A)      +----+----+            b_panels   q0, q1: KC x NR each     packed once
//      +------+    +----+----+            a          p: KC x MR               packed for p0, then for p1, ...
//      |  p0  |    |    |    |            sums       all tiles of the block   p by q0, p by q1
//      +------+    +----+----+
//      |  p1  |    |    |    |            Behind the last step the sums go to C (store_tile.clh).
//      +------+    +----+----+
//
// The inner loop, and the order in which a sum is added up, are those of gemm_packed.cl.
//
//   MR, NR   the register tile, 12 or 6 by 32 or 16
//   KC       steps of k that are packed at a time
//   ROWS, COLUMNS   the largest block of C that a work-item computes: whole tiles
//   SRC_T    storage type of A and B

#if ROWS % MR || COLUMNS % NR
#error "ROWS and COLUMNS must be multiples of MR and NR"
#endif

#define PANEL_SPACE
#include "gemm_panels.clh"

#define TILE_IN_PRIVATE_MEMORY
#define FACTOR(i) a[step * MR + i]
#include "register_tile.clh"
#include "store_tile.clh"

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C.
__kernel ONE_WORK_ITEM WIDE_VECTORS void gemm(
    __global const STORAGE(SRC_T) *restrict A, __global const STORAGE(SRC_T) *restrict B, __global void *restrict C,
    __global const void *restrict bias, const ulong M, const ulong N, const ulong K, const ulong a_stride_row,
    const ulong a_stride_k, const ulong a_batch, const ulong b_stride_row, const ulong b_stride_k, const ulong b_batch,
    const uint block_panels_a, const uint block_panels_b, const int out_type, const int bias_type, const int has_bias,
    const int relu) {
    float b_panels[COLUMNS * KC], a_panel[MR * KC], block[ROWS * COLUMNS];
    const size_t batch = get_global_id(2);
    const size_t first_m = get_global_id(0) * block_panels_a * MR, first_n = get_global_id(1) * block_panels_b * NR;
    const size_t end_m = min(first_m + block_panels_a * MR, (size_t)M);
    const size_t end_n = min(first_n + block_panels_b * NR, (size_t)N);
    A += batch * a_batch;
    B += batch * b_batch;
    size_t k0 = 0;
    do { // without any k, too: sums are 0
        const size_t steps = min((size_t)KC, (size_t)K - k0);
        for (size_t n = first_n, q = 0; n < end_n; n += NR, q++)
            pack_panel(B + n * b_stride_row + k0 * b_stride_k, b_panels + q * NR * KC, NR, N - n, steps, b_stride_row,
                       b_stride_k, 0, steps);
        float *sums = block;
        for (size_t m = first_m; m < end_m; m += MR) {
            pack_panel(A + m * a_stride_row + k0 * a_stride_k, a_panel, MR, M - m, steps, a_stride_row, a_stride_k, 0,
                       steps);
            for (size_t n = first_n, q = 0; n < end_n; n += NR, q++, sums += TILE) {
                const float *a = a_panel, *b = b_panels + q * NR * KC;
                EACH_ROW(CLEAR)
                size_t k = 0;
                for (; k + 4 <= steps; k += 4, a += 4 * MR, b += 4 * NR) {
                    STEP(EACH_ROW, 0) STEP(EACH_ROW, 1) STEP(EACH_ROW, 2) STEP(EACH_ROW, 3)
                }
                for (; k < steps; k++, a += MR, b += NR) { STEP(EACH_ROW, 0) }
                if (k0 > 0) { EACH_ROW(ADD_RESTING) }
                EACH_ROW(SUSPEND)
            }
        }
        k0 += KC;
    } while (k0 < K);

    const float *tile = block;
    for (size_t first = first_m; first < end_m; first += MR)
        for (size_t n = first_n; n < end_n; n += NR, tile += TILE)
            store_tile(tile, C, batch * M * N, first, n, M, N, bias, out_type, bias_type, has_bias, relu);
}
