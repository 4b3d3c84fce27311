// pool_elements.cl: max and average pooling of NCHW tensors without padding, and their gradients, element by element.
//
//          one plane (n, c) of x, width ->                          y
//   oh * stride  |  . [a b] .  .  |   a window: kernel_size x       | . w |   window (oh, ow): its largest element,
//                |  . [c d] .  .  |   kernel_size elements          | . . |   or the mean of all
//                     ow * stride
//
// A work-item takes `span` neighbouring elements of what is written (1 on a GPU). Right for every kernel size and
// stride, on every device; CPU devices have faster kernels for most, in pool_rows.cl and pool_2x2.cl.
//
//   X_T, Y_T, G_T, DX_T   storage types of input, result, gradient of the result, gradient of the input
//   MAX                   1: maximum, 0: average
//   INDEX                 type of an element's number: uint, which GPUs divide fast, or ulong where there are too many

#ifdef POOL_ELEMENTS
// A large window is summed in blocks of its rows, and those in blocks, so that rounding does not grow with it.
static inline float sum_of_row(__global const STORAGE(X_T) *x, INDEX begin, uint count) {
    float sum = 0;
    uint k = 0;
    LONG_SUM(float, sum, k, count, 1, LOAD(X_T, x, begin + k))
    return sum;
}

__kernel void pool_elements(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                            const INDEX out_size, const uint span, const uint height, const uint width,
                            const uint out_height, const uint out_width, const uint kernel_size, const uint stride,
                            const float scale) {
    INDEX i = get_global_id(0) * span;
    const INDEX end = min(i + span, out_size);
    for (; i < end; i++) {
        const INDEX line = i / out_width, plane = line / out_height;
        const INDEX oh = line - plane * out_height, ow = i - line * out_width;
        INDEX at = (plane * height + oh * stride) * width + ow * stride;
#if MAX
        float v = LOAD(X_T, x, at);
        for (uint kh = 0; kh < kernel_size; kh++, at += width) {
            for (uint kw = 0; kw < kernel_size; kw++) {
                const float u = LOAD(X_T, x, at + kw);
                v = u > v || isnan(u) ? u : v;
            }
        }
        STORE(Y_T, v, y, i);
#else
        float sum = 0;
        uint row = 0;
        LONG_SUM(float, sum, row, kernel_size, 1, sum_of_row(x, at + (INDEX)row * width, kernel_size))
        STORE(Y_T, sum * scale, y, i);
#endif
    }
}
#endif

#ifdef MAX_POOL_ARGMAX
// Where in its plane each window has its (first) maximum.
__kernel void max_pool_argmax(__global const STORAGE(X_T) *restrict x, __global int *restrict chosen,
                              const INDEX out_size, const uint span, const uint height, const uint width,
                              const uint out_height, const uint out_width, const uint kernel_size,
                              const uint stride) {
    INDEX i = get_global_id(0) * span;
    const INDEX end = min(i + span, out_size);
    for (; i < end; i++) {
        const INDEX line = i / out_width, plane = line / out_height;
        const uint oh = line - plane * out_height, ow = i - line * out_width;
        const INDEX from = plane * height * width;
        uint at = oh * stride * width + ow * stride, best = at;
        float v = LOAD(X_T, x, from + at);
        for (uint kh = 0; kh < kernel_size; kh++, at += width) {
            for (uint kw = 0; kw < kernel_size; kw++) {
                const float u = LOAD(X_T, x, from + at + kw);
                if (u > v || (isnan(u) && !isnan(v))) v = u, best = at + kw;
            }
        }
        chosen[i] = best;
    }
}
#endif

#ifdef POOL_ELEMENTS_BACKWARD
// Each input gathers from the windows that cover it: all of them (average), or those that chose it (maximum).
__kernel void pool_elements_backward(__global const STORAGE(G_T) *restrict dy, __global const int *restrict chosen,
                                     __global STORAGE(DX_T) *restrict dx, const INDEX in_size, const uint span,
                                     const uint height, const uint width, const uint out_height,
                                     const uint out_width, const uint kernel_size, const uint stride,
                                     const float scale) {
    INDEX i = get_global_id(0) * span;
    const INDEX end = min(i + span, in_size);
    for (; i < end; i++) {
        const INDEX line = i / width, plane = line / height;
        const uint ih = line - plane * height, iw = i - line * width;
        const uint oh_begin = ih < kernel_size ? 0 : (ih - kernel_size) / stride + 1;
        const uint ow_begin = iw < kernel_size ? 0 : (iw - kernel_size) / stride + 1;
        const uint oh_end = min(ih / stride + 1, out_height), ow_end = min(iw / stride + 1, out_width);
        float v = 0;
        for (uint oh = oh_begin; oh < oh_end; oh++) {
            float line = 0; // in two levels, as windows may be many
            for (uint ow = ow_begin; ow < ow_end; ow++) {
                const INDEX window = (plane * out_height + oh) * out_width + ow;
#if MAX
                if (chosen[window] == (int)(ih * width + iw))
#endif
                    line += LOAD(G_T, dy, window);
            }
            v += line;
        }
        STORE(DX_T, MAX ? v : v * scale, dx, i);
    }
}
#endif
