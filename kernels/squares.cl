// squares.cl: the squares of all elements of many tensors, added up, one launch over all of them (slots.clh); and the
// tensors made shorter by them.
//
//   tensors   x_0 |--------|---|    x_1 |-----|    ...      SLOTS of them, in tiles
//                     |       |           |
//   sums      | low mid high | low mid high | ... |         three a tile, from tile `first` on
//
// A square has twice the exponent of a float32. What is below 2^-50 is multiplied by 2^90 before it is squared, and what is
// not below 2^40, inf and nan too, by 2^-90; each kind has a sum of its own, so that none is lost or becomes inf (J. L.
// Blue, A portable Fortran program to find the Euclidean norm of a vector, ACM TOMS 4, 1978). notes.cl adds the sums up.
//
// `clip` multiplies all elements, if the norm of all is larger than `longest`, by their quotient, each kind of norm in its
// own exponents; total[0] is the square of the norm before.
//
//   X_T        storage type; of what is clipped f32
//   CLIP       1: `clip` alone is built; 0, the default: `squares` alone
//   DECADES    of slots.clh: SLOTS = 10, 20 ... 100
//   WG         work-items of a work-group, which has a tile: 1 on CPU devices
//   PIECES     of pieces.clh

#include "lanes.clh"
#include "pieces.clh"
#include "slots.clh"

#define SOURCE_PARAMETER(k) , __global const STORAGE(X_T) *x##k
#define SLOT_CASE(k) case k: x = x##k; break;

#define LOW 0x1p-50f
#define HIGH 0x1p40f
#define UP 0x1p90f
#define DOWN 0x1p-90f

#ifndef CLIP
#define CLIP 0
#endif
#if CLIP

#define TARGET_PARAMETER(k) , __global float *x##k

__kernel void clip(__global const tile *restrict tiles, __global const float *restrict sums, const float longest,
                   __global float *restrict total EACH_SLOT(TARGET_PARAMETER)) {
    const tile t = tiles[get_group_id(0)];
    const float low = sums[0], mid = sums[1], high = sums[2];
    if (get_global_id(0) == 0) total[0] = high / DOWN / DOWN + mid + low / UP / UP;
    const float shift = !(high == 0.0f) ? DOWN : mid > 0.0f ? 1.0f : UP;
    const float norm =
        sqrt(!(high == 0.0f) ? high + mid * DOWN * DOWN : mid > 0.0f ? mid + low / UP / UP : low);
    if (norm == 0.0f || norm <= longest * shift) return;
    // The quotient's root, twice: it is a float where the quotient of very large and very small is none.
    const float factor = sqrt(longest / norm) * (shift == DOWN ? 0x1p-45f : shift == UP ? 0x1p45f : 1.0f);
    __global float *x = x0;
    switch (t.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    x += t.begin;
    const size_t vectors = t.count / 16;
    for (size_t i = get_local_id(0); i < vectors; i += get_local_size(0))
        STORE16(f32, LOAD16(f32, x, 16 * i) * factor * factor, x, 16 * i);
    ONE_BY_ONE for (size_t i = 16 * vectors + get_local_id(0); i < t.count; i += get_local_size(0))
        STORE(f32, LOAD(f32, x, i) * factor * factor, x, i);
}

#else

#define TAKE(values)                                                       \
    {                                                                      \
        const float16 v = values;                                          \
        const int16 is_low = fabs(v) < LOW, is_high = !(fabs(v) < HIGH);   \
        const float16 lifted = v * UP, usual = v, lowered = v * DOWN;      \
        low += select((float16)0.0f, lifted * lifted, is_low);             \
        mid += select(usual * usual, (float16)0.0f, is_low | is_high);     \
        high += select((float16)0.0f, lowered * lowered, is_high);         \
    }

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
squares(__global const tile *restrict tiles, __global float *sums, const ulong first EACH_SLOT(SOURCE_PARAMETER)) {
    const tile t = tiles[get_group_id(0)];
    __global const STORAGE(X_T) *x = x0;
    switch (t.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: break;
    }
    x += t.begin;
    float16 low = 0.0f, mid = 0.0f, high = 0.0f;
    const uint whole = t.count / 16 * 16;
    for (uint i = 16 * get_local_id(0); i < whole; i += 16 * WG) TAKE(LOAD16(X_T, x, i));
    if (whole < t.count && get_local_id(0) == whole / 16 % WG) TAKE(LOAD_PART(X_T, x, whole, t.count, 0.0f));

    __local float own[3 * WG];
    own[get_local_id(0)] = sum_of_floats(low);
    own[WG + get_local_id(0)] = sum_of_floats(mid);
    own[2 * WG + get_local_id(0)] = sum_of_floats(high);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint kind = get_local_id(0); kind < 3; kind += WG) {
        float sum = 0.0f;
        for (uint i = 0; i < WG; i++) sum += own[kind * WG + i];
        sums[3 * (first + get_group_id(0)) + kind] = sum;
    }
}

#endif
