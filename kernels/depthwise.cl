// depthwise.cl: depthwise convolution of NCHW tensors, one kernel_height x kernel_width filter a channel, and its
// gradients by input, weight and bias.
//
//   y[n, c, oh, ow] = bias[c] + sum over kh, kw of w[c, kh, kw] * x[n, c, oh * s + kh - pad, ow * s + kw - pad]
//
// for stride s, with zeros where x has no such element. Two plans.
//
// *_elements: a work-item computes `span` neighbouring elements (1 on a GPU); a work-group sums one tap's gradient.
// Right for every stride and filter.
//
// *_tiles, for CPU devices: a work-item takes `each` tiles, a tile being `band` rows by `tile` columns of a plane. What
// the tile reads is widened to float and framed with zeros once, in private memory, and split by STRIDE into phases:
//
//   0 0 0 0 0 0 0          phase 0     phase 1
//   0 a b c d e 0         0 0 0 0     0 0 0 .       element q of phase f is column STRIDE * q + f of the frame:
//   0 f g h i j 0  --->   0 b d 0     a c e .       tap kw of 16 neighbouring outputs lies side by side from
//   . . .                 0 g i 0     f h j .       element kw / STRIDE of phase kw % STRIDE on
//
// ROWS rows are computed at a time, so that neighbouring rows share their loads, and columns from right to left: what
// the last 16 of a row hold beyond it is then overwritten by the next row. Only at the end of a work-item's elements is
// a store cut short.
//
//   X_T, W_T, B_T, Y_T, G_T, DX_T   storage types of input, weight, bias, result, gradients of result and input
//   BIAS            1: there is a bias
//   STRIDE          1 or 2 (*_tiles)
//   SHIFT           pad % STRIDE (input_gradient_tiles)
//   KERNEL          side of the filter, for the common ones; without it the arguments kernel_height, kernel_width
//   WG              work-items of a work-group in weight_gradient_elements: 1 on CPU devices, else a power of two

#ifdef KERNEL
#define KERNEL_H KERNEL
#define KERNEL_W KERNEL
#define UNROLL_TAPS _Pragma("unroll")
#else
#define UNROLL_TAPS
#define KERNEL_H kernel_height
#define KERNEL_W kernel_width
#endif

#define FRAME 8192 // floats of a frame
#define ROWS 4     // rows computed at a time
#define TAPS 64    // taps of the largest filter whose gradient fits into private memory
#define BLOCK 16   // channels of a work-item, at most, in weight_gradient_tiles

#if defined(FORWARD_TILES) || defined(INPUT_GRADIENT_TILES) || defined(WEIGHT_GRADIENT_TILES)
#define PUT_WHOLE(T, v, p, i, end) STORE16(T, v, p, i)
#define GET_WHOLE(T, p, i, end, fill) LOAD16(T, p, i)

