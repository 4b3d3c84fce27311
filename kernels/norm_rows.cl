// norm_rows.cl: norms over the last axis of a contiguous tensor seen as (rows, n), forward and backward.
//
//         n ->
//   rows |  a work-group takes `each` rows, one after the other, and goes through a row in steps of
//        |  16 elements a work-item; a row's later passes find it in the cache
//
//   KIND     y                                  kept for backward (fp32, one a row)
//   LAYER    (x - mean) r gamma + beta          mean, variance           r = 1 / sqrt(variance + eps)
//   RMS      x r gamma                          r                        r = 1 / sqrt(mean x^2 + eps)
//   UNIT     x r                                norm |x|                 r = 1 / (|x| + eps)
//
// Backward, with d = x - mean (d = x without a mean) and h = gamma * incoming gradient:
//
//   dx = r h  -  r (sum h) / n  -  d r^3 (sum h d) / n        LAYER; RMS lacks the second term
//   dx = r h                    -  d r^2 (sum h d) / |x|      UNIT
//
// Squares of numbers beyond 2^64 / sqrt(n) are infinite in fp32, and those below 2^-64 are lost. A row's statistics are
// therefore those of  x * unit,  and so are the r, d and |x| above: unit is 1, and where the sum of a row's squares tells
// that it does not do, the row is summed again with 2^-100 or, if eps is as small, 2^100. What is kept for backward is of
// x itself; a variance that is infinite there, or lost, is summed again. A CPU has code of its own for a unit of 1: it
// would feel a multiplication by it.
//
// The gradients of gamma and beta are sums over rows. Each work-group adds up its own rows' share in a row of
// `partial_gamma` and `partial_beta`, (groups, n); reduce.cl sums these.
//
//   X_T, G_T, Y_T, DX_T   storage types of input, incoming gradient, result and outgoing gradient
//   SCALE_T, SHIFT_T      storage types of gamma and beta
//   KIND                  LAYER, RMS or UNIT
//   PARAMETERS            whether backward sums the gradients of gamma and beta
//   WG                    work-items of a work-group: 1 on CPU devices, else a power of two
//   PIECES                of pieces.clh
//
// Arguments that a kind has no use for are not read.

#include "pieces.clh"

#define LAYER 1
#define RMS 2
#define UNIT 3

#define STEP (WG * 16)
#define PIECE 4096 // elements of a row that a work-item sums by themselves: rounding grows with pieces, not elements

// Whether two steps are taken at once: a CPU has nothing else to do while it adds, a GPU has other work-items, and needs
// its registers for them.
#define BY_PAIRS(i, end) (WG == 1 && (i) + STEP + 16 <= (end))

#if KIND == LAYER
#define CENTERED(v) ((v) * unit - mean)
#else
#define CENTERED(v) ((v) * unit)
#endif

// eps as it stands beside squares
#if KIND == UNIT
#define SQUARE_OF_EPS (eps * eps)
#else
#define SQUARE_OF_EPS eps
#endif

#define FAR 0x1p-100f
#define NEAR 0x1p100f

// The unit for a row, by the sum or mean of its squares as fp32 has it, which is infinite or NaN where they overflow,
// and by what was taken off before: a row of one large number has squares of 0, and would be infinite in NEAR.
static inline float unit_of(const float squares, const float mean, const float eps) {
    if (!(squares <= FLT_MAX)) return FAR;
    return squares < 0x1p-80f && eps < 0x1p-80f && fabs(mean) < 1 ? NEAR : 1.0f;
}

// eps beside squares of x * unit: never 0 for it, lest 0 be divided by 0.
static inline float eps_of(const float unit, const float eps) {
    return unit == 1 ? eps : fmax(eps * unit * unit, fmin(eps, 0x1p-120f));
}

#if KIND == UNIT
#define SCALED(v, i) (v)
#define SCALED_PART(v, i, n) (v)
#else
#define SCALED(v, i) ((v) * LOAD16(SCALE_T, gamma, i))
#define SCALED_PART(v, i, n) ((v) * LOAD_PART(SCALE_T, gamma, i, n, 0.0f))
#endif

