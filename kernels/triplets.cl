// triplets.cl: which triplets (anchor, positive, negative) of a batch count, their loss, and its slopes.
//
// Every kernel goes along the anchors' rows of the matrix of distances between all samples of a batch:
//
//             n samples ->                            same class as the anchor (and not the anchor): positive
//    anchor | . p n n p n |  a work-group takes       another class: negative
//           |             |  `each` rows
//
// and leaves, for each anchor, its loss, and for each distance the loss's derivative by its square: slopes (n, n).
// The gradient is gathered from those (distances.cl). The anchors' NaNs make loss and slopes NaN.
//
//   HARDEST    of each anchor one triplet: its farthest positive and nearest negative (of equals the first); a sample
//              that lacks either has none
//   ALL        every triplet; counts[anchor] is how many exceed 0. No (n, n, n) array: each negative of an anchor
//              counts the positives it makes such a triplet with, and each positive the negatives.
//   ACTIVE     the sum of losses over the sum of counts
//   CLASSES    the class of a sample as the first sample that has its label, for labels of any type LABEL_T
//
//   ROOT       distances are sqrt(squared distance + 1e-8), else squared
//   WG         work-items of a work-group: 1 on CPU devices, else a power of two

#define LANES ((int16)(LANE_NUMBERS))


// The derivative of a distance by its square.
#ifdef ROOT
#define BY_SQUARE(distance) (0.5f / (distance))
#else
#define BY_SQUARE(distance) 1.0f
#endif

#if defined(HARDEST) || defined(ALL)
// Which of samples j .. j+15 are positives or negatives of the anchor; none of those beyond the end is either.
static inline int16 classes16(__global const int *classes, size_t j, size_t n) {
    if (j + 16 <= n) return vload16(0, classes + j);
    int lanes[16];
    for (uint k = 0; k < 16; k++) lanes[k] = j + k < n ? classes[j + k] : 0;
    return vload16(0, lanes);
}
static inline int16 counted(size_t j, size_t anchor, size_t n) {
    const long self = (long)anchor - (long)j;
    return (LANES != (int)(self >= 0 && self < 16 ? self : -1)) & (LANES < (int)min(n - j, (size_t)16));
}
#endif

