// info_nce.cl: the parts of the InfoNCE loss around its matrix products.
//
//      keys ->
//    q  s . . .     s[i][j] = <q[i], k[j]>, by the matrix product of this library. The positive pairs are on the
//    u  . s . .     diagonal. Row i's loss is the cross entropy of softmax(s[i] / temperature) against class i, and in
//    e  . . s .     the symmetric form column j's likewise, against class j.
//    r  . . . s
//
// The largest similarity is subtracted before dividing by the temperature, so that no temperature makes infinities.
//
//   ROW_LOSS     losses, and for backward tops and totals: softmax is exp((s - top) / temperature) / total
//   COLUMN_LOSS  the same of columns, `start` elements further on; a work-item takes 16 of them
//   SLOPES       g[i][j], gradient of the loss for s[i][j], times the incoming gradient, over the temperature;
//                with SYMMETRIC tops and totals of columns follow those of rows
//
//   G_T          storage type of the incoming gradient
//   WG           work-items of a work-group: 1 on CPU devices, else a power of two

#define LANES ((int16)(LANE_NUMBERS))

#ifdef ROW_LOSS
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
row_loss(__global const float *restrict s, __global float *restrict losses, __global float *restrict tops,
         __global float *restrict totals, const ulong rows, const uint each, const float temperature) {
    SCRATCH;
    const size_t n = rows;
    FOR_EACH_OWN(row, each, rows) {
        __global const float *similar = s + row * n;
        float16 most = -INFINITY, sums = 0.0f;
        FOR_EACH_16(i, n) most = fmax(most, LOAD_PART(f32, similar, i, n, -INFINITY));
        const float top = group_max(max16(most), scratch);
        size_t at = get_local_id(0) * 16;
        LONG_SUM(float16, sums, at, n, WG * 16, exp((LOAD_PART(f32, similar, at, n, -INFINITY) - top) / temperature))
        const float total = group_sum(sum16(sums), scratch);
        if (get_local_id(0) == 0) {
            losses[row] = (top - similar[row]) / temperature + log(total);
            tops[row] = top;
            totals[row] = total;
        }
    }
}
#endif

#ifdef COLUMN_LOSS
// A column beyond the last one is computed as if it were full of zeros, and not stored.
__kernel void column_loss(__global const float *restrict s, __global float *restrict losses,
                          __global float *restrict tops, __global float *restrict totals, const ulong n,
                          const ulong start, const float temperature) {
    const size_t column = get_global_id(0) * 16;
    if (column >= n) return;
    float16 top = -INFINITY, total = 0.0f, own = 0.0f;
    for (size_t row = 0; row < n; row++) {
        const float16 v = LOAD_PART(f32, s + row * n, column, n, 0.0f);
        top = fmax(top, v);
        own = (LANES == (int)(row - column)) ? v : own;
    }
    size_t term = 0;
    LONG_SUM(float16, total, term, n, 1, exp((LOAD_PART(f32, s + term * n, column, n, 0.0f) - top) / temperature))
    STORE_PART(f32, (top - own) / temperature + log(total), losses + start, column, n);
    STORE_PART(f32, top, tops + start, column, n);
    STORE_PART(f32, total, totals + start, column, n);
}
#endif

#ifdef SLOPES
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
similarity_slopes(__global const float *restrict s, __global const float *restrict tops,
                  __global const float *restrict totals, __global const STORAGE(G_T) *restrict g,
                  __global float *restrict slopes, const ulong rows, const uint each, const float temperature,
                  const float divisor) {
    const size_t n = rows;
    const float scale = LOAD(G_T, g, 0) / divisor / temperature;
    FOR_EACH_OWN(row, each, rows) {
        const float top = tops[row], total = totals[row];
        FOR_EACH_16(i, n) {
            const float16 v = LOAD_PART(f32, s + row * n, i, n, 0.0f);
            const long lane = (long)row - (long)i;
            const float16 here =
                LANES == (int)(lane >= 0 && lane < 16 ? lane : -1) ? (float16)1.0f : (float16)0.0f;
            float16 slope = exp((v - top) / temperature) / total - here;
#ifdef SYMMETRIC
            slope += exp((v - LOAD_PART(f32, tops + n, i, n, 0.0f)) / temperature) /
                         LOAD_PART(f32, totals + n, i, n, 1.0f) - here;
#endif
            STORE_PART(f32, slope * scale, slopes + row * n, i, n);
        }
    }
}
#endif
