// conv_amx_grad.cl: the weight gradient of a convolution on the matrix unit of x86 processors (amx.clh).
//
//      partial[m][c] of a tap = sum over positions v of grad[m][v] * staged[v + tap][c]
//
//      grads   panels of A, [32 output channels][step][channel][32 positions] ushort: steps of the sum are 32 positions,
//              numbered as in conv_amx.cl. What lies between two rows is zero.
//      staged  [image][32 channels][position of the plane][channel] uint: a channel's elements at a position and the
//              next, a pair of k, so that a step of B lies ready for every tap, whether it is an even or an odd number of
//              positions away: 16 pairs of positions, every other row.
//
//      positions    0 1 2 3 4 ...            rows of `staged`    01 12 23 34 ...      tap 0: 01 23 45 ...  tap 1: 12 34 ...
//
// A block of images, or of rows of one, is summed up in the tiles, and added to `partial`, [chunk][group][32 channels]
// [tap][32 output channels][output channel][channel]; `weight_grad_finish` adds the chunks and rounds to storage.
//
// Elements between two rows of positions meet zeros. Where one of a channel's is not finite that would make a NaN: then
// a tap gets rows of its own (`masked`), in which they are zero.
//
//   EXPONENT       the bits of an element that are all set where it is not finite
//   OUT_T          storage type of the gradient
//   PARTS, DOT_F16, EMULATE   as in amx.clh; of two parts the lower ones of all that is staged lie behind the upper ones
//
// M: output channels of a group. `work` has a slice for each work-item.

#define SUMS_SPACE __global
#include "amx.clh"

#ifdef WEIGHT_GRAD
#include "conv_amx_stage.clh"

// Lines of 32 channels, as pairs of neighbouring positions, position after position; lower parts `low` words behind.
static inline void transpose_pairs(__global const ushort *lines, size_t line, __global float *rows, size_t plane,
                                   size_t low) {
    for (size_t at = 0; at < plane; at += 32)
        for (uint odd = 0; odd < 2; odd++)
            for (uint right = 0; right < 2; right++) {
                float16 v[16];
                _Pragma("unroll") for (uint c = 0; c < 16; c++) {
                    __global const ushort *from = lines + (right * 16 + c) * line + at + odd;
                    v[c] = (float16)(as_float8(LOAD_ANY(ushort16, from)), as_float8(LOAD_ANY(ushort16, from + 16)));
                }
                transpose_16(v);
                _Pragma("unroll") for (uint p = 0; p < 16; p++) {
                    __global float *to = rows + (at + 2 * p + odd) * SIDE + right * 16;
#if PARTS == 2
                    const parts_of_pairs parts = split_pairs(v[p]);
                    STORE_ANY(float16, parts.high, to);
                    STORE_ANY(float16, parts.low, to + low);
#else
                    STORE_ANY(float16, v[p], to);
#endif
                }
            }
}

// Whether all elements of 32 lines are finite.
static inline bool all_finite(__global const ushort *lines, size_t line) {
    ushort16 strange = 0;
    for (size_t i = 0; i < SIDE * line; i += 16) {
        const ushort16 bits = LOAD_ANY(ushort16, lines + i) & (ushort)EXPONENT;
        strange |= as_ushort16(bits == (ushort16)(EXPONENT));
    }
    const ulong4 lanes = as_ulong4(strange);
    return !(lanes.x | lanes.y | lanes.z | lanes.w);
}

