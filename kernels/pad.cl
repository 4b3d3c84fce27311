// pad.cl: a border of `pad` elements around every plane of an NCHW tensor, and its gradient.
//
//                    0 0 0 0 0                       e d d e f f e
//   REFLECT 0        0 a b c 0     REFLECT 1, pad 2  b a a b c c b      the border mirrors the plane, edge included
//                    0 d e f 0                       b a a b c c b
//                    0 0 0 0 0                       e d d e f f e ...
//
// Two plans. *_elements: a work-item takes `span` neighbouring elements (1 on a GPU). *_rows, for CPU devices: a
// work-item takes `each` rows, 16 elements at a time. Rows are written in order, so that what the last 16 of a row hold
// beyond it is overwritten by the next; only at the end of a work-item's rows is a store cut short.
//
//   X_T, Y_T, G_T, DX_T   storage types of input, result, gradient of the result, gradient of the input
//   REFLECT               1: mirrored border, 0: zeros

// Index in the plane of index i of the padded plane, less the border; -1: none.
static inline int source_of(int i, int extent) {
    if (i >= 0 && i < extent) return i;
    return !REFLECT ? -1 : i < 0 ? -i - 1 : 2 * extent - 1 - i;
}

// The rows that fall to this work-item, in planes of `extent`: from `first` on, which is row h of its plane.
#define OWN_ROWS(extent, h)                                                                        \
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)rows);   \
    size_t plane = first / (extent);                                                               \
    uint h = first - plane * (extent)

#ifdef X_T
__kernel ONE_WORK_ITEM void
pad_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong size,
         const ulong rows, const uint each, const uint height, const uint width, const uint pad) {
    const uint out_height = height + 2 * pad, out_width = width + 2 * pad;
    OWN_ROWS(out_height, oh);
    const size_t end = last * out_width;
    for (size_t row = first; row < last; row++) {
        const int ih = source_of((int)oh - (int)pad, height);
        const size_t from = (plane * height + ih) * width, to = row * out_width, right = to + pad + width;
        if (ih < 0) {
            for (uint k = 0; k < out_width; k += 16) STORE_PART(Y_T, (float16)(0), y, to + k, end);
        } else {
#if REFLECT
            for (uint k = 0; k < pad; k++) STORE(Y_T, LOAD(X_T, x, from + pad - 1 - k), y, to + k);
#else
            for (uint k = 0; k < pad; k += 16) STORE_PART(Y_T, (float16)(0), y, to + k, end);
#endif
            for (uint k = 0; k < width; k += 16)
                STORE_PART(Y_T, LOAD_PART(X_T, x, from + k, size, 0.0f), y, to + pad + k, end);
#if REFLECT
            for (uint k = 0; k < pad; k++) STORE(Y_T, LOAD(X_T, x, from + width - 1 - k), y, right + k);
#else
            for (uint k = 0; k < pad; k += 16) STORE_PART(Y_T, (float16)(0), y, right + k, end);
#endif
        }
        if (++oh == out_height) oh = 0, plane++;
    }
}

__kernel void pad_elements(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                           const ulong out_size, const uint span, const uint height, const uint width,
                           const uint pad) {
    const uint out_height = height + 2 * pad, out_width = width + 2 * pad;
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)out_size);
    for (; i < end; i++) {
        const size_t row = i / out_width, plane = row / out_height;
        const int ih = source_of((int)(row - plane * out_height) - (int)pad, height);
        const int iw = source_of((int)(i - row * out_width) - (int)pad, width);
        const bool has_source = ih >= 0 && iw >= 0;
        STORE(Y_T, has_source ? LOAD(X_T, x, (plane * height + ih) * width + iw) : 0.0f, y, i);
    }
}
#endif

#ifdef G_T
// The indices of the padded plane that hold index i of the plane: itself, its mirror image before and behind.
#define IMAGES(i, extent, found)                                                  \
    int found[3] = {(int)(i) + (int)pad, 0, 0};                                   \
    uint found##_count = 1;                                                       \
    if (REFLECT && (i) < pad) found[found##_count++] = (int)pad - 1 - (int)(i);   \
    if (REFLECT && (i) + pad >= (extent)) found[found##_count++] = 2 * (int)(extent) - 1 - (int)(i) + (int)pad;

static inline float gather(__global const STORAGE(G_T) *dy, size_t from, const int *rows, uint count, uint out_width,
                           const int *columns, uint column_count) {
    float sum = 0;
    for (uint r = 0; r < count; r++)
        for (uint c = 0; c < column_count; c++) {
            const float v = LOAD(G_T, dy, from + (size_t)rows[r] * out_width + columns[c]);
            sum = r + c == 0 ? v : sum + v; // a lone -0 stays
        }
    return sum;
}

__kernel void pad_elements_backward(__global const STORAGE(G_T) *restrict dy, __global STORAGE(DX_T) *restrict dx,
                                    const ulong in_size, const uint span, const uint height, const uint width,
                                    const uint pad) {
    const uint out_height = height + 2 * pad, out_width = width + 2 * pad;
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)in_size);
    for (; i < end; i++) {
        const size_t row = i / width, plane = row / height;
        const uint ih = row - plane * height, iw = i - row * width;
        IMAGES(ih, height, oh)
        IMAGES(iw, width, ow)
        STORE(DX_T, gather(dy, plane * out_height * out_width, oh, oh_count, out_width, ow, ow_count), dx, i);
    }
}

__kernel ONE_WORK_ITEM void
pad_rows_backward(__global const STORAGE(G_T) *restrict dy, __global STORAGE(DX_T) *restrict dx, const ulong size,
                  const ulong rows, const uint each, const uint height, const uint width, const uint pad) {
    const uint out_height = height + 2 * pad, out_width = width + 2 * pad;
    OWN_ROWS(height, ih);
    const size_t end = last * width;
    for (size_t row = first; row < last; row++) {
        const size_t from = plane * out_height * out_width, to = row * width;
        IMAGES(ih, height, oh)
        for (uint k = 0; k < width; k += 16) {
            float16 v = LOAD_PART(G_T, dy, from + (size_t)oh[0] * out_width + pad + k, size, 0.0f);
            for (uint r = 1; r < oh_count; r++)
                v += LOAD_PART(G_T, dy, from + (size_t)oh[r] * out_width + pad + k, size, 0.0f);
            STORE_PART(DX_T, v, dx, to + k, end);
        }
        // Columns with a mirror image, once more and whole.
        for (uint k = 0; REFLECT && k < 2 * pad && k < width; k++) {
            const uint iw = 2 * pad < width && k >= pad ? width - 2 * pad + k : k;
            IMAGES(iw, width, ow)
            STORE(DX_T, gather(dy, from, oh, oh_count, out_width, ow, ow_count), dx, to + iw);
        }
        if (++ih == height) ih = 0, plane++;
    }
}
#endif
