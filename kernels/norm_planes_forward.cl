// norm_planes_forward.cl: batch norm and group norm of NCHW tensors, for CPU devices. norm_planes.clh says which elements
// are normalized together, and names the macros.
//
//   planes_forward      statistics and result of whole sets; or, in three launches,
//   planes_statistics   mean and variance of each part of a set,
//   batch_merge         those of the sets, and the running statistics,
//   planes_apply        the result from them, or from constant statistics

#include "norm_planes.clh"

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
    float lost;            // what is too small for `mean`, of many pieces together not too small
} moments;

static inline void moments_fold(moments *m) {
    if (m->pending == 0) return;
    const float sum = sum16(m->sum), missed = m->lost * m->count;
    m->count += m->pending;
    const float shift = (sum + missed) / m->count, next = m->mean + shift;
    m->m2 += sum16(m->squares) - sum * shift;
    m->lost = shift - (next - m->mean);
    m->mean = next;
    m->pending = 0;
    m->sum = m->squares = 0;
}

#if defined PLANES_STATISTICS || defined PLANES_FORWARD
static inline void moments_add_run(moments *m, __global const STORAGE(X_T) *x, const size_t begin,
                                   const size_t end) {
    for (size_t start = begin; start < end; start += PIECE) {
        const size_t stop = min(start + PIECE, end);
        const float mean = m->mean;
        float16 sum0 = 0, sum1 = 0, squares0 = 0, squares1 = 0;
        size_t i = start;
        for (; i + 32 <= stop; i += 32) {
            const float16 d0 = LOAD16(X_T, x, i) - mean, d1 = LOAD16(X_T, x, i + 16) - mean;
            sum0 += d0;
            sum1 += d1;
            squares0 += d0 * d0;
            squares1 += d1 * d1;
        }
        for (; i + 16 <= stop; i += 16) {
            const float16 d = LOAD16(X_T, x, i) - mean;
            sum0 += d;
            squares0 += d * d;
        }
        m->pending += (float)(i - start);
        if (i < stop) {
            const float16 d = LOAD_TAIL(X_T, x, start, i, stop, mean) - mean;
            sum1 += d;
            squares1 += d * d;
            m->pending += (float)(stop - i);
        }
        m->sum += sum0 + sum1;
        m->squares += squares0 + squares1;
        if (m->pending >= FOLD) moments_fold(m);
    }
}

// (mean, variance) of positions from .. to - 1 of `width` neighbouring sets.
static inline void set_moments(__global const STORAGE(X_T) *x, const size_t set, const uint width, const size_t from,
                               const size_t to, const size_t hw, const size_t first, const size_t step,
                               float2 *results) {
    moments m[WIDTH];
    {
        RUN_OF_PLANE(from, to)
        for (uint k = 0; k < width; k++) {
            const size_t i = begin + k * hw;
            m[k].sum = m[k].squares = 0;
            m[k].pending = m[k].count = m[k].m2 = m[k].lost = 0;
            m[k].mean = end - begin < 16 ? LOAD(X_T, x, i) : sum16(LOAD16(X_T, x, i)) / 16;
        }
    }
    for (size_t at = from; at < to;) {
        RUN_OF_PLANE(at, to)
        for (uint k = 0; k < width; k++) moments_add_run(&m[k], x, begin + k * hw, end + k * hw);
        at += end - begin;
    }
    const float n = (float)(to - from);
    for (uint k = 0; k < width; k++) {
        moments_fold(&m[k]);
        results[k] = (float2)(m[k].mean, m[k].m2 < 0 ? 0 : m[k].m2 / n); // not fmax, which would turn NaN into 0
    }
}
#endif

#ifdef PLANES_STATISTICS
__kernel ONE_WORK_ITEM void
planes_statistics(__global const STORAGE(X_T) *restrict x, __global float *restrict partial_mean,
                  __global float *restrict partial_var, const ulong sets, const ulong planes, const ulong hw,
                  const ulong first, const ulong step, const ulong span, const uint parts, const uint each) {
    FOR_EACH_OWN(job, each, (size_t)sets * parts) {
        const size_t from = job % parts * span, to = min(from + span, (size_t)(planes * hw));
        float2 result;
        set_moments(x, job / parts, 1, from, to, hw, first, step, &result);
        partial_mean[job] = result.x;
        partial_var[job] = result.y;
    }
}
#endif