#ifdef HARDEST
// The smallest of samples j .. j+15 that is marked, as its negative; -INFINITY if none is.
static inline float first_marked(int16 marked, size_t j) {
    return max16(marked ? -(convert_float16(LANES) + (float)j) : (float16)-INFINITY);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
hardest(__global const float *restrict distances, __global const int *restrict classes,
        __global float *restrict slopes, __global float *restrict losses, const ulong n, const uint each,
        const float margin) {
    SCRATCH;
    FOR_EACH_OWN(row, each, n) {
        __global const float *d = distances + row * n;
        const int own = classes[row];
        float16 far = -1.0f, close = -INFINITY, spoilt = 0.0f; // close: minus the smallest distance
        int16 found = 0;
        FOR_EACH_16(j, n) {
            const float16 v = LOAD_PART(f32, d, j, n, 0.0f);
            const int16 same = classes16(classes, j, n) == own, other = counted(j, row, n);
            far = (same & other) ? fmax(far, v) : far;
            close = (~same & other) ? fmax(close, -v) : close;
            found |= ~same & other;
            spoilt += (other & isnan(v)) ? v : 0.0f;
        }
        const float positive = group_max(max16(far), scratch), negative = -group_max(max16(close), scratch);
        const float negatives = group_max(max16(found ? (float16)1.0f : (float16)0.0f), scratch);
        const float nan = group_sum(sum16(spoilt), scratch);
        const int complete = positive >= 0.0f && negatives > 0.0f;
        const float over = (positive - negative) + margin;
        const int active = complete && !(over <= 0.0f);
        const float unknown = complete && isnan(over) ? over : nan; // both distances may be infinite
        float p = -INFINITY, q = -INFINITY; // minus the indices of the two
        FOR_EACH_16(j, n) {
            const float16 v = LOAD_PART(f32, d, j, n, 0.0f);
            const int16 same = classes16(classes, j, n) == own, other = counted(j, row, n);
            p = fmax(p, first_marked(same & other & (v == positive), j));
            q = fmax(q, first_marked(~same & other & (v == negative), j));
        }
        p = group_max(p, scratch);
        q = group_max(q, scratch);
        FOR_EACH_16(j, n) {
            const float16 index = convert_float16(LANES) + (float)j;
            const float16 slope = (index == -p) ? (float16)BY_SQUARE(positive)
                                : (index == -q) ? (float16)-BY_SQUARE(negative) : (float16)0.0f;
            STORE_PART(f32, unknown + (active ? slope : (float16)0.0f), slopes + row * n, j, n);
        }
        if (get_local_id(0) == 0) losses[row] = unknown + (active ? over : 0.0f);
    }
}
#endif

#ifdef ALL
// 1 for each of 16 samples that is a negative and makes a triplet above 0 with a positive whose distance plus the margin
// is `limit`, else 0; NaN where that cannot be told, as of two infinite distances.
static inline float16 exceeding(float limit, float16 distance, int16 negative) {
    const float16 over = limit - distance;
    return negative & ~(over <= 0.0f) ? (isnan(over) ? over : (float16)1.0f) : (float16)0.0f;
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
all_triplets(__global const float *restrict distances, __global const int *restrict classes, __global float *slopes,
             __global float *restrict losses, __global float *restrict counts, const ulong n, const uint each,
             const float margin) {
    SCRATCH;
    FOR_EACH_OWN(row, each, n) {
        __global const float *d = distances + row * n;
        __global float *slope = slopes + row * n;
        const int own = classes[row];
        FOR_EACH_16(j, n) {
            const float16 v = LOAD_PART(f32, d, j, n, 1.0f);
            const int16 negative = (classes16(classes, j, n) != own) & counted(j, row, n);
            float16 part = 0.0f;
            for (size_t p = 0; p < n; p++)
                if (classes[p] == own && p != row)
                    part += exceeding(d[p] + margin, v, negative);
            STORE_PART(f32, -part * BY_SQUARE(v), slope, j, n);
        }
#if WG > 1
        barrier(CLK_GLOBAL_MEM_FENCE); // the positives' slopes are zeros so far
#endif
        float sum = 0.0f, count = 0.0f;
        for (size_t p = get_local_id(0); p < n; p += WG) {
            if (classes[p] != own || p == row) continue;
            float16 sums = 0.0f, part = 0.0f;
            for (size_t j = 0; j < n; j += 16) {
                const float16 v = LOAD_PART(f32, d, j, n, 1.0f);
                const int16 negative = (classes16(classes, j, n) != own) & counted(j, row, n);
                const float16 counts_here = exceeding(d[p] + margin, v, negative);
                sums += counts_here != 0.0f ? d[p] + margin - v : (float16)0.0f;
                part += counts_here;
            }
            sum += sum16(sums);
            count += sum16(part);
            slope[p] = sum16(part) * BY_SQUARE(d[p]);
        }
        sum = group_sum(sum, scratch);
        count = group_sum(count, scratch);
        if (get_local_id(0) == 0) {
            losses[row] = sum;
            counts[row] = count;
        }
    }
}
#endif

#ifdef ACTIVE
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
active_mean(__global const float *restrict losses, __global const float *restrict counts,
            __global float *restrict loss, __global float *restrict count, const ulong n) {
    SCRATCH;
    float16 sums = 0.0f, total = 0.0f;
    size_t i = get_local_id(0) * 16, j = i;
    LONG_SUM(float16, sums, i, n, WG * 16, LOAD_PART(f32, losses, i, n, 0.0f))
    LONG_SUM(float16, total, j, n, WG * 16, LOAD_PART(f32, counts, j, n, 0.0f))
    const float sum = group_sum(sum16(sums), scratch);
    const float divisor = fmax(group_sum(sum16(total), scratch), 1.0f);
    if (get_local_id(0) == 0) {
        loss[0] = sum / divisor;
        count[0] = divisor;
    }
}
#endif

#ifdef CLASSES
#define storage_i64 long
#define label_i32(p, i) ((p)[i])
#define label_i64(p, i) ((p)[i])
#define label_f32(p, i) convert_long_sat(LOAD(f32, p, i))
#define label_f16(p, i) convert_long_sat(LOAD(f16, p, i))
#define label_bf16(p, i) convert_long_sat(LOAD(bf16, p, i))
#define LABEL(i) CAT(label_, LABEL_T)(labels, i)

__kernel void first_of_class(__global const STORAGE(LABEL_T) *restrict labels, __global int *restrict classes,
                             const ulong n) {
    const size_t i = get_global_id(0);
    if (i >= n) return;
    size_t j = 0;
    while (j < i && LABEL(j) != LABEL(i)) j++;
    classes[i] = (int)j;
}
#endif
