// norm_planes.cl: batch norm and group norm of NCHW tensors, forward and backward.
//
// A tensor is N * C planes of hw contiguous elements. Elements are normalized in SETS of planes, each with a mean and
// a variance of its own; `planes` planes make a set, and the k-th of set s is plane  s * first + k * step:
//
//     batch norm   a set is a channel          C sets,       planes = N,        first = 1,       step = C
//     group norm   a set is a sample's group   N * G sets,   planes = C / G,    first = C / G,   step = 1
//
//          plane 0   plane 1   plane 2   plane 3  |  plane 4 ...              (C = 4, G = 2)
//     n=0 [ c = 0  |  c = 1  |  c = 2  |  c = 3  ]|
//          batch: set 0 = planes 0, 4, 8, ...      group: set 0 = planes 0, 1; set 1 = planes 2, 3
//
// The parameters of a plane are those of its channel, plane % C. With r = 1 / sqrt(var + eps) and d = x - mean
//
//     y  = act(d r gamma + beta)
//     dx = r gamma g - r (sum gamma g) / n - d r^3 (sum gamma g d) / n           g = act' * incoming gradient
//
// where n = planes * hw elements are in a set. With constant statistics (evaluation) the two sums drop out.
//
// Where there are sets enough, one work-group does a whole set in one launch (planes_forward, planes_backward) and
// its second read of the set comes from the cache. Otherwise a set is cut into parts of `span` elements, whose results
// are merged in a fixed order.
//
//   X_T, G_T, Y_T, DX_T   storage types of input, incoming gradient, result and outgoing gradient
//   SCALE_T, SHIFT_T      storage types of gamma and beta
//   RUNNING_T             storage type of the running statistics (batch_merge)
//   ACT                   0: none, 1: relu, 2: leaky relu with factor `slope`
//   TRAINING              1: statistics are those of the input, 0: constants (backward)
//   WIDTH                 neighbouring channels whose planes, which lie side by side, are read together (the kernels
//                         of whole sets on CPU devices: a small plane is too short a run for the prefetcher), else 1
//   GROUPS                1: planes of a set differ in gamma, and gamma's gradient is summed over sets (backward)
//   WG                    work-items of a work-group: 1 on CPU devices, else a power of two

#define STEP (WG * 16) // elements a work-group takes side by side
#ifndef WIDTH
#define WIDTH 1
#endif
#define PIECE 4096     // elements a work-item sums before it folds them into its mean and variance

#if ACT == 1
#define ACTIVATE(v) select((v), (float16)0, (v) <= 0)
#define MASK(g, v) select((g), (float16)0, (v) <= 0)
#elif ACT == 2
#define ACTIVATE(v) select((v), (v) * slope, (v) <= 0)
#define MASK(g, v) select((g), (g) * slope, (v) <= 0)
#else
#define ACTIVATE(v) (v)
#endif

// Elements i .. end - 1, fewer than 16, of the run that starts at begin; `fill` stands in the other lanes. A run of at
// least 16 elements gives its last 16, of which those before i are masked: the order of the lanes is not that of a load
// at i.
#define DEFINE_TAIL(T)                                                                                              \
    inline float16 load_tail_##T(__global const STORAGE(T) *p, size_t begin, size_t i, size_t end, float fill) {    \
        if (end - begin < 16) return LOAD_PART(T, p, i, end, fill);                                                 \
        const int16 lanes = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                          \
        return select((float16)fill, LOAD16(T, p, end - 16), lanes >= 16 - (int)(end - i));                         \
    }
DEFINE_TAIL(f32)
DEFINE_TAIL(f16)
DEFINE_TAIL(bf16)
#define LOAD_TAIL(T, p, begin, i, end, fill) CAT(load_tail_, T)((p), (begin), (i), (end), (fill))

// The run of elements begin .. end - 1 that starts at position `at` of a set and ends with its plane, or with `to`.
#define RUN_OF_PLANE(at, to)                                                         \
    const size_t nth = (at) / hw, offset = (at) - nth * hw;                          \
    const size_t plane = set * first + nth * step;                                   \
    const size_t begin = plane * hw + offset, end = begin + min(hw - offset, (to) - (at));

