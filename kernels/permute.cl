// permute.cl: y = x with its axes in another order. Words are moved, never read as numbers.
//
// Axes that stay neighbours are merged beforehand (clamp/ops/shape.py). What is left has one of two forms; the axes
// not drawn are the batch: up to RANK of them, given as extents and strides in x and y.
//
// 1. The last axis stays last: move_rows copies runs of `inner` words.
//
//        x  |-- run --|   |-- run --|   |-- run --|      from_step words from one run to the next
//        y  |-- run --|-- run --|-- run --|              to_step
//
//    A work-item copies `row_span` runs, or its `column_span` words of them (on a GPU, one word).
//
// 2. The last axis of x, a, goes elsewhere, and another, b, becomes last: batches of transposed tiles.
//
//            a ->                       b ->
//        b  | 0 1 2 |               a  | 0 3 |           x: word (b, a) at b * from_step + a
//           | 3 4 5 |     becomes      | 1 4 |           y: word (a, b) at a * to_step + b
//                                      | 2 5 |
//
//    CPU devices (transpose): a work-item goes along b in tiles of 16 x 16, each transposed in 16 vectors.
//    GPUs (transpose_local): a work-group moves a tile of 32 x 32 through local memory.
//
// Work-items (or work-groups) are numbered in one dimension, because GPUs limit the others: `across` of them lie
// along the first axis drawn, `down` along the second, and then comes the next batch.
//
//   WORD  type of an element's bits: ushort or uint
//   RANK  batch axes, 0 to 5

#if RANK > 5
#error "RANK must be 0 to 5"
#endif
#define VECTOR CAT(WORD, 16)

// Where a batch begins in x and y: `batch` written in the mixed radix of the extents, the last running fastest.
#define BATCH_ARGUMENTS                                                                                    \
    const uint e0, const uint e1, const uint e2, const uint e3, const uint e4,                             \
    const ulong from0, const ulong from1, const ulong from2, const ulong from3, const ulong from4,         \
    const ulong to0, const ulong to1, const ulong to2, const ulong to3, const ulong to4

#if RANK > 0
#define BATCH_STEP(k)                                \
    if (RANK > k) {                                  \
        const uint place = batch % e##k;             \
        batch /= e##k;                               \
        x += place * (size_t)from##k;                \
        y += place * (size_t)to##k;                  \
    }
#define GO_TO_BATCH(index)                           \
    uint batch = (index);                            \
    BATCH_STEP(4) BATCH_STEP(3) BATCH_STEP(2) BATCH_STEP(1) BATCH_STEP(0)
#else
#define GO_TO_BATCH(index)
#endif

#ifdef MOVE_ROWS
__kernel void move_rows(__global const WORD *restrict x, __global WORD *restrict y, const ulong inner,
                        const ulong column_span, const ulong rows, const ulong row_span, const ulong from_step,
                        const ulong to_step, const uint across, const uint down, const uint batches,
                        BATCH_ARGUMENTS) {
    const uint item = get_global_id(0), line = item / across;
    if (line >= down * batches) return;
    GO_TO_BATCH(line / down);
    const size_t column = (item % across) * (size_t)column_span, end = min(column + column_span, (size_t)inner);
    const size_t first = (line % down) * (size_t)row_span, last = min(first + row_span, (size_t)rows);
    for (size_t row = first; row < last; row++) {
        __global const WORD *from = x + row * from_step;
        __global WORD *to = y + row * to_step;
        size_t i = column;
        for (; i + 16 <= end; i += 16) STORE_ANY(VECTOR, LOAD_ANY(VECTOR, from + i), to + i);
        for (; i < end; i++) to[i] = from[i];
    }
}
#endif