// The gradients of up to 32 channels at `tall` rows of positions, as a panel of A; by way of a line.
static inline void stage_grads(source grad, size_t size, size_t at, size_t channel_size, size_t count,
                               __global ushort *to, __global ushort *panel, size_t tall, size_t line, size_t width,
                               size_t steps) {
    for (size_t c = 0; c < SIDE; c++, at += channel_size, panel += SIDE) {
        for (size_t r = 0; r < tall && c < count; r++) {
            for (size_t q = 0; q < width; q += 16)
                STORE_ANY(ushort16, read_elements(grad, at + r * width + q, 1, min(width - q, (size_t)16), size),
                          to + r * line + q);
            clear(to, r * line + width, r + 1 < tall ? (r + 1) * line : steps * SIDE);
        }
        if (c >= count) clear(to, 0, steps * SIDE);
        for (size_t step = 0; step < steps; step++)
            for (uint i = 0; i < SIDE; i += 16)
            {
                const ushort16 v = LOAD_ANY(ushort16, to + step * SIDE + i);
#if PARTS == 2
                const float16 wide = halves(v), high = as_float16(as_uint16(wide) & 0xffff0000u);
                STORE_ANY(ushort16, convert_ushort16(as_uint16(high) >> 16), panel + step * 2 * SUMS + i);
                STORE_ANY(ushort16, convert_ushort16(as_uint16(wide - high) >> 16), panel + (step * 2 + 1) * SUMS + i);
#else
                STORE_ANY(ushort16, v, panel + step * SUMS + i);
#endif
            }
    }
}