// STATISTICS. Sums are formed of what an element differs from the mean of all elements before its piece (from a guess
// in the first piece), so nothing large cancels: with S1 = sum (x - mean) and S2 = sum (x - mean)^2 over a new piece,
//
//     mean' = mean + S1 / count'        m2' = m2 + S2 - S1^2 / count'
//
// which is Chan, Golub and LeVeque's merge (1983) of a piece with what came before it.
typedef struct {
    float16 sum, squares;  // of the piece
    float pending;         // elements in the piece
    float count, mean, m2; // of everything before it
} moments;

inline void moments_fold(moments *m) {
    if (m->pending == 0) return;
    m->count += m->pending;
    const float sum = sum16(m->sum), shift = sum / m->count;
    m->m2 += sum16(m->squares) - sum * shift;
    m->mean += shift;
    m->pending = 0;
    m->sum = m->squares = 0;
}

#if defined PLANES_STATISTICS || defined PLANES_FORWARD
inline void moments_add_run(moments *m, __global const STORAGE(X_T) *x, const size_t begin, const size_t end,
                            const size_t lane) {
    for (size_t start = begin; start < end; start += PIECE * WG) {
        const size_t stop = min(start + PIECE * WG, end);
        const float mean = m->mean;
        float16 sum0 = 0, sum1 = 0, squares0 = 0, squares1 = 0;
        size_t i = start + lane;
        for (; i + STEP + 16 <= stop; i += 2 * STEP) {
            const float16 d0 = LOAD16(X_T, x, i) - mean, d1 = LOAD16(X_T, x, i + STEP) - mean;
            sum0 += d0;
            sum1 += d1;
            squares0 += d0 * d0;
            squares1 += d1 * d1;
        }
        for (; i + 16 <= stop; i += STEP) {
            const float16 d = LOAD16(X_T, x, i) - mean;
            sum0 += d;
            squares0 += d * d;
        }
        m->pending += (float)((i - start - lane) / WG);
        if (i < stop) {
            const float16 d = LOAD_TAIL(X_T, x, start, i, stop, mean) - mean;
            sum1 += d;
            squares1 += d * d;
            m->pending += (float)(stop - i);
        }
        m->sum += sum0 + sum1;
        m->squares += squares0 + squares1;
        if (m->pending >= PIECE) moments_fold(m);
    }
}

// (mean, variance) of positions from .. to - 1 of `width` neighbouring sets, for all work-items of the group.
inline void set_moments(__global const STORAGE(X_T) *x, const size_t set, const uint width, const size_t from,
                        const size_t to, const size_t hw, const size_t first, const size_t step,
                        __local float *scratch, float2 *results) {
    moments m[WIDTH];
    {
        RUN_OF_PLANE(from, to)
        for (uint k = 0; k < width; k++) {
            const size_t i = begin + k * hw;
            m[k].sum = m[k].squares = 0;
            m[k].pending = m[k].count = m[k].m2 = 0;
            m[k].mean = end - begin < 16 ? LOAD(X_T, x, i) : sum16(LOAD16(X_T, x, i)) / 16;
        }
    }
#if WG > 1
    const float guess = m[0].mean;
#endif
    for (size_t at = from; at < to;) {
        RUN_OF_PLANE(at, to)
        for (uint k = 0; k < width; k++)
            moments_add_run(&m[k], x, begin + k * hw, end + k * hw, get_local_id(0) * 16);
        at += end - begin;
    }
    const float n = (float)(to - from);
    for (uint k = 0; k < width; k++) {
        moments_fold(&m[k]);
#if WG > 1
        const float mean = guess + group_sum(m[k].count * (m[k].mean - guess), scratch) / n;
        const float away = m[k].mean - mean;
        const float m2 = group_sum(m[k].m2 + m[k].count * away * away, scratch);
#else
        const float mean = m[k].mean, m2 = m[k].m2;
#endif
        results[k] = (float2)(mean, m2 < 0 ? 0 : m2 / n); // not fmax, which would turn NaN into 0
    }
}
#endif

