// statistics.cl: what the elements of many tensors are, one launch over all of them (slots.clh): how many are inf, nan
// and zero, the least and the greatest magnitude, and a histogram of magnitudes.
//
//   results   | ... | row of tensor 0 | row of tensor 1 | ...         HEAD + BINS words a row, from word `first` on
//
//   a row     | not zero | inf or nan | nan | -smallest | largest | bin 0 | bin 1 | ... | bin BINS - 1 |
//
//   bins      14 an octave: its eighths, and within the first and the last of them where roundings turn:
//
//             {1}  (1, 9/8)  [9/8, 10/8)  ...  [15/8, A)  [A, B)  [B, -)  [-, C)  [C, D)  [D, 2)   times a power of two
//
//             A = 2 - 2^-7 and B = 2 - 2^-8: bfloat16's normal numbers begin there, and it overflows there, if
//             magnitudes are first multiplied by any power of two; C = 2 - 2^-10 and D = 2 - 2^-11: float16's. What
//             turns to 0 ends with {1}. The octaves:
//
//             2^-149        2^-126                                 2^128
//             |  23 octaves   |             254 octaves              |   FIRST_BIN 0, BINS 3878: every float32
//                (subnormal)              |  40   |                       FIRST_BIN 1750, BINS 560: every float16
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

#include "lanes.clh"
#include "pieces.clh"
#include "slots.clh"

#define HEAD 5
#define SOURCE_PARAMETER(k) , __global const STORAGE(X_T) *x##k
#define SLOT_CASE(k) case k: x = x##k; break;

#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

// On CPUs 16 lanes stay apart until the tile's end; on GPUs, which compute them one by one, they would take registers.
#if WG > 1
#define SHARED __local
typedef uint lanes;
#define SUM(v) sum_of_uints(v)
#define MAX(v) max_of_uints(v)
#define SUM_OF_LANES(v) (v)
#define MAX_OF_LANES(v) (v)
#else
#define SHARED // (PoCL 3.1 loses what is added to 14 KiB of local memory)
typedef uint16 lanes;
#define SUM(v) (v)
#define MAX(v) (v)
#define SUM_OF_LANES(v) sum_of_uints(v)
#define MAX_OF_LANES(v) max_of_uints(v)
#endif
#define ABOVE(least, v) min(sub_sat(v, (uint16)(least)), (uint16)1) // 1 or 0

#if BINS
// Of zero, inf and nan: BINS and beyond. A subnormal's is found from its mantissa, a whole number, as a float.
static inline uint16 bins_of(uint16 magnitude) {
    const uint16 normal = magnitude + (22u << 23);
    const uint16 subnormal = as_uint16(convert_float16(magnitude)) - (127u << 23);
    const uint16 place = FIRST_BIN ? normal : select(normal, subnormal, magnitude < 0x00800000u); // octave, mantissa
    const uint16 mantissa = place & 0x007fffffu;
    // The last five are told by how far it is to the octave's end: 2^16, 2^15 ... 2^12 at most.
    const uint16 distance = as_uint16(convert_float16(mantissa ^ 0x007fffffu)) >> 23;
    const uint16 turns = min(mantissa, (uint16)1) + (127 + 16) - clamp(distance, (uint16)(127 + 11), (uint16)(127 + 16));
    return 14 * (place >> 23) + (mantissa >> 20) + turns - FIRST_BIN;
}

// What has no bin is counted by lanes, because counters that are written over and over are slow.
static inline void count_bins(SHARED uint *counters, uint16 magnitude) {
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

// Adds what a work-item has found.
#define PUT(row)                                       \
    {                                                  \
        atomic_add(&(row)[0], SUM_OF_LANES(not_zero)); \
        if (bad) atomic_add(&(row)[1], bad);           \
        if (nans) atomic_add(&(row)[2], nans);         \
        atomic_max(&(row)[3], MAX_OF_LANES(smallest)); \
        atomic_max(&(row)[4], top);                    \
    }

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
statistics(__global const tile *restrict tiles, __global uint *results, const ulong first EACH_SLOT(SOURCE_PARAMETER)) {
#if WG > 1
    __local uint head[HEAD];
    for (uint i = get_local_id(0); i < HEAD; i += WG) head[i] = 0;
#endif
#if BINS
    SHARED uint counters[BINS + 16];
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
    uint top = MAX_OF_LANES(largest), bad = 0, nans = 0;
    if (top >= INFINITE) { // inf and nan are rare: only who has met one looks for them, at the same elements again
        top = 0;
        for (uint i = 16 * get_local_id(0); i < t.count; i += 16 * WG) {
            const uint16 magnitude = as_uint16(LOAD_PART(X_T, x, i, t.count, 0.0f)) & MAGNITUDE;
            bad += sum_of_uints(ABOVE(INFINITE - 1, magnitude));
            nans += sum_of_uints(ABOVE(INFINITE, magnitude));
            top = max(top, max_of_uints(select(magnitude, 0u, magnitude >= INFINITE)));
        }
    }

    __global uint *const row = results + first + t.tensor * (ulong)(HEAD + BINS);
#if WG > 1
    PUT(head);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = get_local_id(0); i < HEAD; i += WG) {
        if (i < 3) atomic_add(&row[i], head[i]);
        else atomic_max(&row[i], head[i]);
    }
#else
    PUT(row);
#endif
#if BINS
    for (uint i = get_local_id(0); i < BINS; i += WG)
        if (counters[i]) atomic_add(&row[HEAD + i], counters[i]);
#endif
}
