// numerics.cl: what the elements of many tensors are as numbers, one launch over all of them (slots.clh): how many lie
// above some magnitudes, the greatest, the least, and their sum.
//
//   tensors   x_0 |--------|--------|---|    x_1 |----|   ...   cut into tiles, a work-group each
//
//   results   | row of tile 0 | row of tile 1 | ...             ROW words each
//
//   a row     | tensor | not 0 | 2^-24 and above | above 65504 | inf or nan | nan | greatest | least | sum | factor |
//
// The host puts the rows of a tensor together, so that nothing has to be set to zero before, and no order changes a sum.
// The greatest and the least are floats and pass over nan: -inf and inf where there is nothing else. The sum is one of
// floats, in fp32, to be multiplied by the factor: where plain sums leave a float's range, elements are divided by it
// first.
//
//   X_T      storage type
//   DECADES  of slots.clh: SLOTS = 10, 20 ... 100
//   WG       work-items of a work-group: 1 on CPU devices
//   PIECES   of pieces.clh

#include "lanes.clh"
#include "pieces.clh"
#include "slots.clh"

#define ROW 10
#define COUNTS 5
#define SOURCE_PARAMETER(k) , __global const STORAGE(X_T) *x##k
#define SLOT_CASE(k) case k: x = x##k; break;

// By the bits, so that no compiler setting can assume inf and nan away.
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define LARGEST_HALF 0x477fe000u  // 65504
#define SMALLEST_HALF 0x33800000u // 2^-24

#define FACTOR 131072.0f // 2^17: a tile has 2^16 elements at most

#define ABOVE(least, v) sum_of_uints(min(sub_sat(v, (uint16)(least)), (uint16)1)) // how many

// As TERMS of group_sum.clh: lanes stay apart on CPUs, and would take registers on GPUs.
#if WG == 1
#define EXTREMES float16
#define EXTREME(v) (v)
#define EXTREME_OF(v) max_of_floats(v)
#else
#define EXTREMES float
#define EXTREME(v) max_of_floats(v)
#define EXTREME_OF(v) (v)
#endif

// The elements from i on, nan past the end, and which of them are there.
#define NEXT(v, there, i)                                 \
    const float16 v = LOAD_PART(X_T, x, i, t.count, NAN); \
    const int16 there = (i) + (uint16)(LANE_NUMBERS) < t.count;

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
numerics(__global const tile *restrict tiles, __global uint *results EACH_SLOT(SOURCE_PARAMETER)) {
    __local uint counts[COUNTS];
    SCRATCH;
    for (uint i = get_local_id(0); i < COUNTS; i += WG) counts[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);

    const tile t = tiles[get_group_id(0)];
    __global const STORAGE(X_T) *x;
    switch (t.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    x += t.begin;
    uint not_zero = 0, normal = 0, beyond = 0, bad = 0, nans = 0;
    EXTREMES greatest = -INFINITY, negated_least = -INFINITY;
    GROUP_TERMS sums = 0.0f;
    for (uint i = 16 * get_local_id(0); i < t.count; i += 16 * WG) {
        NEXT(v, there, i)
        const uint16 magnitude = select((uint16)(0), as_uint16(v) & MAGNITUDE, there);
        not_zero += ABOVE(0, magnitude);
        normal += ABOVE(SMALLEST_HALF - 1, magnitude);
        beyond += ABOVE(LARGEST_HALF, magnitude);
        bad += ABOVE(INFINITE - 1, magnitude);
        nans += ABOVE(INFINITE, magnitude);
        greatest = fmax(greatest, EXTREME(v));
        negated_least = fmax(negated_least, EXTREME(-v));
        sums += TERMS(select((float16)(0.0f), v, there));
    }
    atomic_add(&counts[0], not_zero);
    atomic_add(&counts[1], normal);
    atomic_add(&counts[2], beyond);
    atomic_add(&counts[3], bad);
    atomic_add(&counts[4], nans);
    const float top = group_max(EXTREME_OF(greatest), scratch);
    const float bottom = -group_max(EXTREME_OF(negated_least), scratch);
    float total = group_sum(TERMS_SUM(sums), scratch), factor = 1.0f;
    if ((as_uint(total) & MAGNITUDE) >= INFINITE) { // the same for all of a group
        factor = FACTOR;
        GROUP_TERMS parts = 0.0f;
        for (uint i = 16 * get_local_id(0); i < t.count; i += 16 * WG) {
            NEXT(v, there, i)
            parts += TERMS(select((float16)(0.0f), v / FACTOR, there));
        }
        total = group_sum(TERMS_SUM(parts), scratch);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0)) return;
    __global uint *const row = results + ROW * get_group_id(0);
    row[0] = t.tensor;
    for (uint i = 0; i < COUNTS; i++) row[1 + i] = counts[i];
    row[6] = as_uint(top);
    row[7] = as_uint(bottom);
    row[8] = as_uint(total);
    row[9] = as_uint(factor);
}
