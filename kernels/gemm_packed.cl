// gemm_packed.cl: C = epilogue(op(A) op(B)) for CPU devices, from panels of floats that gemm_pack.cl has made. The
// inner loop reads them from front to back; one work-item computes a block of C.
//
//      a_panels [M/MR][K][MR]         b_panels [N/NR][K][NR]             C, one work-item's block
//
//      m  0  k ->                     n  0 .. NR-1   NR .. 2NR-1          NR  NR  NR
//      |  +----------+                k  +--------+ +--------+          +---+---+---+
//      v  | panel 0  | MR rows        |  | panel  | | panel  |       MR | 1 | 3 | 5 |
//      MR +----------+                v  |   0    | |   1    |          +---+---+---+
//         | panel 1  |                   |        | |        |       MR | 2 | 4 | 6 |
//         +----------+                   +--------+ +--------+          +---+---+---+
//
// Rows of A and columns of B beyond the matrix are zero in the panels; what they compute is never stored. For each
// KC steps of k a work-item walks its tiles in the order drawn: KC x NR floats of B stay in the first-level cache for
// all its A panels, which stay in the second level. A tile of C is MR x NR/16 vectors in registers. Its sums between
// two blocks of k rest in `partial`, a float workspace laid out tile by tile, and are rounded to storage once.
//
//   MR, NR   the register tile, 12 or 6 by 32 or 16: 12 x 32 with 32 vector registers of 16 floats, else 6 x 16
//   KC       steps of k between two visits to a tile
//
// All matrices of a batch are computed by one launch, its third dimension; a batch stride of 0 (in elements) uses one
// matrix for the whole batch.

#define FACTOR(i) a[step * MR + i]
#include "register_tile.clh"
#include "store_tile.clh"

#define SPILL_VECTOR(i, v) STORE_PRIVATE(float16, c##i##_##v, tile + i * NR + v * 16);
#define SPILL(i) EACH_VECTOR(SPILL_VECTOR, i)

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
gemm(__global const float *restrict a_panels, __global const float *restrict b_panels, __global void *restrict C,
     __global const void *restrict bias, __global float *restrict partial, const ulong M, const ulong N, const ulong K,
     const ulong a_batch, const ulong b_batch, const uint block_panels_a, const uint block_panels_b, const int out_type,
     const int bias_type, const int has_bias, const int relu) {
    const size_t panels_a = (M + MR - 1) / MR, panels_b = (N + NR - 1) / NR, batch = get_global_id(2);
    const size_t first_a = get_global_id(0) * block_panels_a, end_a = min(first_a + block_panels_a, panels_a);
    const size_t first_b = get_global_id(1) * block_panels_b, end_b = min(first_b + block_panels_b, panels_b);
    a_panels += batch * a_batch;
    b_panels += batch * b_batch;
    partial += batch * panels_a * panels_b * TILE;
    for (size_t k0 = 0; k0 < K; k0 += KC) {
        const int steps = (int)min((size_t)KC, (size_t)K - k0);
        const bool is_last = k0 + steps >= K;
        for (size_t q = first_b; q < end_b; q++)
            for (size_t p = first_a; p < end_a; p++) {
                __global const float *a = a_panels + (p * K + k0) * MR;
                __global const float *b = b_panels + (q * K + k0) * NR;
                __global float *sums = partial + (q * panels_a + p) * TILE;
                EACH_ROW(CLEAR)
                int k = 0;
                for (; k + 4 <= steps; k += 4, a += 4 * MR, b += 4 * NR) {
                    STEP(EACH_ROW, 0) STEP(EACH_ROW, 1) STEP(EACH_ROW, 2) STEP(EACH_ROW, 3)
                }
                for (; k < steps; k++, a += MR, b += NR) { STEP(EACH_ROW, 0) }
                // Blocks of steps are summed by themselves, so that rounding grows with them and not with K.
                if (k0 > 0) { EACH_ROW(ADD_RESTING) }
                if (!is_last) {
                    EACH_ROW(SUSPEND)
                    continue;
                }
                float tile[TILE];
                EACH_ROW(SPILL)
                store_tile(tile, C, batch * M * N, p * MR, q * NR, M, N, bias, out_type, bias_type, has_bias, relu);
            }
    }
}