#ifdef PLANES_STATISTICS
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_statistics(__global const STORAGE(X_T) *restrict x, __global float *restrict partial_mean,
                  __global float *restrict partial_var, const ulong sets, const ulong planes, const ulong hw,
                  const ulong first, const ulong step, const ulong span, const uint parts, const uint each) {
#if WG > 1
    __local float scratch[WG];
#else
    __local float *scratch = 0;
#endif
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets * parts);
    for (size_t job = (size_t)get_group_id(0) * each; job < stop; job++) {
        const size_t from = job % parts * span, to = min(from + span, (size_t)(planes * hw));
        float2 result;
        set_moments(x, job / parts, 1, from, to, hw, first, step, scratch, &result);
        if (get_local_id(0) == 0) {
            partial_mean[job] = result.x;
            partial_var[job] = result.y;
        }
    }
}
#endif

// Merges the parts of each channel (Chan et al.) and moves the running statistics, unless a statistic of any channel
// is not finite. One work-group; with one part the partial statistics may be the merged ones.
#ifdef BATCH_MERGE
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
batch_merge(__global const float *partial_mean, __global const float *partial_var, __global float *mean,
            __global float *var, __global STORAGE(RUNNING_T) *running_mean, __global STORAGE(RUNNING_T) *running_var,
            const ulong channels, const ulong total, const ulong span, const uint parts, const float momentum) {
#if WG > 1
    __local float scratch[WG];
#endif
    float bad = 0;
    for (size_t c = get_local_id(0); c < channels; c += WG) {
        float center = partial_mean[c * parts], spread = partial_var[c * parts];
        size_t before = min(span, total);
        for (uint part = 1; part < parts; part++) {
            const size_t now = min((size_t)(part + 1) * span, (size_t)total);
            const float share = (float)(now - before) / (float)now;
            const float away = partial_mean[c * parts + part] - center;
            spread += share * (partial_var[c * parts + part] - spread + away * away * (1 - share));
            center += share * away;
            before = now;
        }
        mean[c] = center;
        var[c] = spread;
        if (!isfinite(center) || !isfinite(spread)) bad = 1;
    }
#if RUNNING
    if (group_max(bad, scratch) != 0) return;
    for (size_t c = get_local_id(0); c < channels; c += WG) {
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_mean, c) + momentum * mean[c], running_mean, c);
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_var, c) + momentum * var[c], running_var, c);
    }
#endif
}
#endif

#if defined PLANES_FORWARD || defined PLANES_APPLY
inline void apply_run(__global const STORAGE(X_T) *x, __global STORAGE(Y_T) *y, const size_t begin, const size_t end,
                      const float mean, const float scale, const float shift, const float slope) {
    size_t i = begin + get_local_id(0) * 16;
    for (; i + 16 <= end; i += STEP) {
        const float16 v = (LOAD16(X_T, x, i) - mean) * scale + shift;
        STORE16(Y_T, ACTIVATE(v), y, i);
    }
    if (i >= end) return;
#if WG == 1
    if (end - begin >= 16) { // some of the last 16 a second time
        const float16 v = (LOAD16(X_T, x, end - 16) - mean) * scale + shift;
        STORE16(Y_T, ACTIVATE(v), y, end - 16);
        return;
    }
#endif
    const float16 v = (LOAD_PART(X_T, x, i, end, 0.0f) - mean) * scale + shift;
    STORE_PART(Y_T, ACTIVATE(v), y, i, end);
}
#endif

#ifdef PLANES_FORWARD
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_forward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
               __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
               __global float *restrict mean, __global float *restrict var, const ulong sets, const ulong planes,
               const ulong hw, const ulong first, const ulong step, const ulong channels, const uint each,
               const float eps, const float slope) {
#if WG > 1
    __local float scratch[WG];
#else
    __local float *scratch = 0;
#endif
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets);
    for (size_t set = (size_t)get_group_id(0) * each; set < stop; set += WIDTH) {
        const uint width = min((size_t)WIDTH, stop - set);
        float2 statistics[WIDTH];
        set_moments(x, set, width, 0, planes * hw, hw, first, step, scratch, statistics);
        for (uint k = 0; k < width && get_local_id(0) == 0; k++) {
            mean[set + k] = statistics[k].x;
            var[set + k] = statistics[k].y;
        }
        for (size_t nth = 0; nth < planes; nth++) {
            for (uint k = 0; k < width; k++) {
                const size_t plane = set * first + nth * step + k, c = plane % channels;
                const float scale = LOAD(SCALE_T, gamma, c) / sqrt(statistics[k].y + eps);
                apply_run(x, y, plane * hw, (plane + 1) * hw, statistics[k].x, scale, LOAD(SHIFT_T, beta, c), slope);
            }
        }
    }
}
#endif