// The frame of a plane p of `height` x `width` elements: `rows` rows from row `top` on, `columns` columns from column
// `left` on (they may lie outside), in phases of `pitch` elements. Stores reach up to 31 elements beyond a phase.
// The last planes of the tensor, beyond which a load of 16 could reach, have a function of their own.
#define DEFINE_FRAME(NAME, T, GET)                                                                                     \
    inline void NAME(float *frame, __global const STORAGE(T) *p, size_t plane, size_t size, int height, int width,     \
                     int top, int left, int rows, int columns, int stride, int pitch) {                                \
        const int skip = left < 0 ? (-left + stride - 1) / stride : 0; /* elements of phase 0 left of the plane */     \
        const int begin = left + skip * stride, reach = min(width, left + columns);                                    \
        for (int row = 0; row < rows; row++, frame += stride * pitch) {                                                \
            const int h = top + row;                                                                                   \
            if (h < 0 || h >= height) {                                                                                \
                for (int k = 0; k < stride * pitch; k += 16) STORE_PRIVATE(float16, (float16)(0), frame + k);          \
                continue;                                                                                              \
            }                                                                                                          \
            const size_t from = plane + (size_t)h * width;                                                             \
            for (int f = 0; f < stride; f++)                                                                           \
                for (int k = 0; k < skip; k += 16) STORE_PRIVATE(float16, (float16)(0), frame + f * pitch + k);        \
            if (stride == 1) {                                                                                         \
                for (int w = begin, k = skip; w < reach; w += 16, k += 16)                                             \
                    STORE_PRIVATE(float16, GET(T, p, from + w, size, 0.0f), frame + k);                                \
            } else {                                                                                                   \
                if (begin == 1 && skip > 0) /* column 0, of phase 1; what follows it is overwritten */                 \
                    STORE_PRIVATE(float16, GET(T, p, from, size, 0.0f), frame + pitch + skip - 1);                     \
                for (int w = begin, k = skip; w < reach; w += 32, k += 16) {                                           \
                    const float16 a = GET(T, p, from + w, size, 0.0f), b = GET(T, p, from + w + 16, size, 0.0f);       \
                    STORE_PRIVATE(float16, ((float16)(a.even, b.even)), frame + k);                                    \
                    STORE_PRIVATE(float16, ((float16)(a.odd, b.odd)), frame + pitch + k);                              \
                }                                                                                                      \
            }                                                                                                          \
            for (int f = 0; f < stride; f++) {                                                                         \
                const int end = (columns - f + stride - 1) / stride;                                                   \
                for (int k = max((width - left - f + stride - 1) / stride, 0); k < end; k += 16)                       \
                    STORE_PRIVATE(float16, (float16)(0), frame + f * pitch + k);                                       \
            }                                                                                                          \
        }                                                                                                              \
    }
#define FILL_FRAME(frame, p, plane, size, height, width, ...)                                                          \
    if ((plane) + (size_t)(height) * (width) + 32 <= (size)) {                                                         \
        fill_whole(frame, p, plane, size, height, width, __VA_ARGS__);                                                 \
    } else {                                                                                                           \
        fill_part(frame, p, plane, size, height, width, __VA_ARGS__);                                                  \
    }
#endif

#if defined(FORWARD_TILES) || defined(WEIGHT_GRADIENT_TILES)
DEFINE_FRAME(fill_whole, X_T, GET_WHOLE)
DEFINE_FRAME(fill_part, X_T, LOAD_PART)
// Tap (kh, kw) of 16 outputs `r` rows below `at`, the frame's element for the first tap of the first row.
#define FIRST (frame + (size_t)row * STRIDE * STRIDE * step + column)
#define TAP(r, kh, kw) \
    LOAD_PRIVATE(float16, at + (((r) * STRIDE + (kh)) * STRIDE + (kw) % STRIDE) * step + (kw) / STRIDE)
#endif

