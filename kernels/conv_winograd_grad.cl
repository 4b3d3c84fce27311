// conv_winograd_grad.cl: the weight gradient of a 3x3 convolution of stride 1 for CPU devices, with 16 multiplications
// for what a tile of 2x2 outputs adds to the 9 taps in place of 36. Winograd's F(3x3, 2x2), the convolution of
// conv_winograd.cl with result and filter exchanged: the same tiles read the same 4x4 elements d of every channel, and
// what they are multiplied by is their 2x2 elements e of the output's gradient:
//
//      grad = At [ sum over tiles of (G e Gt) * (Bt d B) ] A            * element by element
//
//      G | 1  0 |      At | 1 1/2  1/2  0 |        The halves of Winograd's G stand in At: they are the same for all
//        | 1  1 |         | 0 1/2 -1/2  0 |        tiles. A tile at the edge has zeros for outputs that there are not.
//        | 1 -1 |         | 0 1/2  1/2 -1 |
//        | 0  1 |
//
// For each of the 16 places in a transformed tile, the sum over tiles is a matrix product:
//
//      read [place][c][BLOCK tiles]          grads [place][BLOCK tiles][NR]          partial [place][tile of MR x NR]
//
//      c  tile ->                            tile  +---------+                       c  +---------+
//      |  +------------------+               |     | NR      |                       |  | m ->    |
//      v  | MR rows are MR   |               v     | output  |                       v  |         |
//         | streams of       |                     | channels|                          +---------+
//         | factors          |                     +---------+
//         +------------------+
//
// A work-item transforms what BLOCK tiles read of its input channels, then, for NR output channels at a time, their
// gradients, and multiplies place by place. The sums rest in `partial`; weight_grad_finish adds those of all chunks of
// tiles, in their order, and turns 16 places into 9 taps. Where an element is not finite, all 9 taps are nan.
//
//   MR, NR   the register tile;  BLOCK  tiles that are transformed at a time
//   X_T, G_T, OUT_T   storage types of staged source, gradient of the output, gradient of the weights
//
// M, C: output and input channels of one group; `columns`: tiles of the batch, `positions`: of an image, in rows of
// `width`. HS x WS: a phase of a staged plane; OH x OW: outputs. `work` is a workspace with a slice for each work-item.

#include "register_tile.clh"
#include "transpose.clh"
#define EDGE 2
#define SOURCE_EDGE 2
#define PLACES 16 // of a transformed tile

#ifdef WEIGHT_GRAD
#include "winograd_runs.clh"

// Written out place by place: values in registers have names, t1_2 is that of row 1, column 2.
#define EACH_4(X) X(0) X(1) X(2) X(3)
#define EACH_PLACE(X)                   \
    X(0, 0) X(0, 1) X(0, 2) X(0, 3)     \
    X(1, 0) X(1, 1) X(1, 2) X(1, 3)     \
    X(2, 0) X(2, 1) X(2, 2) X(2, 3)     \
    X(3, 0) X(3, 1) X(3, 2) X(3, 3)

// Bt d and its like: four values in place of four.
#define TRANSFORM(d0, d1, d2, d3)                \
    {                                            \
        const float16 t0 = d0, t1 = d1, t2 = d2; \
        d0 = t0 - t2;                            \
        d1 = t1 + t2;                            \
        d2 = t2 - t1;                            \
        d3 = t1 - d3;                            \
    }

// What 16 tiles read of one channel, from x[at] on, transformed, to every `distance` floats from `read`.
static inline void transform_read(__global const STORAGE(X_T) *x, size_t at, size_t WS, size_t phase,
                                  __global float *read, size_t distance) {
#define READ(i, j) float16 t##i##_##j = LOAD16(X_T, x, at + i * WS + j % 2 * phase + j / 2);
#define TRANSFORM_COLUMN(j) TRANSFORM(t0_##j, t1_##j, t2_##j, t3_##j)
#define TRANSFORM_ROW(i) TRANSFORM(t##i##_0, t##i##_1, t##i##_2, t##i##_3)
#define WRITE(i, j) STORE16(f32, t##i##_##j, read, (4 * i + j) * distance);
#define PREFETCH_ROW(i)                     \
    PREFETCH(x + at + i * WS + 4 * phase); \
    PREFETCH(x + at + i * WS + 5 * phase);
    EACH_4(PREFETCH_ROW) // of the channel after the next: a row is too short for the processor to guess
    EACH_PLACE(READ)
    EACH_4(TRANSFORM_COLUMN)
    EACH_4(TRANSFORM_ROW)
    EACH_PLACE(WRITE)
}

