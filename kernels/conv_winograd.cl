// conv_winograd.cl: a 3x3 convolution of stride 1 for CPU devices, with 36 multiplications for 16 outputs, not 144.
// Winograd's F(4x4, 3x3): A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
//
// The outputs fall into tiles of 4x4, each of which reads 6x6 elements d of every channel:
//
//      out = At [ sum over channels of (G g Gt) * (Bt d B) ] A          g: the 3x3 weights; * element by element
//
// It multiplies polynomials by their values at 0, a, -a, b, -b and infinity (the rows of Bt, the columns of At):
//
//      Bt | aabb  0  -aa-bb   0     1  0 |    G | 1/aabb  0   0   |    At | 1  1    1   1    1   0 |
//         |  0  -abb   -bb    a     1  0 |      | p      pa   paa |       | 0  a   -a   b   -b   0 |
//         |  0   abb   -bb   -a     1  0 |      | p     -pa   paa |       | 0  aa  aa   bb   bb  0 |
//         |  0  -aab   -aa    b     1  0 |      | q      qb   qbb |       | 0 aaa -aaa  bbb -bbb 1 |
//         |  0   aab   -aa   -b     1  0 |      | q     -qb   qbb |
//         |  0   aabb   0   -aa-bb  0  1 |      | 0      0    1   |    p = 1/2aa(aa-bb), q = 1/2bb(bb-aa)
//
// With a = 5/8 and b = 3/2 all of Bt and At are exact, and the error is the least: 1.8 times that of a direct sum in the
// mean, where the usual 1 and 2 make it 4 times (B. Barabasz et al., Error Analysis and Improving the Accuracy of
// Winograd Convolution for Deep Neural Networks, ACM TOMS 46(4), 2020, on the choice of points).
//
// For each of the 36 places in a transformed tile, the sum over channels is a matrix product:
//
//      weights [place][block of KC][panel][c][row]     read [place][c][NR tiles]        sums [place][row][NR tiles]
//
//      m  c ->                                         c  +-----------+                 m  +-----------+
//      |  +---------+                                  |  | 16 tiles, | of one row      |  | tile of MR|
//      v  | panel 0 |  MR rows, at the end SHORT       v  | 16 tiles, | or several      v  +-----------+
//         +---------+                                     +-----------+                    +-----------+
//
// Tiles that are neighbours in a row of tiles, and in the NR of a work-item, are a run. A work-item transforms what its
// runs read, 16 tiles at a time; multiplies place by place, so that KC x NR floats of `read` stay in the first-level
// cache for all panels of weights; and turns the sums of each output channel into four rows of outputs a run.
//
// Outputs of a tile share terms that cancel, and inf or nan does not. A tile with an output that is not finite is
// computed again, directly, from the weights as they are: 9 more places, which follow the 36.
//
// The source is staged, padded with zeros, every fourth column together, so that 16 tiles read neighbours:
//
//      staged [n][c][HS rows][column % 4][WS]      element (i, j) of the tile in row r, column q of tiles lies in
//                                                  row 4 r + i, phase j % 4, column q + j / 4
//
//   MR, NR, SHORT, KC   as in conv_packed.cl
//   ROW_PANELS          panels of weights whose sums rest at a time
//   X_T, OUT_T, BIAS_T, SRC_T   storage types of staged source, output, bias; of the weights that are transformed
//
// M, C: output and input channels of one group; `columns`: tiles of the batch, `positions`: of an image, in rows of
// `width`. A staged plane has HS rows of 4 WS elements; OH x OW: outputs. `work` is a workspace with a slice for each work-item.

#include "register_tile.clh"

#define EDGE 4
#define PLACES 36 // of a transformed tile
#define TAPS 9    // places of the weights as they are
#define A 0.625f
#define B 1.5f