#ifdef TRANSPOSE
// One riffle of 16 rows: rows k and k + 8 are interleaved into rows 2k and 2k + 1. Four riffles transpose.
#define RIFFLE_LOW(p, q)                                                                                        \
    (VECTOR)(p.s0, q.s0, p.s1, q.s1, p.s2, q.s2, p.s3, q.s3, p.s4, q.s4, p.s5, q.s5, p.s6, q.s6, p.s7, q.s7)
#define RIFFLE_HIGH(p, q)                                                                                       \
    (VECTOR)(p.s8, q.s8, p.s9, q.s9, p.sa, q.sa, p.sb, q.sb, p.sc, q.sc, p.sd, q.sd, p.se, q.se, p.sf, q.sf)

static inline void riffle(const VECTOR *in, VECTOR *out) {
#pragma unroll
    for (uint k = 0; k < 8; k++) {
        out[2 * k] = RIFFLE_LOW(in[k], in[k + 8]);
        out[2 * k + 1] = RIFFLE_HIGH(in[k], in[k + 8]);
    }
}

static inline void transpose_tile(__global const WORD *x, size_t from_step, __global WORD *y, size_t to_step) {
    VECTOR tile[16], other[16];
#pragma unroll
    for (uint k = 0; k < 16; k++) tile[k] = LOAD_ANY(VECTOR, x + k * from_step);
    riffle(tile, other);
    riffle(other, tile);
    riffle(tile, other);
    riffle(other, tile);
#pragma unroll
    for (uint k = 0; k < 16; k++) STORE_ANY(VECTOR, tile[k], y + k * to_step);
}

// A work-item moves 16 neighbours of a, for `b_span` neighbours of b.
__kernel void transpose(__global const WORD *restrict x, __global WORD *restrict y, const ulong a_extent,
                        const ulong b_extent, const ulong b_span, const ulong from_step, const ulong to_step,
                        const uint across, const uint down, const uint batches, BATCH_ARGUMENTS) {
    const uint item = get_global_id(0), line = item / across;
    if (line >= down * batches) return;
    GO_TO_BATCH(line / down);
    const size_t a = (item % across) * (size_t)16, a_end = min(a + 16, (size_t)a_extent);
    const size_t b_first = (line % down) * (size_t)b_span, b_end = min(b_first + b_span, (size_t)b_extent);
    for (size_t b = b_first; b < b_end; b += 16) {
        if (a + 16 <= a_end && b + 16 <= b_end) {
            transpose_tile(x + b * from_step + a, from_step, y + a * to_step + b, to_step);
            continue;
        }
        const size_t stop = min(b + 16, b_end);
        for (size_t i = a; i < a_end; i++)
            for (size_t j = b; j < stop; j++) y[i * to_step + j] = x[j * from_step + i];
    }
}
#endif

#ifdef TRANSPOSE_LOCAL
#define TILE 32
#ifndef LINES
#define LINES 8 // lines of a tile that the work-group moves at a time: a power of two
#endif

__kernel __attribute__((reqd_work_group_size(TILE, LINES, 1))) void
transpose_local(__global const WORD *restrict x, __global WORD *restrict y, const ulong a_extent,
                const ulong b_extent, const ulong from_step, const ulong to_step, const uint across,
                const uint down, const uint batches, BATCH_ARGUMENTS) {
    __local WORD tile[TILE][TILE + 1]; // one word more a line, so that a column's words lie in different banks
    const uint item = get_group_id(0), line_of_tiles = item / across;
    GO_TO_BATCH(line_of_tiles / down);
    const size_t a = (item % across) * (size_t)TILE, b = (line_of_tiles % down) * (size_t)TILE;
    const uint lane = get_local_id(0);
    for (uint line = get_local_id(1); line < TILE; line += LINES)
        if (b + line < b_extent && a + lane < a_extent) tile[line][lane] = x[(b + line) * from_step + a + lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint line = get_local_id(1); line < TILE; line += LINES)
        if (a + line < a_extent && b + lane < b_extent) y[(a + line) * to_step + b + lane] = tile[lane][line];
}
#endif
