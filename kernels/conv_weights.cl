// conv_weights.cl: a convolution's weights, packed into panels of rows in the order in which its kernels read them.
//
//      weights of a group                     [block of KC steps][panel][step][row]     What is read one after the
//                                                                                       other lies so, or a page
//      m  0    step = (channel, tap) ->       block 0          block 1                  would be left after each
//      |  +-------------------------+         +-------------+  +-------------+          panel's part of a block.
//      v  |        panel 0          |   -->   | 0 | 1 | ... |  | 0 | 1 | ... |
//         +-------------------------+         +-------------+  +-------------+          Rows beyond M are zero.
//         |        panel 1          |
//
//   SRC_T          storage type of the weights
//   WIDTH, SHORT   rows of the first `tall` panels and of the others
//   KC             steps of a block
//   PAIRS          0: an element is a float. 1: the weights are bfloat16, and an element is a pair of them as they are,
//                  of k = 2 step and 2 step + 1 (zero beyond K).

#if PAIRS
#define K_PER_STEP 2
#define ELEMENT ushort
#define READ(at) w[at]
#else
#define K_PER_STEP 1
#define ELEMENT float
#define READ(at) LOAD(SRC_T, w, at)
#endif

// Rows of the panels before panel p, of which `tall` have WIDTH.
#define ROWS_BEFORE(p) (min((size_t)(p), (size_t)tall) * WIDTH + (max((size_t)(p), (size_t)tall) - tall) * SHORT)

// k = (channel c, tap (i, j)) of row m is the weight at
// group * stride_group + m * stride_m + c * stride_c + first + i * step_y + j * step_x.
// Work-item (panel, block of KC steps, group).
__kernel ONE_WORK_ITEM void
pack_weights(__global const STORAGE(SRC_T) *restrict w, __global ELEMENT *restrict panels, const ulong M, const ulong K,
             const uint taps_y, const uint taps_x, const ulong stride_group, const ulong stride_m,
             const ulong stride_c, const uint first, const uint step_y, const uint step_x, const uint tall) {
    const size_t all_steps = (K + K_PER_STEP - 1) / K_PER_STEP;
    const size_t panel = get_global_id(0), m = ROWS_BEFORE(panel), group = get_global_id(2);
    const size_t step = get_global_id(1) * KC, steps = min((size_t)KC, all_steps - step), begin = step * K_PER_STEP;
    const size_t height = panel < tall ? WIDTH : SHORT, rows = min(height, (size_t)M - m);
    w += group * stride_group + m * stride_m + first;
    panels += ((group * all_steps + step) * ROWS_BEFORE(get_global_size(0)) + m * steps) * K_PER_STEP;
    uint y = begin % (taps_y * taps_x) / taps_x, x = begin % taps_x;
    w += begin / (taps_y * taps_x) * stride_c;
    for (size_t k = 0; k < steps * K_PER_STEP; k++) {
        const size_t at = y * step_y + x * step_x;
        for (size_t i = 0; i < height; i++)
            panels[(k / K_PER_STEP * height + i) * K_PER_STEP + k % K_PER_STEP] =
                i < rows && begin + k < K ? READ(at + i * stride_m) : 0;
        if (++x < taps_x) continue;
        x = 0;
        if (++y < taps_y) continue;
        y = 0;
        w += stride_c;
    }
}
