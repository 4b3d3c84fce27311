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
//
// Of a 16-bit SRC_T, A and B may be float32 as well (a_wide, b_wide): they are rounded to SRC_T in the panels, with the
// bits of cast.cl. A weight's rounded values are wanted later: `copy`, which lies as the weight does, gets them.
//     copied   0   nothing
//              COPY_A   op(A), one row, by the work-items of the first columns
//              COPY_B   op(B), whose columns are neighbours in memory, by the work-items of the first rows

#if ROWS % MR || COLUMNS % NR
#error "ROWS and COLUMNS must be multiples of MR and NR"
#endif

#define WIDE_f32 0
#define WIDE_f16 1
#define WIDE_bf16 1
#define MAY_BE_WIDE CAT(WIDE_, SRC_T)
#define PANEL_SPACE
#include "gemm_panels.clh"

#define TILE_IN_PRIVATE_MEMORY
#define FACTOR(i) a[step * MR + i]
#include "register_tile.clh"
#include "store_tile.clh"

#if MAY_BE_WIDE
#if KC % 16
#error "KC must be a multiple of 16"
#endif
// Rounds what a panel holds to SRC_T.
static inline void narrow(panel d, size_t elements) {
    for (size_t i = 0; i < elements; i += 16)
        STORE_PRIVATE(float16, WIDEN16(SRC_T, BITS16(SRC_T, LOAD_PRIVATE(float16, d + i))), d + i);
}
// Writes what a narrowed panel of B holds of `columns` columns to rows that are `pitch` apart.
static inline void copy_steps(const float *b, __global ushort *to, size_t columns, size_t pitch, size_t steps) {
    for (size_t t = 0; t < steps; t++, b += NR, to += pitch)
        for (size_t j = 0; j < NR && j < columns; j += 16) {
            const ushort16 bits = BITS16(SRC_T, LOAD_PRIVATE(float16, b + j));
            if (j + 16 <= columns) {
                STORE_ANY(ushort16, bits, to + j);
            } else {
                ushort lanes[16];
                vstore16(bits, 0, lanes);
                for (size_t i = 0; j + i < columns; i++) to[j + i] = lanes[i];
            }
        }
}
#define NARROW(is_wide, d, width) if (is_wide) narrow(d, steps * (width));
#define COPY_STEPS(b, to, columns, pitch) copy_steps(b, (__global ushort *)(to), columns, pitch, steps);
#else
#define NARROW(is_wide, d, width)
#define COPY_STEPS(b, to, columns, pitch) ;
#endif

// Packs row (or column) i of `all` in a matrix, and those after it, from step k0 on. A pointer steps by 16 bits.
#define PACK(s, d, width, i, all, stride_row, stride_k, is_wide)                                              \
    pack_panel(s + (((i) * stride_row + k0 * stride_k) << is_wide), d, width, (all) - (i), stride_row,        \
               stride_k, 0, steps WIDE(is_wide));                                                             \
    NARROW(is_wide, d, width)

#define COPY_A 1
#define COPY_B 2

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C.
__kernel ONE_WORK_ITEM WIDE_VECTORS void gemm(
    __global const STORAGE(SRC_T) *restrict A, __global const STORAGE(SRC_T) *restrict B, __global void *restrict C,
    __global const void *restrict bias, __global STORAGE(SRC_T) *restrict copy, const ulong M, const ulong N,
    const ulong K, const ulong a_stride_row, const ulong a_stride_k, const ulong a_batch, const ulong b_stride_row,
    const ulong b_stride_k, const ulong b_batch, const uint block_panels_a, const uint block_panels_b,
    const int a_wide, const int b_wide, const int copied, const int out_type, const int bias_type, const int has_bias,
    const int relu) {
    float b_panels[COLUMNS * KC], a_panel[MR * KC], block[ROWS * COLUMNS];
    const size_t batch = get_global_id(2);
    const size_t first_m = get_global_id(0) * block_panels_a * MR, first_n = get_global_id(1) * block_panels_b * NR;
    const size_t end_m = min(first_m + block_panels_a * MR, (size_t)M);
    const size_t end_n = min(first_n + block_panels_b * NR, (size_t)N);
    A += batch * a_batch << a_wide;
    B += batch * b_batch << b_wide;
    size_t k0 = 0;
    do { // without any k, too: sums are 0
        const size_t steps = min((size_t)KC, (size_t)K - k0);
        for (size_t n = first_n, q = 0; n < end_n; n += NR, q++) {
            panel b = b_panels + q * NR * KC;
            PACK(B, b, NR, n, N, b_stride_row, b_stride_k, b_wide)
            if (copied == COPY_B && get_global_id(0) + batch == 0) COPY_STEPS(b, copy + k0 * N + n, N - n, N)
        }
        float *sums = block;
        for (size_t m = first_m; m < end_m; m += MR) {
            PACK(A, a_panel, MR, m, M, a_stride_row, a_stride_k, a_wide)
            if (copied == COPY_A && get_global_id(1) + batch == 0)
                for (size_t t = 0; t < steps; t++) STORE(SRC_T, a_panel[t * MR], copy, k0 + t);
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
