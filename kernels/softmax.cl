// softmax.cl: softmax over one axis of a contiguous tensor seen as (outer, n, inner), and its backward.
//
//   forward    y = exp(x - max x) / sum exp(x - max x)      three passes: maximum, sum, result; *_kept_rows goes
//                                                           through memory once and keeps a row's exponentials
//   backward   dx = y * (dy - sum dy * y)                   two passes: sum, result
//
//   inner == 1: *_rows                              inner > 1: *_columns
//
//         n ->                                              inner ->
//   outer |  a work-group takes `each` rows |           n  |-- width --|-- width --| ...
//         |  and goes through each row in   |              |  a work-item goes down each of its columns,
//         |  steps of 16 elements a work-item              |  16 columns at a time
//
// Sums over n are formed in blocks (LONG_SUM), so that rounding does not grow with the axis; rows of *_kept_rows are
// too short to need it.
//
// A row of nothing but -inf, or with +inf or NaN in it, becomes NaN, as in numpy.
//
//   X_T, G_T, Y_T, DX_T  storage types of input, incoming gradient, result and outgoing gradient
//   WG                   work-items of a work-group in *_rows: 1 on CPU devices, else a power of two
//   KEPT                 elements of the longest row that *_kept_rows (for CPU devices) takes, a multiple of 16
//   PIECES               of pieces.clh
//   ONE_COLUMN           1: *_columns have a column a work-item (on GPUs), 0: strips of `width`

#include "pieces.clh"

#ifdef SOFTMAX_KEPT_ROWS
#if KEPT % 16
#error "KEPT must be a multiple of 16"
#endif
__kernel ONE_WORK_ITEM void
softmax_kept_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong rows,
                  const ulong n, const uint each) {
    float kept[KEPT];
    const size_t whole = n / 16 * 16; // of a row, in vectors of 16
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *from = x + row * n;
        __global STORAGE(Y_T) *to = y + row * n;
        float16 most = -INFINITY, sums = 0;
        for (size_t i = 0; i < n; i += 16) {
            const float16 v = i < whole ? LOAD16(X_T, from, i) : LOAD_PART(X_T, from, i, n, -INFINITY);
            most = v > most ? v : most; // passes over NaNs: the sum will be one
            STORE_PRIVATE(float16, v, kept + i);
        }
        const float top = max16(most);
        for (size_t i = 0; i < n; i += 16) {
            PREFETCH(from + n + i); // what is computed here leaves memory idle
            PREFETCH_TO_WRITE(to + i);
            const float16 v = exp16(LOAD_PRIVATE(float16, kept + i) - top);
            sums += v;
            STORE_PRIVATE(float16, v, kept + i);
        }
        const float inverse = 1 / sum16(sums);
        for (size_t i = 0; i < whole; i += 16) STORE16(Y_T, LOAD_PRIVATE(float16, kept + i) * inverse, to, i);
        if (whole < n) STORE_PART(Y_T, LOAD_PRIVATE(float16, kept + whole) * inverse, to, whole, n);
    }
}
#endif

#ifdef SOFTMAX_ROWS
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
softmax_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong rows,
             const ulong n, const uint each) {
    SCRATCH;
    const size_t lane = get_local_id(0) * 16;
    FOR_EACH_OWN(row, each, rows) {
        const size_t begin = row * n + lane, end = (row + 1) * n;
        float16 most = -INFINITY;
        GROUP_TERMS sums = 0;
        for (size_t i = begin; i < end; i += WG * 16) most = fmax(most, LOAD_PART(X_T, x, i, end, -INFINITY));
        const float top = group_max(max16(most), scratch);
        size_t at = begin;
        // The lanes beyond the end hold -inf; in a row of -inf they would add NaNs, which it gets anyway.
        LONG_SUM(GROUP_TERMS, sums, at, end, WG * 16, TERMS(exp16(LOAD_PART(X_T, x, at, end, -INFINITY) - top)))
        const float inverse = 1 / group_sum(TERMS_SUM(sums), scratch);
        for (size_t i = begin; i < end; i += WG * 16)
            STORE_PART(Y_T, exp16(LOAD_PART(X_T, x, i, end, 0.0f) - top) * inverse, y, i, end);
    }
}
#endif

