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

// The first WIDTH elements of v (of 16 if there are more).
inline void store_row(float16 v, __global float *d) {
#if WIDTH == 6
    vstore4(v.lo.lo, 0, d);
    vstore2(v.lo.hi.lo, 0, d + 4);
#elif WIDTH == 12
    vstore8(v.lo, 0, d);
    vstore4(v.hi.lo, 0, d + 8);
#else
    vstore16(v, 0, d);
#endif
}

// Neighbouring rows (columns of B) are neighbours in memory: copy WIDTH of them at each k.
inline void pack_rows_together(__global const STORAGE(SRC_T) *restrict s, __global float *restrict d, size_t stride_k,
                               size_t begin, size_t end) {
    for (size_t k = begin; k < end; k++)
        for (size_t i = 0; i < WIDTH; i += 16) store_row(LOAD16(SRC_T, s, k * stride_k + i), d + k * WIDTH + i);
}

// x0 y0 x1 y1 ... of two vectors of 8, in floats and in pairs of floats
#define ZIP4(x, y) (x).s0, (y).s0, (x).s1, (y).s1, (x).s2, (y).s2, (x).s3, (y).s3
#define ZIP(x, y) ((float16)(ZIP4((x).lo, (y).lo), ZIP4((x).hi, (y).hi)))
#define ZIP_PAIRS(x, y) as_float16((ulong8)(ZIP4(as_ulong4(x), as_ulong4(y))))

inline void store_4_steps(float16 v, __global float *d) {
    vstore4(v.lo.lo, 0, d);
    vstore4(v.lo.hi, 0, d + WIDTH);
    vstore4(v.hi.lo, 0, d + 2 * WIDTH);
    vstore4(v.hi.hi, 0, d + 3 * WIDTH);
}

// Neighbouring k are neighbours in memory: transpose blocks of 4 rows by 16 k in registers.
inline void pack_k_together(__global const STORAGE(SRC_T) *restrict s, __global float *restrict d, size_t stride_row,
                            size_t begin, size_t end) {
    for (size_t k = begin; k < end; k += 16)
        for (size_t i = 0; i < WIDTH; i += 4) {
            const size_t row = min(i, (size_t)(WIDTH - 4)); // 6 rows: the second block repeats two of the first
            const float16 r0 = LOAD16(SRC_T, s, row * stride_row + k);
            const float16 r1 = LOAD16(SRC_T, s, (row + 1) * stride_row + k);
            const float16 r2 = LOAD16(SRC_T, s, (row + 2) * stride_row + k);
            const float16 r3 = LOAD16(SRC_T, s, (row + 3) * stride_row + k);
            const float16 lo01 = ZIP(r0.lo, r1.lo), lo23 = ZIP(r2.lo, r3.lo);
            const float16 hi01 = ZIP(r0.hi, r1.hi), hi23 = ZIP(r2.hi, r3.hi);
            __global float *e = d + k * WIDTH + row;
            store_4_steps(ZIP_PAIRS(lo01.lo, lo23.lo), e);
            store_4_steps(ZIP_PAIRS(lo01.hi, lo23.hi), e + 4 * WIDTH);
            store_4_steps(ZIP_PAIRS(hi01.lo, hi23.lo), e + 8 * WIDTH);
            store_4_steps(ZIP_PAIRS(hi01.hi, hi23.hi), e + 12 * WIDTH);
        }
}

// Any strides, and the last panel of a matrix, which may have fewer than WIDTH rows.
inline void pack_elements(__global const STORAGE(SRC_T) *restrict s, __global float *restrict d, size_t stride_row,
                          size_t stride_k, size_t rows, size_t begin, size_t end) {
    for (size_t k = begin; k < end; k++)
        for (size_t i = 0; i < WIDTH; i++)
            d[k * WIDTH + i] = i < rows ? LOAD(SRC_T, s, i * stride_row + k * stride_k) : 0.0f;
}

// Work-item (panel, block of K_SPAN steps, batch). `rows` of op(A), or columns of op(B).
__kernel ONE_WORK_ITEM WIDE_VECTORS void pack(__global const STORAGE(SRC_T) *restrict src,
                                              __global float *restrict panels, const ulong rows, const ulong K,
                                              const ulong stride_row, const ulong stride_k, const ulong stride_batch) {
    const size_t row = get_global_id(0) * WIDTH;
    const size_t begin = get_global_id(1) * K_SPAN, end = min(begin + K_SPAN, (size_t)K);
    __global const STORAGE(SRC_T) *s = src + get_global_id(2) * stride_batch + row * stride_row;
    __global float *d = panels + (get_global_id(2) * get_global_size(0) + get_global_id(0)) * WIDTH * K;
    const size_t whole = end - (end - begin) % 16;
    if (stride_row == 1 && row + (WIDTH + 15) / 16 * 16 <= rows) {
        pack_rows_together(s, d, stride_k, begin, end);
    } else if (stride_k == 1 && row + WIDTH <= rows) {
        pack_k_together(s, d, stride_row, begin, whole);
        pack_elements(s, d, stride_row, 1, WIDTH, whole, end);
    } else {
        pack_elements(s, d, stride_row, stride_k, rows - row, begin, end);
    }
}

