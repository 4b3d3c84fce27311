// loss.cl: losses fused with their reduction, and their gradients.
//
// Two families. Every kernel works on 16 elements at a time and reads the incoming gradient of the loss from its
// device buffer, so that a loss scale never reaches the host or a kernel's source.
//
// 1. PAIRS of x and t, element by element over a flat range: mse, l1, smooth_l1, bce (with logits)
//
//        |---- span ----|---- span ----| ... |      one work-group a span; sums[group] is its part of the loss
//
//    pair_loss      sums[group] = sum loss(x, t)       pair_terms   y[i] = loss(x[i], t[i])
//    pair_gradient  dx[i] = g * slope(x[i], t[i]), g the loss's gradient: one number, or (G_EACH) one an element
//
//    The gradient for t of mse, l1 and smooth_l1 is that for x with the operands swapped; bce has bce_target.
//
// 2. ROWS of logits x (rows, n): cross_entropy over labels or probabilities, hinge
//
//             n classes ->
//    row 0  |             |  a work-group takes `each` rows, one after the other
//    row 1  |             |  and leaves statistics of each row for backward: (rows, STATS) floats
//
//   X_T, T_T, G_T, Y_T, DX_T  storage types of logits, targets, incoming gradient, terms, outgoing gradient
//   LABEL_T                   type of labels: i32, i64, or a storage type holding whole numbers
//   KIND                      which pair loss: mse, l1, smooth_l1, bce, bce_target; with PAIR_LOSS, PAIR_TERMS or
//                             PAIR_GRADIENT, the kernel wanted
//   LABELS, PROBABILITIES, HINGE  which row loss: its forward kernels, or with DX_T its gradient
//   WG                        work-items of a work-group: 1 on CPU devices, else a power of two

// ------------------------------------------------------------------------------------------------ pairs

#ifdef KIND
#define LOSS CAT(loss_, KIND)
#define SLOPE CAT(slope_, KIND)

// a * b, with 0 * inf = 0: the term is absent, however large the other factor.
inline float16 product(float16 a, float16 b) { return a == 0.0f ? (float16)0.0f : a * b; }

inline float16 loss_mse(float16 x, float16 t, float beta) { return (x - t) * (x - t); }
inline float16 slope_mse(float16 x, float16 t, float beta) { return 2.0f * (x - t); }

// The sign of d; NaN stays NaN, which OpenCL's sign() would turn into 0.
inline float16 sign_of(float16 d) { return d > 0.0f ? (float16)1.0f : d < 0.0f ? (float16)-1.0f : d; }

inline float16 loss_l1(float16 x, float16 t, float beta) { return fabs(x - t); }
inline float16 slope_l1(float16 x, float16 t, float beta) { return sign_of(x - t); }

inline float16 loss_smooth_l1(float16 x, float16 t, float beta) {
    const float16 d = fabs(x - t);
    return d < beta ? 0.5f * d * (d / beta) : d - 0.5f * beta;
}
inline float16 slope_smooth_l1(float16 x, float16 t, float beta) {
    const float16 d = x - t;
    return fabs(d) < beta ? d / beta : sign_of(d);
}

// max(x, 0) - x * t + log(1 + exp(-|x|)), without its cancellation: for x > 0 the first two are x * (1 - t).
inline float16 loss_bce(float16 x, float16 t, float beta) {
    return (x > 0.0f ? product(1.0f - t, x) : -product(t, x)) + log1p(exp(-fabs(x)));
}
// sigmoid(x) - t; for x > 0 as (1 - t) - sigmoid(-x), which keeps its digits where sigmoid(x) is close to 1
inline float16 slope_bce(float16 x, float16 t, float beta) {
    const float16 e = exp(-fabs(x)), tail = e / (1.0f + e);
    return x > 0.0f ? (1.0f - t) - tail : tail - t;
}
// Gradient for the target. Here the operands come swapped: x is the target, t the logit.
inline float16 slope_bce_target(float16 x, float16 t, float beta) { return -t; }

