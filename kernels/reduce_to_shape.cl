// reduce_to_shape.cl: sums one axis of a contiguous tensor, in float, in a fixed order.
//
// The host groups the dimensions around the summed axis: x is [outer][rows][inner] and the rows are added up.
// They may be cut into chunks, so that a long axis keeps every core busy; y is then [outer][chunks][inner] and a
// second launch adds the chunks.
//
//   sum_rows (inner > 1)      columns                   sum_row (inner == 1)
//               |-- PANEL --|-- PANEL --|- rest -|          rows of x lie in memory one after the other
//          row  0   work-       work-      work-          |-- chunk 0 --|-- chunk 1 --| ... of outer 0
//          ...      item 0      item 1     item 2         |-- chunk 0 --|-- chunk 1 --| ... of outer 1
//      per_chunk  ------------------------------            one task each
//          ...      item 3      item 4     item 5
//
// A task is one panel of one chunk, or one chunk; a work-item does tasks_per_item neighbouring tasks, because on
// a CPU device a work-item that adds only a few numbers costs more in scheduling than in adding.
//
// sum_row may also add up an axis outside: x is [parts][outer][rows] then, channels of images say, and a task adds its
// rows of all parts.
//
//   X_T, Y_T    storage types: f32, f16 or bf16
//   rows, inner extents of x; per_chunk rows a chunk; chunks chunks an outer index; tasks how many in all;
//               part_stride elements from part to part

#define PANEL 64  // columns a task: long enough a run of memory in every row, four accumulators of 16

#include "columns.clh"

#ifdef SUM_ROWS
__kernel void sum_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong rows,
                       const ulong inner, const ulong per_chunk, const ulong chunks, const ulong tasks,
                       const ulong tasks_per_item) {
    const size_t panels = (inner + PANEL - 1) / PANEL;
    size_t task = (size_t)get_global_id(0) * tasks_per_item;
    const size_t last = min(task + tasks_per_item, (size_t)tasks);
    for (; task < last; task++) {
        const size_t slice = task / panels;  // chunk slice % chunks of outer index slice / chunks
        const size_t first_row = (slice % chunks) * per_chunk;
        const size_t count = min((size_t)per_chunk, (size_t)rows - first_row);
        const size_t from = (slice / chunks * rows + first_row) * inner;
        const size_t to = slice * inner;
        size_t column = (task % panels) * PANEL;
        const size_t end = min(column + PANEL, (size_t)inner);
        if (column + PANEL == end) {
            float16 sums[4];
            sum_64_columns(x, from + column, count, inner, sums);
            for (uint k = 0; k < 4; k++) STORE16(Y_T, sums[k], y, to + column + 16 * k);
            continue;
        }
        for (; column + 16 <= end; column += 16)
            STORE16(Y_T, sum_16_columns(x, from + column, count, inner), y, to + column);
        for (; column < end; column++) STORE(Y_T, sum_column(x, from + column, count, inner), y, to + column);
    }
}
#endif

#ifdef SUM_ROW
__kernel void sum_row(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong rows,
                      const ulong per_chunk, const ulong chunks, const ulong tasks, const ulong tasks_per_item,
                      const ulong parts, const ulong part_stride) {
    size_t task = (size_t)get_global_id(0) * tasks_per_item;
    const size_t last = min(task + tasks_per_item, (size_t)tasks);
    for (; task < last; task++) {
        const size_t first = (task % chunks) * per_chunk;
        const size_t count = min((size_t)per_chunk, (size_t)rows - first);
        const size_t lines = count / 64;
        size_t from = task / chunks * rows + first;
        float16 total = 0.0f;
        float total_rest = 0.0f;
        for (size_t part = 0; part < parts;) { // in the levels of LONG_SUM
            const size_t stop = min(part + RUN_TERMS, (size_t)parts);
            float16 block = 0.0f;
            float block_rest = 0.0f;
            for (; part < stop; part++, from += part_stride) {
                float16 sums[4];
                sum_64_columns(x, from, lines, 64, sums); // the row as lines of 64
                size_t i = from + lines * 64;
                for (; i + 16 <= from + count; i += 16) sums[0] += LOAD16(X_T, x, i);
                float rest = 0.0f;
                for (; i < from + count; i++) rest += LOAD(X_T, x, i);
                block += (sums[0] + sums[1]) + (sums[2] + sums[3]);
                block_rest += rest;
            }
            total += block;
            total_rest += block_rest;
        }
        STORE(Y_T, sum16(total) + total_rest, y, task);
    }
}
#endif
