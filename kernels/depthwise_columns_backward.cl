// depthwise_columns_backward.cl: gradients of a depthwise convolution with stride 1 and a square filter, by input and
// weight in one pass, for CPU devices. depthwise.clh says what is computed.
//
// A work-item takes planes one by one, and goes down each in passes of 16 or 32 columns, from right to left. A row of
// dy is loaded once for each column of the filter. It meets KERNEL rows of x, which move along in registers with their
// gradients:
//
//      row h of dy, three loads           gradients[0], values[0]   row h - PAD of x: complete, and stored
//      . a b c d . .    s = 0 b c d ..    gradients[1], values[1]   row h - PAD + 1
//                       s = 1 a b c ..    gradients[2], values[2]   row h - PAD + 2: begins with 0, x is loaded
//                       s = 2 . a b ..
//
// What a load finds beside the plane counts as zero (`keep`). A pass has such lanes of dy at its left end in the first
// columns, and at its right end in the last, where x is zero beyond the plane (`inside`), whatever dy is. What the last
// 16 of a row store beyond it is overwritten by the next row, or by a later pass.
//
//   X_T, G_T, W_T, DX_T   storage types of input, gradient of the result, weight, gradient of the input
//   KERNEL, PAD           side of the filter; padding, less than it
//   INPUT_GRADIENT, WEIGHT_GRADIENT   1: it is wanted

#define STRIDE 1
#include "depthwise.clh"
#include "depthwise_columns.clh"

DEFINE_LOAD_KEPT(load_kept_x, X_T)
DEFINE_LOAD_KEPT(load_kept_dy, G_T)

#define MOVE_DOWN(CHUNKS, WHOLE)                                                                                       \
    EACH(chunk, CHUNKS) {                                                                                              \
        EACH(i, KERNEL - 1) {                                                                                          \
            gradients[chunk][i] = gradients[chunk][i + 1];                                                             \
            values[chunk][i] = values[chunk][i + 1];                                                                   \
        }                                                                                                              \
        gradients[chunk][KERNEL - 1] = values[chunk][KERNEL - 1] = 0;                                                  \
        if (WEIGHT_GRADIENT && (WHOLE || h < height - (KERNEL - 1 - PAD)))                                             \
            values[chunk][KERNEL - 1] =                                                                                \
                load_kept_x(x, to + (KERNEL - 1) * width + chunk * 16, size, inside[chunk], WHOLE, true);              \
    }

#define ADD_ROW(CHUNKS, WHOLE)                                                                                         \
    EACH(chunk, CHUNKS)                                                                                                \
        EACH(s, KERNEL) {                                                                                              \
            const bool masked = (chunk == 0 && s > PAD) || s < KERNEL - 1 - PAD;                                       \
            const float16 v = load_kept_dy(dy, from + chunk * 16 - s, out_size, keep[chunk][s], WHOLE, masked);        \
            EACH(i, KERNEL) {                                                                                          \
                if (INPUT_GRADIENT) gradients[chunk][i] += weights[i * KERNEL + s] * v;                                \
                if (WEIGHT_GRADIENT) sums[i * KERNEL + s] += values[chunk][i] * v;                                     \
            }                                                                                                          \
        }

// All that a row loads lies in the tensors, and what it stores in the work-item's planes.
#define WHOLE_ROW(CHUNKS)                                                                                              \
    {                                                                                                                  \
        FETCH_AHEAD(CHUNKS, PREFETCH, dy, ahead_dy)                                                                    \
        if (WEIGHT_GRADIENT) FETCH_AHEAD(CHUNKS, PREFETCH, x, ahead_x)                                                 \
        if (INPUT_GRADIENT) FETCH_AHEAD(CHUNKS, PREFETCH_TO_WRITE, dx, ahead_dx)                                       \
        MOVE_DOWN(CHUNKS, true)                                                                                        \
        ADD_ROW(CHUNKS, true)                                                                                          \
        if (INPUT_GRADIENT) EACH(chunk, CHUNKS) STORE16(DX_T, gradients[chunk][0], dx, to + chunk * 16);               \
    }

#define PART_OF_ROW(CHUNKS)                                                                                            \
    {                                                                                                                  \
        MOVE_DOWN(CHUNKS, false)                                                                                       \
        if (h >= 0 && h < out_height) { ADD_ROW(CHUNKS, false) }                                                       \
        if (INPUT_GRADIENT && h >= PAD)                                                                                \
            EACH(chunk, CHUNKS) STORE_PART(DX_T, gradients[chunk][0], dx, to + chunk * 16, range_end);                 \
    }