#ifdef PAIR_LOSS
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
pair_loss(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
          __global float *restrict sums, const ulong n, const ulong span, const float beta) {
#if WG > 1
    __local float scratch[WG];
#endif
    const size_t begin = get_group_id(0) * (size_t)span, end = min(begin + span, (size_t)n);
    float16 total = 0;
    // In blocks of 64 steps, whose sums are then added: few roundings even over long spans.
    for (size_t block = begin; block < end; block += WG * 1024) {
        const size_t stop = min(block + WG * 1024, end);
        float16 sum = 0;
        for (size_t i = block + get_local_id(0) * 16; i < stop; i += WG * 16) {
            // Lanes beyond the end hold x = t = 0, where every one of these losses is 0.
            sum += LOSS(LOAD_PART(X_T, x, i, stop, 0.0f), LOAD_PART(T_T, t, i, stop, 0.0f), beta);
        }
        total += sum;
    }
    const float sum = group_sum(sum16(total), scratch);
    if (get_local_id(0) == 0) sums[get_group_id(0)] = sum;
}
#endif

#ifdef PAIR_TERMS
__kernel void pair_terms(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
                         __global STORAGE(Y_T) *restrict y, const ulong n, const ulong span, const float beta) {
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)n);
    for (; i < end; i += 16)
        STORE_PART(Y_T, LOSS(LOAD_PART(X_T, x, i, end, 0.0f), LOAD_PART(T_T, t, i, end, 0.0f), beta), y, i, end);
}
#endif

#ifdef PAIR_GRADIENT
#ifdef G_EACH
#define GRADIENT(i, end) LOAD_PART(G_T, g, i, end, 0.0f)
#else
#define GRADIENT(i, end) LOAD(G_T, g, 0)
#endif

__kernel void pair_gradient(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
                            __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx,
                            const ulong n, const ulong span, const float beta) {
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)n);
    for (; i < end; i += 16) {
        const float16 slope = SLOPE(LOAD_PART(X_T, x, i, end, 0.0f), LOAD_PART(T_T, t, i, end, 0.0f), beta);
        STORE_PART(DX_T, slope * GRADIENT(i, end), dx, i, end);
    }
}
#endif
#endif

// ------------------------------------------------------------------------------------------------- rows

#if defined(LABELS) || defined(PROBABILITIES) || defined(HINGE)
#define STATS 4
#define FOR_EACH_16(i) for (size_t i = get_local_id(0) * 16; i < n; i += WG * 16)
#define LANES ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))

// Largest logit of the row, and the sum of exp(x - largest): softmax is exp(x - top) / total.
inline float row_top(__global const STORAGE(X_T) *row, size_t n, __local float *scratch) {
    float16 most = -INFINITY;
    FOR_EACH_16(i) most = fmax(most, LOAD_PART(X_T, row, i, n, -INFINITY));
    return group_max(max16(most), scratch);
}

inline float row_total(__global const STORAGE(X_T) *row, size_t n, float top, __local float *scratch) {
    float16 sums = 0;
    FOR_EACH_16(i) sums += exp(LOAD_PART(X_T, row, i, n, -INFINITY) - top);
    return group_sum(sum16(sums), scratch);
}

#if WG > 1
#define SCRATCH __local float scratch[WG]
#else
#define SCRATCH __local float *scratch = 0
#endif
#define ROW_RANGE                                                                                  \
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)rows);   \
    const uint lid = get_local_id(0)

// Labels. losses[row] = log(sum exp x) - x[label]. An ignored row has loss 0 and total 0; a label that is no class
// makes its row's loss and gradient NaN. stats: top, total.
#ifdef LABELS
#define storage_i64 long

// A label as a class number; one that is no class of n (or NaN) becomes -1.
inline long class_of_long(long label, ulong n) { return label >= 0 && label < (long)n ? label : -1; }
inline long class_of_float(float label, ulong n) { return label > -1.0f && label < (float)n ? (long)label : -1; }
#define class_i32(p, i, n) class_of_long((p)[i], n)
#define class_i64(p, i, n) class_of_long((p)[i], n)
#define class_f32(p, i, n) class_of_float(LOAD(f32, p, i), n)
#define class_f16(p, i, n) class_of_float(LOAD(f16, p, i), n)
#define class_bf16(p, i, n) class_of_float(LOAD(bf16, p, i), n)
#define CLASS(T, p, i, n) CAT(class_, T)((p), (i), (n))
#define number_i32(p, i) ((p)[i])
#define number_i64(p, i) ((p)[i])
#define number_f32(p, i) LOAD(f32, p, i)
#define number_f16(p, i) LOAD(f16, p, i)
#define number_bf16(p, i) LOAD(bf16, p, i)
#define NUMBER(T, p, i) CAT(number_, T)((p), (i))

