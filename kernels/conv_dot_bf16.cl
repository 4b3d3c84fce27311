// conv_dot_bf16.cl: a convolution of bfloat16 by bfloat16 by the processor's dot product (dot_bf16.clh). It is
// conv_packed.cl with pairs of steps in place of steps:
//
//      weights [block of KC][panel][step][row]    panel [step][32]               Bits are moved as they are, and never
//                                                  32 positions                  widened. A work-item copies a block of
//      m   0   step = a pair of k ->              +-----------+-----------+      steps of 32 positions into its panel,
//      |   +-------------+                  step  | k   k + 1 | of a position,   multiplies all its panels of weights
//      v   | panel 0     |                   |    | low  high |  and so on       by it, then does the next block. Sums
//    12, 8 +-------------+                   v    +-----------+-----------+      rest in between in `sums`.
//
//   KC   steps of a block
//   OUT_T, BIAS_T   storage types of output and bias
//
// M, K: output channels of one group, and its offsets, two to a step; all else is as in conv_packed.cl.

#include "dot_bf16.clh"
#define X_T bf16
#define PAIRS 1
#include "conv_positions.clh"
#include "epilogue.clh"

// Work-item (share of the panels of positions, share of the panels of output channels, `each_m` at most; group).
__kernel ONE_WORK_ITEM void
conv(__global const uint *restrict weights, __global const ushort *restrict x, __global const ulong *restrict offsets,
     __global STORAGE(OUT_T) *restrict out, __global const STORAGE(BIAS_T) *restrict bias, __global uint *restrict work,
     const ulong out_begin, const ulong columns, const ulong M, const ulong K, const ulong positions, const ulong width,
     const ulong pitch, const ulong image, const ulong group_size, const ulong size, const ulong reach,
     const ulong out_image, const uint panels_m, const uint tall, const uint each_m,
     const int has_bias, const int relu) {
    const size_t panels_j = (columns + NR - 1) / NR, group = get_global_id(2);
    const size_t first_j = SHARE(0, 0, panels_j), last_j = SHARE(0, 1, panels_j);
    const size_t first_m = SHARE(1, 0, panels_m), last_m = SHARE(1, 1, panels_m);
    const size_t begin = ROWS_BEFORE(first_m), end = ROWS_BEFORE(last_m), all_rows = ROWS_BEFORE(panels_m);
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    __global uint *panel = work + item * (KC * NR + (size_t)each_m * TILE);
    __global float *sums = (__global float *)(panel + KC * NR);
    weights += group * STEPS(K) * all_rows;
    out += out_begin;
    for (size_t i = 0; K == 0 && i < (end - begin) * NR; i++) sums[i] = 0.0f; // the epilogue of nothing
    for (size_t j = first_j * NR; j < last_j * NR; j += NR) {
        for (size_t k = 0; k < K; k += 2 * KC) {
            const int count = (int)min((size_t)(2 * KC), (size_t)K - k), steps = STEPS(count);
            for (int v = 0; v < NR && j + v < columns; v += 16) // what lies beyond is never stored
                pack_positions(x, offsets + k, count, panel + v, j + v, columns, positions, width, pitch, image,
                               group * group_size, size, reach);
            multiply_column(weights + k / 2 * all_rows + begin * steps, panel, sums, first_m, last_m, tall, steps,
                            k > 0);
        }
        for (int v = 0; v < NR && j + v < columns; v += 16) {
            const long at = together_at(j + v, columns, positions, out_image);
            for (size_t m = begin; m < min(end, (size_t)M); m++) {
                const float16 sum = LOAD16(f32, sums, (m - begin) * NR + v);
                const size_t channel = group * M + m;
                store_positions(epilogue(sum, BIAS(channel), relu), out, channel * positions, j + v, columns,
                                positions, out_image, at);
            }
        }
    }
}
