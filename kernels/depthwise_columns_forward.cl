// depthwise_columns_forward.cl: depthwise convolution with stride 1 and a square filter, for CPU devices.
// depthwise.clh says what is computed.
//
// A work-item takes planes one by one, and goes down each in passes of 16 or 32 columns, from right to left. A row of x
// is loaded once for each column of the filter, and adds to the KERNEL rows of outputs that read it, whose sums move
// along in registers:
//
//      row h of x, three loads              sums[0]  row h + PAD of outputs: begins with the bias
//      . . a b c d . .    s = 0 a b c ..    sums[1]  row h + PAD - 1
//                         s = 1 b c d ..    sums[2]  row h + PAD - 2: complete, and stored
//                         s = 2 c d e ..
//
// What a load finds beside the plane counts as zero (`keep`); a pass has such lanes at its left end in the first
// columns, and at its right end in the last. What the last 16 of a row store beyond it is overwritten by the next row,
// or by a later pass.
//
//   X_T, W_T, B_T, Y_T   storage types of input, weight, bias and result
//   KERNEL, PAD          side of the filter; padding, less than it
//   BIAS                 1: there is a bias

#include "depthwise_columns.clh"

DEFINE_LOAD_KEPT(load_kept, X_T)

#define MOVE_DOWN(CHUNKS)                                                                                              \
    EACH(chunk, CHUNKS) {                                                                                              \
        _Pragma("unroll") for (int i = KERNEL - 1; i > 0; i--) sums[chunk][i] = sums[chunk][i - 1];                    \
        sums[chunk][0] = offset;                                                                                       \
    }

#define ADD_ROW(CHUNKS, WHOLE)                                                                                         \
    EACH(chunk, CHUNKS)                                                                                                \
        EACH(s, KERNEL) {                                                                                              \
            const bool masked = (chunk == 0 && s < PAD) || s >= KERNEL - PAD;                                          \
            const float16 v = load_kept(x, from + chunk * 16 + s, size, keep[chunk][s], WHOLE, masked);                \
            EACH(i, KERNEL) sums[chunk][i] += weights[i * KERNEL + s] * v;                                             \
        }

// All that a row loads lies in the tensor, and what it stores in the work-item's planes.
#define WHOLE_ROW(CHUNKS)                                                                                              \
    {                                                                                                                  \
        FETCH_AHEAD(CHUNKS, PREFETCH, x, ahead_x)                                                                      \
        FETCH_AHEAD(CHUNKS, PREFETCH_TO_WRITE, y, ahead_y)                                                             \
        MOVE_DOWN(CHUNKS)                                                                                              \
        ADD_ROW(CHUNKS, true)                                                                                          \
        EACH(chunk, CHUNKS) STORE16(Y_T, sums[chunk][KERNEL - 1], y, to + chunk * 16);                                 \
    }

// Rows from `height` on have no elements, only outputs that are still to be stored.
#define PART_OF_ROW(CHUNKS)                                                                                            \
    {                                                                                                                  \
        MOVE_DOWN(CHUNKS)                                                                                              \
        if (h < height) { ADD_ROW(CHUNKS, false) }                                                                     \
        if (h >= KERNEL - 1 - PAD)                                                                                     \
            EACH(chunk, CHUNKS) STORE_PART(Y_T, sums[chunk][KERNEL - 1], y, to + chunk * 16, range_end);               \
    }

// Columns `column` to `column + 16 * CHUNKS - 1`. What row h of x adds to begins at `from`, the row that it completes
// at `to`.
#define PASS(CHUNKS)                                                                                                   \
    {                                                                                                                  \
        float16 sums[CHUNKS][KERNEL];                                                                                  \
        int16 keep[CHUNKS][KERNEL];                                                                                    \
        EACH(chunk, CHUNKS)                                                                                            \
            EACH(s, KERNEL) {                                                                                          \
                const int16 at = lane + (int)(column + chunk * 16 + s - PAD);                                          \
                keep[chunk][s] = (at >= 0) & (at < (int)width);                                                        \
                sums[chunk][s] = offset;                                                                               \
            }                                                                                                          \
        long from = plane * height * width + column - PAD;                                                             \
        long to = (plane * out_height - (KERNEL - 1 - PAD)) * out_width + column;                                      \
        const long last_from = size - (CHUNKS * 16 + KERNEL - 1), last_to = range_end - CHUNKS * 16;                   \
        for (long h = 0; h < height + PAD; h++, from += width, to += out_width) {                                      \
            if (LIKELY(h >= KERNEL - 1 - PAD && h < height && from >= 0 && from <= last_from && to <= last_to))        \
                WHOLE_ROW(CHUNKS)                                                                                      \
            else                                                                                                       \
                PART_OF_ROW(CHUNKS)                                                                                    \
        }                                                                                                              \
    }

__kernel ONE_WORK_ITEM void
forward_columns(__global const STORAGE(X_T) *restrict x, __global const STORAGE(W_T) *restrict w,
                __global const STORAGE(B_T) *restrict bias, __global STORAGE(Y_T) *restrict y, const long size,
                const long planes, const uint each, const uint channels, const long height, const long width,
                const long out_height, const long out_width) {
    const int16 lane = (int16)(LANE_NUMBERS);
    float weights[KERNEL * KERNEL];
    const long begin = (long)get_group_id(0) * each, end = min(begin + each, planes);
    const long range_end = end * out_height * out_width;
    for (long plane = begin; plane < end; plane++) {
        const uint c = plane % channels;
        long ahead_x = (plane + 1) * height * width, ahead_y = (plane + 1) * out_height * out_width;
        for (uint k = 0; k < KERNEL * KERNEL; k++) weights[k] = LOAD(W_T, w, c * KERNEL * KERNEL + k);
        const float offset = BIAS ? LOAD(B_T, bias, c) : 0.0f;
        long column = (out_width - 1) / 16 * 16 - 16;
        for (; column >= 0; column -= 32) PASS(2)
        column += 16;
        if (column == 0) PASS(1)
    }
}