// Factor r of a row from its variance, mean square or norm.
static inline float inverse(const float statistic, const float eps, const float unit) {
#if KIND == UNIT
    return 1 / (statistic + eps * unit);
#else
    return 1 / sqrt(statistic + eps_of(unit, eps));
#endif
}

#ifdef ROWS_FORWARD
#if KIND == LAYER
#define SHIFTED(v, i) ((v) + LOAD16(SHIFT_T, beta, i))
#define SHIFTED_PART(v, i, n) ((v) + LOAD_PART(SHIFT_T, beta, i, n, 0.0f))
#else
#define SHIFTED(v, i) (v)
#define SHIFTED_PART(v, i, n) (v)
#endif

// The sum of a row's squares in this unit, and its mean.
static inline float squares_of(__global const STORAGE(X_T) *in, __global STORAGE(Y_T) *out,
                               const ulong n, const float unit, float *mean_of_row, __local float *scratch) {
    const size_t lane = get_local_id(0) * 16;
    size_t i;
    GROUP_TERMS sum = 0;
#if KIND == LAYER
    for (i = lane; BY_PAIRS(i, n);) {
        const size_t stop = min(i + PIECE * WG, (size_t)n);
        float16 sum0 = 0, sum1 = 0;
        for (; BY_PAIRS(i, stop); i += 2 * STEP) {
            sum0 += LOAD16(X_T, in, i) * unit;
            sum1 += LOAD16(X_T, in, i + STEP) * unit;
        }
        sum += TERMS(sum0 + sum1);
    }
    for (; i + 16 <= n; i += STEP) sum += TERMS(LOAD16(X_T, in, i) * unit);
    if (i < n) sum += TERMS(LOAD_PART(X_T, in, i, n, 0.0f) * unit);
    const float mean = *mean_of_row = group_sum(TERMS_SUM(sum), scratch) / n;
    sum = 0;
#else
    const float mean = 0;
#endif
    for (i = lane; BY_PAIRS(i, n);) {
        const size_t stop = min(i + PIECE * WG, (size_t)n);
        float16 sum0 = 0, sum1 = 0;
        for (; BY_PAIRS(i, stop); i += 2 * STEP) {
            PREFETCH_TO_WRITE(out + i);
            PREFETCH_TO_WRITE(out + i + STEP);
            const float16 d0 = CENTERED(LOAD16(X_T, in, i)), d1 = CENTERED(LOAD16(X_T, in, i + STEP));
            sum0 += d0 * d0;
            sum1 += d1 * d1;
        }
        sum += TERMS(sum0 + sum1);
    }
    for (; i + 16 <= n; i += STEP) {
        const float16 d = CENTERED(LOAD16(X_T, in, i));
        sum += TERMS(d * d);
    }
    if (i < n) {
        const float16 d = CENTERED(LOAD_PART(X_T, in, i, n, mean / unit));
        sum += TERMS(d * d);
    }
    return group_sum(TERMS_SUM(sum), scratch);
}

#define NORMALIZED                                                           \
    __global const STORAGE(X_T) *in, __global const STORAGE(SCALE_T) *gamma, \
        __global const STORAGE(SHIFT_T) *beta, __global STORAGE(Y_T) *out,   \
        __global float *means, __global float *kept, const ulong n, const float eps

static inline void normalize(NORMALIZED, const float unit, const float mean, const float squares) {
    const size_t lane = get_local_id(0) * 16;
    size_t i;
#if KIND == UNIT
    const float statistic = sqrt(squares), r = inverse(statistic, eps, unit), keep = statistic / unit;
#elif KIND == RMS
    const float r = inverse(squares / n, eps, unit), keep = r * unit;
#else
    const float statistic = squares / n, r = inverse(statistic, eps, unit), keep = statistic / unit / unit;
    if (lane == 0) *means = mean / unit;
#endif
    if (lane == 0) *kept = keep;
    for (i = lane; i + 16 <= n; i += STEP) {
        PREFETCH(in + n + i);
        STORE16(Y_T, SHIFTED(SCALED(CENTERED(LOAD16(X_T, in, i)) * r, i), i), out, i);
    }
    if (i < n) {
        const float16 v = CENTERED(LOAD_PART(X_T, in, i, n, 0.0f)) * r;
        STORE_PART(Y_T, SHIFTED_PART(SCALED_PART(v, i, n), i, n), out, i, n);
    }
}

