// gemm_amx.cl: C = epilogue(op(A) op(B)) of 16-bit matrices on the matrix unit of x86 processors (amx.clh).
//
//      a panel of A    [step][PARTS][32 rows][16 pairs of k]    bfloat16, or float16 where DOT_F16; a float16 in two parts
//      a panel of B    [step][PARTS][16 pairs of k][32 columns] otherwise. A step has 32 k; what lies beyond is zero.
//
// A work-item multiplies a block of panels of A by a block of panels of B, SUM_STEPS steps at a time, so that rounding
// grows with these and not with K: such sums are added up in private memory, a tile for each panel of A. Where its block
// has all panels of A, it packs those of B itself, one after the other in a place of its own, which stays in its cache.
//
// Both kernels are one program: what packs is compiled once for both.
//
//   PARTS, DOT_F16, EMULATE   as in amx.clh
//   IN_T    what is multiplied, f16 or bf16
//   SUM_STEPS   steps whose products are one sum
//   BLOCK_A   the most panels of A of a work-item that visits a tile more than once

#include "amx.clh"
#include "amx_pack.clh"

// Work-item (share of the panels, share of the steps, batch). Strides are in bytes, `width` those of an element. Of B,
// `is_b`, rows are columns. What f32 is rounded to goes to `copy` as well, if it `copies`.
__kernel ONE_WORK_ITEM WIDE_VECTORS void pack(matrix src, __global uint *panels, matrix_copy copy,
                                              const ulong rows, const ulong K, const ulong stride_row,
                                              const ulong stride_k, const ulong stride_batch, const uint width,
                                              const int is_b, const int copies) {
    const size_t steps = max((K + K_STEP - 1) / K_STEP, (ulong)1), all = (rows + SIDE - 1) / SIDE;
    const size_t words = STEP_BYTES / sizeof(uint), first = SHARE(0, 0, all), count = SHARE(0, 1, all) - first;
    const size_t begin = SHARE(1, 0, steps), end = SHARE(1, 1, steps), whole_end = min(end, (size_t)K / K_STEP);
    const bool by_rows = !is_b && stride_k == width && begin < whole_end;
    const size_t by_row = by_rows ? min(count, (rows - first * SIDE) / SIDE) : 0; // panels
    panels += (get_global_id(2) * all + first) * steps * words;
    src += get_global_id(2) * stride_batch;
    for (size_t p = 0; p < by_row; p++)
        pack_rows(src + (first + p) * SIDE * stride_row + begin * K_STEP * width, panels + (p * steps + begin) * words,
                  whole_end - begin, stride_row, width);
    for (size_t t = begin; t < end; t++) {
        const size_t done = t < whole_end ? by_row : 0;
        pack_step(src, panels + (done * steps + t) * words, count - done, steps * words, (first + done) * SIDE, t,
                  rows, K, stride_row, stride_k, is_b, copy, copies, width);
    }
}

#define MR SIDE
#define NR SIDE
#include "store_tile.clh"

// A tile of sums, transposed where it lies: two quarters change places.
APART void transpose_sums(float *sums) {
    for (size_t quarter = 0; quarter < 3; quarter++) {
        const size_t at = quarter / 2 * (16 * SIDE + 16) + quarter % 2 * 16, to = quarter == 1 ? 16 * SIDE : at;
        float16 upper[16], lower[16];
        for (size_t i = 0; i < 16; i++) {
            upper[i] = LOAD_PRIVATE(float16, sums + at + i * SIDE);
            lower[i] = LOAD_PRIVATE(float16, sums + to + i * SIDE);
        }
        transpose_16(upper);
        transpose_16(lower);
        for (size_t i = 0; i < 16; i++) {
            STORE_PRIVATE(float16, upper[i], sums + to + i * SIDE);
            STORE_PRIVATE(float16, lower[i], sums + at + i * SIDE);
        }
    }
}

#if PARTS == 2
// What numbers that are not finite make of a sum, their upper parts tell; lower ones are NaN. A sum of finite halves is
// finite.
APART void mend_sums(lines_a a, ulong a_row, ulong a_step, lines_b b, float *sums, ulong steps) {
    int16 is_odd = 0;
    for (size_t i = 0; i < SUMS; i += 16) is_odd |= !isfinite(LOAD_PRIVATE(float16, sums + i));
    if (!any(is_odd)) return;
    float high[SUMS] __attribute__((aligned(64)));
    multiply_high(a, a_row, a_step, b, high, steps, 0);
    for (size_t i = 0; i < SUMS; i++)
        if (!isfinite(sums[i])) sums[i] = high[i];
}
#endif

