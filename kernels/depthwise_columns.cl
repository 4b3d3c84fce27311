// depthwise_columns.cl: depthwise convolution with stride 1 and a square filter, for CPU devices. depthwise.clh says
// what is computed.
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
// or by a later pass; rows at the ends of tensor and plane, where that would be too far, go one element at a time.
//
//   X_T, W_T, B_T, Y_T   storage types of input, weight, bias and result
//   KERNEL, PAD          side of the filter; padding, less than it
//   BIAS                 1: there is a bias

#define LINE(p) (long)(64 / sizeof(*(p))) // elements of a cache line
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

// 16 elements from x[at] on, as far as they lie in the tensor; zero where `keep` is, if anything is `masked`.
static inline float16 load_kept(__global const STORAGE(X_T) *x, long at, long size, int16 keep, bool inside,
                                bool masked) {
    float16 v;
    if (inside) {
        v = LOAD16(X_T, x, at);
    } else {
        float lanes[16];
        for (int l = 0; l < 16; l++) lanes[l] = at + l >= 0 && at + l < size ? LOAD(X_T, x, at + l) : 0.0f;
        v = vload16(0, lanes);
    }
    return masked ? as_float16(as_int16(v) & keep) : v;
}

#define MOVE_DOWN(CHUNKS)                                                                                              \
    EACH(chunk, CHUNKS) {                                                                                              \
        _Pragma("unroll") for (int i = KERNEL - 1; i > 0; i--) sums[chunk][i] = sums[chunk][i - 1];                    \
        sums[chunk][0] = offset;                                                                                       \
    }

#define ADD_ROW(CHUNKS, INSIDE)                                                                                        \
    EACH(chunk, CHUNKS)                                                                                                \
        EACH(s, KERNEL) {                                                                                              \
            const bool masked = (chunk == 0 && s < PAD) || s >= KERNEL - PAD;                                          \
            const float16 v = load_kept(x, from + chunk * 16 + s, size, keep[chunk][s], INSIDE, masked);               \
            EACH(i, KERNEL) sums[chunk][i] += weights[i * KERNEL + s] * v;                                             \
        }

// Rows of x up to `end`, of which those from `height` on have no elements, only outputs that are still to be stored.
#define ROWS_AT_THE_EDGE(CHUNKS, end)                                                                                  \
    for (; h < end; h++, from += width) {                                                                              \
        MOVE_DOWN(CHUNKS)                                                                                              \
        if (h < height) { ADD_ROW(CHUNKS, false) }                                                                     \
        if (h < KERNEL - 1 - PAD) continue;                                                                            \
        EACH(chunk, CHUNKS) STORE_PART(Y_T, sums[chunk][KERNEL - 1], y, to + chunk * 16, plane_end);                   \
        to += out_width;                                                                                               \
    }

#define ROWS_INSIDE(CHUNKS, end)                                                                                       \
    for (; h < end; h++, from += width, to += out_width) {                                                             \
        MOVE_DOWN(CHUNKS)                                                                                              \
        ADD_ROW(CHUNKS, true)                                                                                          \
        EACH(chunk, CHUNKS) {                                                                                          \
            PREFETCH(x + from + PAD + height * width + chunk * LINE(x)); /* the next plane */                          \
            PREFETCH_TO_WRITE(y + to + out_height * out_width + chunk * LINE(y));                                      \
            STORE16(Y_T, sums[chunk][KERNEL - 1], y, to + chunk * 16);                                                 \
        }                                                                                                              \
    }

// Columns `column` to `column + 16 * CHUNKS - 1`.
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
        long from = plane * height * width + column - PAD, to = plane * out_height * out_width + column;               \
        /* Rows whose loads lie in the tensor and whose stores lie in the plane; all of them complete a row. */        \
        const long first = max((long)(KERNEL - 1 - PAD), from < 0 ? (width - 1 - from) / width : 0);                   \
        const long left = size - (from + CHUNKS * 16 + KERNEL - 1), room = plane_end - (to + CHUNKS * 16);             \
        const long loads = left < 0 ? 0 : min(height, left / width + 1);                                               \
        const long stores = room < 0 ? 0 : room / out_width + KERNEL - PAD;                                            \
        long h = 0;                                                                                                    \
        ROWS_AT_THE_EDGE(CHUNKS, min(first, height + PAD))                                                             \
        ROWS_INSIDE(CHUNKS, min(loads, stores))                                                                        \
        ROWS_AT_THE_EDGE(CHUNKS, height + PAD)                                                                         \
    }

__kernel ONE_WORK_ITEM void
forward_columns(__global const STORAGE(X_T) *restrict x, __global const STORAGE(W_T) *restrict w,
                __global const STORAGE(B_T) *restrict bias, __global STORAGE(Y_T) *restrict y, const long size,
                const long planes, const uint each, const uint channels, const long height, const long width,
                const long out_height, const long out_width) {
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float weights[KERNEL * KERNEL];
    const long begin = (long)get_group_id(0) * each, end = min(begin + each, planes);
    for (long plane = begin; plane < end; plane++) {
        const uint c = plane % channels;
        for (uint k = 0; k < KERNEL * KERNEL; k++) weights[k] = LOAD(W_T, w, c * KERNEL * KERNEL + k);
        const float offset = BIAS ? LOAD(B_T, bias, c) : 0.0f;
        const long plane_end = (plane + 1) * out_height * out_width;
        long column = (out_width - 1) / 16 * 16 - 16;
        for (; column >= 0; column -= 32) PASS(2)
        column += 16;
        if (column == 0) PASS(1)
    }
}