// Written out place by place: values in registers have names, t1_2 is that of row 1, column 2.
#define EACH_4(X) X(0) X(1) X(2) X(3)
#define EACH_6(X) EACH_4(X) X(4) X(5)
#define EACH_PLACE(X)                                       \
    X(0, 0) X(0, 1) X(0, 2) X(0, 3) X(0, 4) X(0, 5)         \
    X(1, 0) X(1, 1) X(1, 2) X(1, 3) X(1, 4) X(1, 5)         \
    X(2, 0) X(2, 1) X(2, 2) X(2, 3) X(2, 4) X(2, 5)         \
    X(3, 0) X(3, 1) X(3, 2) X(3, 3) X(3, 4) X(3, 5)         \
    X(4, 0) X(4, 1) X(4, 2) X(4, 3) X(4, 4) X(4, 5)         \
    X(5, 0) X(5, 1) X(5, 2) X(5, 3) X(5, 4) X(5, 5)

#include "winograd_runs.clh"

#ifdef WINOGRAD
// A place of `read` and of `sums` begins this many floats after the one before: what 16 tiles write beyond a run's end,
// and not in another cache set than the same channel's other places.
#define READ_FLOATS (KC * NR + 16)
#define SUM_FLOATS (ROW_PANELS * TILE + 16)
#define ROW (EDGE * NR) // outputs in a row of all tiles of a work-item

// Bt d and its like: six values in place of six.
#define TRANSFORM(d0, d1, d2, d3, d4, d5)                                                        \
    {                                                                                            \
        const float16 even_a = d4 - B * B * d2, odd_a = d3 - B * B * d1;                         \
        const float16 even_b = d4 - A * A * d2, odd_b = d3 - A * A * d1;                         \
        d0 = A * A * B * B * d0 + (d4 - (A * A + B * B) * d2);                                   \
        d5 = A * A * B * B * d1 + (d5 - (A * A + B * B) * d3);                                   \
        d1 = even_a + A * odd_a;                                                                 \
        d2 = even_a - A * odd_a;                                                                 \
        d3 = even_b + B * odd_b;                                                                 \
        d4 = even_b - B * odd_b;                                                                 \
    }

// 16 tiles that are transformed together: pieces of as many neighbours, of one run each.
typedef struct {
    size_t read;  // where the first tile's elements begin
    ushort first; // of the NR
} Piece;

// FROM_PIECES(i, j): element (i, j) of the 16 tiles.  TO_PIECES(v, to): those of a place, to their columns.
#define WAY(i, j) (4 * (i) + (j) % 4) * WS + (j) / 4
#if PIECES == 1
#define FROM_PIECES(i, j) LOAD16(X_T, x, pieces[0].read + WAY(i, j))
#define TO_PIECES(v, to) STORE_ANY(float16, v, to + pieces[0].first);
#elif PIECES == 2
#define PART(k, i, j) LOAD_ANY(ushort8, (__global const ushort *)x + pieces[k].read + WAY(i, j))
#define FROM_PIECES(i, j) WIDEN16(X_T, (ushort16)(PART(0, i, j), PART(1, i, j)))
#define TO_PIECES(v, to)                             \
    STORE_ANY(float8, (v).lo, to + pieces[0].first); \
    STORE_ANY(float8, (v).hi, to + pieces[1].first);
#else
#define PART(k, i, j) LOAD_ANY(ushort4, (__global const ushort *)x + pieces[k].read + WAY(i, j))
#define FROM_PIECES(i, j) WIDEN16(X_T, (ushort16)(PART(0, i, j), PART(1, i, j), PART(2, i, j), PART(3, i, j)))
#define TO_PIECES(v, to)                                \
    STORE_ANY(float4, (v).lo.lo, to + pieces[0].first); \
    STORE_ANY(float4, (v).lo.hi, to + pieces[1].first); \
    STORE_ANY(float4, (v).hi.lo, to + pieces[2].first); \
    STORE_ANY(float4, (v).hi.hi, to + pieces[3].first);
#endif