#ifndef DX_T
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
label_loss(__global const STORAGE(X_T) *restrict x, __global const STORAGE(LABEL_T) *restrict labels,
           __global float *restrict losses, __global float *restrict stats, const ulong rows, const ulong n,
           const uint each, const int ignored) {
    SCRATCH;
    ROW_RANGE;
    for (size_t row = first; row < last; row++) {
        __global const STORAGE(X_T) *logits = x + row * n;
        const float top = row_top(logits, n, scratch);
        const float total = row_total(logits, n, top, scratch);
        if (lid == 0) {
            const long label = CLASS(LABEL_T, labels, row, n);
            const int skip = NUMBER(LABEL_T, labels, row) == ignored;
            const float loss = label < 0 ? NAN : (top - LOAD(X_T, logits, max(label, 0L))) + log(total);
            losses[row] = skip ? 0.0f : loss;
            stats[row * STATS] = top;
            stats[row * STATS + 1] = skip ? 0.0f : label < 0 ? NAN : total;
        }
    }
}

// loss = sum losses / rows that count, at least 1; count[0] = that number. One work-group.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
label_mean(__global const float *restrict losses, __global const float *restrict stats, __global float *restrict loss,
           __global float *restrict count, const ulong rows) {
    SCRATCH;
    const size_t block = 1024 * WG;
    float sum = 0, valid = 0;
    for (size_t start = 0; start < rows; start += block) {
        const size_t stop = min(start + block, (size_t)rows);
        float block_sum = 0;
        uint block_valid = 0;
        for (size_t row = start + get_local_id(0); row < stop; row += WG) {
            block_sum += losses[row];
            block_valid += stats[row * STATS + 1] != 0.0f;
        }
        sum += block_sum;
        valid += block_valid;
    }
    sum = group_sum(sum, scratch);
    valid = fmax(group_sum(valid, scratch), 1.0f);
    if (get_local_id(0) == 0) {
        loss[0] = sum / valid;
        count[0] = valid;
    }
}
#else

// dx = (softmax - onehot(label)) * g / count
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
label_gradient(__global const STORAGE(X_T) *restrict x, __global const STORAGE(LABEL_T) *restrict labels,
               __global const float *restrict stats, __global const float *restrict count,
               __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx, const ulong rows,
               const ulong n, const uint each) {
    ROW_RANGE;
    const float scale = LOAD(G_T, g, 0) / count[0];
    for (size_t row = first; row < last; row++) {
        const float top = stats[row * STATS], total = stats[row * STATS + 1];
        const long label = CLASS(LABEL_T, labels, row, n);
        for (size_t i = lid * 16; i < n; i += WG * 16) {
            const long lane = label - (long)i; // where the label is among these 16, if it is
            const int16 here = LANES == (int)(lane >= 0 && lane < 16 ? lane : -1);
            const float16 share = exp(LOAD_PART(X_T, x + row * n, i, n, 0.0f) - top) / total;
            float16 slope = (here ? share - 1.0f : share) * scale;
            if (total == 0.0f) slope = 0.0f;
            STORE_PART(DX_T, slope, dx + row * n, i, n);
        }
    }
}
#endif
#endif

// Probabilities (or one-hot rows) t. losses[row] = sum t * (log(sum exp x) - x). stats: top, total, sum t.
#ifdef PROBABILITIES
#ifndef DX_T
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
probability_loss(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
                 __global float *restrict losses, __global float *restrict stats, const ulong rows, const ulong n,
                 const uint each) {
    SCRATCH;
    ROW_RANGE;
    for (size_t row = first; row < last; row++) {
        __global const STORAGE(X_T) *logits = x + row * n;
        const float top = row_top(logits, n, scratch);
        const float total = row_total(logits, n, top, scratch);
        float16 weights = 0, distances = 0;
        FOR_EACH_16(i) {
            const float16 weight = LOAD_PART(T_T, t + row * n, i, n, 0.0f);
            const float16 distance = top - LOAD_PART(X_T, logits, i, n, 0.0f);
            weights += weight;
            distances += weight == 0.0f ? (float16)0.0f : weight * distance; // a logit of -inf may have weight 0
        }
        const float weight = group_sum(sum16(weights), scratch);
        const float distance = group_sum(sum16(distances), scratch);
        if (lid == 0) {
            losses[row] = distance + weight * log(total);
            stats[row * STATS] = top;
            stats[row * STATS + 1] = total;
            stats[row * STATS + 2] = weight;
        }
    }
}
#else