// What 16 tiles write beyond a run's end lies in the next channel or tile, or behind the last: 16 floats, 16 rows.
#define READ_FLOATS(channels) ((channels) * BLOCK + 16)
#define GRAD_FLOATS ((BLOCK + 16) * NR)

// Elements e of 16 tiles, by row and column in the tile.
typedef struct {
    float16 e0_0, e0_1, e1_0, e1_1;
} Elements;

// `outputs` elements of a row from g[at] on, 32 at most, in even and odd columns; zeros beyond, and where a row or an
// output channel is not there. Nothing is read at g[size] and beyond.
static inline Elements read_elements(__global const STORAGE(G_T) *g, size_t at, size_t outputs, bool two_rows,
                                     size_t OW, bool is_there, size_t size) {
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const size_t stop0 = is_there ? at + outputs : at, stop1 = is_there && two_rows ? at + OW + outputs : at + OW;
    Elements e;
#define READ_ROW(i, LOAD_16)                                             \
    {                                                                    \
        const float16 low = LOAD_16(at + i * OW, stop##i);               \
        const float16 high = LOAD_16(at + i * OW + 16, stop##i);         \
        e.e##i##_0 = (float16)(low.even, high.even);                     \
        e.e##i##_1 = (float16)(low.odd, high.odd);                       \
    }
#define WHOLE(from, stop) LOAD16(G_T, g, from)
#define PART(from, stop) LOAD_PART(G_T, g, from, stop, 0.0f)
    if (at + OW + 32 > size) {
        READ_ROW(0, PART)
        READ_ROW(1, PART)
        return e;
    }
    READ_ROW(0, WHOLE)
    READ_ROW(1, WHOLE)
    if (is_there && two_rows && outputs == 32) return e;
    const int count0 = (int)(stop0 - at), count1 = (int)(stop1 - at - OW);
    e.e0_0 = select((float16)(0.0f), e.e0_0, 2 * lane < count0);
    e.e0_1 = select((float16)(0.0f), e.e0_1, 2 * lane + 1 < count0);
    e.e1_0 = select((float16)(0.0f), e.e1_0, 2 * lane < count1);
    e.e1_1 = select((float16)(0.0f), e.e1_1, 2 * lane + 1 < count1);
    return e;
}

// G e: row i of 4 in columns 0 and 1 of the tile, of output channel k of four.
#define FIRST(k, i) e##k.e0_##i
#define SECOND(k, i) e##k.e1_##i
#define SUM(k, i) e##k.e0_##i + e##k.e1_##i
#define DIFFERENCE(k, i) e##k.e0_##i - e##k.e1_##i
// G e Gt: the places of row `row`, of 16 tiles and four output channels, to their rows of the panel.
#define STORE_ROW(row, COMBINE)                                                                                        \
    {                                                                                                                  \
        const float16 a0 = COMBINE(0, 0), b0 = COMBINE(1, 0), c0 = COMBINE(2, 0), d0 = COMBINE(3, 0);                  \
        const float16 a1 = COMBINE(0, 1), b1 = COMBINE(1, 1), c1 = COMBINE(2, 1), d1 = COMBINE(3, 1);                  \
        store_columns(a0, b0, c0, d0, panel + 4 * row * GRAD_FLOATS, NR);                                              \
        store_columns(a0 + a1, b0 + b1, c0 + c1, d0 + d1, panel + (4 * row + 1) * GRAD_FLOATS, NR);                    \
        store_columns(a0 - a1, b0 - b1, c0 - c1, d0 - d1, panel + (4 * row + 2) * GRAD_FLOATS, NR);                    \
        store_columns(a1, b1, c1, d1, panel + (4 * row + 3) * GRAD_FLOATS, NR);                                        \
    }

// The gradients of NR output channels in the runs, transformed; zeros from channel `rows` on.
static inline void transform_grads(__global const STORAGE(G_T) *g, const Run *runs, int count, size_t rows,
                                   size_t out_plane, size_t OW, size_t size, __global float *grads) {
    for (size_t m = 0; m < NR; m += 4)
        for (int i = 0; i < count; i++)
            for (size_t t = 0; t < runs[i].tiles; t += 16) {
                const size_t from = LAST_16(t, runs[i].tiles), outputs = min(runs[i].outputs - 2 * from, (size_t)32);
                const size_t at = m * out_plane + runs[i].out + 2 * from;
                const bool two_rows = runs[i].rows == 2;
                __global float *panel = grads + (runs[i].first + from) * NR + m;
                const Elements e0 = read_elements(g, at, outputs, two_rows, OW, m < rows, size);
                const Elements e1 = read_elements(g, at + out_plane, outputs, two_rows, OW, m + 1 < rows, size);
                const Elements e2 = read_elements(g, at + 2 * out_plane, outputs, two_rows, OW, m + 2 < rows, size);
                const Elements e3 = read_elements(g, at + 3 * out_plane, outputs, two_rows, OW, m + 3 < rows, size);
                STORE_ROW(0, FIRST)
                STORE_ROW(1, SUM)
                STORE_ROW(2, DIFFERENCE)
                STORE_ROW(3, SECOND)
            }
}

#define STREAM(i) __global const float *const x##i = read + min(c + i, channels - 1) * BLOCK;
#define FACTOR(i) x##i[t + step]

// Adds the product of a place to the sums of all panels of channels from `sums` on, `distance` floats apart.
static inline void multiply_place(__global const float *read, __global const float *grads, size_t channels,
                                  size_t tiles, __global float *sums, size_t distance, bool resume) {
    for (size_t c = 0; c < channels; c += MR, sums += distance) {
        EACH_ROW(STREAM)
        __global const float *b = grads;
        EACH_ROW(CLEAR)
        if (resume) { EACH_ROW(RESUME) }
        size_t t = 0;
        for (; t + 4 <= tiles; t += 4, b += 4 * NR) {
            STEP(EACH_ROW, 0) STEP(EACH_ROW, 1) STEP(EACH_ROW, 2) STEP(EACH_ROW, 3)
        }
        for (; t < tiles; t++, b += NR) { STEP(EACH_ROW, 0) }
        EACH_ROW(SUSPEND)
    }
}

// Work-item (`each_k` panels of input channels, chunk of `each` tiles in blocks of `block`, group).
__kernel ONE_WORK_ITEM WIDE_VECTORS void
weight_grad(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
            __global float *restrict partial, __global float *restrict work, const ulong grad_begin,
            const ulong columns, const ulong M, const ulong C, const ulong positions, const ulong width,
            const ulong HS, const ulong WS, const ulong OH, const ulong OW, const ulong grad_size, const uint each_k,
            const ulong each, const ulong block, const int accumulate) {
    const size_t panels_k = (C + MR - 1) / MR, panels_m = (M + NR - 1) / NR;
    const size_t group = get_global_id(2), groups = get_global_size(2), part = get_global_id(1) * groups + group;
    const size_t first_k = get_global_id(0) * each_k, first_c = first_k * MR;
    const size_t channels = min((size_t)each_k * MR, C - first_c);
    const size_t phase = HS * WS, plane = 2 * phase, out_plane = OH * OW, place_floats = READ_FLOATS(each_k * MR);
    const size_t item = part * get_global_size(0) + get_global_id(0);
    __global float *read = work + item * PLACES * (place_floats + GRAD_FLOATS);
    __global float *grads = read + PLACES * place_floats;
    partial += part * PLACES * panels_k * panels_m * TILE;
    x += (group * C + first_c) * plane;
    grad += grad_begin + group * M * out_plane;
    const size_t size = grad_size - grad_begin - group * M * out_plane;
    const size_t begin = get_global_id(1) * each, end = min(begin + each, (size_t)columns);
    bool resume = accumulate;
    for (size_t j = begin; j < end; j += block, resume = true) {
        Run runs[BLOCK];
        const size_t tiles = min((size_t)block, end - j);
        const int count = find_runs(runs, j, j + tiles, positions, width, WS, OH, OW, groups * C * plane,
                                    groups * M * out_plane);
        for (size_t c = 0; c < channels; c++)
            for (int i = 0; i < count; i++)
                for (size_t t = 0; t < runs[i].tiles; t += 16) {
                    const size_t from = LAST_16(t, runs[i].tiles);
                    transform_read(x, c * plane + runs[i].read + from, WS, phase,
                                   read + c * BLOCK + runs[i].first + from, place_floats);
                }
        for (size_t P = 0; P < panels_m; P++) {
            transform_grads(grad + P * NR * out_plane, runs, count, min((size_t)NR, (size_t)M - P * NR), out_plane, OW,
                            size - P * NR * out_plane, grads);
            for (size_t place = 0; place < PLACES; place++)
                multiply_place(read + place * place_floats, grads + place * GRAD_FLOATS, channels, tiles,
                               partial + ((place * panels_k + first_k) * panels_m + P) * TILE, panels_m * TILE, resume);
        }
    }
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// At s: three values of four.
#define TRANSFORM_SUMS(y0, y1, y2, s0, s1, s2, s3)           \
    {                                                        \
        const float16 half_sum = 0.5f * (s1 + s2);           \
        y0 = s0 + half_sum;                                  \
        y1 = 0.5f * (s1 - s2);                               \
        y2 = half_sum - s3;                                  \
    }

// grad[group][m][c][3][3] from the sums of `chunks` chunks. Work-item (panel of c, panel of m, group).
__kernel ONE_WORK_ITEM void weight_grad_finish(__global const float *restrict partial,
                                               __global STORAGE(OUT_T) *restrict grad, const ulong M, const ulong C,
                                               const uint chunks) {
    const size_t panels_k = get_global_size(0), panels_m = get_global_size(1), groups = get_global_size(2);
    const size_t c = get_global_id(0) * MR, m = get_global_id(1) * NR, group = get_global_id(2);
    const size_t place_floats = panels_k * panels_m * TILE, chunk_floats = groups * PLACES * place_floats;
    partial += group * PLACES * place_floats + (get_global_id(0) * panels_m + get_global_id(1)) * TILE;
    const size_t rows = min((size_t)MR, (size_t)C - c), lanes = min((size_t)NR, (size_t)M - m);
    for (size_t i = 0; i < rows; i++)
        for (size_t l = 0; l < lanes; l += 16) {
            float16 s[4][4], t[3][4], y[3][3];
            for (int place = 0; place < PLACES; place++) {
                __global const float *sums = partial + place * place_floats + i * NR + l;
                float16 sum = LOAD16(f32, sums, 0);
                for (uint k = 1; k < chunks; k++) sum += LOAD16(f32, sums, k * chunk_floats);
                s[place / 4][place % 4] = sum;
            }
            for (int j = 0; j < 4; j++) TRANSFORM_SUMS(t[0][j], t[1][j], t[2][j], s[0][j], s[1][j], s[2][j], s[3][j])
            for (int k = 0; k < 3; k++) TRANSFORM_SUMS(y[k][0], y[k][1], y[k][2], t[k][0], t[k][1], t[k][2], t[k][3])
            for (int tap = 0; tap < 9; tap++) {
                float values[16];
                vstore16(y[tap / 3][tap % 3], 0, values);
                for (size_t k = 0; k < 16 && l + k < lanes; k++)
                    STORE(OUT_T, values[k], grad, ((group * M + m + l + k) * C + c + i) * 9 + tap);
            }
        }
}
#endif
