// reduce.cl: sums over one axis of a contiguous tensor, and the gradient of a sum spread back over that axis.
//
// Every tensor is seen as (outer, n, inner): n is the axis that is summed. A sum over everything is one row.
//
//   inner == 1: sum_rows                            inner > 1: sum_columns
//
//            n ->                                            inner ->
//         |-- span --|-- span --|- ... -|                 |-- width --|-- width --| ...
//   outer | part 0   | part 1   |       |              n  |  . . .    |           |   span of rows: part 0
//         |  one work-group a piece     |                 |  . . .    |           |   span of rows: part 1
//
// Where rows or columns are too few to keep the device busy, each is cut into `parts` spans; their sums, laid out
// (outer, parts, inner) in fp32, are summed by a second launch of the same kernel.
//
// Rounding: the innermost sums run over blocks (BLOCK elements in 4 x 16 lanes; columns.clh), whose sums are then
// added. So a span of n elements of a row costs about n / BLOCK roundings, not n.
//
//   X_T, Y_T    storage types of input and output
//   WG          work-items of a work-group in sum_rows: 1 on CPU devices, else a power of two
//   PIECES      of pieces.clh
//   ONE_COLUMN  1: sum_columns has a column a work-item (on GPUs), 0, the default: strips of `width`

#include "pieces.clh"

#define BLOCK 1024 // elements summed in one go by sum_rows, a multiple of 64

#include "columns.clh"

#ifndef ONE_COLUMN
#define ONE_COLUMN 0
#endif

#ifdef SUM_ROWS
static inline float16 block_sum(__global const STORAGE(X_T) *x, size_t i) {
    float16 a = 0, b = 0, c = 0, d = 0;
    for (uint k = 0; k < BLOCK; k += 64) {
        a += LOAD16(X_T, x, i + k);
        b += LOAD16(X_T, x, i + k + 16);
        c += LOAD16(X_T, x, i + k + 32);
        d += LOAD16(X_T, x, i + k + 48);
    }
    return (a + b) + (c + d);
}

// y[row, part] = sum of the part's elements of the row / divisor; each work-group does `each` neighbouring pieces.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
sum_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong pieces,
         const ulong n, const ulong span, const uint parts, const uint each, const float divisor) {
    SCRATCH;
    const size_t first = (size_t)get_group_id(0) * each;
    const size_t last = min(first + each, (size_t)pieces);
    for (size_t piece = first; piece < last; piece++) {
        const size_t row = piece / parts;
        size_t i = row * n + (piece - row * parts) * span;
        const size_t end = min(i + span, (row + 1) * n);
        float16 total = 0;
#if WG == 1
        LONG_SUM(float16, total, i, max(end, (size_t)BLOCK - 1) - (BLOCK - 1), BLOCK, block_sum(x, i))
#endif
        float16 rest = 0;
        for (i += get_local_id(0) * 16; i < end; i += WG * 16) rest += LOAD_PART(X_T, x, i, end, 0.0f);
        const float sum = group_sum(sum16(total + rest), scratch);
        if (get_local_id(0) == 0) STORE(Y_T, sum / divisor, y, piece);
    }
}
#endif

#ifdef SUM_COLUMNS
// y[outer, part, column] = sum over the part's rows / divisor; a work-item sums a strip of `width` columns.
__kernel void sum_columns(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                          const ulong n, const ulong inner, const ulong span, const ulong width,
                          const ulong pieces, const uint strips, const uint parts, const float divisor) {
    const size_t piece = get_global_id(0) / strips, part = piece % parts;
    if (piece >= pieces) return;
    const size_t begin = part * span, end = min(begin + span, (size_t)n);
    x += piece / parts * n * inner;
    y += piece * inner;
    size_t i = (get_global_id(0) % strips) * width;
    const size_t last = min(i + width, (size_t)inner);
#if !ONE_COLUMN
    for (; i + 64 <= last; i += 64) {
        float16 sums[4];
        sum_64_columns(x, begin * inner + i, end - begin, inner, sums);
        for (uint k = 0; k < 4; k++) STORE16(Y_T, sums[k] / divisor, y, i + 16 * k);
    }
    for (; i + 16 <= last; i += 16)
        STORE16(Y_T, sum_16_columns(x, begin * inner + i, end - begin, inner) / divisor, y, i);
#endif
    for (; i < last; i++) STORE(Y_T, sum_column(x, begin * inner + i, end - begin, inner) / divisor, y, i);
}
#endif

#ifdef EXPAND_ROWS
// y[row, 0 .. n-1] = x[row] / divisor: a gradient spread over the last axis. A work-item writes `span` elements.
__kernel void expand_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                          const ulong size, const ulong n, const ulong span, const float divisor) {
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)size);
    while (i < end) {
        const size_t row = i / n, stop = min((row + 1) * n, end);
        const float value = LOAD(X_T, x, row) / divisor;
        for (; i + 16 <= stop; i += 16) STORE16(Y_T, (float16)value, y, i);
        for (; i < stop; i++) STORE(Y_T, value, y, i);
    }
}
#endif

#ifdef EXPAND_COLUMNS
// y[outer, 0 .. n-1, inner] = x[outer, inner] / divisor: a gradient spread over an axis that is not the last.
__kernel void expand_columns(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                             const ulong size, const ulong n, const ulong inner, const ulong span,
                             const float divisor) {
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)size);
    while (i < end) {
        const size_t row = i / inner, stop = min((row + 1) * inner, end);
        size_t from = row / n * inner + (i - row * inner);
        for (; i + 16 <= stop; i += 16, from += 16) STORE16(Y_T, LOAD16(X_T, x, from) / divisor, y, i);
        for (; i < stop; i++, from++) STORE(Y_T, LOAD(X_T, x, from) / divisor, y, i);
    }
}
#endif