// ------------------------------------------------------------------------------------------------- forward
#ifdef FORWARD_TILES
// ROWS_NOW (a constant) rows of outputs from row `row` of the frame on; PUT stores 16 elements, or what is left of them
#define COMPUTE(ROWS_NOW, PUT)                                                                                         \
    for (int column = (columns - 1) / 16 * 16; column >= 0; column -= 16) {                                            \
        const float *at = FIRST;                                                                                       \
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
            PUT(Y_T, sums[r], y, to + column, across == 1 ? range_end : to + columns);                                 \
        }                                                                                                              \
    }

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
forward_tiles(__global const STORAGE(X_T) *restrict x, __global const STORAGE(W_T) *restrict w,
              __global const STORAGE(B_T) *restrict bias, __global STORAGE(Y_T) *restrict y, const ulong size,
              const ulong tiles, const uint each, const uint channels, const int height, const int width,
              const uint out_height, const uint out_width, const uint kernel_height, const uint kernel_width,
              const uint pad, const uint band, const uint tile, const int pitch) {
    float frame[FRAME], weights[TAPS];
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
#if BIAS
        const float offset = LOAD(B_T, bias, c);
#else
        const float offset = 0;
#endif
        FILL_FRAME(frame, x, plane * height * width, size, height, width, (int)(oh * STRIDE) - (int)pad,
                   (int)(ow * STRIDE) - (int)pad, (rows - 1) * STRIDE + KERNEL_H, (columns - 1) * STRIDE + KERNEL_W,
                   STRIDE, pitch)
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

// ------------------------------------------------------------------------------------ gradient by the input
// Element (ih, iw) of x meets output (oh, ow) at tap (ih + pad - oh * STRIDE, iw + pad - ow * STRIDE). So row
// STRIDE * u + a has taps (a + pad) % STRIDE + STRIDE * t, at output rows u + (a + pad) / STRIDE - t; columns likewise.
#ifdef INPUT_GRADIENT_TILES
DEFINE_FRAME(fill_whole, G_T, GET_WHOLE)
DEFINE_FRAME(fill_part, G_T, LOAD_PART)
#if STRIDE == 1
#define GROUPS ROWS // groups of STRIDE rows computed at a time
#else
#define GROUPS 1
#endif
#define CARRY(a) (((a) + SHIFT) / STRIDE)
#define FIRST_TAP(a) (((a) + SHIFT) % STRIDE)

#define COMPUTE(GROUPS_NOW, PUT)                                                                                       \
    for (int column = (columns - 1) / 16 * 16; column >= 0; column -= 16) {                                            \
        const float *at = frame + (row + margin_rows) * step + column + margin_columns;                                \
        float16 sums[GROUPS_NOW * STRIDE][STRIDE];                                                                     \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW * STRIDE; r++)                                                \
            _Pragma("unroll") for (int b = 0; b < STRIDE; b++) sums[r][b] = 0;                                         \
        _Pragma("unroll") for (int a = 0; a < STRIDE; a++)                                                             \
            _Pragma("unroll") for (int b = 0; b < STRIDE; b++)                                                         \
                UNROLL_TAPS for (int kh = FIRST_TAP(a), t = 0; kh < (int)KERNEL_H; kh += STRIDE, t++)                  \
                    UNROLL_TAPS for (int kw = FIRST_TAP(b), s = 0; kw < (int)KERNEL_W; kw += STRIDE, s++) {            \
                        const float weight = weights[kh * KERNEL_W + kw];                                              \
                        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW; r++)                                         \
                            sums[r * STRIDE + a][b] += weight * LOAD_PRIVATE(float16,                                  \
                                at + (r + CARRY(a) - t) * step + CARRY(b) - s);                                        \
                    }                                                                                                  \
        _Pragma("unroll") for (int r = 0; r < GROUPS_NOW * STRIDE; r++) {                                              \
            const int ih = (top + row) * STRIDE + r, iw = (left + column) * STRIDE;                                    \
            if (ih >= height) break;                                                                                   \
            const size_t start = (plane * height + ih) * width, to = start + iw;                                       \
            const size_t end = across == 1 ? range_end : start + min((left + columns) * STRIDE, width);                \
            STORE_GROUPS(sums[r], PUT)                                                                                 \
        }                                                                                                              \
    }
#if STRIDE == 1
#define STORE_GROUPS(sum, PUT) PUT(DX_T, sum[0], dx, to, end);
#else
#define STORE_GROUPS(sum, PUT)                                                                                         \
    float16 v;                                                                                                         \
    v.even = sum[0].lo, v.odd = sum[1].lo;                                                                             \
    PUT(DX_T, v, dx, to, end);                                                                                         \
    v.even = sum[0].hi, v.odd = sum[1].hi;                                                                             \
    if (iw + 16 < width) PUT(DX_T, v, dx, to + 16, end);
#endif