// y of batch norm from given statistics, plane after plane.
#ifdef PLANES_APPLY
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_apply(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
             __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
             __global const float *restrict mean, __global const float *restrict var, const ulong planes,
             const ulong hw, const ulong channels, const uint each, const float eps, const float slope) {
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)planes);
    for (size_t plane = (size_t)get_group_id(0) * each; plane < stop; plane++) {
        const size_t c = plane % channels;
        apply_run(x, y, plane * hw, (plane + 1) * hw, mean[c], LOAD(SCALE_T, gamma, c) / sqrt(var[c] + eps),
                  LOAD(SHIFT_T, beta, c), slope);
    }
}
#endif

// BACKWARD. The activation's mask is computed again from x, so forward keeps nothing but x and the statistics.

#if ACT
#define MASKED(g, d) MASK(g, (d) * scale + shift)
#else
#define MASKED(g, d) (g)
#endif

#if defined PLANES_BACKWARD || defined PLANES_BACKWARD_SUMS
// Adds this work-item's sum of g, and of g (x - mean), over a run to sum_g and sum_gd.
inline void add_sums(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *grad, const size_t begin,
                     const size_t end, const float mean, const float scale, const float shift, const float slope,
                     float16 *sum_g, float16 *sum_gd) {
    float16 g0 = 0, g1 = 0, gd0 = 0, gd1 = 0; // of this run only, so that rounding grows with runs, not with elements
    size_t i = begin + get_local_id(0) * 16;
    for (; i + STEP + 16 <= end; i += 2 * STEP) {
        const float16 d = LOAD16(X_T, x, i) - mean, g = MASKED(LOAD16(G_T, grad, i), d);
        const float16 e = LOAD16(X_T, x, i + STEP) - mean, h = MASKED(LOAD16(G_T, grad, i + STEP), e);
        g0 += g;
        g1 += h;
        gd0 += g * d;
        gd1 += h * e;
    }
    for (; i + 16 <= end; i += STEP) {
        const float16 d = LOAD16(X_T, x, i) - mean, g = MASKED(LOAD16(G_T, grad, i), d);
        g0 += g;
        gd0 += g * d;
    }
    if (i < end) {
        const float16 d = LOAD_TAIL(X_T, x, begin, i, end, mean) - mean;
        const float16 g = MASKED(LOAD_TAIL(G_T, grad, begin, i, end, 0.0f), d);
        g1 += g;
        gd1 += g * d;
    }
    *sum_g += g0 + g1;
    *sum_gd += gd0 + gd1;
}
#endif

#if defined PLANES_BACKWARD || defined PLANES_BACKWARD_APPLY
// dx = scale g - constant - linear d
inline void gradient_run(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *grad,
                         __global STORAGE(DX_T) *dx, const size_t begin, const size_t end, const float mean,
                         const float scale, const float shift, const float slope, const float constant_part,
                         const float linear) {
#if TRAINING
#define GRADIENT(g, d) ((g) * scale - (constant_part + (d) * linear))
#else
#define GRADIENT(g, d) ((g) * scale)
#endif
    size_t i = begin + get_local_id(0) * 16;
    for (; i + 16 <= end; i += STEP) {
        const float16 d = LOAD16(X_T, x, i) - mean, g = MASKED(LOAD16(G_T, grad, i), d);
        STORE16(DX_T, GRADIENT(g, d), dx, i);
    }
    if (i >= end) return;
#if WG == 1
    if (end - begin >= 16) {
        const float16 d = LOAD16(X_T, x, end - 16) - mean, g = MASKED(LOAD16(G_T, grad, end - 16), d);
        STORE16(DX_T, GRADIENT(g, d), dx, end - 16);
        return;
    }
#endif
    const float16 d = LOAD_PART(X_T, x, i, end, 0.0f) - mean, g = MASKED(LOAD_PART(G_T, grad, i, end, 0.0f), d);
    STORE_PART(DX_T, GRADIENT(g, d), dx, i, end);
}
#endif

