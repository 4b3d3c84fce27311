// gemm_packed.cl: C = epilogue(op(A) op(B)) for CPU devices. Both operands are first copied, widened to float, into
// panels that the inner loop reads from front to back; one work-item then computes a block of C.
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
//   WIDTH    rows or columns of a panel (pack): MR or NR
//   K_SPAN   steps of k that a work-item packs, a multiple of 16
//   MR, NR   the register tile: 12 x 32 with 32 vector registers of 16 floats, else 6 x 16
//   KC       steps of k between two visits to a tile
//   SRC_T, OUT_T, BIAS_T   storage types of a packed matrix, of C and of the bias
//
// All matrices of a batch are computed by one launch, its third dimension. Strides are in elements; a batch stride
// of 0 uses one matrix for the whole batch.

#if defined(__has_attribute)
#if __has_attribute(min_vector_width)
#define WIDE_VECTORS __attribute__((min_vector_width(512))) // compilers for AVX-512 keep to half its width otherwise
#endif
#endif
#ifndef WIDE_VECTORS
#define WIDE_VECTORS
#endif
#define ONE_WORK_ITEM __attribute__((reqd_work_group_size(1, 1, 1)))

#ifdef WIDTH

// The first WIDTH (12, 16 or 32, or 6) elements that x0 and x1 hold, to d.
#if WIDTH == 32
#define VECTORS 2
#else
#define VECTORS 1
#endif

inline void store_row(float16 v, __global float *d) {
#if WIDTH == 12
    vstore8(v.lo, 0, d);
    vstore4(v.hi.lo, 0, d + 8);
#elif WIDTH == 6
    vstore4(v.lo.lo, 0, d);
    vstore2(v.lo.hi.lo, 0, d + 4);
#else
    vstore16(v, 0, d);
#endif
}

// Neighbouring rows of a panel are neighbours in memory: copy WIDTH of them at each k.
inline void pack_rows_together(__global const STORAGE(SRC_T) *restrict s, __global float *restrict d, size_t stride_k,
                               size_t begin, size_t end) {
    for (size_t k = begin; k < end; k++)
        for (int v = 0; v < VECTORS; v++) store_row(LOAD16(SRC_T, s, k * stride_k + v * 16), d + k * WIDTH + v * 16);
}

#define PAIRS(x, y) (x).s0, (y).s0, (x).s1, (y).s1, (x).s2, (y).s2, (x).s3, (y).s3
#define ZIP(x, y) (float16)(PAIRS((x).lo, (y).lo), PAIRS((x).hi, (y).hi))
#define ZIP_PAIRS(x, y) as_float16((ulong8)(PAIRS(as_ulong4(x), as_ulong4(y))))

inline void store_steps(float16 steps, __global float *d) {
    vstore4(steps.lo.lo, 0, d);
    vstore4(steps.lo.hi, 0, d + WIDTH);
    vstore4(steps.hi.lo, 0, d + 2 * WIDTH);
    vstore4(steps.hi.hi, 0, d + 3 * WIDTH);
}

// Neighbouring k are neighbours in memory: transpose blocks of 4 rows by 16 k.
inline void pack_k_together(__global const STORAGE(SRC_T) *restrict s, __global float *restrict d, size_t stride_row,
                            size_t begin, size_t end) {
    for (size_t k = begin; k < end; k += 16)
        for (int i = 0; i < WIDTH / 4 * 4; i += 4) {
            const float16 r0 = LOAD16(SRC_T, s, (i + 0) * stride_row + k);
            const float16 r1 = LOAD16(SRC_T, s, (i + 1) * stride_row + k);
            const float16 r2 = LOAD16(SRC_T, s, (i + 2) * stride_row + k);
            const float16 r3 = LOAD16(SRC_T, s, (i + 3) * stride_row + k);
            __global float *e = d + k * WIDTH + i;
            const float16 lo01 = ZIP(r0.lo, r1.lo), lo23 = ZIP(r2.lo, r3.lo);
            const float16 hi01 = ZIP(r0.hi, r1.hi), hi23 = ZIP(r2.hi, r3.hi);
            store_steps(ZIP_PAIRS(lo01.lo, lo23.lo), e);
            store_steps(ZIP_PAIRS(lo01.hi, lo23.hi), e + 4 * WIDTH);
            store_steps(ZIP_PAIRS(hi01.lo, hi23.lo), e + 8 * WIDTH);
            store_steps(ZIP_PAIRS(hi01.hi, hi23.hi), e + 12 * WIDTH);
        }
}