#ifdef SOFTMAX_ROWS_BACKWARD
static inline float16 product16(__global const STORAGE(Y_T) *y, __global const STORAGE(G_T) *dy, size_t i,
                                __global const STORAGE(DX_T) *next) {
    PREFETCH_TO_WRITE(next + i);
    return LOAD16(Y_T, y, i) * LOAD16(G_T, dy, i);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
softmax_rows_backward(__global const STORAGE(Y_T) *restrict y, __global const STORAGE(G_T) *restrict dy,
                      __global STORAGE(DX_T) *restrict dx, const ulong rows, const ulong n, const uint each) {
    SCRATCH;
    const size_t lane = get_local_id(0) * 16;
    FOR_EACH_OWN(row, each, rows) {
        const size_t begin = row * n + lane, end = (row + 1) * n;
        GROUP_TERMS sums = 0;
        size_t i = begin;
        const size_t whole = max(end, (size_t)15) - 15; // i < whole: i + 16 <= end
        LONG_SUM(GROUP_TERMS, sums, i, whole, WG * 16, TERMS(product16(y, dy, i, dx)))
        if (i < end) sums += TERMS(LOAD_PART(Y_T, y, i, end, 0.0f) * LOAD_PART(G_T, dy, i, end, 0.0f));
        const float dot_product = group_sum(TERMS_SUM(sums), scratch);
        for (i = begin; i + 16 <= end; i += WG * 16) {
            PREFETCH(y + n + i);
            PREFETCH(dy + n + i);
            STORE16(DX_T, LOAD16(Y_T, y, i) * (LOAD16(G_T, dy, i) - dot_product), dx, i);
        }
        if (i < end) {
            const float16 slope = LOAD_PART(G_T, dy, i, end, 0.0f) - dot_product;
            STORE_PART(DX_T, LOAD_PART(Y_T, y, i, end, 0.0f) * slope, dx, i, end);
        }
    }
}
#endif

#ifdef SOFTMAX_COLUMNS
__kernel void softmax_columns(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                              const ulong n, const ulong inner, const ulong width, const uint strips,
                              const ulong planes) {
    if (get_global_id(0) / strips >= planes) return;
    const size_t plane = get_global_id(0) / strips * n * inner;
    x += plane;
    y += plane;
    size_t i = (get_global_id(0) % strips) * width;
    const size_t last = min(i + width, (size_t)inner);
#if !ONE_COLUMN
    for (; i + 16 <= last; i += 16) {
        float16 top = -INFINITY, total = 0;
        for (size_t row = 0; row < n; row++) top = fmax(top, LOAD16(X_T, x, row * inner + i));
        size_t term = 0;
        LONG_SUM(float16, total, term, n, 1, exp16(LOAD16(X_T, x, term * inner + i) - top))
        const float16 inverse = 1.0f / total;
        for (size_t row = 0; row < n; row++)
            STORE16(Y_T, exp16(LOAD16(X_T, x, row * inner + i) - top) * inverse, y, row * inner + i);
    }
#endif
    for (; i < last; i++) {
        float top = -INFINITY, total = 0;
        for (size_t row = 0; row < n; row++) top = fmax(top, LOAD(X_T, x, row * inner + i));
        size_t term = 0;
        LONG_SUM(float, total, term, n, 1, exp(LOAD(X_T, x, term * inner + i) - top))
        for (size_t row = 0; row < n; row++)
            STORE(Y_T, exp(LOAD(X_T, x, row * inner + i) - top) / total, y, row * inner + i);
    }
}
#endif

#ifdef SOFTMAX_COLUMNS_BACKWARD
__kernel void softmax_columns_backward(__global const STORAGE(Y_T) *restrict y,
                                       __global const STORAGE(G_T) *restrict dy,
                                       __global STORAGE(DX_T) *restrict dx, const ulong n, const ulong inner,
                                       const ulong width, const uint strips, const ulong planes) {
    if (get_global_id(0) / strips >= planes) return;
    const size_t plane = get_global_id(0) / strips * n * inner;
    size_t i = (get_global_id(0) % strips) * width;
    const size_t last = min(i + width, (size_t)inner);
#if !ONE_COLUMN
    for (; i + 16 <= last; i += 16) {
        float16 sum = 0;
        size_t term = plane + i;
        LONG_SUM(float16, sum, term, plane + n * inner, inner, LOAD16(Y_T, y, term) * LOAD16(G_T, dy, term))
        for (size_t at = plane + i, row = 0; row < n; row++, at += inner)
            STORE16(DX_T, LOAD16(Y_T, y, at) * (LOAD16(G_T, dy, at) - sum), dx, at);
    }
#endif
    for (; i < last; i++) {
        float sum = 0;
        size_t term = plane + i;
        LONG_SUM(float, sum, term, plane + n * inner, inner, LOAD(Y_T, y, term) * LOAD(G_T, dy, term))
        for (size_t at = plane + i, row = 0; row < n; row++, at += inner)
            STORE(DX_T, LOAD(Y_T, y, at) * (LOAD(G_T, dy, at) - sum), dx, at);
    }
}
#endif