// One set a work-group. Batch norm: `dgamma` and `dbeta` are the gradients. Group norm (GROUPS): they are fp32 and hold
// the sums of each plane, to be summed over the samples.
#ifdef PLANES_BACKWARD
#if GROUPS
#define DGAMMA_T f32
#define DBETA_T f32
#else
#define DGAMMA_T SCALE_T
#define DBETA_T SHIFT_T
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_backward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                __global const float *restrict mean, __global const float *restrict var,
                __global STORAGE(DX_T) *restrict dx, __global STORAGE(DGAMMA_T) *restrict dgamma,
                __global STORAGE(DBETA_T) *restrict dbeta, const ulong sets, const ulong planes, const ulong hw,
                const ulong first, const ulong step, const ulong channels, const uint each, const float eps,
                const float slope) {
#if WG > 1
    __local float scratch[WG];
#endif
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets);
    const float n = (float)(planes * hw);
#if GROUPS
    for (size_t set = (size_t)get_group_id(0) * each; set < stop; set++) {
        const float center = mean[set], r = 1 / sqrt(var[set] + eps);
        float set_g = 0, set_gd = 0;
        for (size_t nth = 0; nth < planes; nth++) {
            const size_t plane = set * first + nth * step, c = plane % channels;
            float16 sum_g = 0, sum_gd = 0;
            add_sums(x, grad, plane * hw, (plane + 1) * hw, center, 0, 0, slope, &sum_g, &sum_gd);
            const float plane_g = group_sum(sum16(sum_g), scratch), plane_gd = group_sum(sum16(sum_gd), scratch);
            set_g += LOAD(SCALE_T, gamma, c) * plane_g;
            set_gd += LOAD(SCALE_T, gamma, c) * plane_gd;
            if (get_local_id(0) == 0) {
                dgamma[plane] = r * plane_gd;
                dbeta[plane] = plane_g;
            }
        }
        const float constant_part = r * (set_g / n), linear = r * (r * (r * set_gd / n));
        for (size_t nth = 0; nth < planes; nth++) {
            const size_t plane = set * first + nth * step;
            gradient_run(x, grad, dx, plane * hw, (plane + 1) * hw, center,
                         r * LOAD(SCALE_T, gamma, plane % channels), 0, slope, constant_part, linear);
        }
    }
#else
    for (size_t set = (size_t)get_group_id(0) * each; set < stop; set += WIDTH) {
        const uint width = min((size_t)WIDTH, stop - set);
        float scale[WIDTH], shift[WIDTH], constant_part[WIDTH], linear[WIDTH];
        float16 sum_g[WIDTH], sum_gd[WIDTH];
        for (uint k = 0; k < width; k++) {
            scale[k] = LOAD(SCALE_T, gamma, set + k) / sqrt(var[set + k] + eps);
            shift[k] = LOAD(SHIFT_T, beta, set + k);
            sum_g[k] = sum_gd[k] = 0;
        }
        for (size_t nth = 0; nth < planes; nth++) {
            for (uint k = 0; k < width; k++) {
                const size_t plane = set * first + nth * step + k;
                add_sums(x, grad, plane * hw, (plane + 1) * hw, mean[set + k], scale[k], shift[k], slope, &sum_g[k],
                         &sum_gd[k]);
            }
        }
        for (uint k = 0; k < width; k++) {
            const float r = 1 / sqrt(var[set + k] + eps);
            const float total_g = group_sum(sum16(sum_g[k]), scratch);
            const float total_gz = r * group_sum(sum16(sum_gd[k]), scratch);
            if (get_local_id(0) == 0) {
                STORE(DGAMMA_T, total_gz, dgamma, set + k);
                STORE(DBETA_T, total_g, dbeta, set + k);
            }
            constant_part[k] = scale[k] * (total_g / n);
            linear[k] = scale[k] * (r * (total_gz / n));
        }
        for (size_t nth = 0; nth < planes; nth++) {
            for (uint k = 0; k < width; k++) {
                const size_t plane = set * first + nth * step + k;
                gradient_run(x, grad, dx, plane * hw, (plane + 1) * hw, mean[set + k], scale[k], shift[k], slope,
                             constant_part[k], linear[k]);
            }
        }
    }