// `band` and `tile` count groups of STRIDE rows and columns of dx.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
input_gradient_tiles(__global const STORAGE(G_T) *restrict dy, __global const STORAGE(W_T) *restrict w,
                     __global STORAGE(DX_T) *restrict dx, const ulong size, const ulong tiles, const uint each,
                     const uint channels, const int height, const int width, const int out_height, const int out_width,
                     const uint kernel_height, const uint kernel_width, const uint pad, const uint band,
                     const uint tile, const int pitch) {
    float frame[FRAME], weights[TAPS];
    const long step = pitch;
    const uint down = (height + STRIDE - 1) / STRIDE, right = (width + STRIDE - 1) / STRIDE; // groups of a plane
    const uint bands = (down + band - 1) / band, across = (right + tile - 1) / tile;
    const int margin_rows = (KERNEL_H - 1) / STRIDE, margin_columns = (KERNEL_W - 1) / STRIDE;
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)tiles);
    const size_t last_plane = last / across / bands, last_band = last / across - last_plane * bands;
    const size_t range_end = (last_plane * height + last_band * band * STRIDE) * width; // if tiles are whole rows
    for (size_t unit = first; unit < last; unit++) {
        const size_t plane = unit / across / bands;
        const uint c = plane % channels;
        const int top = (unit / across - plane * bands) * band, left = unit % across * tile;
        const int rows = min(band, down - top), columns = min(tile, right - left);
        for (uint k = 0; k < KERNEL_H * KERNEL_W; k++) weights[k] = LOAD(W_T, w, c * KERNEL_H * KERNEL_W + k);
        FILL_FRAME(frame, dy, plane * out_height * out_width, size, out_height, out_width,
                   top + (int)(pad / STRIDE) - margin_rows, left + (int)(pad / STRIDE) - margin_columns,
                   rows + margin_rows + 1, columns + margin_columns + 1, 1, pitch)
        int row = 0;
        const size_t start = (plane * height + (size_t)top * STRIDE) * width;
        const size_t fit = across > 1 || range_end < start + 16 ? 0 : (range_end - start - 16) / (STRIDE * width);
        const int whole = min(fit, (size_t)rows);
        for (; row + GROUPS <= whole; row += GROUPS) COMPUTE(GROUPS, PUT_WHOLE)
#if GROUPS > 1
        for (; row < whole; row++) COMPUTE(1, PUT_WHOLE)
#endif
        for (; row < rows; row++) COMPUTE(1, STORE_PART)
    }
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

// -------------------------------------------------------------------------- gradients by weight and bias
// Partial sums in fp32, (parts, channels, taps) and (parts, channels); a part is `images` images. A channel's images
// are summed one by one, so that no sum is longer than a plane.
#ifdef WEIGHT_GRADIENT_TILES
#define COMPUTE(ROWS_NOW, GET)                                                                                         \
    int column = 0;                                                                                                    \
    for (; column + 16 <= columns; column += 16) SUM_PRODUCTS(ROWS_NOW, GET, ALL)                                      \
    if (column < columns) SUM_PRODUCTS(ROWS_NOW, GET, INSIDE)

// What lies beyond a row's last column has no part in any tap: INSIDE puts zeros in place of such gradients, and of what
// they meet in the frame, be it another tap's element or memory that nobody wrote. (A zero alone would not do: 0 * inf.)
#define ALL(v) (v)
#define INSIDE(v) select((float16)(0), v, lane < (int16)(columns - column))
#define SUM_PRODUCTS(ROWS_NOW, GET, MASK)                                                                              \
    {                                                                                                                  \
        const float *at = FIRST;                                                                                       \
        float16 grads[ROWS_NOW];                                                                                       \
        _Pragma("unroll") for (int r = 0; r < ROWS_NOW; r++) {                                                         \
            const size_t from = start + (size_t)(row + r) * out_width + column;                                        \
            grads[r] = MASK(GET(G_T, dy, from, out_size, 0.0f));                                                       \
            bias_sum += grads[r];                                                                                      \
        }                                                                                                              \
        UNROLL_TAPS for (int kh = 0; kh < (int)KERNEL_H; kh++)                                                         \
            UNROLL_TAPS for (int kw = 0; kw < (int)KERNEL_W; kw++)                                                     \
                _Pragma("unroll") for (int r = 0; r < ROWS_NOW; r++)                                                   \
                    sums[kh * KERNEL_W + kw] += grads[r] * MASK(TAP(r, kh, kw));                                       \
    }

#ifdef KERNEL
#define SUMS (KERNEL * KERNEL)
#else
#define SUMS TAPS
#endif

