// conv_amx.cl: a convolution on the matrix unit of x86 processors (amx.clh), without a matrix of patches.
//
// A work-item copies a block of the source (some images, or some rows of one) into its workspace, with the padding
// around it, 32 channels of a position next to one another, which is a row of A:
//
//      staged [image][32 channels][position of the plane][PARTS][channel] ushort
//
//      channels   0 0 0 0 0 0
//      0 to 31    0 p p p p 0        32 rows of A, a step of 32 k, lie ready for every tap of the kernel: taps differ in
//                 0 p p p p 0        the address only, by a multiple of 64 bytes (`offsets`, for each tap and 32
//                 0 0 0 0 0 0        channels). Channels that there are not are zero.
//
// Positions are numbered along the rows of outputs, `line` to a row: with what lies between two rows of a plane, whose
// sums are not stored, or as many as a row has if these are a multiple of 32.
//
//      line 6   0  1  2  3  .  .     line 4   0  1  2  3         A run is 32 of them, in one row or in several.
//               6  7  8  9  .  .              4  5  6  7
//
// Up to RUNS runs are multiplied by a panel of 32 output channels, which is read in parts of `part` steps: these stay in
// the first-level cache while the sums of each run rest in `sums`, [run][position][channel]. Transposed, they are stored.
//
//   OUT_T, BIAS_T  storage types of output and bias
//   RUNS           see above
//   PARTS, DOT_F16, EMULATE   as in amx.clh
//
// M: output channels of a group. `work` has a slice for each work-item.

#define ROW_WORDS (16 * PARTS) // of 32 channels of a position
#define A_PART 64
#define SUMS_SPACE __global
#include "amx.clh"
#include "epilogue.clh"
#include "conv_amx_stage.clh"

// 32 positions of 32 channels, transposed.
static inline void transpose_sums(__global float *sums) {
    for (uint i = 0; i < 2; i++)
        for (uint j = i; j < 2; j++) {
            __global float *upper = sums + i * 16 * SIDE + j * 16, *lower = sums + j * 16 * SIDE + i * 16;
            float16 u[16], v[16];
            _Pragma("unroll") for (uint k = 0; k < 16; k++) u[k] = LOAD_ANY(float16, upper + k * SIDE);
            transpose_16(u);
            if (i != j) {
                _Pragma("unroll") for (uint k = 0; k < 16; k++) v[k] = LOAD_ANY(float16, lower + k * SIDE);
                transpose_16(v);
                _Pragma("unroll") for (uint k = 0; k < 16; k++) STORE_ANY(float16, v[k], upper + k * SIDE);
            }
            _Pragma("unroll") for (uint k = 0; k < 16; k++) STORE_ANY(float16, u[k], lower + k * SIDE);
        }
}

// The sums of a channel at the positions [v, stop) of an image, in runs SUMS floats apart, to out[0] and following.
static inline void store_runs(__global const float *sums, __global STORAGE(OUT_T) *out, size_t v, size_t stop,
                              size_t line, size_t width, float bias, int relu) {
    // One beyond the last position. Stores reach beyond the end of a row, and the next row overwrites that.
    const size_t end = stop / line * width + min(stop % line, width);
    for (; line == width && v + 16 <= stop; v += 16)
        STORE16(OUT_T, epilogue(LOAD16(f32, sums, v / SIDE * SUMS + v % SIDE), bias, relu), out, v);
    for (size_t next; v < stop; v = next) {
        const size_t q = v % line, at = v / line * width + q;
        next = min(stop, v - v % SIDE + SIDE); // sums of a run lie together
        const size_t count = q < width ? min(next - v, width - q) : 0;
        for (size_t i = 0; i < count; i += 16) {
            const float16 sum = epilogue(LOAD16(f32, sums, v / SIDE * SUMS + v % SIDE + i), bias, relu);
            if (at + i + 16 <= end)
                STORE16(OUT_T, sum, out, at + i);
            else
                STORE_PART(OUT_T, sum, out, at + i, at + count);
        }
        next = min(next, v - q + (q < width ? width : line));
    }
}

// 16 positions of 32 channels from x[at] on, of which there are `count`, as rows of A.
static inline void stage_16(source x, size_t size, size_t at, size_t stride, size_t positions, size_t count,
                            size_t channel, __global float *to) {
    float16 v[16];
    if (stride == 1 && count >= SIDE && at + (SIDE - 1) * channel + 16 <= size) {
        _Pragma("unroll") for (uint c = 0; c < 16; c++) {
            source s = x + at + 2 * c * channel;
            v[c] = as_float16(convert_uint16(LOAD_ANY(ushort16, s)) |
                              convert_uint16(LOAD_ANY(ushort16, s + channel)) << 16);
        }
    } else {
        ONE_BY_ONE for (size_t c = 0; c < 16; c++) {
            const size_t s = at + 2 * c * channel;
            uint16 pairs = 0;
            if (2 * c < count) pairs = convert_uint16(read_elements(x, s, stride, positions, size));
            if (2 * c + 1 < count)
                pairs |= convert_uint16(read_elements(x, s + channel, stride, positions, size)) << 16;
            v[c] = as_float16(pairs);
        }
    }
    transpose_16(v);
    _Pragma("unroll") for (uint p = 0; p < 16; p++) {
#if PARTS == 2
        const parts_of_pairs parts = split_pairs(v[p]);
        STORE_ANY(float16, parts.high, to + p * ROW_WORDS);
        STORE_ANY(float16, parts.low, to + p * ROW_WORDS + 16);
#else
        STORE_ANY(float16, v[p], to + p * ROW_WORDS);
#endif
    }
}

