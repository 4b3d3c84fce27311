// conv_winograd.cl: a 3x3 convolution of stride 1 for CPU devices, with 16 multiplications for 4 outputs, not 36.
// Winograd's F(2x2, 3x3): A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
//
// The outputs fall into tiles of 2x2, each of which reads 4x4 elements d of every channel:
//
//      out = At [ sum over channels of (G g Gt) * (Bt d B) ] A          g: the 3x3 weights; * element by element
//
//      Bt | 1  0 -1  0 |     G | 1    0    0   |     At | 1  1  1  0 |   An output has no term with an element that it
//         | 0  1  1  0 |       | 1/2  1/2  1/2 |        | 0  1 -1 -1 |   does not read: the first of two takes the
//         | 0 -1  1  0 |       | 1/2 -1/2  1/2 |                         rows 0 to 2 of Bt, without d3, the second
//         | 0  1  0 -1 |       | 0    0    1   |                         those of 1 to 3, without d0.
//
// So inf and nan reach the outputs that read them, as nan, and no others, and what lies beyond the source may be
// anything. For each of the 16 places in a transformed tile, the sum over channels is a matrix product:
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
// cache for all panels of weights; and turns the sums of each output channel into two rows of outputs a run.
//
// The source is laid out by conv_stage.cl, even and odd columns apart, so that 16 tiles read neighbours (winograd.clh).
//
//   MR, NR, SHORT, KC   as in conv_packed.cl
//   BLOCK_PANELS        panels of weights whose sums rest at a time
//   X_T, OUT_T, BIAS_T, SRC_T   storage types of staged source, output, bias; of the weights that are transformed
//
// M, C: output and input channels of one group; `columns`: tiles of the batch, `positions`: of an image, in rows of
// `width`. HS x WS: a phase of a staged plane; OH x OW: outputs. `work` is a workspace with a slice for each work-item.

#include "register_tile.clh"
#include "winograd.clh"

#ifdef WINOGRAD
// A place of `read` begins this many floats after the one before: what 16 tiles write beyond a run's end, and not in
// another cache set than the same channel's other places.
#define PLACE_FLOATS (C * NR + 16)

// The sums of 16 tiles of one output channel, every `distance` floats from `sums`: the outputs in even and odd columns
// of two rows.
typedef struct {
    float16 even0, odd0, even1, odd1;
} Outputs;

static inline Outputs transform_sums(__global const float *sums, size_t distance, float bias, int relu) {
#define SUM(i, j) const float16 s##i##_##j = LOAD16(f32, sums, (4 * i + j) * distance);
#define SUM_COLUMN(j)                                        \
    const float16 y0_##j = s0_##j + s1_##j + s2_##j;         \
    const float16 y1_##j = s1_##j - s2_##j - s3_##j;
#define SUM_ROW(i)                                           \
    y.even##i = epilogue(y##i##_0 + y##i##_1 + y##i##_2, bias, relu); \
    y.odd##i = epilogue(y##i##_1 - y##i##_2 - y##i##_3, bias, relu);
    EACH_PLACE(SUM)
    EACH_4(SUM_COLUMN)
    Outputs y;
    SUM_ROW(0)
    SUM_ROW(1)
    return y;
}

// Values in even and odd columns, in order: 16 neighbours, and the next 16.
#define ZIP8(x, y) ((float16)((x).s0, (y).s0, (x).s1, (y).s1, (x).s2, (y).s2, (x).s3, (y).s3, \
                              (x).s4, (y).s4, (x).s5, (y).s5, (x).s6, (y).s6, (x).s7, (y).s7))
#define LOW(even, odd) ZIP8((even).lo, (odd).lo)
#define HIGH(even, odd) ZIP8((even).hi, (odd).hi)

// `count` values to storage; none beyond the last is written.
static inline void store_values(const float *values, __global STORAGE(OUT_T) *out, size_t at, size_t count) {
    if (count < 16) {
        for (size_t i = 0; i < count; i++) STORE(OUT_T, values[i], out, at + i);
        return;
    }
    for (size_t i = 0; i < count; i += 16) {
        const size_t first = min(i, count - 16); // the last 16 may include some of those before
        STORE16(OUT_T, LOAD_PRIVATE(float16, values + first), out, at + first);
    }
}

