// pool_2x2.cl: max and average pooling with 2 x 2 windows that tile their planes, and the gradients, for CPU devices.
//
// Height and width are even and windows touch, so the rows of all planes follow each other in pairs, and the windows
// of pair p are row p of the result, wherever a plane begins:
//
//   x, dx   pair p   |a b|a b|a b| . . |        y, dy   row p   |w|w|w| . . |
//                    |c d|c d|c d| . . |
//
// A work-item takes `each` pairs, 16 windows at a time. The last 16 of a row end with it and may include some of those
// before (`columns` windows a row, at least 16), so that no load or store is cut short.
//
//   X_T, Y_T, G_T, DX_T   storage types of input, result, gradient of the result, gradient of the input. In max pooling
//                         Y_T is X_T, G_T is DX_T, and all have the same width: numbers are moved as they are

#define FOR_EACH_PAIR(p)                                                  \
    const size_t first_pair = (size_t)get_group_id(0) * each;             \
    for (size_t p = first_pair; p < min(first_pair + each, (size_t)pairs); p++)
#define FOR_EACH_16(w) \
    for (uint begin = 0, w = 0; begin < columns; begin += 16, w = min(begin, columns - 16))

// Elements of even and of odd columns, from 32 neighbours.
#define EVEN(V, low, high) ((V)((low).even, (high).even))
#define ODD(V, low, high) ((V)((low).odd, (high).odd))

// -------------------------------------------------------------------------------------------------- maximum
// Maxima are taken among keys (ordered_keys.clh). Those of negative NaNs come below -infinity's; as many are taken from
// all keys, and they wrap around to the top, where the other NaNs are, so that NaNs win.

#ifdef X_T
#include "ordered_keys.clh"

#define NANS ((WORD)(LARGEST - INFINITE)) // NaNs of one sign

static inline KEYS keys_at(__global const WORD *x, size_t i) {
    return AS_KEYS(AS_WORDS(turn(AS_KEYS(LOAD_ANY(WORDS, x + i)))) - NANS);
}
#endif

#ifdef MAX_POOL_2X2
__kernel ONE_WORK_ITEM void max_pool_2x2(__global const WORD *restrict x,
                                                                          __global WORD *restrict y, const ulong pairs,
                                                                          const uint each, const uint columns) {
    FOR_EACH_PAIR(p) {
        FOR_EACH_16(w) {
            const size_t above = p * 4 * columns + 2 * w, below = above + 2 * columns;
            const KEYS low = max(keys_at(x, above), keys_at(x, below));
            const KEYS high = max(keys_at(x, above + 16), keys_at(x, below + 16));
            const KEYS most = max(EVEN(KEYS, low, high), ODD(KEYS, low, high));
            STORE_ANY(WORDS, AS_WORDS(turn(AS_KEYS(AS_WORDS(most) + NANS))), y + p * columns + w);
        }
    }
}
#endif

// 32 neighbours from 16 elements of even and 16 of odd columns.
#define STORE_COLUMNS(STORE_16, V, even_columns, odd_columns, i)   \
    {                                                              \
        const V evens = (even_columns), odds = (odd_columns);      \
        V v;                                                       \
        v.even = evens.lo, v.odd = odds.lo;                        \
        STORE_16(v, i);                                            \
        v.even = evens.hi, v.odd = odds.hi;                        \
        STORE_16(v, (i) + 16);                                     \
    }

#ifdef MAX_POOL_2X2_BACKWARD
#define NEGATIVE_ZERO AS_KEYS((WORDS)(WORD)(-1 - NANS))
#define ZERO AS_KEYS((WORDS)(WORD)(-NANS))
#define FIRST_NAN AS_KEYS((WORDS)(WORD)(CAT(INF_, X_T) + 1 - NANS))

// The first of equal numbers is chosen, so these need equal keys: zeros of both signs, and all NaNs.
static inline KEYS leveled_at(__global const WORD *x, size_t i) {
    const KEYS v = min(keys_at(x, i), FIRST_NAN);
    return v == NEGATIVE_ZERO ? ZERO : v;
}

#define STORE_WORDS(v, i) STORE_ANY(WORDS, v, dx + (i))
__kernel ONE_WORK_ITEM void
max_pool_2x2_backward(__global const WORD *restrict x, __global const WORD *restrict dy, __global WORD *restrict dx,
                      const ulong pairs, const uint each, const uint columns) {
    const WORDS none = 0;
    FOR_EACH_PAIR(p) {
        FOR_EACH_16(w) {
            const size_t above = p * 4 * columns + 2 * w, below = above + 2 * columns;
            const KEYS ab_low = leveled_at(x, above), ab_high = leveled_at(x, above + 16);
            const KEYS cd_low = leveled_at(x, below), cd_high = leveled_at(x, below + 16);
            const KEYS a = EVEN(KEYS, ab_low, ab_high), b = ODD(KEYS, ab_low, ab_high);
            const KEYS c = EVEN(KEYS, cd_low, cd_high), d = ODD(KEYS, cd_low, cd_high);
            const KEYS is_b = b > a, is_d = d > c, is_below = max(c, d) > max(a, b);
            const WORDS g = LOAD_ANY(WORDS, dy + p * columns + w);
            const WORDS to_ab = is_below ? none : g, to_cd = is_below ? g : none;
            STORE_COLUMNS(STORE_WORDS, WORDS, is_b ? none : to_ab, is_b ? to_ab : none, above)
            STORE_COLUMNS(STORE_WORDS, WORDS, is_d ? none : to_cd, is_d ? to_cd : none, below)
        }
    }
}
#endif

// -------------------------------------------------------------------------------------------------- average
#ifdef AVG_POOL_2X2
__kernel ONE_WORK_ITEM void
avg_pool_2x2(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong pairs,
             const uint each, const uint columns) {
    FOR_EACH_PAIR(p) {
        FOR_EACH_16(w) {
            const size_t above = p * 4 * columns + 2 * w, below = above + 2 * columns;
            const float16 low = LOAD16(X_T, x, above) + LOAD16(X_T, x, below);
            const float16 high = LOAD16(X_T, x, above + 16) + LOAD16(X_T, x, below + 16);
            const float16 sum = EVEN(float16, low, high) + ODD(float16, low, high);
            STORE16(Y_T, sum * 0.25f, y, p * columns + w);
        }
    }
}
#endif

#ifdef AVG_POOL_2X2_BACKWARD
#define STORE_FLOATS(v, i) STORE16(DX_T, v, dx, i)
__kernel ONE_WORK_ITEM void
avg_pool_2x2_backward(__global const STORAGE(G_T) *restrict dy, __global STORAGE(DX_T) *restrict dx, const ulong pairs,
                      const uint each, const uint columns) {
    FOR_EACH_PAIR(p) {
        FOR_EACH_16(w) {
            const size_t above = p * 4 * columns + 2 * w;
            const float16 share = LOAD16(G_T, dy, p * columns + w) * 0.25f;
            STORE_COLUMNS(STORE_FLOATS, float16, share, share, above)
            STORE_COLUMNS(STORE_FLOATS, float16, share, share, above + 2 * columns)
        }
    }
}
#endif