// Cuts runs into pieces; returns how many, a multiple of PIECES.
static inline int find_pieces(Piece *pieces, const Run *runs, int count) {
    const size_t most = 16 / PIECES;
    int n = 0;
    for (int i = 0; i < count; i++)
        for (size_t t = 0; t < runs[i].tiles; t += most, n++) {
            const size_t from = runs[i].tiles < most ? 0 : min(t, runs[i].tiles - most); // may include some before
            pieces[n].read = runs[i].read + from;
            pieces[n].first = (ushort)(runs[i].first + from);
        }
    for (; n % PIECES > 0; n++) pieces[n] = pieces[n - 1];
    return n;
}

// What 16 tiles read of the channel at x, transformed, place by place, to `read`. `ahead` is the way to the next
// channel, which is fetched: rows are too short for the processor to guess.
static inline void transform_read(__global const STORAGE(X_T) *x, const Piece *pieces, size_t WS, size_t ahead,
                                  __global float *read) {
#define READ(i, j) float16 t##i##_##j = FROM_PIECES(i, j);
#define TRANSFORM_COLUMN(j) TRANSFORM(t0_##j, t1_##j, t2_##j, t3_##j, t4_##j, t5_##j)
#define TRANSFORM_ROW(i) TRANSFORM(t##i##_0, t##i##_1, t##i##_2, t##i##_3, t##i##_4, t##i##_5)
#define WRITE(i, j) TO_PIECES(t##i##_##j, read + (6 * i + j) * READ_FLOATS)
#define PREFETCH_ROW(i)                                                               \
    for (int k = 0; k < PIECES; k++) PREFETCH(x + pieces[k].read + ahead + 4 * i * WS); \
    if (PIECES == 1) PREFETCH(x + pieces[0].read + ahead + (4 * i + 2) * WS);
    EACH_6(PREFETCH_ROW)
    EACH_PLACE(READ)
    EACH_6(TRANSFORM_COLUMN)
    EACH_6(TRANSFORM_ROW)
    EACH_PLACE(WRITE)
}

// The bits of two outputs of 16 tiles, the first in the lower half of 32 bits.
#define BITS_OF_2(v0, v1) \
    (convert_uint16(BITS16(OUT_T, epilogue(v0, bias, relu))) | convert_uint16(BITS16(OUT_T, epilogue(v1, bias, relu))) << 16)
// Outputs 0 and 1 of four tiles, and outputs 2 and 3: 16 neighbours.
#define ZIP4(x, y) as_ushort16((uint8)((x).s0, (y).s0, (x).s1, (y).s1, (x).s2, (y).s2, (x).s3, (y).s3))

