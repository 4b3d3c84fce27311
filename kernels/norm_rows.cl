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
#define CENTERED(v) ((v) - mean)
#else
#define CENTERED(v) (v)
#endif

#if KIND == UNIT
#define SCALED(v, i) (v)
#define SCALED_PART(v, i, n) (v)
#else
#define SCALED(v, i) ((v) * LOAD16(SCALE_T, gamma, i))
#define SCALED_PART(v, i, n) ((v) * LOAD_PART(SCALE_T, gamma, i, n, 0.0f))
#endif

// Factor r of a row from what is kept for it.
static inline float inverse(const float kept, const float eps) {
#if KIND == LAYER
    return 1 / sqrt(kept + eps);
#elif KIND == RMS
    return kept;
#else
    return 1 / (kept + eps);
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

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
rows_forward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
             __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
             __global float *restrict means, __global float *restrict kept, const ulong rows, const ulong n,
             const uint each, const float eps) {
    SCRATCH;
    const size_t lane = get_local_id(0) * 16;
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *in = x + row * n;
        __global STORAGE(Y_T) *out = y + row * n;
        size_t i;
        GROUP_TERMS sum = 0;
#if KIND == LAYER
        for (i = lane; BY_PAIRS(i, n);) {
            const size_t stop = min(i + PIECE * WG, (size_t)n);
            float16 sum0 = 0, sum1 = 0;
            for (; BY_PAIRS(i, stop); i += 2 * STEP) {
                sum0 += LOAD16(X_T, in, i);
                sum1 += LOAD16(X_T, in, i + STEP);
            }
            sum += TERMS(sum0 + sum1);
        }
        for (; i + 16 <= n; i += STEP) sum += TERMS(LOAD16(X_T, in, i));
        if (i < n) sum += TERMS(LOAD_PART(X_T, in, i, n, 0.0f));
        const float mean = group_sum(TERMS_SUM(sum), scratch) / n;
        if (lane == 0) means[row] = mean;
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
            const float16 d = CENTERED(LOAD_PART(X_T, in, i, n, mean));
            sum += TERMS(d * d);
        }
        const float squares = group_sum(TERMS_SUM(sum), scratch);
#if KIND == LAYER
        const float keep = squares / n;
#elif KIND == RMS
        const float keep = 1 / sqrt(squares / n + eps);
#else
        const float keep = sqrt(squares);
#endif
        if (lane == 0) kept[row] = keep;
        const float r = inverse(keep, eps);
        for (i = lane; i + 16 <= n; i += STEP) {
            PREFETCH(in + n + i);
            STORE16(Y_T, SHIFTED(SCALED(CENTERED(LOAD16(X_T, in, i)) * r, i), i), out, i);
        }
        if (i < n) {
            const float16 v = CENTERED(LOAD_PART(X_T, in, i, n, 0.0f)) * r;
            STORE_PART(Y_T, SHIFTED_PART(SCALED_PART(v, i, n), i, n), out, i, n);
        }
    }
}
#endif

#ifdef ROWS_BACKWARD
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
rows_backward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
              __global const STORAGE(SCALE_T) *restrict gamma, __global const float *restrict means,
              __global const float *restrict kept, __global STORAGE(DX_T) *restrict dx,
              __global float *restrict partial_gamma, __global float *restrict partial_beta, const ulong rows,
              const ulong n, const uint each, const float eps) {
    SCRATCH;
    const size_t lane = get_local_id(0) * 16;
    partial_gamma += get_group_id(0) * n;
    partial_beta += get_group_id(0) * n;
#if PARAMETERS
    // A work-item touches the same columns in every row, so the group's sums need no barrier.
    for (size_t i = lane; i < n; i += STEP) {
        STORE_PART(f32, (float16)0, partial_gamma, i, n);
#if KIND == LAYER
        STORE_PART(f32, (float16)0, partial_beta, i, n);
#endif
    }
#endif
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *in = x + row * n;
        __global const STORAGE(G_T) *g_in = grad + row * n;
        __global STORAGE(DX_T) *out = dx + row * n;
#if KIND == LAYER
        const float mean = means[row];
#endif
        const float r = inverse(kept[row], eps);
        size_t i;
        GROUP_TERMS sum = 0, products = 0;
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
        const float constant_part = r * (group_sum(TERMS_SUM(sum), scratch) / n);
#else
        const float constant_part = 0;
#endif
#if KIND == UNIT
        const float linear = kept[row] == 0 ? 0 : r * (r * product / kept[row]);
#else
        const float linear = r * (r * (r * product / n));
#endif
        for (i = lane; i + 16 <= n; i += STEP) {
            PREFETCH(in + n + i);
            PREFETCH(g_in + n + i);
            const float16 g = LOAD16(G_T, g_in, i), d = CENTERED(LOAD16(X_T, in, i));
            STORE16(DX_T, SCALED(g, i) * r - (constant_part + d * linear), out, i);
#if PARAMETERS
            STORE16(f32, LOAD16(f32, partial_gamma, i) + g * (d * r), partial_gamma, i);
#if KIND == LAYER
            STORE16(f32, LOAD16(f32, partial_beta, i) + g, partial_beta, i);
#endif
#endif
        }
        if (i < n) {
            const float16 g = LOAD_PART(G_T, g_in, i, n, 0.0f), d = CENTERED(LOAD_PART(X_T, in, i, n, 0.0f));
            STORE_PART(DX_T, SCALED_PART(g, i, n) * r - (constant_part + d * linear), out, i, n);
#if PARAMETERS
            STORE_PART(f32, LOAD_PART(f32, partial_gamma, i, n, 0.0f) + g * (d * r), partial_gamma, i, n);
#if KIND == LAYER
            STORE_PART(f32, LOAD_PART(f32, partial_beta, i, n, 0.0f) + g, partial_beta, i, n);
#endif
#endif
        }
    }
}
#endif
