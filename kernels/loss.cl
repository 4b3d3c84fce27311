// loss.cl: losses of rows of logits fused with their reduction, and their gradients: cross entropy over labels or
// probabilities, hinge. (Losses of single elements are in loss_elementwise.cl.)
//
//             n classes ->
//    row 0  |             |  a work-group takes `each` rows, one after the other, 16 classes at a time,
//    row 1  |             |  and leaves statistics of each row for backward: (rows, STATS) floats
//
// Every kernel reads the incoming gradient of the loss from its device buffer, so that a loss scale never reaches the
// host or a kernel's source.
//
//   X_T, T_T, G_T, DX_T       storage types of logits, targets, incoming gradient, outgoing gradient
//   LABEL_T                   type of labels: i32, i64, or a storage type holding whole numbers
//   LABELS, PROBABILITIES, HINGE  which loss: its forward kernels, or with DX_T its gradient
//   WG                        work-items of a work-group: 1 on CPU devices, else a power of two
//   PIECES                    of pieces.clh

#include "pieces.clh"

#define STATS 4
// Blocks of a row that are summed by themselves: 256 terms of each lane, so that rounding does not grow with the row.
#define FOR_EACH_BLOCK(start, stop) \
    for (size_t start = 0, stop; stop = min(start + WG * 4096, (size_t)n), start < n; start = stop)
#define LANES ((int16)(LANE_NUMBERS))

// Largest logit of the row, and the sum of exp(x - largest): softmax is exp(x - top) / total.
static inline float row_top(__global const STORAGE(X_T) *row, size_t n, __local float *scratch) {
    float16 most = -INFINITY;
    FOR_EACH_16(i, n) most = fmax(most, LOAD_PART(X_T, row, i, n, -INFINITY));
    return group_max(max16(most), scratch);
}

static inline float row_total(__global const STORAGE(X_T) *row, size_t n, float top, __local float *scratch) {
    GROUP_TERMS sums = 0;
    size_t i = get_local_id(0) * 16;
    LONG_SUM(GROUP_TERMS, sums, i, n, WG * 16, TERMS(exp16(LOAD_PART(X_T, row, i, n, -INFINITY) - top)))
    return group_sum(TERMS_SUM(sums), scratch);
}

// Labels. losses[row] = log(sum exp x) - x[label]. An ignored row has loss 0 and total 0; a label that is no class
// makes its row's loss and gradient NaN. stats: top, total.
#ifdef LABELS
#define storage_i64 long