// Turns the sums of 16 tiles into four rows of 64 outputs. Returns for each tile a number that is finite only if all its
// outputs are: neither inf nor nan goes away in a sum.
static inline float16 transform_sums(__global const float *sums, float bias, int relu, ushort *rows) {
#define SUM_4(y0, y1, y2, y3, s0, s1, s2, s3, s4, s5)          \
    {                                                          \
        const float16 plus_a = s1 + s2, minus_a = s1 - s2;     \
        const float16 plus_b = s3 + s4, minus_b = s3 - s4;     \
        y0 = s0 + plus_a + plus_b;                             \
        y1 = A * minus_a + B * minus_b;                        \
        y2 = A * A * plus_a + B * B * plus_b;                  \
        y3 = A * A * A * minus_a + (B * B * B * minus_b + s5); \
    }
#define SUM(i, j) const float16 s##i = LOAD16(f32, sums, (6 * i + j) * SUM_FLOATS);
#define SUM_COLUMN(j)                                                 \
    float16 y0_##j, y1_##j, y2_##j, y3_##j;                           \
    {                                                                 \
        SUM(0, j) SUM(1, j) SUM(2, j) SUM(3, j) SUM(4, j) SUM(5, j)   \
        SUM_4(y0_##j, y1_##j, y2_##j, y3_##j, s0, s1, s2, s3, s4, s5) \
    }
#define STORE_ROW(i)                                                                      \
    {                                                                                     \
        float16 v0, v1, v2, v3;                                                           \
        SUM_4(v0, v1, v2, v3, y##i##_0, y##i##_1, y##i##_2, y##i##_3, y##i##_4, y##i##_5) \
        total += (v0 + v1) + (v2 + v3);                                                   \
        const uint16 first = BITS_OF_2(v0, v1), second = BITS_OF_2(v2, v3);               \
        STORE_PRIVATE(ushort16, ZIP4(first.lo.lo, second.lo.lo), rows + i * ROW);         \
        STORE_PRIVATE(ushort16, ZIP4(first.lo.hi, second.lo.hi), rows + i * ROW + 16);    \
        STORE_PRIVATE(ushort16, ZIP4(first.hi.lo, second.hi.lo), rows + i * ROW + 32);    \
        STORE_PRIVATE(ushort16, ZIP4(first.hi.hi, second.hi.hi), rows + i * ROW + 48);    \
    }
    float16 total = 0.0f;
    EACH_6(SUM_COLUMN)
    EACH_4(STORE_ROW)
    return total;
}

// Computes the tiles of a run that are `spoiled` once more, into `rows`: term by term, from the taps at `weights`,
// `tap_floats` and (in a panel) `height` apart.
static __attribute__((noinline)) void compute_directly(__global const STORAGE(X_T) *x, Run run, const int *spoiled, size_t plane,
                                         size_t WS, __global const float *weights, size_t all_rows, size_t m,
                                         size_t first_row, size_t height, size_t C, float bias, int relu,
                                         ushort *rows) {
    for (size_t t = 0; t < run.tiles; t += 16) {
        const size_t from = LAST_16(t, run.tiles), column = run.first + from;
        float16 y[EDGE][EDGE];
        for (int k = 0; k < 16; k++) y[k / 4][k % 4] = 0.0f;
        for (size_t c = 0; c < C; c++) {
            const size_t at = c * plane + run.read + from, k0 = c / KC * KC, steps = min((size_t)KC, C - k0);
            __global const float *taps = weights + k0 * all_rows + first_row * steps + (c - k0) * height + m - first_row;
            for (int tap = 0; tap < TAPS; tap++) {
                const float16 g = taps[tap * C * all_rows];
                for (int k = 0; k < 16; k++) y[k / 4][k % 4] += g * LOAD16(X_T, x, at + WAY(tap / 3 + k / 4, tap % 3 + k % 4));
            }
        }
        for (int k = 0; k < 16; k++) {
            ushort bits[16];
            STORE_PRIVATE(ushort16, BITS16(OUT_T, epilogue(y[k / 4][k % 4], bias, relu)), bits);
            for (size_t i = 0; i < 16 && from + i < run.tiles; i++)
                if (spoiled[column + i]) rows[k / 4 * ROW + 4 * (column + i) + k % 4] = bits[i];
        }
    }
}

// `count` elements; none beyond the last is written.
static inline void copy_elements(const ushort *from, __global ushort *to, size_t count) {
    if (count < 16) {
        for (size_t i = 0; i < count; i++) to[i] = from[i];
        return;
    }
    for (size_t i = 0; i < count; i += 16) {
        const size_t at = min(i, count - 16); // the last 16 may include some of those before
        STORE_ANY(ushort16, LOAD_PRIVATE(ushort16, from + at), to + at);
    }
}

// Adds the product of a panel of weights and a block of what was read to `sums`, or begins with it.
#define ADD_PRODUCT(ROWS, rows)      \
    {                                \
        ROWS(CLEAR)                  \
        if (k0 > 0) { ROWS(RESUME) } \
        MULTIPLY_STEPS(ROWS, rows)   \
        ROWS(SUSPEND)                \
    }

// Work-item (`each_j` times NR tiles, `each_m` panels of output channels, group).
__kernel ONE_WORK_ITEM WIDE_VECTORS void
winograd(__global const float *restrict weights, __global const STORAGE(X_T) *restrict x,
         __global STORAGE(OUT_T) *restrict out, __global const STORAGE(BIAS_T) *restrict bias,
         __global float *restrict work, const ulong out_begin, const ulong columns, const ulong M, const ulong C,
         const ulong positions, const ulong width, const ulong HS, const ulong WS, const ulong OH, const ulong OW,
         const uint panels_m, const uint tall, const uint each_j, const uint each_m, const int has_bias,
         const int relu) {
    const size_t panels_j = (columns + NR - 1) / NR, group = get_global_id(2), groups = get_global_size(2);
    const size_t first_j = get_global_id(0) * each_j, last_j = min(first_j + each_j, panels_j);
    const size_t first_m = get_global_id(1) * each_m, last_m = min(first_m + each_m, (size_t)panels_m);
    const size_t plane = 4 * HS * WS, out_plane = OH * OW;
    const size_t all_rows = ROWS_BEFORE(panels_m, MR);
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    // The sums of all blocks of panels have to rest where there is more than one block of channels to add.
    const size_t resting = C > KC ? (each_m + ROW_PANELS - 1) / ROW_PANELS : 1;
    __global float *read = work + item * PLACES * (READ_FLOATS + resting * SUM_FLOATS);
    __global float *all_sums = read + PLACES * READ_FLOATS;
    weights += group * (PLACES + TAPS) * C * all_rows;
    x += group * C * plane;
    out += out_begin + group * M * out_plane;
    for (size_t J = first_j; J < last_j; J++) {
        Run runs[NR];
        const size_t tiles = min((size_t)NR, (size_t)columns - J * NR);
        const int count = find_runs(runs, J * NR, J * NR + tiles, positions, width, 4 * WS, OH, OW,
                                    groups * C * plane, groups * M * out_plane);
        Piece pieces[NR + PIECES];
        const int count_pieces = find_pieces(pieces, runs, count);
        size_t k0 = 0;
        do { // once for C = 0 too: sums of nothing
            const int steps = (int)min((size_t)KC, (size_t)C - k0);
            for (int c = 0; c < steps; c++) {
                for (int i = 0; i < count_pieces; i += PIECES)
                    transform_read(x + (k0 + c) * plane, pieces + i, WS, plane, read + c * NR);
                // Never stored, but multiplied: memory's last content, if subnormal, would take 100 times as long.
                for (size_t t = tiles; t < NR; t += 16)
                    for (int place = 0; place < PLACES; place++)
                        STORE16(f32, (float16)(0), read, place * READ_FLOATS + c * NR + t);
            }
            for (size_t begin_m = first_m; begin_m < last_m; begin_m += ROW_PANELS) {
                const size_t end_m = min(begin_m + ROW_PANELS, last_m), first_row = ROWS_BEFORE(begin_m, MR);
                __global float *block_sums =
                    all_sums + (resting > 1 ? (begin_m - first_m) / ROW_PANELS : 0) * PLACES * SUM_FLOATS;
                for (size_t place = 0; place < PLACES; place++)
                    for (size_t p = begin_m; p < end_m; p++) {
                        const size_t m = ROWS_BEFORE(p, MR);
                        __global const float *a = weights + (place * C + k0) * all_rows + m * steps;
                        __global const float *b = read + place * READ_FLOATS;
                        __global float *sums = block_sums + place * SUM_FLOATS + (m - first_row) * NR;
                        if (p < tall) ADD_PRODUCT(EACH_ROW, MR) else ADD_PRODUCT(CAT(ROWS_, SHORT), SHORT)
                    }
                if (k0 + steps < C) continue;
                for (size_t p = begin_m; p < end_m; p++) {
                    const size_t panel_row = ROWS_BEFORE(p, MR), height = p < tall ? MR : SHORT;
                    for (size_t m = panel_row; m < min(panel_row + height, (size_t)M); m++) {
                        ushort rows[EDGE * ROW];
                        int spoiled[NR], is_spoiled = 0;
                        const float bias_m = BIAS(group * M + m);
                        for (size_t t = 0; t < tiles; t += 16) {
                            __global const float *sums = block_sums + (m - first_row) * NR + t;
                            const float16 total = transform_sums(sums, bias_m, relu, rows + EDGE * t);
                            const int16 is_wrong = isfinite(total) == 0;
                            is_spoiled |= any(is_wrong);
                            vstore16(is_wrong, 0, spoiled + t);
                        }
                        for (int i = 0; i < count; i++) {
                            if (is_spoiled)
                                compute_directly(x, runs[i], spoiled, plane, WS, weights + PLACES * C * all_rows,
                                                 all_rows, m, panel_row, height, C, bias_m, relu, rows);
                            for (size_t row = 0; row < runs[i].rows; row++)
                                copy_elements(rows + row * ROW + EDGE * runs[i].first,
                                              (__global ushort *)out + m * out_plane + runs[i].out + row * OW,
                                              runs[i].outputs);
                        }
                    }
                }
            }
            k0 += steps;
        } while (k0 < C);
    }
}
#endif

#ifdef STAGE
// The first or the second pair of columns of every four: eight of each, as one element in 32 bits.
#define FIRST_PAIRS(low, high) ((uint8)(as_uint8(low).even, as_uint8(high).even))
#define SECOND_PAIRS(low, high) ((uint8)(as_uint8(low).odd, as_uint8(high).odd))

// 64 neighbours from x on as four times 16, every fourth together: to y, then y + WS, y + 2 WS and y + 3 WS.
static inline void stage_64(__global const ushort *x, __global ushort *y, size_t WS) {
    const ushort16 v0 = LOAD_ANY(ushort16, x), v1 = LOAD_ANY(ushort16, x + 16);
    const ushort16 v2 = LOAD_ANY(ushort16, x + 32), v3 = LOAD_ANY(ushort16, x + 48);
    const uint16 first = (uint16)(FIRST_PAIRS(v0, v1), FIRST_PAIRS(v2, v3));
    const uint16 second = (uint16)(SECOND_PAIRS(v0, v1), SECOND_PAIRS(v2, v3));
    STORE_ANY(ushort16, convert_ushort16(first & 0xffff), y);
    STORE_ANY(ushort16, convert_ushort16(first >> 16), y + WS);
    STORE_ANY(ushort16, convert_ushort16(second & 0xffff), y + 2 * WS);
    STORE_ANY(ushort16, convert_ushort16(second >> 16), y + 3 * WS);
}

// Column u of a padded row.
#define COLUMN(u) to[(u) % 4 * WS + (u) / 4]

// Rows of planes x[plane][H][W], from element `first` on, as `rows` staged rows y[plane][HS][4][WS]. What is written
// beyond the end of a row is overwritten by the next one. Work-item: `each` rows.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
stage_tiles(__global const ushort *restrict x, __global ushort *restrict y, const ulong first, const ulong size,
            const ulong rows, const ulong H, const ulong W, const ulong HS, const ulong WS, const uint pad_y,
            const uint pad_x, const uint each) {
    const size_t begin = (size_t)get_global_id(0) * each, last = min(begin + each, (size_t)rows);
    for (size_t row = begin; row < last; row++) {
        const size_t plane = row / HS, h = row - plane * HS, at = first + (plane * H + h - pad_y) * W;
        __global ushort *const to = y + row * 4 * WS;
        if (h < pad_y || h - pad_y >= H) {
            for (size_t u = 0; u < 4 * WS; u++) to[u] = 0;
            continue;
        }
        const bool is_read_beyond = at < pad_x || at - pad_x + 4 * max(WS, (size_t)16) > size;
        const bool is_written_beyond = (row * 4 + 3) * WS + max(WS, (size_t)16) > last * 4 * WS;
        if (is_read_beyond || is_written_beyond)
            for (size_t w = 0; w < W; w++) COLUMN(w + pad_x) = x[at + w];
        else
            for (size_t q = 0; q < WS; q += 16) {
                const size_t from = LAST_16(q, WS);
                stage_64(x + at - pad_x + 4 * from, to + from, WS);
            }
        for (size_t u = 0; u < pad_x; u++) COLUMN(u) = 0;
        for (size_t u = W + pad_x; u < 4 * WS; u++) COLUMN(u) = 0;
    }
}
#endif

#ifdef TRANSFORM_WEIGHTS
// G g: six values of three.
#define TRANSFORM_TAPS(u, g0, g1, g2)                                  \
    {                                                                  \
        const float16 t0 = g0, t1 = g1, t2 = g2;                       \
        const float p = 1.0f / (2.0f * A * A * (A * A - B * B));       \
        const float q = 1.0f / (2.0f * B * B * (B * B - A * A));       \
        const float16 even_a = p * (t0 + A * A * t2), odd_a = p * A * t1; \
        const float16 even_b = q * (t0 + B * B * t2), odd_b = q * B * t1; \
        u[0] = t0 * (1.0f / (A * A * B * B));                          \
        u[1] = even_a + odd_a;                                         \
        u[2] = even_a - odd_a;                                         \
        u[3] = even_b + odd_b;                                         \
        u[4] = even_b - odd_b;                                         \
        u[5] = t2;                                                     \
    }

// G g Gt of all weights, into panels. Tap (i, j) of row m and channel c of a group is the weight at
// group * stride_group + m * stride_m + c * stride_c + first + i * step_y + j * step_x.
// Work-item (panel, block of KC channels, group).
__kernel ONE_WORK_ITEM void transform_weights(__global const STORAGE(SRC_T) *restrict w,
                                              __global float *restrict panels, const ulong M, const ulong C,
                                              const ulong stride_group, const ulong stride_m, const ulong stride_c,
                                              const uint first, const int step_y, const int step_x, const uint tall) {
    const size_t panel = get_global_id(0), m = ROWS_BEFORE(panel, MR), group = get_global_id(2);
    const size_t begin = get_global_id(1) * KC, steps = min((size_t)KC, (size_t)C - begin);
    const size_t height = panel < tall ? MR : SHORT, all_rows = ROWS_BEFORE(get_global_size(0), MR);
    w += group * stride_group + first;
    panels += (group * (PLACES + TAPS) * C + begin) * all_rows + m * steps;
    for (size_t e = 0; e < steps * height; e += 16) { // 16 elements (c, row) of the panel
        float g[TAPS][16];
        for (size_t k = 0; k < 16; k++) {
            const size_t c = (e + k) / height, row = m + e + k - c * height;
            for (int tap = 0; tap < TAPS; tap++) {
                const size_t at = row * stride_m + (begin + c) * stride_c + (long)(tap / 3 * step_y + tap % 3 * step_x);
                g[tap][k] = row < M && c < steps ? LOAD(SRC_T, w, at) : 0.0f;
            }
        }
        float16 u[3][6], v[6];
        for (int j = 0; j < 3; j++) TRANSFORM_TAPS(u[j], vload16(0, g[j]), vload16(0, g[3 + j]), vload16(0, g[6 + j]))
        for (int i = 0; i < 6; i++) {
            TRANSFORM_TAPS(v, u[0][i], u[1][i], u[2][i])
            for (int j = 0; j < 6; j++) STORE_PART(f32, v[j], panels + (6 * i + j) * C * all_rows, e, steps * height);
        }
        for (int tap = 0; tap < TAPS; tap++)
            STORE_PART(f32, vload16(0, g[tap]), panels + (PLACES + tap) * C * all_rows, e, steps * height);
    }
}
#endif