// A tile of sums to C; `streamed`, without an epilogue, past the caches where its rows are whole lines of one.
static inline void store(const float *sums, __global void *C, size_t begin, size_t m, size_t n, size_t M, size_t N,
                         __global const void *bias, int streamed, int out_type, int bias_type, int has_bias, int relu) {
    __global float *out = (__global float *)C + begin + m * N + n;
    if (!streamed || m + SIDE > M || n + SIDE > N || N % 16 || (size_t)out % 64) {
        store_tile(sums, C, begin, m, n, M, N, bias, out_type, bias_type, has_bias, relu);
        return;
    }
    for (size_t i = 0; i < SIDE; i++, out += N) {
        STORE_STREAMED(LOAD_PRIVATE(float16, sums + i * SIDE), (__global float16 *)out);
        STORE_STREAMED(LOAD_PRIVATE(float16, sums + i * SIDE + 16), (__global float16 *)(out + 16));
    }
}

// Has the lines of a tile of C, which is large, come while it is multiplied. Places behind its end may be among them.
static inline void fetch_to_write(__global void *C, size_t begin, size_t N, int out_type) {
    const size_t width = out_type == 0 ? 4 : 2;
    for (size_t i = 0; i < SIDE; i++) PREFETCH_TO_WRITE((__global uchar *)C + (begin + i * N) * width);
}

// Work-item (block of rows, block of columns, batch): block_a x block_b tiles of C. Rows of a panel of A are a_row bytes
// apart, its steps a_step, panels a_panel, and matrices a_batch: panels, or 16-bit A itself. C of float32 without bias
// and relu may be `streamed`. `transposed`, C is N x M, and bias is of M. B is in panels, or, where `b_width` is not 0,
// a matrix of elements of so many bytes, b_row, b_k and b_batch bytes apart: `panels` has place for SUM_STEPS steps of
// one panel a block then, and what B is rounded to goes to `copy`, if it `copies`.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
gemm(__global const uchar *A, __global const uchar *B, __global void *C, __global const void *bias,
     __global uint *panels, __global ushort *copy, const ulong M, const ulong N, const ulong K, const ulong a_row,
     const ulong a_step, const ulong a_panel, const ulong a_batch, const ulong b_row, const ulong b_k,
     const ulong b_batch, const uint block_a, const uint block_b, const uint b_width, const int copies,
     const int transposed, const int streamed, const int out_type, const int bias_type, const int has_bias,
     const int relu) {
    const size_t steps = max((K + K_STEP - 1) / K_STEP, (ulong)1), batch = get_global_id(2);
    const size_t panels_a = (M + SIDE - 1) / SIDE, panels_b = (N + SIDE - 1) / SIDE;
    const size_t first_a = get_global_id(0) * block_a, end_a = min(first_a + block_a, panels_a);
    const size_t first_b = get_global_id(1) * block_b, end_b = min(first_b + block_b, panels_b);
    const size_t columns = transposed ? M : N; // of C
    float sums[SUMS] __attribute__((aligned(64))), totals[BLOCK_A * SUMS] __attribute__((aligned(64)));
    A += batch * a_batch;
    const size_t block = (batch * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    B += batch * b_batch;
    if (b_width) panels += block * min(steps, (size_t)SUM_STEPS) * (STEP_BYTES / sizeof(uint));
    begin_tiles();
    for (size_t q = first_b; q < end_b; q++)
        for (size_t t = 0; t < steps; t += SUM_STEPS) {
            const size_t count = min((size_t)SUM_STEPS, steps - t);
            const bool is_last = t + count == steps;
            lines_b b = b_width ? (lines_b)panels : B + (q * steps + t) * STEP_BYTES;
            for (size_t s = 0; b_width && s < count; s++)
                pack_step(B, panels + s * (STEP_BYTES / sizeof(uint)), 1, 0, q * SIDE, t + s, N, K, b_row, b_k, 1,
                          (matrix_copy)copy, copies, b_width);
            for (size_t p = first_a; p < end_a; p++) {
                float *total = totals + (steps > SUM_STEPS ? (p - first_a) * SUMS : 0);
                float *sum = t > 0 || is_last ? sums : total;
                lines_a a = A + p * a_panel + t * a_step;
                if (is_last && !streamed && !b_width) {
                    const size_t m = (transposed ? q : p) * SIDE, n = (transposed ? p : q) * SIDE;
                    fetch_to_write(C, batch * M * N + m * columns + n, columns, out_type);
                }
                if (b_width)
                    multiply(a, a_row, a_step, b, sum, count, 0);
                else // what is multiplied next of B lies behind this, and comes a share at a time
                    multiply_ahead(a, a_row, a_step, b, sum, count, 0,
                                   b + count * STEP_BYTES + (p - first_a) * count * AHEAD_BYTES);
#if PARTS == 2
                mend_sums(a, a_row, a_step, b, sum, count);
#endif
                if (t > 0) {
                    float *to = is_last ? sums : total;
                    for (size_t i = 0; i < SUMS; i += 16)
                        STORE_PRIVATE(float16, LOAD_PRIVATE(float16, sums + i) + LOAD_PRIVATE(float16, total + i),
                                      to + i);
                }
                if (!is_last) continue;
                if (transposed) transpose_sums(sums);
                store(sums, C, batch * M * N, (transposed ? q : p) * SIDE, (transposed ? p : q) * SIDE,
                      transposed ? N : M, transposed ? M : N, bias, streamed, out_type, bias_type, has_bias, relu);
            }
        }
    end_tiles();
}
