// squares.cl: the squares of all elements of many tensors, added up, one launch over all of them (slots.clh).
//
//   tensors   x_0 |--------|---|    x_1 |-----|    ...      SLOTS of them, in tiles
//                     |       |           |
//   sums      | low mid high | low mid high | ... |         three a tile, from tile `first` on
//
// A square has twice the exponent of a float32. What is below 2^-50 is multiplied by 2^90 before it is squared, and what is
// not below 2^40, inf and nan too, by 2^-90; each kind has a sum of its own, so that none is lost or becomes inf (J. L.
// Blue, A portable Fortran program to find the Euclidean norm of a vector, ACM TOMS 4, 1978). notes.cl adds the sums up.
//
//   X_T        storage type
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