// A work-item takes `block` neighbouring channels, whose planes lie side by side in memory.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
weight_gradient_tiles(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict dy,
                      __global float *restrict dw, __global float *restrict db, const ulong size,
                      const ulong out_size, const uint all_images, const uint images, const uint block,
                      const uint channels, const int height, const int width, const uint out_height,
                      const uint out_width, const uint kernel_height, const uint kernel_width, const uint pad,
                      const uint band, const uint tile, const int pitch) {
    float frame[FRAME], totals[BLOCK * TAPS], bias_totals[BLOCK];
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const long step = pitch;
    const uint blocks = (channels + block - 1) / block, part = get_group_id(0) / blocks;
    const uint c_begin = get_group_id(0) % blocks * block, c_end = min(c_begin + block, channels);
    const uint taps = KERNEL_H * KERNEL_W;
    for (uint k = 0; k < block * taps; k++) totals[k] = 0;
    for (uint k = 0; k < block; k++) bias_totals[k] = 0;
    for (uint n = part * images; n < min((part + 1) * images, all_images); n++) {
        for (uint c = c_begin; c < c_end; c++) {
            const size_t plane = (size_t)n * channels + c;
            float16 sums[SUMS], bias_sum = 0;
            UNROLL_TAPS for (uint k = 0; k < SUMS; k++) sums[k] = 0;
            for (uint oh = 0; oh < out_height; oh += band) {
                for (uint ow = 0; ow < out_width; ow += tile) {
                    const int rows = min(band, out_height - oh), columns = min(tile, out_width - ow);
                    const size_t start = (plane * out_height + oh) * out_width + ow;
                    FILL_FRAME(frame, x, plane * height * width, size, height, width, (int)(oh * STRIDE) - (int)pad,
                               (int)(ow * STRIDE) - (int)pad, (rows - 1) * STRIDE + KERNEL_H,
                               (columns - 1) * STRIDE + KERNEL_W, STRIDE, pitch)
                    int row = 0;
                    const size_t fit = out_size < start + 16 ? 0 : (out_size - start - 16) / out_width;
                    const int whole = min(fit, (size_t)rows);
                    for (; row + ROWS <= whole; row += ROWS) { COMPUTE(ROWS, GET_WHOLE) }
                    for (; row < whole; row++) { COMPUTE(1, GET_WHOLE) }
                    for (; row < rows; row++) { COMPUTE(1, LOAD_PART) }
                }
            }
            float *channel = totals + (c - c_begin) * taps;
            UNROLL_TAPS for (uint k = 0; k < SUMS; k++)
                if (k < taps) channel[k] += sum16(sums[k]);
            bias_totals[c - c_begin] += sum16(bias_sum);
        }
    }
    for (uint c = c_begin; c < c_end; c++) {
        const size_t to = (size_t)part * channels + c;
        for (uint k = 0; k < taps; k++) dw[to * taps + k] = totals[(c - c_begin) * taps + k];
        db[to] = bias_totals[c - c_begin];
    }
}
#endif

#ifdef WEIGHT_GRADIENT_ELEMENTS
// A work-group sums one tap over a part's images.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
weight_gradient_elements(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict dy,
                         __global float *restrict dw, const uint all_images, const uint images, const uint channels,
                         const int height, const int width, const uint out_height, const uint out_width,
                         const uint kernel_height, const uint kernel_width, const uint pad, const uint stride) {
#if WG > 1
    __local float scratch[WG];
#endif
    const uint taps = kernel_height * kernel_width, tap = get_group_id(0) % taps;
    const uint c = get_group_id(0) / taps % channels, part = get_group_id(0) / taps / channels;
    const int down = (int)(tap / kernel_width) - (int)pad, right = (int)(tap % kernel_width) - (int)pad;
    float total = 0;
    for (uint n = part * images; n < min((part + 1) * images, all_images); n++) {
        const size_t plane = (size_t)n * channels + c;
        float sum = 0;
        for (uint i = get_local_id(0); i < out_height * out_width; i += WG) {
            const uint oh = i / out_width;
            const int h = (int)(oh * stride) + down, v = (int)((i - oh * out_width) * stride) + right;
            if (h < 0 || h >= height || v < 0 || v >= width) continue;
            sum += LOAD(X_T, x, (plane * height + h) * width + v) *
                   LOAD(G_T, dy, plane * out_height * out_width + i);
        }
        total += sum;
    }
    const float result = group_sum(total, scratch);
    if (get_local_id(0) == 0) dw[get_group_id(0)] = result;
}
#endif
