// depthwise_backward.cl: gradients of a depthwise convolution by input and weight. depthwise.clh says what is computed,
// shows the frame that tiles of the result's gradient are read from, and names the other macros.
//
//   INPUT_GRADIENT, WEIGHT_GRADIENT   1: it is wanted; SHIFT: pad % STRIDE (gradient_tiles)
//   WG   work-items of a work-group in weight_gradient_elements: 1 on CPU devices, else a power of two

#ifdef GRADIENT_TILES
#define FRAME_T G_T
#endif
#include "depthwise.clh"

// Element (ih, iw) of x meets output (oh, ow) at tap (ih + pad - oh * STRIDE, iw + pad - ow * STRIDE). So row
// STRIDE * u + a has taps (a + pad) % STRIDE + STRIDE * t, at output rows u + (a + pad) / STRIDE - t; columns likewise.
// The gradient by x sums weight * dy over its taps, and that of a tap sums x * dy over the elements: both in one pass.
#ifdef GRADIENT_TILES
#if STRIDE == 2
#define GROUPS 1 // groups of STRIDE rows computed at a time
#elif WEIGHT_GRADIENT
#define GROUPS 2 // beside the sums of the taps there are no registers for more
#else
#define GROUPS ROWS
#endif
#define CARRY(a) (((a) + SHIFT) / STRIDE)
#define FIRST_TAP(a) (((a) + SHIFT) % STRIDE)
#ifdef KERNEL
#define SUMS (KERNEL * KERNEL)
#else
#define SUMS TAPS
#endif

// Rows and columns here are groups of STRIDE rows and columns of x.
#define COMPUTE(GROUPS_NOW, GET, PUT)                                                                                  \
    for (int column = (columns - 1) / 16 * 16; column >= 0; column -= 16) {                                            \
        const float *at = frame + (row + margin_rows) * step + column + margin_columns;                                \
        const int iw = (left + column) * STRIDE, rest = min((left + columns) * STRIDE, width) - iw;                    \
        const size_t to = (plane * height + (top + row) * STRIDE) * width + iw;                                        \
        const int below = height - (top + row) * STRIDE; /* rows of x from here on */                                  \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW * STRIDE; r++)                                                \
            if (WEIGHT_GRADIENT) PREFETCH(x + to + (size_t)(rows * STRIDE + r) * width);                               \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW; r++)                                                         \
            PREFETCH(dy + (plane * out_height + top + rows + row + r) * out_width + left + column);                    \
        float16 gradients[GROUPS_NOW * STRIDE][STRIDE], values[GROUPS_NOW * STRIDE][STRIDE];                           \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW * STRIDE; r++) {                                              \
            _Pragma("unroll") for (int b = 0; b < STRIDE; b++) gradients[r][b] = 0, values[r][b] = 0;                  \
            if (WEIGHT_GRADIENT && (STRIDE == 1 || r < below)) SPLIT(values[r], to + (size_t)r * width, GET)           \
        }                                                                                                              \
        _Pragma("unroll") for (int a = 0; a < STRIDE; a++)                                                             \
            _Pragma("unroll") for (int b = 0; b < STRIDE; b++)                                                         \
                UNROLL_TAPS for (int kh = FIRST_TAP(a), t = 0; kh < (int)KERNEL_H; kh += STRIDE, t++)                  \
                    UNROLL_TAPS for (int kw = FIRST_TAP(b), s = 0; kw < (int)KERNEL_W; kw += STRIDE, s++)              \
                        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW; r++) {                                       \
                            const float16 dys = LOAD_PRIVATE(float16, at + (r + CARRY(a) - t) * step + CARRY(b) - s);  \
                            const int i = r * STRIDE + a, k = kh * KERNEL_W + kw;                                      \
                            if (INPUT_GRADIENT) gradients[i][b] += weights[k] * dys;                                   \
                            if (WEIGHT_GRADIENT) sums[k] += values[i][b] * dys;                                        \
                        }                                                                                              \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW * STRIDE; r++)                                                \
            if (INPUT_GRADIENT && (STRIDE == 1 || r < below)) {                                                        \
                const size_t end = across == 1 ? range_end : to + (size_t)r * width + rest;                            \
                JOIN(gradients[r], to + (size_t)r * width, PUT)                                                        \
            }                                                                                                          \
    }