#if WG == 1
APART void normalize_far(NORMALIZED, const float unit) {
    float mean = 0;
    const float squares = squares_of(in, out, n, unit, &mean, 0);
    normalize(in, gamma, beta, out, means, kept, n, eps, unit, mean, squares);
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
rows_forward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
             __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
             __global float *restrict means, __global float *restrict kept, const ulong rows, const ulong n,
             const uint each, const float eps) {
    SCRATCH;
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *in = x + row * n;
        __global STORAGE(Y_T) *out = y + row * n;
        float unit = 1, mean = 0, squares;
#if WG == 1
        squares = squares_of(in, out, n, 1, &mean, scratch);
        unit = unit_of(squares, mean, SQUARE_OF_EPS);
        if (unit == 1) normalize(in, gamma, beta, out, means + row, kept + row, n, eps, 1, mean, squares);
        else normalize_far(in, gamma, beta, out, means + row, kept + row, n, eps, unit);
#else
        for (;;) {
            squares = squares_of(in, out, n, unit, &mean, scratch);
            if (unit != 1 || (unit = unit_of(squares, mean, SQUARE_OF_EPS)) == 1) break;
        }
        normalize(in, gamma, beta, out, means + row, kept + row, n, eps, unit, mean, squares);
#endif
    }
}
#endif

#ifdef ROWS_BACKWARD
#define BACKWARD_ARGUMENTS                                                               \
    __global const STORAGE(X_T) *in, __global const STORAGE(G_T) *g_in,                  \
        __global const STORAGE(SCALE_T) *gamma, __global STORAGE(DX_T) *out,             \
        __global float *partial_gamma, __global float *partial_beta, const float center, \
        const float keep, const ulong n, const float eps, __local float *scratch

