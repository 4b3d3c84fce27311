// depthwise_forward.cl: depthwise convolution. depthwise.clh says what is computed, shows the frame that tiles are read
// from, and names the other macros.
//
//   BIAS   1: there is a bias

#ifdef FORWARD_TILES
#define FRAME_T X_T
#endif
#include "depthwise.clh"

#ifdef FORWARD_TILES
// Tap (kh, kw) of 16 outputs `r` rows below `at`, the frame's element for the first tap of the first row.
#define TAP(r, kh, kw)                                                                                                 \
    LOAD_PRIVATE(float16, at + (((r) * STRIDE + (kh)) * STRIDE + (kw) % STRIDE) * step + (kw) / STRIDE)

// ROWS_NOW (a constant) rows of outputs from row `row` of the frame on; PUT stores 16 elements, or what is left of them
#define COMPUTE(ROWS_NOW, PUT)                                                                                         \
    for (int column = (columns - 1) / 16 * 16; column >= 0; column -= 16) {                                            \
        const float *at = frame + (size_t)row * STRIDE * STRIDE * step + column;                                       \
        float16 sums[ROWS_NOW];                                                                                        \
        _Pragma("unroll") for (int r = 0; r < ROWS_NOW; r++) sums[r] = offset;                                         \
        UNROLL_TAPS for (int kh = 0; kh < (int)KERNEL_H; kh++)                                                         \
            UNROLL_TAPS for (int kw = 0; kw < (int)KERNEL_W; kw++) {                                                   \
                const float weight = weights[kh * KERNEL_W + kw];                                                      \
                _Pragma("unroll") for (int r = 0; r < ROWS_NOW; r++)                                                   \
                    sums[r] += weight * TAP(r, kh, kw);                                                                \
            }                                                                                                          \
        _Pragma("unroll") for (int r = 0; r < ROWS_NOW; r++) {                                                         \
            const size_t to = start + (size_t)(row + r) * out_width;                                                   \
            PREFETCH(x + ahead + STRIDE * ((row + r) * width + column));                                               \
            PREFETCH_TO_WRITE(y + to + (size_t)rows * out_width + column);                                             \
            PUT(Y_T, sums[r], y, to + column, across == 1 ? range_end : to + columns);                                 \
        }                                                                                                              \
    }

__kernel ONE_WORK_ITEM void
forward_tiles(__global const STORAGE(X_T) *restrict x, __global const STORAGE(W_T) *restrict w,
              __global const STORAGE(B_T) *restrict bias, __global STORAGE(Y_T) *restrict y, const ulong size,
              const ulong tiles, const uint each, const uint channels, const int height, const int width,
              const uint out_height, const uint out_width, const uint kernel_height, const uint kernel_width,
              const uint pad, const uint band, const uint tile, const int pitch) {
    float frame[FRAME + BEYOND], weights[TAPS];
    const long step = pitch;
    const uint bands = (out_height + band - 1) / band, across = (out_width + tile - 1) / tile;
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)tiles);
    const size_t last_plane = last / across / bands, last_band = last / across - last_plane * bands;
    const size_t range_end = (last_plane * out_height + last_band * band) * out_width; // if tiles are whole rows
    for (size_t unit = first; unit < last; unit++) {
        const size_t plane = unit / across / bands;
        const uint c = plane % channels, oh = (unit / across - plane * bands) * band, ow = unit % across * tile;
        const int rows = min(band, out_height - oh), columns = min(tile, out_width - ow);
        const size_t start = (plane * out_height + oh) * out_width + ow;
        for (uint k = 0; k < KERNEL_H * KERNEL_W; k++) weights[k] = LOAD(W_T, w, c * KERNEL_H * KERNEL_W + k);
        const float offset = BIAS ? LOAD(B_T, bias, c) : 0.0f;
        FILL_FRAME(frame, x, plane * height * width, size, height, width, (int)(oh * STRIDE) - (int)pad,
                   (int)(ow * STRIDE) - (int)pad, (rows - 1) * STRIDE + KERNEL_H, (columns - 1) * STRIDE + KERNEL_W,
                   STRIDE, pitch)
        const size_t ahead = plane * height * width + (size_t)(oh + rows) * STRIDE * width;
        int row = 0;
        const size_t fit = across > 1 || range_end < start + 16 ? 0 : (range_end - start - 16) / out_width;
        const int whole = min(fit, (size_t)rows);
        for (; row + ROWS <= whole; row += ROWS) COMPUTE(ROWS, PUT_WHOLE)
        for (; row < whole; row++) COMPUTE(1, PUT_WHOLE)
        for (; row < rows; row++) COMPUTE(1, STORE_PART)
    }
}
#endif

#ifdef FORWARD_ELEMENTS
__kernel void forward_elements(__global const STORAGE(X_T) *restrict x, __global const STORAGE(W_T) *restrict w,
                               __global const STORAGE(B_T) *restrict bias, __global STORAGE(Y_T) *restrict y,
                               const ulong out_size, const uint span, const uint channels, const int height,
                               const int width, const uint out_height, const uint out_width,
                               const uint kernel_height, const uint kernel_width, const uint pad, const uint stride) {
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)out_size);
    for (; i < end; i++) {
        const size_t line = i / out_width, plane = line / out_height;
        const int top = (int)((line - plane * out_height) * stride) - (int)pad;
        const int left = (int)((i - line * out_width) * stride) - (int)pad;
        const uint c = plane % channels;
        float sum = 0;
        for (int kh = 0; kh < (int)kernel_height; kh++) {
            for (int kw = 0; kw < (int)kernel_width; kw++) {
                const int h = top + kh, v = left + kw;
                if (h < 0 || h >= height || v < 0 || v >= width) continue;
                sum += LOAD(X_T, x, (plane * height + h) * width + v) *
                       LOAD(W_T, w, ((size_t)c * kernel_height + kh) * kernel_width + kw);
            }
        }
#if BIAS
        sum += LOAD(B_T, bias, c);
#endif
        STORE(Y_T, sum, y, i);
    }
}
#endif