// SPLIT: 16 groups of x, zeros where the row ends, by their place in the group; JOIN stores such.
#define UP_TO(rest, v) ((rest) < 16 ? select((float16)(0), v, lane < (int16)(rest)) : (v))
#if STRIDE == 1
#define SPLIT(v, from, GET) v[0] = UP_TO(rest, GET(X_T, x, from, size, 0.0f));
#define JOIN(v, to, PUT) PUT(DX_T, v[0], dx, to, end);
#else
#define SPLIT(v, from, GET)                                                                                            \
    {                                                                                                                  \
        const float16 p = UP_TO(rest, GET(X_T, x, from, size, 0.0f));                                                  \
        const float16 q = rest > 16 ? UP_TO(rest - 16, GET(X_T, x, from + 16, size, 0.0f)) : (float16)(0);             \
        v[0] = (float16)(p.even, q.even), v[1] = (float16)(p.odd, q.odd);                                              \
    }
#define JOIN(v, to, PUT)                                                                                               \
    float16 p;                                                                                                         \
    p.even = v[0].lo, p.odd = v[1].lo;                                                                                 \
    PUT(DX_T, p, dx, to, end);                                                                                         \
    p.even = v[0].hi, p.odd = v[1].hi;                                                                                 \
    if (rest > 16) PUT(DX_T, p, dx, to + 16, end);
#endif

// A work-item takes `each` of the images' bands, and of each of them `block` neighbouring channels, whose planes lie
// side by side in memory. It leaves partial sums of the weight's gradient in fp32, (parts, channels, taps), a tile's
// sums added up one by one, so that no sum is longer than a tile. `band` and `tile` count groups of STRIDE rows and
// columns of x. Of INPUT_GRADIENT and WEIGHT_GRADIENT, what is not wanted is not touched.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
gradient_tiles(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *dy, __global const STORAGE(W_T) *w,
               __global STORAGE(DX_T) *dx, __global float *dw, const ulong size, const ulong out_size,
               const uint units, const uint each, const uint block, const uint channels, const int height,
               const int width, const int out_height, const int out_width, const uint kernel_height,
               const uint kernel_width, const uint pad, const uint band, const uint tile, const int pitch) {
    float frame[FRAME + BEYOND], weights[TAPS], totals[BLOCK * TAPS];
    const int16 lane = (int16)(LANE_NUMBERS);
    const long step = pitch;
    const uint taps = KERNEL_H * KERNEL_W;
    const uint down = (height + STRIDE - 1) / STRIDE, wide = (width + STRIDE - 1) / STRIDE; // groups of a plane
    const uint bands = (down + band - 1) / band, across = (wide + tile - 1) / tile;
    const int margin_rows = (KERNEL_H - 1) / STRIDE, margin_columns = (KERNEL_W - 1) / STRIDE;
    const uint blocks = (channels + block - 1) / block, part = get_group_id(0) / blocks;
    const uint c_begin = get_group_id(0) % blocks * block, c_end = min(c_begin + block, channels);
    for (uint k = 0; k < FRAME + BEYOND; k++) frame[k] = 0; // lanes beyond a row's end multiply what is there by 0
    for (uint k = 0; k < block * taps; k++) totals[k] = 0;
    for (uint unit = part * each; unit < min((part + 1) * each, units); unit++) {
        const size_t n = unit / bands;
        const int top = unit % bands * band, rows = min(band, down - top);
        const int bottom = min((top + rows) * STRIDE, height);
        for (uint c = c_begin; c < c_end; c++) {
            const size_t plane = n * channels + c;
            // Where the work-item's elements end, if tiles are whole rows.
            const size_t range_end = bands == 1 ? (n * channels + c_end) * height * width
                                                : (plane * height + bottom) * width;
            float *const channel = totals + (c - c_begin) * taps;
            for (uint k = 0; k < taps; k++) weights[k] = LOAD(W_T, w, c * taps + k);
            for (int left = 0; left < (int)wide; left += tile) {
                const int columns = min((int)tile, (int)wide - left);
                const size_t start = (plane * height + (size_t)top * STRIDE) * width;
                const size_t fit =
                    across > 1 || range_end < start + 16 ? 0 : (range_end - start - 16) / (STRIDE * width);
                const int whole = min(fit, (size_t)rows);
                float16 sums[SUMS];
                UNROLL_TAPS for (uint k = 0; k < SUMS; k++) sums[k] = 0;
                FILL_FRAME(frame, dy, plane * out_height * out_width, out_size, out_height, out_width,
                           top + (int)(pad / STRIDE) - margin_rows, left + (int)(pad / STRIDE) - margin_columns,
                           rows + margin_rows + 1, columns + margin_columns + 1, 1, pitch)
                int row = 0;
                for (; row + GROUPS <= whole; row += GROUPS) COMPUTE(GROUPS, GET_WHOLE, PUT_WHOLE)
#if GROUPS > 1
                for (; row < whole; row++) COMPUTE(1, GET_WHOLE, PUT_WHOLE)
#endif
                for (; row < rows; row++) COMPUTE(1, LOAD_PART, STORE_PART)
#if WEIGHT_GRADIENT
                float found[SUMS];
                UNROLL_TAPS for (uint k = 0; k < SUMS; k++) found[k] = sum16(sums[k]);
                for (uint k = 0; k < taps; k++) {
                    if (!isfinite(found[k])) // an inf or NaN may have met a zero of the frame
                        found[k] = exact_sum(x + plane * height * width, dy + plane * out_height * out_width,
                                             top * STRIDE, bottom, left * STRIDE, min((left + columns) * STRIDE, width),
                                             width, (int)(pad - k / KERNEL_W), (int)(pad - k % KERNEL_W), out_height,
                                             out_width);
                    channel[k] += found[k];
                }
#endif
            }
        }
    }
#if WEIGHT_GRADIENT
    for (uint k = 0; k < (c_end - c_begin) * taps; k++) dw[((size_t)part * channels + c_begin) * taps + k] = totals[k];
#endif
}
#endif