// dx = (softmax * sum t - t) * g / rows
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
probability_gradient(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
                     __global const float *restrict stats, __global const STORAGE(G_T) *restrict g,
                     __global STORAGE(DX_T) *restrict dx, const ulong rows, const ulong n, const uint each) {
    ROW_RANGE;
    const float scale = LOAD(G_T, g, 0) / (float)rows;
    for (size_t row = first; row < last; row++) {
        const float top = stats[row * STATS], total = stats[row * STATS + 1], weight = stats[row * STATS + 2];
        for (size_t i = lid * 16; i < n; i += WG * 16) {
            const float16 share = exp(LOAD_PART(X_T, x + row * n, i, n, 0.0f) - top) / total;
            const float16 slope = (share * weight - LOAD_PART(T_T, t + row * n, i, n, 0.0f)) * scale;
            STORE_PART(DX_T, slope, dx + row * n, i, n);
        }
    }
}
#endif
#endif

// Hinge. The true class is the first with a target other than 0 (none: -1, and score 0).
// losses[row] = sum over the other classes of max(0, margin + x - x[true]). stats: true class, how many exceeded 0.
#ifdef HINGE
// A step's worth of classes: what each adds to the loss, 0 for the true class and beyond the end.
inline float16 excess(float16 x, float score, float margin, long first, long truth, long n) {
    const long lane = truth - first;
    const int16 counted = (LANES != (int)(lane >= 0 && lane < 16 ? lane : -1)) && (LANES < (int)min(n - first, 16L));
    const float16 over = (x - score) + margin;
    return counted && !(over <= 0.0f) ? over : (float16)0.0f; // a NaN stays
}
#define HINGE_SLOPE(over) ((over) > 0.0f ? (float16)1.0f : (over)) // 1 where it exceeded, else 0; NaN stays

#ifndef DX_T
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
hinge_loss(__global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,
           __global float *restrict losses, __global float *restrict stats, const ulong rows, const ulong n,
           const uint each, const float margin) {
    SCRATCH;
    ROW_RANGE;
    for (size_t row = first; row < last; row++) {
        __global const STORAGE(X_T) *logits = x + row * n;
        float found = -INFINITY; // minus the smallest class found; classes are below 2**24
        for (size_t i = lid; i < n; i += WG)
            if (LOAD(T_T, t, row * n + i) != 0.0f) {
                found = -(float)i;
                break;
            }
        found = group_max(found, scratch);
        const long truth = found == -INFINITY ? -1 : (long)-found;
        const float score = truth < 0 ? 0.0f : LOAD(X_T, logits, truth);
        float16 sums = 0, counts = 0;
        FOR_EACH_16(i) {
            const float16 over = excess(LOAD_PART(X_T, logits, i, n, 0.0f), score, margin, i, truth, n);
            sums += over;
            counts += HINGE_SLOPE(over);
        }
        const float sum = group_sum(sum16(sums), scratch);
        const float count = group_sum(sum16(counts), scratch);
        if (lid == 0) {
            losses[row] = sum;
            stats[row * STATS] = truth;
            stats[row * STATS + 1] = count;
        }
    }
}
#else

// dx = g / rows for a class that exceeded 0, -g / rows * (how many did) for the true class
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
hinge_gradient(__global const STORAGE(X_T) *restrict x, __global const float *restrict stats,
               __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx, const ulong rows,
               const ulong n, const uint each, const float margin) {
    ROW_RANGE;
    const float scale = LOAD(G_T, g, 0) / (float)rows;
    for (size_t row = first; row < last; row++) {
        const long truth = (long)stats[row * STATS];
        const float count = stats[row * STATS + 1];
        const float score = truth < 0 ? 0.0f : LOAD(X_T, x + row * n, truth);
        for (size_t i = lid * 16; i < n; i += WG * 16) {
            const float16 over = excess(LOAD_PART(X_T, x + row * n, i, n, 0.0f), score, margin, i, truth, n);
            const long lane = truth - (long)i;
            const int16 here = LANES == (int)(lane >= 0 && lane < 16 ? lane : -1);
            STORE_PART(DX_T, (here ? (float16)-count : HINGE_SLOPE(over)) * scale, dx + row * n, i, n);
        }
    }
}
#endif
#endif
#endif