#endif
}
#endif

// Batch norm's backward in parts: sums of each part, their merge into the gradients of gamma and beta, dx.

#ifdef PLANES_BACKWARD_SUMS
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_backward_sums(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                     __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                     __global const float *restrict mean, __global const float *restrict var,
                     __global float *restrict partial_gd, __global float *restrict partial_g, const ulong sets,
                     const ulong planes, const ulong hw, const ulong first, const ulong step, const ulong span,
                     const uint parts, const uint each, const float eps, const float slope) {
#if WG > 1
    __local float scratch[WG];
#endif
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets * parts);
    for (size_t job = (size_t)get_group_id(0) * each; job < stop; job++) {
        const size_t set = job / parts, from = job % parts * span, to = min(from + span, (size_t)(planes * hw));
        const float scale = LOAD(SCALE_T, gamma, set) / sqrt(var[set] + eps);
        float16 sum_g = 0, sum_gd = 0;
        for (size_t at = from; at < to;) {
            RUN_OF_PLANE(at, to)
            add_sums(x, grad, begin, end, mean[set], scale, LOAD(SHIFT_T, beta, set), slope, &sum_g, &sum_gd);
            at += end - begin;
        }
        const float total_g = group_sum(sum16(sum_g), scratch), total_gd = group_sum(sum16(sum_gd), scratch);
        if (get_local_id(0) == 0) {
            partial_g[job] = total_g;
            partial_gd[job] = total_gd;
        }
    }
}
#endif

// Besides the gradients, each channel's sum of g r d and of g, in fp32, for planes_backward_apply.
#ifdef BATCH_BACKWARD_MERGE
__kernel void batch_backward_merge(__global const float *restrict partial_gd, __global const float *restrict partial_g,
                                   __global const float *restrict var, __global float *restrict sums,
                                   __global STORAGE(SCALE_T) *restrict dgamma,
                                   __global STORAGE(SHIFT_T) *restrict dbeta, const ulong channels, const uint parts,
                                   const float eps) {
    const size_t c = get_global_id(0);
    if (c >= channels) return;
    float sum_g = 0, sum_gd = 0;
    for (uint part = 0; part < parts; part++) {
        sum_g += partial_g[c * parts + part];
        sum_gd += partial_gd[c * parts + part];
    }
    sum_gd /= sqrt(var[c] + eps);
    sums[2 * c] = sum_gd;
    sums[2 * c + 1] = sum_g;
    STORE(SCALE_T, sum_gd, dgamma, c);
    STORE(SHIFT_T, sum_g, dbeta, c);
}
#endif

// `sums` is not read if TRAINING is 0.
#ifdef PLANES_BACKWARD_APPLY
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
planes_backward_apply(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                      __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                      __global const float *restrict mean, __global const float *restrict var,
                      __global const float *restrict sums, __global STORAGE(DX_T) *restrict dx, const ulong planes,
                      const ulong hw, const ulong channels, const uint each, const float n, const float eps,
                      const float slope) {
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)planes);
    for (size_t plane = (size_t)get_group_id(0) * each; plane < stop; plane++) {
        const size_t c = plane % channels;
        const float r = 1 / sqrt(var[c] + eps), scale = r * LOAD(SCALE_T, gamma, c);
        float constant_part = 0, linear = 0;
#if TRAINING
        constant_part = scale * (sums[2 * c + 1] / n);
        linear = scale * (r * (sums[2 * c] / n));
#endif
        gradient_run(x, grad, dx, plane * hw, (plane + 1) * hw, mean[c], scale, LOAD(SHIFT_T, beta, c), slope,
                     constant_part, linear);
    }
}
#endif