static inline void clear_rows(__global float *to, size_t rows) {
    for (size_t i = 0; i < rows * ROW_WORDS; i += 16) STORE_ANY(float16, (float16)(0.0f), to + i);
}

// A plane of 32 channels, of which there are `count`, the first at x[at], as rows of A. Positions are written in ascending
// order, and up to 15 beyond the last of a row.
APART void stage_plane_of_rows(source x, size_t size, size_t at, size_t count, __global float *to, size_t top,
                               STAGING_ARGUMENTS) {
    EACH_STAGED_ROW(to, WS * ROW_WORDS, clear_rows(to, WS),
        clear_rows(to, left);
        for (size_t u = left; u < right; u += 16, from += 16 * stride_x)
            stage_16(x, size, at + from, stride_x, right - u, count, H * W, to + u * ROW_WORDS);
        clear_rows(to + right * ROW_WORDS, WS - right);)
}

// A convolution, or one of those that an input gradient consists of, for each remainder of the position by the stride.
// As a row of the table `correlations`: 64 bits each.
typedef struct {
    ulong first, steps, part; // of `offsets`, and how many of them are read at a time
    ulong height, width, line; // of the positions
    ulong weights, out;        // where its panels begin, in bytes, and its results, in elements
} correlation;

// Work-item (share of the blocks of `images` images, or of `rows` rows of one; share of the panels of weights; group).
__kernel ONE_WORK_ITEM void
conv(__global const uchar *restrict weights, source x, __global const ulong *restrict correlations,
     __global const ulong *restrict offsets, __global STORAGE(OUT_T) *restrict out,
     __global const STORAGE(BIAS_T) *restrict bias, __global float *restrict work, const ulong correlation_count,
     const ulong size, const ulong batch, const ulong images, const ulong rows, const ulong bands,
     const ulong channels, const ulong M, STAGING_ARGUMENTS, const ulong work_words, const int has_bias,
     const int relu) {
    const size_t group = get_global_id(2), groups = get_global_size(2), panels = (M + SIDE - 1) / SIDE;
    const size_t blocks = (batch + images - 1) / images * bands, blocks_k = (channels + SIDE - 1) / SIDE;
    const size_t plane = (STAGED_PLANE + 15) / 16 * 16;
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    __global float *sums = work + item * work_words;
    __global float *staged = sums + (RUNS + PARTS - 1) * SUMS;
    begin_tiles();
    for (size_t block = SHARE(0, 0, blocks); block < SHARE(0, 1, blocks); block++) {
        const size_t first = block / bands * images, count = min((size_t)images, batch - first);
        const size_t top = block % bands * rows;
        for (size_t n = 0; n < count; n++)
            for (size_t k = 0; k < blocks_k; k++)
                stage_plane_of_rows(x, size, (((first + n) * groups + group) * channels + k * SIDE) * H * W,
                                    channels - k * SIDE, staged + (n * blocks_k + k) * plane * ROW_WORDS, top, STAGING);
        for (size_t i = 0; i < correlation_count; i++) {
            const correlation c = ((__global const correlation *)correlations)[i];
            if (top >= c.height) continue;
            const size_t line = c.line, tall = min((size_t)rows, c.height - top);
            const size_t positions = (tall - 1) * line + c.width, runs = (positions + SIDE - 1) / SIDE;
            const size_t all = count * runs;
            for (size_t from = 0; from < all; from += RUNS) {
                const size_t to = min(from + RUNS, all);
                for (size_t p = SHARE(1, 0, panels); p < SHARE(1, 1, panels); p++) {
                    __global const uchar *panel = weights + c.weights + (group * panels + p) * c.steps * STEP_BYTES;
                    for (size_t j = 0; c.steps == 0 && j < (to - from) * SUMS; j++) sums[j] = 0.0f;
                    for (size_t step = 0; step < c.steps; step += c.part)
                        for (size_t run = from; run < to; run++) {
                            const size_t v = run % runs * SIDE;
                            const size_t at = run / runs * blocks_k * plane + v / line * WS + v % line;
                            multiply_rows((lines_a)(staged + at * ROW_WORDS), 4 * ROW_WORDS, offsets + c.first + step,
                                          panel + step * STEP_BYTES, sums + (run - from) * SUMS,
                                          min(c.part, c.steps - step), step > 0);
                        }
#if PARTS == 2
                    for (size_t run = from; run < to; run++) {
                        const size_t v = run % runs * SIDE, at = run / runs * blocks_k * plane + v / line * WS + v % line;
                        if (!has_strange(sums + (run - from) * SUMS)) continue;
                        multiply_high_rows((lines_a)(staged + at * ROW_WORDS), 4 * ROW_WORDS, offsets + c.first, panel,
                                           sums + RUNS * SUMS, c.steps, 0);
                        replace_strange(sums + (run - from) * SUMS, sums + RUNS * SUMS);
                    }
#endif
                    for (size_t run = from; run < to; run++) transpose_sums(sums + (run - from) * SUMS);
                    for (size_t m = p * SIDE; m < min((p + 1) * SIDE, (size_t)M); m++) {
                        const size_t channel = group * M + m;
                        for (size_t run = from, next; run < to; run = next) {
                            next = min((run / runs + 1) * runs, to); // of one image
                            const size_t v = run % runs * SIDE, plane_of = (first + run / runs) * groups * M + channel;
                            store_runs(sums + ((run - from) * SIDE + m % SIDE) * SIDE - v / SIDE * SUMS,
                                       out + c.out + (plane_of * c.height + top) * c.width, v,
                                       min(v + (next - run) * SIDE, positions), line, c.width, BIAS(channel), relu);
                        }
                    }
                }
            }
        }
    }
    end_tiles();
}