#else

// The tile's code, written once for each row i and vector of columns j. X(i) must come row by row: an element of A is
// broadcast and used by all vectors of its row.
#if MR == 12
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif
#if NR == 32
#define FIRST_AND_SECOND(first, second) first second
#else
#define FIRST_AND_SECOND(first, second) first
#endif

#define CLEAR(i) FIRST_AND_SECOND(float16 c##i##_0 = 0.0f;, float16 c##i##_1 = 0.0f;)
#define MULTIPLY_ADD(i) \
    FIRST_AND_SECOND(c##i##_0 = (float16)(a[i]) * b0 + c##i##_0;, c##i##_1 = (float16)(a[i]) * b1 + c##i##_1;)
#define RESUME(i) \
    FIRST_AND_SECOND(c##i##_0 = vload16(0, sums + i * NR);, c##i##_1 = vload16(0, sums + i * NR + 16);)
#define SUSPEND(i) \
    FIRST_AND_SECOND(vstore16(c##i##_0, 0, sums + i * NR);, vstore16(c##i##_1, 0, sums + i * NR + 16);)
#define SPILL(i) FIRST_AND_SECOND(vstore16(c##i##_0, 0, edge + i * NR);, vstore16(c##i##_1, 0, edge + i * NR + 16);)
#define FINISH(i)                                                                \
    FIRST_AND_SECOND(STORE16(OUT_T, EPILOGUE(c##i##_0, bias0, relu_16), out, i * N);, \
                     STORE16(OUT_T, EPILOGUE(c##i##_1, bias1, relu_16), out, i * N + 16);)

// A NaN is not below zero and stays.
inline float relu_1(float v) { return v < 0.0f ? 0.0f : v; }
inline float16 relu_16(float16 v) { return select(v, (float16)(0.0f), v < 0.0f); }
#define EPILOGUE(v, b, relu_n) (relu ? relu_n((v) + (b)) : (v) + (b))
#define NO_BIAS (-0.0f) // v + -0 is v for every v, -0 included

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C.
__kernel ONE_WORK_ITEM WIDE_VECTORS void gemm(__global const float *restrict a_panels,
                                              __global const float *restrict b_panels,
                                              __global STORAGE(OUT_T) *restrict C,
                                              __global const STORAGE(BIAS_T) *restrict bias,
                                              __global float *restrict partial, const ulong M, const ulong N,
                                              const ulong K, const ulong a_batch, const ulong b_batch,
                                              const uint block_panels_a, const uint block_panels_b, const int has_bias,
                                              const int relu) {
    const size_t panels_a = (M + MR - 1) / MR, panels_b = (N + NR - 1) / NR, batch = get_global_id(2);
    const size_t first_a = get_global_id(0) * block_panels_a, end_a = min(first_a + block_panels_a, panels_a);
    const size_t first_b = get_global_id(1) * block_panels_b, end_b = min(first_b + block_panels_b, panels_b);
    a_panels += batch * a_batch;
    b_panels += batch * b_batch;
    C += batch * M * N;
    partial += batch * panels_a * panels_b * (MR * NR);
    size_t k0 = 0;
    do { // once even if K is 0: the epilogue of a sum of nothing
        const int steps = (int)min((size_t)KC, (size_t)K - k0);
        const bool is_last = k0 + steps >= K;
        for (size_t q = first_b; q < end_b; q++)
            for (size_t p = first_a; p < end_a; p++) {
                __global const float *a = a_panels + (p * K + k0) * MR;
                __global const float *b = b_panels + (q * K + k0) * NR;
                __global float *sums = partial + (q * panels_a + p) * (MR * NR);
                EACH_ROW(CLEAR)
                if (k0 > 0) { EACH_ROW(RESUME) }
#pragma unroll 4
                for (int k = 0; k < steps; k++) {
                    const float16 b0 = vload16(0, b);
                    FIRST_AND_SECOND(, const float16 b1 = vload16(0, b + 16);)
                    EACH_ROW(MULTIPLY_ADD)
                    a += MR;
                    b += NR;
                }
                if (!is_last) {
                    EACH_ROW(SUSPEND)
                    continue;
                }
                const size_t m = p * MR, n = q * NR;
                if (m + MR <= M && n + NR <= N) {
                    __global STORAGE(OUT_T) *out = C + m * N + n;
                    const float16 bias0 = has_bias ? LOAD16(BIAS_T, bias, n) : (float16)(NO_BIAS);
                    FIRST_AND_SECOND(, const float16 bias1 = has_bias ? LOAD16(BIAS_T, bias, n + 16) : (float16)(NO_BIAS);)
                    EACH_ROW(FINISH)
                } else {
                    float edge[MR * NR];
                    EACH_ROW(SPILL)
                    for (size_t i = 0; i < MR && m + i < M; i++)
                        for (size_t j = 0; j < NR && n + j < N; j++) {
                            const float b = has_bias ? LOAD(BIAS_T, bias, n + j) : NO_BIAS;
                            STORE(OUT_T, EPILOGUE(edge[i * NR + j], b, relu_1), C, (m + i) * N + n + j);
                        }
                }
            }
        k0 += KC;
    } while (k0 < K);
}

#endif
