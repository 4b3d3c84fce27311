// layer_scale.cl: by how much a gradient is multiplied before it is rounded to 16 bits, a power of two, and back after.
//
//   x         |---- span ----|---- span ----|-- ... --|      n elements
//                    |              |           |
//   largest   |      m0      |      m1      |   ...   |      magnitudes, one a part; NaNs are passed over
//                    '-------.------'-- ... ----'
//   fit             up = 2^k, down = 2^-k                    largest * 2^k is from 2^(top - 1) to 2^top
//
// top is 8 where the loss scale is 2^16 or more: 8 octaves are free above, for what an op computes on its way, and 22 of
// normal float16 below, 10 more of subnormal. Where that overflows all the same, the loss scale goes down, and top with it.
//
//   X_T        storage type of x
//   WG         work-items of a work-group, which does `each` parts, one after the other: 1 on CPU devices
//   PIECES     of pieces.clh

#include "lanes.clh"
#include "pieces.clh"

#define SCALE 2 // the word of a loss scale's state (loss_scale.cl)
#define TOP 8
#define USUAL_EXPONENT 16 // of the loss scale
#define POWER_OF_TWO(k) as_float((127 + (k)) << 23)

static inline int exponent_of_normal(float x) { return (as_int(x) >> 23) - 127; }
// Of a positive number, subnormal ones too.
static inline int exponent_of(float x) {
    return x < 0x1p-126f ? exponent_of_normal(x * 0x1p24f) - 24 : exponent_of_normal(x);
}

__kernel void largest(__global const STORAGE(X_T) *restrict x, __global float *restrict parts, const ulong n,
                      const ulong span, const uint count, const uint each) {
    SCRATCH;
    for (uint r = 0; r < each; r++) {
        const uint part = get_group_id(0) * each + r;
        if (part >= count) return;
        const ulong begin = part * span, end = min(begin + span, n);
        float16 lanes = 0.0f;
        for (ulong i = begin + 16 * get_local_id(0); i < end; i += 16 * WG)
            lanes = fmax(lanes, fabs(i + 16 <= end ? LOAD16(X_T, x, i) : LOAD_PART(X_T, x, i, end, 0.0f)));
        const float top = group_max(max_of_floats(lanes), scratch);
        if (get_local_id(0) == 0) parts[part] = top;
    }
}

// One work-item. What is inf, or nothing but zeros, stays as it is.
__kernel void fit(__global const float *restrict parts, __global float *restrict up, __global float *restrict down,
                  __global const float *restrict state, const uint count) {
    float largest_of_all = 0.0f;
    for (uint i = 0; i < count; i++) largest_of_all = fmax(largest_of_all, parts[i]);
    int k = 0;
    if (largest_of_all > 0.0f && isfinite(largest_of_all)) {
        const int top = TOP + min(exponent_of(state[SCALE]) - USUAL_EXPONENT, 0);
        k = clamp(top - 1 - exponent_of(largest_of_all), -126, 126);
    }
    up[0] = POWER_OF_TWO(k);
    down[0] = POWER_OF_TWO(-k);
}
