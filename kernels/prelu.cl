// prelu.cl: y = x > 0 ? x : slope * x, and its backward in one pass over x and the gradient g of y.
//
// x is rows of n elements, and all of a row have one slope:  row = image * channels + channel. A row is cut into parts:
//
//                  n ->
//           |-- span --|-- span --| ...      backward: part p of row (i, c) writes its sum of g * x, over x <= 0,
//   row     |  part 0  |  part 1  |          to sums[i * parts + p][c]; what is left is a sum over columns
//
// Rows of a single element run on elementwise.cl.
//
//   X_T, SLOPE_T, G_T         storage types of x, the slopes and g
//   Y_T, DX_T                 of the result and of the gradient of x
//   WITH_DX                   0: only the slopes want a gradient (dx is not written)
//   WG                        work-items of a work-group: 1 on CPU devices, else a power of two

#ifdef PRELU
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
prelu(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SLOPE_T) *restrict slopes,
      __global STORAGE(Y_T) *restrict y, const uint channels, const ulong n, const ulong span, const uint parts,
      const uint each, const ulong units) {
    FOR_EACH_OWN(unit, each, units) {
        const size_t row = unit / parts, begin = row * n + unit % parts * span, end = min(begin + span, (row + 1) * n);
        const float slope = LOAD(SLOPE_T, slopes, row % channels);
        for (size_t i = begin + get_local_id(0) * 16; i < end; i += WG * 16) {
            const float16 v = LOAD_PART(X_T, x, i, end, 0.0f);
            STORE_PART(Y_T, v > 0.0f ? v : slope * v, y, i, end);
        }
    }
}
#endif

#ifdef PRELU_BACKWARD
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
prelu_backward(__global const STORAGE(G_T) *restrict g, __global const STORAGE(X_T) *restrict x,
               __global const STORAGE(SLOPE_T) *restrict slopes, __global STORAGE(DX_T) *restrict dx,
               __global float *restrict sums, const uint channels, const ulong n, const ulong span, const uint parts,
               const uint each, const ulong units) {
    SCRATCH;
    FOR_EACH_OWN(unit, each, units) {
        const size_t row = unit / parts, part = unit % parts, channel = row % channels;
        const size_t begin = row * n + part * span, end = min(begin + span, (row + 1) * n);
        const float slope = LOAD(SLOPE_T, slopes, channel);
        float16 total = 0;
        for (size_t i = begin + get_local_id(0) * 16; i < end;) {
            const size_t stop = min(i + WG * 4096, end); // summed by itself: rounding does not grow with the row
            float16 block = 0;
            for (; i < stop; i += WG * 16) {
                const float16 v = LOAD_PART(X_T, x, i, end, 1.0f), grad = LOAD_PART(G_T, g, i, end, 0.0f);
                block += v > 0.0f ? (float16)(0.0f) : grad * v; // a NaN is not above
#if WITH_DX
                STORE_PART(DX_T, v > 0.0f ? grad : slope * grad, dx, i, end);
#endif
            }
            total += block;
        }
        const float sum = group_sum(sum16(total), scratch);
        if (get_local_id(0) == 0) sums[(row / channels * parts + part) * channels + channel] = sum;
    }
}
#endif
