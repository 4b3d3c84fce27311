// statistics.cl: what the elements of many tensors are, one launch over all of them (slots.clh): how many are inf, nan
// and zero, the least and the greatest magnitude, and a histogram of magnitudes.
//
//   results   | ... | row of tensor 0 | row of tensor 1 | ...         HEAD + BINS words a row, from word `first` on
//
//   a row     | not zero | inf or nan | nan | -smallest | largest | bin 0 | bin 1 | ... | bin BINS - 1 |
//
//   bins      of an eighth of an octave: a float32's exponent and the three highest bits of its mantissa
//
//             2^-149        2^-126                                 2^128
//             |  23 octaves   |             254 octaves              |   FIRST_BIN 0, BINS 2216: every float32
//                (subnormal)              |  40   |                       FIRST_BIN 1000, BINS 320: every float16
//                                       2^-24   2^16
//
// Magnitudes are compared as the bits of a float32 without its sign, which are ordered as they are. All of a row are
// sums or maxima of integers, so that no order changes them, and begin at 0: of the smallest the row has the bits
// negated, the largest of which belong to the smallest magnitude, and 0 to a zero. A tile's last 16 elements may be
// filled up with zeros, which change nothing.
//
//   X_T        storage type
//   DECADES    of slots.clh: SLOTS = 10, 20 ... 100
//   BINS       counters of the histogram; 0: without one
//   FIRST_BIN  the bin, of those of float32, that is the first
//   WG         work-items of a work-group, which has a tile and a histogram of its own: 1 on CPU devices
//   PIECES     of pieces.clh

#include "pieces.clh"
#include "slots.clh"

#define HEAD 5
#define SOURCE_PARAMETER(k) , __global const STORAGE(X_T) *x##k
#define SLOT_CASE(k) case k: x = x##k; break;

#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

// On CPUs 16 lanes stay apart until the tile's end; on GPUs, which compute them one by one, they would take registers.
static inline uint sum_of(uint16 v) {
    const uint8 a = v.lo + v.hi;
    const uint4 b = a.lo + a.hi;
    return b.x + b.y + b.z + b.w;
}
static inline uint max_of(uint16 v) {
    const uint8 a = max(v.lo, v.hi);
    const uint4 b = max(a.lo, a.hi);
    return max(max(b.x, b.y), max(b.z, b.w));
}
#if WG > 1
typedef uint lanes;
#define SUM(v) sum_of(v)
#define MAX(v) max_of(v)
#define SUM_OF_LANES(v) (v)
#define MAX_OF_LANES(v) (v)
#else
typedef uint16 lanes;
#define SUM(v) (v)
#define MAX(v) (v)
#define SUM_OF_LANES(v) sum_of(v)
#define MAX_OF_LANES(v) max_of(v)
#endif
#define ABOVE(least, v) min(sub_sat(v, (uint16)(least)), (uint16)1) // 1 or 0

#if BINS
// Of zero, inf and nan: BINS and beyond. A subnormal's is found from its mantissa, a whole number, as a float.
static inline uint16 bins_of(uint16 magnitude) {
    const uint16 normal = (magnitude >> 20) + (184 - 8 - FIRST_BIN);
    const uint16 subnormal = (as_uint16(convert_float16(magnitude)) >> 20) - (127 * 8 + FIRST_BIN);
    return select(normal, subnormal, magnitude < 0x00800000u);
}

// What has no bin is counted by lanes, because counters that are written over and over are slow.
static inline void count_bins(__local uint *counters, uint16 magnitude) {
    uint bins[16];
    vstore16(min(bins_of(magnitude), BINS + (uint16)(LANE_NUMBERS)), 0, bins);
    for (uint k = 0; k < 16; k++) {
#if WG > 1
        if (bins[k] < BINS) atomic_inc(&counters[bins[k]]);
#else
        counters[bins[k]]++;
#endif
    }
}
#define COUNT_BINS(magnitude) count_bins(counters, magnitude)
#else
#define COUNT_BINS(magnitude)
#endif

#define TAKE(values)                                            \
    {                                                           \
        const uint16 magnitude = as_uint16(values) & MAGNITUDE; \
        not_zero += SUM(ABOVE(0, magnitude));                   \
        smallest = max(smallest, MAX(-magnitude));              \
        largest = max(largest, MAX(magnitude));                 \
        COUNT_BINS(magnitude);                                  \
    }

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
statistics(__global const tile *restrict tiles, __global uint *results, const ulong first EACH_SLOT(SOURCE_PARAMETER)) {
    __local uint head[HEAD];
    for (uint i = get_local_id(0); i < HEAD; i += WG) head[i] = 0;
#if BINS
    __local uint counters[BINS + 16];
    for (uint i = get_local_id(0); i < BINS; i += WG) counters[i] = 0;
#endif
    barrier(CLK_LOCAL_MEM_FENCE);

    const tile t = tiles[get_group_id(0)];
    __global const STORAGE(X_T) *x;
    switch (t.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    x += t.begin;
    lanes not_zero = 0, smallest = 0, largest = 0;
    const uint whole = t.count / 16 * 16;
    for (uint i = 16 * get_local_id(0); i < whole; i += 16 * WG) TAKE(LOAD16(X_T, x, i));
    if (whole < t.count && get_local_id(0) == whole / 16 % WG) TAKE(LOAD_PART(X_T, x, whole, t.count, 0.0f));
    uint top = MAX_OF_LANES(largest);
    if (top >= INFINITE) { // inf and nan are rare: only who has met one looks for them, at the same elements again
        uint bad = 0, nans = 0;
        top = 0;
        for (uint i = 16 * get_local_id(0); i < t.count; i += 16 * WG) {
            const uint16 magnitude = as_uint16(LOAD_PART(X_T, x, i, t.count, 0.0f)) & MAGNITUDE;
            bad += sum_of(ABOVE(INFINITE - 1, magnitude));
            nans += sum_of(ABOVE(INFINITE, magnitude));
            top = max(top, max_of(select(magnitude, 0u, magnitude >= INFINITE)));
        }
        atomic_add(&head[1], bad);
        atomic_add(&head[2], nans);
    }
    atomic_add(&head[0], SUM_OF_LANES(not_zero));
    atomic_max(&head[3], MAX_OF_LANES(smallest));
    atomic_max(&head[4], top);
    barrier(CLK_LOCAL_MEM_FENCE);

    __global uint *const row = results + first + t.tensor * (ulong)(HEAD + BINS);
    for (uint i = get_local_id(0); i < HEAD; i += WG) {
        if (i < 3) atomic_add(&row[i], head[i]);
        else atomic_max(&row[i], head[i]);
    }
#if BINS
    for (uint i = get_local_id(0); i < BINS; i += WG)
        if (counters[i]) atomic_add(&row[HEAD + i], counters[i]);
#endif
}