// A label as a class number; one that is no class of n (or NaN, or between two) becomes -1.
static inline long class_of_long(long label, ulong n) { return label >= 0 && label < (long)n ? label : -1; }
static inline long class_of_float(float label, ulong n) {
    return label >= 0.0f && label < (float)n && label == floor(label) ? (long)label : -1;
}
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
           const uint each, const long ignored) {
    SCRATCH;
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *logits = x + row * n;
        const float top = row_top(logits, n, scratch);
        const float total = row_total(logits, n, top, scratch);
        if (get_local_id(0) == 0) {
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
    float sum = 0, valid = 0;
    size_t row = get_local_id(0);
    LONG_SUM(float, sum, row, rows, WG, losses[row])
    for (size_t start = 0; start < rows; start += 1024 * WG) { // a float counts to 2^24, a sum of blocks further
        uint block_valid = 0;
        for (row = start + get_local_id(0); row < min(start + 1024 * WG, (size_t)rows); row += WG)
            block_valid += stats[row * STATS + 1] != 0.0f;
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

// dx = (softmax - onehot(label)) * g, divided by count if COUNTED
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
label_gradient(__global const STORAGE(X_T) *restrict x, __global const STORAGE(LABEL_T) *restrict labels,
               __global const float *restrict stats, __global const float *restrict count,
               __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx, const ulong rows,
               const ulong n, const uint each) {
#ifdef COUNTED
    const float scale = LOAD(G_T, g, 0) / count[0];
#else
    const float scale = LOAD(G_T, g, 0);
#endif
    FOR_EACH_OWN(row, each, rows) {
        const float top = stats[row * STATS], total = stats[row * STATS + 1];
        const long label = CLASS(LABEL_T, labels, row, n);
        FOR_EACH_16(i, n) {
            const long lane = label - (long)i; // where the label is among these 16, if it is
            const int16 here = LANES == (int)(lane >= 0 && lane < 16 ? lane : -1);
            const float16 share = exp16(LOAD_PART(X_T, x + row * n, i, n, 0.0f) - top) / total;
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
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *logits = x + row * n;
        const float top = row_top(logits, n, scratch);
        const float total = row_total(logits, n, top, scratch);
        float16 weights = 0, distances = 0;
        FOR_EACH_BLOCK(start, stop) {
            float16 block_weights = 0, block_distances = 0;
            for (size_t i = start + get_local_id(0) * 16; i < stop; i += WG * 16) {
                const float16 weight = LOAD_PART(T_T, t + row * n, i, n, 0.0f);
                const float16 distance = top - LOAD_PART(X_T, logits, i, n, 0.0f);
                block_weights += weight;
                // a logit of -inf may have weight 0
                block_distances += weight == 0.0f ? (float16)0.0f : weight * distance;
            }
            weights += block_weights;
            distances += block_distances;
        }
        const float weight = group_sum(sum16(weights), scratch);
        const float distance = group_sum(sum16(distances), scratch);
        if (get_local_id(0) == 0) {
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
    const float scale = LOAD(G_T, g, 0) / (float)rows;
    FOR_EACH_OWN(row, each, rows) {
        const float top = stats[row * STATS], total = stats[row * STATS + 1], weight = stats[row * STATS + 2];
        FOR_EACH_16(i, n) {
            const float16 share = exp16(LOAD_PART(X_T, x + row * n, i, n, 0.0f) - top) / total;
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
static inline float16 excess(float16 x, float score, float margin, long first, long truth, long n) {
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
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *logits = x + row * n;
        float found = -INFINITY; // minus the smallest class found; classes are below 2**24
        for (size_t i = get_local_id(0); i < n; i += WG)
            if (LOAD(T_T, t, row * n + i) != 0.0f) {
                found = -(float)i;
                break;
            }
        found = group_max(found, scratch);
        const long truth = found == -INFINITY ? -1 : (long)-found;
        const float score = truth < 0 ? 0.0f : LOAD(X_T, logits, truth);
        float16 sums = 0, counts = 0;
        FOR_EACH_BLOCK(start, stop) {
            float16 block_sum = 0;
            for (size_t i = start + get_local_id(0) * 16; i < stop; i += WG * 16) {
                const float16 over = excess(LOAD_PART(X_T, logits, i, n, 0.0f), score, margin, i, truth, n);
                block_sum += over;
                counts += HINGE_SLOPE(over); // whole numbers
            }
            sums += block_sum;
        }
        const float sum = group_sum(sum16(sums), scratch);
        const float count = group_sum(sum16(counts), scratch);
        if (get_local_id(0) == 0) {
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
    const float scale = LOAD(G_T, g, 0) / (float)rows;
    FOR_EACH_OWN(row, each, rows) {
        const long truth = (long)stats[row * STATS];
        const float count = stats[row * STATS + 1];
        const float score = truth < 0 ? 0.0f : LOAD(X_T, x + row * n, truth);
        FOR_EACH_16(i, n) {
            const float16 over = excess(LOAD_PART(X_T, x + row * n, i, n, 0.0f), score, margin, i, truth, n);
            const long lane = truth - (long)i;
            const int16 here = LANES == (int)(lane >= 0 && lane < 16 ? lane : -1);
            STORE_PART(DX_T, (here ? (float16)-count : HINGE_SLOPE(over)) * scale, dx + row * n, i, n);
        }
    }
}
#endif
#endif