#ifdef INPUT_GRADIENT_ELEMENTS
__kernel void input_gradient_elements(__global const STORAGE(G_T) *restrict dy, __global const STORAGE(W_T) *restrict w,
                                      __global STORAGE(DX_T) *restrict dx, const ulong in_size, const uint span,
                                      const uint channels, const int height, const int width, const int out_height,
                                      const int out_width, const uint kernel_height, const uint kernel_width,
                                      const uint pad, const uint stride) {
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)in_size);
    for (; i < end; i++) {
        const size_t line = i / width, plane = line / height;
        const int bottom = (int)(line - plane * height) + (int)pad, right = (int)(i - line * width) + (int)pad;
        const uint c = plane % channels;
        float sum = 0;
        for (int kh = bottom % (int)stride; kh < (int)kernel_height && kh <= bottom; kh += stride) {
            const int oh = (bottom - kh) / (int)stride;
            if (oh >= out_height) continue;
            for (int kw = right % (int)stride; kw < (int)kernel_width && kw <= right; kw += stride) {
                const int ow = (right - kw) / (int)stride;
                if (ow >= out_width) continue;
                sum += LOAD(G_T, dy, (plane * out_height + oh) * out_width + ow) *
                       LOAD(W_T, w, ((size_t)c * kernel_height + kh) * kernel_width + kw);
            }
        }
        STORE(DX_T, sum, dx, i);
    }
}
#endif

#ifdef WEIGHT_GRADIENT_ELEMENTS
// A work-group sums one tap over the `images` images of a part: fp32, (parts, channels, taps).
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
weight_gradient_elements(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict dy,
                         __global float *restrict dw, const uint all_images, const uint images, const uint channels,
                         const int height, const int width, const uint out_height, const uint out_width,
                         const uint kernel_height, const uint kernel_width, const uint pad, const uint stride) {
    SCRATCH;
    const uint taps = kernel_height * kernel_width, tap = get_group_id(0) % taps;
    const uint c = get_group_id(0) / taps % channels, part = get_group_id(0) / taps / channels;
    const int down = (int)(tap / kernel_width) - (int)pad, right = (int)(tap % kernel_width) - (int)pad;
    float total = 0;
    for (uint n = part * images; n < min((part + 1) * images, all_images); n++) {
        const size_t plane = (size_t)n * channels + c;
        float sum = 0;
        for (uint i = get_local_id(0); i < out_height * out_width;) {
            const uint stop = min(i + WG * 1024, out_height * out_width);
            float block = 0; // by itself: rounding does not grow with the plane
            for (; i < stop; i += WG) {
                const uint oh = i / out_width;
                const int h = (int)(oh * stride) + down, v = (int)((i - oh * out_width) * stride) + right;
                if (h < 0 || h >= height || v < 0 || v >= width) continue;
                block += LOAD(X_T, x, (plane * height + h) * width + v) *
                         LOAD(G_T, dy, plane * out_height * out_width + i);
            }
            sum += block;
        }
        total += sum;
    }
    const float result = group_sum(total, scratch);
    if (get_local_id(0) == 0) dw[get_group_id(0)] = result;
}
#endif