// The first `count` outputs of two rows, or of one.
static inline void store_outputs(Outputs y, __global STORAGE(OUT_T) *out, size_t at, size_t count,
                                 bool two_rows, size_t OW) {
    if (count == 32) {
        STORE16(OUT_T, LOW(y.even0, y.odd0), out, at);
        STORE16(OUT_T, HIGH(y.even0, y.odd0), out, at + 16);
        if (!two_rows) return;
        STORE16(OUT_T, LOW(y.even1, y.odd1), out, at + OW);
        STORE16(OUT_T, HIGH(y.even1, y.odd1), out, at + OW + 16);
        return;
    }
    float values[2 * 32];
    const bool is_joined = two_rows && count == OW; // whole rows of outputs lie one behind the other
    float *second = values + (is_joined ? count : 32);
    STORE_PRIVATE(float16, LOW(y.even0, y.odd0), values);
    STORE_PRIVATE(float16, HIGH(y.even0, y.odd0), values + 16);
    STORE_PRIVATE(float16, LOW(y.even1, y.odd1), second);
    STORE_PRIVATE(float16, HIGH(y.even1, y.odd1), second + 16);
    store_values(values, out, at, is_joined ? 2 * count : count);
    if (two_rows && !is_joined) store_values(second, out, at + OW, count);
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
    const size_t phase = HS * WS, plane = 2 * phase, out_plane = OH * OW;
    const size_t all_rows = ROWS_BEFORE(panels_m, MR);
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    __global float *read = work + item * PLACES * (PLACE_FLOATS + BLOCK_PANELS * TILE);
    __global float *all_sums = read + PLACES * PLACE_FLOATS;
    weights += group * PLACES * C * all_rows;
    x += group * C * plane;
    out += out_begin + group * M * out_plane;
    for (size_t J = first_j; J < last_j; J++) {
        Run runs[NR];
        const int count = find_runs(runs, J * NR, min((J + 1) * NR, (size_t)columns), positions, width, WS, OH, OW,
                                    groups * C * plane, groups * M * out_plane);
        for (size_t c = 0; c < C; c++) {
            for (int i = 0; i < count; i++)
                for (size_t t = 0; t < runs[i].tiles; t += 16) {
                    const size_t from = LAST_16(t, runs[i].tiles);
                    transform_read(x, c * plane + runs[i].read + from, WS, phase,
                                   read + c * NR + runs[i].first + from, PLACE_FLOATS);
                }
            // Never stored, but multiplied: memory's last content, if subnormal, would take 100 times as long.
            for (size_t t = columns - J * NR; t < NR; t += 16)
                for (int place = 0; place < PLACES; place++)
                    STORE16(f32, (float16)(0), read, place * PLACE_FLOATS + c * NR + t);
        }
        for (size_t begin_m = first_m; begin_m < last_m; begin_m += BLOCK_PANELS) {
            const size_t end_m = min(begin_m + BLOCK_PANELS, last_m), first_row = ROWS_BEFORE(begin_m, MR);
            const size_t rows = ROWS_BEFORE(end_m, MR) - first_row, last_row = min(first_row + rows, (size_t)M);
            for (size_t place = 0; place < PLACES; place++) {
                size_t k0 = 0;
                do { // once for C = 0 too: sums of nothing
                    const int steps = (int)min((size_t)KC, (size_t)C - k0);
                    for (size_t p = begin_m; p < end_m; p++) {
                        const size_t m = ROWS_BEFORE(p, MR);
                        __global const float *a = weights + (place * C + k0) * all_rows + m * steps;
                        __global const float *b = read + place * PLACE_FLOATS + k0 * NR;
                        __global float *sums = all_sums + (place * rows + m - first_row) * NR;
                        if (p < tall) ADD_PRODUCT(EACH_ROW, MR) else ADD_PRODUCT(CAT(ROWS_, SHORT), SHORT)
                    }
                    k0 += steps;
                } while (k0 < C);
            }
            for (size_t m = first_row; m < last_row; m++) {
                const float bias_m = BIAS(group * M + m);
                for (int i = 0; i < count; i++)
                    for (size_t t = 0; t < runs[i].tiles; t += 16) {
                        const size_t from = LAST_16(t, runs[i].tiles), at = m * out_plane + runs[i].out + 2 * from;
                        __global const float *sums = all_sums + (m - first_row) * NR + runs[i].first + from;
                        const Outputs y = transform_sums(sums, rows * NR, bias_m, relu);
                        const size_t outputs = min(runs[i].outputs - 2 * from, (size_t)32);
                        PREFETCH_TO_WRITE(out + at + 2 * out_plane);
                        PREFETCH_TO_WRITE(out + at + 2 * out_plane + OW);
                        store_outputs(y, out, at, outputs, runs[i].two_rows, OW);
                    }
            }
        }
    }
}
#endif

#ifdef TRANSFORM_WEIGHTS
// G g: four values of three.
#define TRANSFORM_TAPS(u0, u1, u2, u3, g0, g1, g2) \
    {                                              \
        u0 = g0;                                   \
        u1 = 0.5f * (g0 + g1 + g2);                \
        u2 = 0.5f * (g0 - g1 + g2);                \
        u3 = g2;                                   \
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
    panels += (group * PLACES * C + begin) * all_rows + m * steps;
    for (size_t c = 0; c < steps; c++)
        for (size_t row = 0; row < height; row++) {
            float u[4][3], places[4][4];
            for (int j = 0; j < 3; j++) {
                float g[3];
                for (int i = 0; i < 3; i++) {
                    const size_t at = (m + row) * stride_m + (begin + c) * stride_c + (long)(i * step_y + j * step_x);
                    g[i] = m + row < M ? LOAD(SRC_T, w, at) : 0.0f;
                }
                TRANSFORM_TAPS(u[0][j], u[1][j], u[2][j], u[3][j], g[0], g[1], g[2])
            }
            for (int i = 0; i < 4; i++)
                TRANSFORM_TAPS(places[i][0], places[i][1], places[i][2], places[i][3], u[i][0], u[i][1], u[i][2])
            for (int place = 0; place < PLACES; place++)
                panels[place * C * all_rows + c * height + row] = places[place / 4][place % 4];
        }
}
#endif