// Columns `column` to `column + 16 * CHUNKS - 1`. Row h of dy begins at `from` and row h - PAD of x at `to`.
#define PASS(CHUNKS)                                                                                                   \
    {                                                                                                                  \
        float16 gradients[CHUNKS][KERNEL], values[CHUNKS][KERNEL], sums[KERNEL * KERNEL];                              \
        int16 keep[CHUNKS][KERNEL], inside[CHUNKS];                                                                    \
        EACH(k, KERNEL * KERNEL) sums[k] = 0;                                                                          \
        EACH(chunk, CHUNKS) {                                                                                          \
            inside[chunk] = lane + (int)(column + chunk * 16) < (int)width;                                            \
            EACH(s, KERNEL) {                                                                                          \
                const int16 at = lane + (int)(column + chunk * 16 + PAD - s);                                          \
                keep[chunk][s] = (at >= 0) & (at < (int)out_width);                                                    \
                gradients[chunk][s] = values[chunk][s] = 0;                                                            \
            }                                                                                                          \
        }                                                                                                              \
        long h = PAD - (KERNEL - 1);                                                                                   \
        long from = (plane * out_height + h) * out_width + column + PAD;                                               \
        long to = (plane * height + h - PAD) * width + column;                                                         \
        const long last_from = out_size - CHUNKS * 16;                                                                 \
        const long last_to = min(size - (KERNEL - 1) * width, range_end) - CHUNKS * 16;                                \
        for (; h < height + PAD; h++, from += out_width, to += width) {                                                \
            if (LIKELY(h >= PAD && h < height + PAD - (KERNEL - 1) && from >= KERNEL - 1 && from <= last_from &&       \
                       to <= last_to))                                                                                 \
                WHOLE_ROW(CHUNKS)                                                                                      \
            else                                                                                                       \
                PART_OF_ROW(CHUNKS)                                                                                    \
        }                                                                                                              \
        EACH(k, KERNEL * KERNEL) plane_sums[k] += sums[k];                                                             \
    }

// As gradient_tiles in depthwise_backward.cl: a work-item takes `each` of the images, and of each of them `block`
// neighbouring channels; it leaves partial sums of the weight's gradient in fp32, (parts, channels, taps), a plane's
// sums added up one by one. Of INPUT_GRADIENT and WEIGHT_GRADIENT, what is not wanted is not touched.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
gradient_columns(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *dy, __global const STORAGE(W_T) *w,
                 __global STORAGE(DX_T) *dx, __global float *dw, const long size, const long out_size,
                 const uint images, const uint each, const uint block, const uint channels, const long height,
                 const long width, const long out_height, const long out_width) {
    const int16 lane = (int16)(LANE_NUMBERS);
    float weights[KERNEL * KERNEL], totals[BLOCK * KERNEL * KERNEL];
    const uint blocks = (channels + block - 1) / block, part = get_group_id(0) / blocks;
    const uint c_begin = get_group_id(0) % blocks * block, c_end = min(c_begin + block, channels);
    for (uint k = 0; k < block * KERNEL * KERNEL; k++) totals[k] = 0;
    for (uint n = part * each; n < min((part + 1) * each, images); n++) {
        const long range_end = ((long)n * channels + c_end) * height * width;
        for (uint c = c_begin; c < c_end; c++) {
            const long plane = (long)n * channels + c, next = plane + (c + 1 < c_end ? 1 : channels - (c - c_begin));
            long ahead_dy = next * out_height * out_width, ahead_x = next * height * width, ahead_dx = ahead_x;
            for (uint k = 0; k < KERNEL * KERNEL; k++) weights[k] = LOAD(W_T, w, c * KERNEL * KERNEL + k);
            float16 plane_sums[KERNEL * KERNEL];
            EACH(k, KERNEL * KERNEL) plane_sums[k] = 0;
            long column = (width - 1) / 16 * 16 - 16;
            for (; column >= 0; column -= 32) PASS(2)
            column += 16;
            if (column == 0) PASS(1)
#if WEIGHT_GRADIENT
            for (uint k = 0; k < KERNEL * KERNEL; k++) {
                float sum = sum16(plane_sums[k]);
                if (!isfinite(sum)) // an inf or NaN may have met a zero beside the plane
                    sum = exact_sum(x + plane * height * width, dy + plane * out_height * out_width, 0, height, 0,
                                    width, width, PAD - (int)(k / KERNEL), PAD - (int)(k % KERNEL), out_height,
                                    out_width);
                totals[(c - c_begin) * KERNEL * KERNEL + k] += sum;
            }
#endif
        }
    }
#if WEIGHT_GRADIENT
    for (uint k = 0; k < (c_end - c_begin) * KERNEL * KERNEL; k++)
        dw[((size_t)part * channels + c_begin) * KERNEL * KERNEL + k] = totals[k];
#endif
}