static inline void backward_row(BACKWARD_ARGUMENTS, const float unit) {
    const size_t lane = get_local_id(0) * 16;
    size_t i;
    GROUP_TERMS sum = 0, products = 0;
#if KIND == RMS
    const float r = keep / unit;
#elif KIND == UNIT
    const float norm = keep * unit, r = inverse(norm, eps, unit);
#else
    const float mean = center * unit;
    float variance = keep;
    if (unit != 1) {
        ONE_BY_ONE for (i = lane; i < n; i += STEP) {
            const float16 d = CENTERED(LOAD_PART(X_T, in, i, n, center));
            sum += TERMS(d * d);
        }
        variance = group_sum(TERMS_SUM(sum), scratch) / n;
        sum = 0;
    }
    const float r = inverse(variance, eps, unit);
#endif
    for (i = lane; BY_PAIRS(i, n);) {
        const size_t stop = min(i + PIECE * WG, (size_t)n);
        float16 sum0 = 0, sum1 = 0, product0 = 0, product1 = 0;
        for (; BY_PAIRS(i, stop); i += 2 * STEP) {
            PREFETCH_TO_WRITE(out + i);
            PREFETCH_TO_WRITE(out + i + STEP);
            const float16 h0 = SCALED(LOAD16(G_T, g_in, i), i);
            const float16 h1 = SCALED(LOAD16(G_T, g_in, i + STEP), i + STEP);
            sum0 += h0;
            sum1 += h1;
            product0 += h0 * CENTERED(LOAD16(X_T, in, i));
            product1 += h1 * CENTERED(LOAD16(X_T, in, i + STEP));
        }
        sum += TERMS(sum0 + sum1);
        products += TERMS(product0 + product1);
    }
    for (; i + 16 <= n; i += STEP) {
        const float16 h = SCALED(LOAD16(G_T, g_in, i), i);
        sum += TERMS(h);
        products += TERMS(h * CENTERED(LOAD16(X_T, in, i)));
    }
    if (i < n) {
        const float16 h = SCALED_PART(LOAD_PART(G_T, g_in, i, n, 0.0f), i, n);
        sum += TERMS(h);
        products += TERMS(h * CENTERED(LOAD_PART(X_T, in, i, n, 0.0f)));
    }
    const float product = group_sum(TERMS_SUM(products), scratch);
#if KIND == LAYER
    const float constant_part = unit * (r * (group_sum(TERMS_SUM(sum), scratch) / n));
#else
    const float constant_part = 0;
#endif
#if KIND == UNIT
    const float linear = norm == 0 ? 0 : unit * (r * (r * product / norm));
#else
    const float linear = unit * (r * (r * (r * product / n)));
#endif
    const float slope = r * unit;
    for (i = lane; i + 16 <= n; i += STEP) {
        PREFETCH(in + n + i);
        PREFETCH(g_in + n + i);
        const float16 g = LOAD16(G_T, g_in, i), d = CENTERED(LOAD16(X_T, in, i));
        STORE16(DX_T, SCALED(g, i) * slope - (constant_part + d * linear), out, i);
#if PARAMETERS
        STORE16(f32, LOAD16(f32, partial_gamma, i) + g * (d * r), partial_gamma, i);
#if KIND == LAYER
        STORE16(f32, LOAD16(f32, partial_beta, i) + g, partial_beta, i);
#endif
#endif
    }
    if (i < n) {
        const float16 g = LOAD_PART(G_T, g_in, i, n, 0.0f), d = CENTERED(LOAD_PART(X_T, in, i, n, 0.0f));
        STORE_PART(DX_T, SCALED_PART(g, i, n) * slope - (constant_part + d * linear), out, i, n);
#if PARAMETERS
        STORE_PART(f32, LOAD_PART(f32, partial_gamma, i, n, 0.0f) + g * (d * r), partial_gamma, i, n);
#if KIND == LAYER
        STORE_PART(f32, LOAD_PART(f32, partial_beta, i, n, 0.0f) + g, partial_beta, i, n);
#endif
#endif
    }
}

#if WG == 1
APART void backward_far(BACKWARD_ARGUMENTS, const float unit) {
    backward_row(in, g_in, gamma, out, partial_gamma, partial_beta, center, keep, n, eps, scratch, unit);
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
rows_backward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
              __global const STORAGE(SCALE_T) *restrict gamma, __global const float *restrict means,
              __global const float *restrict kept, __global STORAGE(DX_T) *restrict dx,
              __global float *restrict partial_gamma, __global float *restrict partial_beta, const ulong rows,
              const ulong n, const uint each, const float eps) {
    SCRATCH;
    partial_gamma += get_group_id(0) * n;
    partial_beta += get_group_id(0) * n;
#if PARAMETERS
    // A work-item touches the same columns in every row, so the group's sums need no barrier.
    for (size_t i = get_local_id(0) * 16; i < n; i += STEP) {
        STORE_PART(f32, (float16)0, partial_gamma, i, n);
#if KIND == LAYER
        STORE_PART(f32, (float16)0, partial_beta, i, n);
#endif
    }
#endif
    FOR_EACH_OWN(row, each, rows) {
        const float keep = kept[row];
#if KIND == LAYER
        const float center = means[row], unit = unit_of(keep, center, eps);
#elif KIND == RMS
        const float center = 0, unit = !(keep >= 0x1p-64f) ? FAR : keep > 0x1p40f ? NEAR : 1.0f; // keep is 1 / |x|
#else
        const float center = 0, unit = unit_of(keep * keep, center, SQUARE_OF_EPS);
#endif
#define ROW x + row * n, grad + row * n, gamma, dx + row * n, partial_gamma, partial_beta, center, keep, n, eps, scratch
#if WG == 1
        if (unit == 1) backward_row(ROW, 1);
        else backward_far(ROW, unit);
#else
        backward_row(ROW, unit);
#endif
#undef ROW
    }
}
#endif