// Merges the parts of each channel (Chan et al.) and moves the running statistics, unless a statistic of any channel
// is not finite. One work-item; with one part the partial statistics may be the merged ones.
#ifdef BATCH_MERGE
__kernel ONE_WORK_ITEM void
batch_merge(__global const float *partial_mean, __global const float *partial_var, __global float *mean,
            __global float *var, __global STORAGE(RUNNING_T) *running_mean, __global STORAGE(RUNNING_T) *running_var,
            const ulong channels, const ulong total, const ulong span, const uint parts, const float momentum) {
    bool bad = false;
    for (size_t c = 0; c < channels; c++) {
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
        if (!isfinite(center) || !isfinite(spread)) bad = true;
    }
#if RUNNING
    if (bad) return;
    for (size_t c = 0; c < channels; c++) {
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_mean, c) + momentum * mean[c], running_mean, c);
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_var, c) + momentum * var[c], running_var, c);
    }
#endif
}
#endif

#if defined PLANES_FORWARD || defined PLANES_APPLY
static inline void apply_run(__global const STORAGE(X_T) *x, __global STORAGE(Y_T) *y, const size_t begin,
                             const size_t end, const float mean, const float scale, const float shift,
                             const float slope) {
    size_t i = begin;
    for (; i + 16 <= end; i += 16) {
        const float16 v = (LOAD16(X_T, x, i) - mean) * scale + shift;
        STORE16(Y_T, ACTIVATE(v), y, i);
    }
    if (i >= end) return;
    if (end - begin >= 16) { // some of the last 16 a second time
        const float16 v = (LOAD16(X_T, x, end - 16) - mean) * scale + shift;
        STORE16(Y_T, ACTIVATE(v), y, end - 16);
        return;
    }
    const float16 v = (LOAD_PART(X_T, x, i, end, 0.0f) - mean) * scale + shift;
    STORE_PART(Y_T, ACTIVATE(v), y, i, end);
}
#endif

#ifdef PLANES_FORWARD
__kernel ONE_WORK_ITEM void
planes_forward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
               __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
               __global float *restrict mean, __global float *restrict var, const ulong sets, const ulong planes,
               const ulong hw, const ulong first, const ulong step, const ulong channels, const uint each,
               const float eps, const float slope) {
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets);
    for (size_t set = (size_t)get_group_id(0) * each; set < stop; set += WIDTH) {
        const uint width = min((size_t)WIDTH, stop - set);
        float2 statistics[WIDTH];
        set_moments(x, set, width, 0, planes * hw, hw, first, step, statistics);
        for (uint k = 0; k < width; k++) {
            mean[set + k] = statistics[k].x;
            var[set + k] = statistics[k].y;
        }
        for (size_t nth = 0; nth < planes; nth++) {
            for (uint k = 0; k < width; k++) {
                const size_t plane = set * first + nth * step + k, c = plane % channels;
                const float scale = LOAD(SCALE_T, gamma, c) / DEVIATION(statistics[k].y, eps);
                apply_run(x, y, plane * hw, (plane + 1) * hw, statistics[k].x, scale, LOAD(SHIFT_T, beta, c), slope);
            }
        }
    }
}
#endif

// y of batch norm from given statistics, plane after plane.
#ifdef PLANES_APPLY
__kernel ONE_WORK_ITEM void
planes_apply(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
             __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
             __global const float *restrict mean, __global const float *restrict var, const ulong planes,
             const ulong hw, const ulong channels, const uint each, const float eps, const float slope) {
    FOR_EACH_OWN(plane, each, planes) {
        const size_t c = plane % channels;
        apply_run(x, y, plane * hw, (plane + 1) * hw, mean[c], LOAD(SCALE_T, gamma, c) / DEVIATION(var[c], eps),
                  LOAD(SHIFT_T, beta, c), slope);
    }
}
#endif