// Work-item (share of the blocks of 32 input channels, chunk of `each` images, group).
__kernel ONE_WORK_ITEM void
weight_grad(source x, source grad, __global const ulong *restrict taps, __global float *restrict partial,
            __global ulong *restrict work, const ulong size, const ulong grad_size, const ulong batch,
            const ulong each, const ulong images, const ulong channels, const ulong M, const ulong tap_count,
            const ulong height, const ulong width, const ulong rows, const ulong line, STAGING_ARGUMENTS,
            const ulong work_words) {
    const size_t group = get_global_id(2), groups = get_global_size(2), panels = (M + SIDE - 1) / SIDE;
    const size_t bands = (height + rows - 1) / rows, plane = (STAGED_PLANE + 31) / 32 * 32;
    const size_t most = images * (((rows - 1) * line + width + SIDE - 1) / SIDE); // steps
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    const size_t blocks_k = (channels + SIDE - 1) / SIDE, begin = get_global_id(1) * each;
    const size_t stop = min(begin + each, (size_t)batch);
    partial += (get_global_id(1) * groups + group) * blocks_k * tap_count * panels * SUMS;
    __global ulong *offsets = work + item * work_words;
    __global float *sums = (__global float *)(offsets + (2 * most + 7) / 8 * 8);
    __global ushort *grads = (__global ushort *)(sums + PARTS * SUMS), *lines = grads + panels * most * PARTS * SUMS;
    const size_t part = (images * plane + 32) * SIDE; // words
    __global uint *staged = (__global uint *)(lines + SIDE * (plane + 32)), *masked = staged + PARTS * part;
    clear(lines, 0, SIDE * (plane + 32)); // what lies behind a line is read, too
    begin_tiles();
    bool resume = false;
    for (size_t first = begin; first < stop; first += images)
        for (size_t band = 0; band < bands; band++, resume = true) {
            const size_t count = min((size_t)images, stop - first), top = band * rows;
            const size_t tall = min((size_t)rows, height - top);
            const size_t positions = (tall - 1) * line + width, runs = (positions + SIDE - 1) / SIDE;
            const size_t steps = count * runs;
            for (size_t s = 0; s < steps; s++) {
                const size_t v = s % runs * SIDE;
                offsets[s] = (s / runs * plane + v / line * WS + v % line) * SIDE * sizeof(uint);
                offsets[most + s] = s * SUMS * sizeof(uint); // of `masked`
            }
            for (size_t n = 0; n < count; n++)
                for (size_t p = 0; p < panels; p++) {
                    const size_t channel = ((first + n) * groups + group) * M + p * SIDE;
                    stage_grads(grad, grad_size, (channel * height + top) * width, height * width, M - p * SIDE, lines,
                                grads + (p * steps + n * runs) * PARTS * SUMS, tall, line, width, runs);
                }
            for (size_t k = SHARE(0, 0, blocks_k); k < SHARE(0, 1, blocks_k); k++) {
                bool finite = true;
                for (size_t n = 0; n < count; n++) {
                    const size_t at = (((first + n) * groups + group) * channels + k * SIDE) * H * W;
                    stage_channels(x, size, at, channels - k * SIDE, lines, plane + 32, top, STAGING);
                    finite = finite && all_finite(lines, plane + 32);
                    transpose_pairs(lines, plane + 32, (__global float *)staged + n * plane * SIDE, plane,
                                    part);
                }
                for (size_t i = 0; i < SIDE * SIDE; i += 16) // what the last step reads beyond
                    for (uint low = 0; low < PARTS; low++)
                        STORE_ANY(uint16, (uint16)(0), staged + low * part + count * plane * SIDE + i);
                for (size_t tap = 0; tap < tap_count; tap++) {
                    __global const uint *from = staged + taps[tap] * SIDE;
                    for (size_t s = 0; s < steps && !finite; s++)
                        for (size_t i = 0; i < SIDE; i += 2) {
                            const size_t v = s % runs * SIDE + i;
                            const uint low = v < positions && v % line < width ? 0xffffu : 0;
                            const uint high = v + 1 < positions && (v + 1) % line < width ? 0xffff0000u : 0;
                            for (size_t c = 0; c < PARTS * SIDE; c++)
                                masked[c / SIDE * most * SUMS + (s * SIDE + i) * SIDE + c % SIDE] =
                                    from[c / SIDE * part + offsets[s] / sizeof(uint) + i * SIDE + c % SIDE] &
                                    (low | high);
                        }
                    __global const uint *b = finite ? from : masked, *b_low = b + (finite ? part : most * SUMS);
                    __global const ulong *at = finite ? offsets : offsets + most;
                    for (size_t p = 0; p < panels; p++) {
                        const lines_a a = (lines_a)(grads + p * steps * PARTS * SUMS);
                        multiply_at(a, (lines_b)b, (lines_b)b_low, 2 * SIDE * sizeof(uint), at, sums, steps, 0);
#if PARTS == 2
                        if (has_strange(sums)) {
                            multiply_high_at(a, (lines_b)b, (lines_b)b_low, 2 * SIDE * sizeof(uint), at, sums + SUMS,
                                             steps, 0);
                            replace_strange(sums, sums + SUMS);
                        }
#endif
                        __global float *sum = partial + ((k * tap_count + tap) * panels + p) * SUMS;
                        for (size_t i = 0; i < SUMS; i += 16) {
                            const float16 v = LOAD16(f32, sums, i);
                            STORE16(f32, resume ? LOAD16(f32, sum, i) + v : v, sum, i);
                        }
                    }
                }
            }
        }
    end_tiles();
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// Work-item (32 output channels, 32 input channels, group).
__kernel ONE_WORK_ITEM void
weight_grad_finish(__global const float *restrict partial, __global STORAGE(OUT_T) *restrict grad, const ulong M,
                   const ulong C, const ulong tap_count, const uint chunks) {
    const size_t panels = get_global_size(0), p = get_global_id(0), k = get_global_id(1), group = get_global_id(2);
    const size_t chunk = get_global_size(2) * get_global_size(1) * tap_count * panels * SUMS;
    partial += ((group * get_global_size(1) + k) * tap_count * panels + p) * SUMS;
    for (size_t m = 0; m < min((size_t)SIDE, M - p * SIDE); m++)
        for (size_t tap = 0; tap < tap_count; tap++)
            for (size_t c = 0; c < SIDE && k * SIDE + c < C; c += 16) {
                __global const float *from = partial + tap * panels * SUMS + m * SIDE + c;
                float16 sum = LOAD16(f32, from, 0);
                for (size_t i = 1; i < chunks; i++) sum += LOAD16(f32, from, i * chunk);
                float lanes[16];
                vstore16(sum, 0, lanes);
                const size_t at = ((group * M + p * SIDE + m) * C + k * SIDE + c) * tap_count + tap;
                for (size_t i = 0; i < 16 && k * SIDE + c + i < C; i++)
                    STORE(OUT_T, lanes[i], grad, at + i * tap_count);
            }
}
#endif
