// gemm_amx.cl: products of 16-bit matrices (gemm_pairs.clh) on the matrix unit of x86 processors (amx.clh). A number of
// a panel is a bfloat16, or a float16 where DOT_F16; a float16 in two parts otherwise.
//
//   PARTS, DOT_F16, EMULATE   as in amx.clh
//   IN_T, SUM_STEPS, BLOCK_A  as in gemm_pairs.clh

#include "amx.clh"

static inline void multiply_tile(lines_a a, ulong a_row, ulong a_step, lines_b b, float *sums, ulong steps, ulong rows,
                                 lines_b ahead) {
    if (ahead)
        multiply_ahead(a, a_row, a_step, b, sums, steps, 0, ahead);
    else
        multiply(a, a_row, a_step, b, sums, steps, 0);
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

#include "gemm_pairs.clh"
