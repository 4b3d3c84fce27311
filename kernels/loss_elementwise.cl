// loss_elementwise.cl: losses of each element of a flat range, fused with their sum or kept apart, and their gradients.
//
//        |---- span ----|---- span ----| ... |      one work-group (loss_sum) or work-item (the others) a span
//
//    loss_sum       sums[group] = sum of loss(x, t, w, v) over its span
//    loss_terms     y[i] = loss(x[i], t[i], w[i], v[i])
//    loss_gradient  dx[i] = g * slope(x[i], t[i], w[i], v[i]), g the loss's gradient: one number, or (G_EACH) one an
//                   element, read on the device: a loss scale never reaches the host or a kernel's source
//
// x is the prediction, t the target, w and v weights. Everything is done 16 elements at a time. The gradient for t of
// mse, l1 and smooth_l1 is that for x with the operands swapped; elsewhere a KIND of its own gives it.
//
//   KIND                          which loss, one of loss_* and slope_* below
//   LOSS_SUM, LOSS_TERMS, LOSS_GRADIENT  the kernel wanted
//   WEIGHTS                       how many of w and v there are: 0, 1 or 2
//   X_T, T_T, W_T, V_T            storage types of the operands
//   G_T, Y_T, DX_T                storage types of incoming gradient, terms, outgoing gradient
//   WG                            work-items of a work-group of loss_sum: 1 on CPU devices, else a power of two
//   PIECES                        of pieces.clh
//
// c holds what a loss is set up with; each kind reads its own of these.

#include "pieces.clh"

#define BETA c.s0       // smooth_l1: where the parabola ends
#define EPSILON c.s1    // probability_bce: probabilities are held in EPSILON .. 1 - EPSILON,
#define LOG_LOW c.s2    //   so that their logarithms are held in log(EPSILON)
#define LOG_HIGH c.s3   //   .. log(1 - EPSILON)
#define BCE_SCALE c.s4  // detection: share of the cross entropy
#define BOX_SCALE c.s5  //   and of the smooth l1
#define AREA_REFERENCE c.s1  // box
#define AREA_GAIN c.s2
#define MISS_GAIN c.s3
#define CENTER_GAIN c.s4
#define SIZE_GAIN c.s5

// --------------------------------------------------------------------------------------------- without weights

// a * b, with 0 * inf = 0: the term is absent, however large the other factor.
static inline float16 product(float16 a, float16 b) { return a == 0.0f ? (float16)0.0f : a * b; }

// The sign of d; NaN stays NaN, which OpenCL's sign() would turn into 0.
static inline float16 sign_of(float16 d) { return d > 0.0f ? (float16)1.0f : d < 0.0f ? (float16)-1.0f : d; }

// x, held between two numbers; NaN stays NaN.
static inline float16 between(float16 x, float low, float high) {
    const float16 t = x < low ? (float16)low : x;
    return t > high ? (float16)high : t;
}

#define ARGUMENTS float16 x, float16 t, float16 w, float16 v, float8 c

static inline float16 loss_mse(ARGUMENTS) { return (x - t) * (x - t); }
static inline float16 slope_mse(ARGUMENTS) { return 2.0f * (x - t); }

static inline float16 loss_l1(ARGUMENTS) { return fabs(x - t); }
static inline float16 slope_l1(ARGUMENTS) { return sign_of(x - t); }

static inline float16 loss_smooth_l1(ARGUMENTS) {
    const float16 d = fabs(x - t);
    return d < BETA ? 0.5f * d * (d / BETA) : d - 0.5f * BETA;
}
static inline float16 slope_smooth_l1(ARGUMENTS) {
    const float16 d = x - t;
    return fabs(d) < BETA ? d / BETA : sign_of(d);
}

// Binary cross entropy of a logit: max(x, 0) - x * t + log(1 + exp(-|x|)), without its cancellation: for x > 0 the
// first two are x * (1 - t).
static inline float16 loss_logit_bce(ARGUMENTS) {
    return (x > 0.0f ? product(1.0f - t, x) : -product(t, x)) + log1p(exp(-fabs(x)));
}
// sigmoid(x) - t; for x > 0 as (1 - t) - sigmoid(-x), which keeps its digits where sigmoid(x) is close to 1
static inline float16 slope_logit_bce(ARGUMENTS) {
    const float16 e = exp(-fabs(x)), tail = e / (1.0f + e);
    return x > 0.0f ? (1.0f - t) - tail : tail - t;
}
static inline float16 slope_logit_bce_target(ARGUMENTS) { return -x; }

// Binary cross entropy of a probability p: -t * log(p) - (1 - t) * log(1 - p), p held in EPSILON .. 1 - EPSILON.
// It is the logarithms that are held: 1 - EPSILON itself has one digit in fp32.
static inline float16 log_of(float16 x, float8 c) { return between(log(between(x, 0.0f, 1.0f)), LOG_LOW, LOG_HIGH); }
static inline float16 log_of_rest(float16 x, float8 c) {
    return between(log1p(-between(x, 0.0f, 1.0f)), LOG_LOW, LOG_HIGH);
}
static inline float16 loss_probability_bce(ARGUMENTS) { return -(t * log_of(x, c) + (1.0f - t) * log_of_rest(x, c)); }
// (p - t) / (p * (1 - p)); 0 where p is held. The conditions let NaN through.
static inline float16 slope_probability_bce(ARGUMENTS) {
    const float16 slope = (x - t) / (x * (1.0f - x));
    return ((x < EPSILON) | (1.0f - x < EPSILON)) ? (float16)0.0f : slope;
}
static inline float16 slope_probability_bce_target(ARGUMENTS) { return log_of_rest(x, c) - log_of(x, c); }

// ------------------------------------------------------------------------------------------------ with weights

static inline float16 loss_weighted_smooth_l1(ARGUMENTS) { return w * loss_smooth_l1(x, t, w, v, c); }
static inline float16 slope_weighted_smooth_l1(ARGUMENTS) { return w * slope_smooth_l1(x, t, w, v, c); }
static inline float16 slope_weighted_smooth_l1_weight(ARGUMENTS) { return loss_smooth_l1(x, t, w, v, c); }

static inline float16 loss_weighted_bce(ARGUMENTS) { return w * loss_probability_bce(x, t, w, v, c); }
static inline float16 slope_weighted_bce(ARGUMENTS) { return w * slope_probability_bce(x, t, w, v, c); }

// A heat map's cross entropy, weighted by w, and its smooth l1, weighted by v.
static inline float16 loss_detection(ARGUMENTS) {
    return BCE_SCALE * loss_weighted_bce(x, t, w, v, c) + BOX_SCALE * (v * loss_smooth_l1(x, t, w, v, c));
}
static inline float16 slope_detection(ARGUMENTS) {
    return BCE_SCALE * slope_weighted_bce(x, t, w, v, c) + BOX_SCALE * (v * slope_smooth_l1(x, t, w, v, c));
}

// Boxes (center x, center y, width, height): four of them in 16 lanes. The weight of a box grows with the target's
// area and with what the prediction misses of it; it is a constant to the gradient.
#define CENTER_X(v) (v).s048c
#define CENTER_Y(v) (v).s159d
#define WIDTH(v) (v).s26ae
#define HEIGHT(v) (v).s37bf
#define UNIT(v) fmin(fmax(v, 0.0f), 1.0f)
#define EXTENT(a, b) fmax((b) - (a), 0.0f)

static inline float4 intersection_over_union(float16 x, float16 t) {
    const float4 x_left = UNIT(CENTER_X(x) - 0.5f * WIDTH(x)), x_right = UNIT(CENTER_X(x) + 0.5f * WIDTH(x));
    const float4 t_left = UNIT(CENTER_X(t) - 0.5f * WIDTH(t)), t_right = UNIT(CENTER_X(t) + 0.5f * WIDTH(t));
    const float4 x_top = UNIT(CENTER_Y(x) - 0.5f * HEIGHT(x)), x_bottom = UNIT(CENTER_Y(x) + 0.5f * HEIGHT(x));
    const float4 t_top = UNIT(CENTER_Y(t) - 0.5f * HEIGHT(t)), t_bottom = UNIT(CENTER_Y(t) + 0.5f * HEIGHT(t));
    const float4 common = EXTENT(fmax(x_left, t_left), fmin(x_right, t_right)) *
                          EXTENT(fmax(x_top, t_top), fmin(x_bottom, t_bottom));
    const float4 x_area = EXTENT(x_left, x_right) * EXTENT(x_top, x_bottom);
    const float4 t_area = EXTENT(t_left, t_right) * EXTENT(t_top, t_bottom);
    return common / fmax(x_area + t_area - common, 1e-6f);
}

static inline float16 box_weight(float16 x, float16 t, float8 c) {
    const float4 area = fmax(WIDTH(t) * HEIGHT(t), 1e-6f);
    const float4 miss = 1.0f - intersection_over_union(x, t);
    const float4 weight = (1.0f + AREA_GAIN * fmin(sqrt(area / AREA_REFERENCE), 6.0f)) *
                          (1.0f + MISS_GAIN * miss * miss);
    const float4 gains = (float4)(CENTER_GAIN, CENTER_GAIN, SIZE_GAIN, SIZE_GAIN);
    return (float16)(weight.x * gains, weight.y * gains, weight.z * gains, weight.w * gains);
}
static inline float16 loss_box(ARGUMENTS) { return box_weight(x, t, c) * loss_smooth_l1(x, t, w, v, c); }
static inline float16 slope_box(ARGUMENTS) { return box_weight(x, t, c) * slope_smooth_l1(x, t, w, v, c); }
static inline float16 slope_box_target(ARGUMENTS) { return -slope_box(x, t, w, v, c); }

// ------------------------------------------------------------------------------------------------- the kernels

// Ways to load 16 elements: all of them there, or beyond `end` none.
#define WHOLE(T, p, i, end) LOAD16(T, p, i)
#define PARTLY(T, p, i, end) LOAD_PART(T, p, i, end, 0.0f)

#if WEIGHTS > 0
#define W_AT(HOW, i, end) HOW(W_T, w, i, end)
#else
#define W_AT(HOW, i, end) ((float16)0.0f)
#endif
#if WEIGHTS > 1
#define V_AT(HOW, i, end) HOW(V_T, v, i, end)
#else
#define V_AT(HOW, i, end) ((float16)0.0f)
#endif
#define OPERANDS_AT(HOW, i, end) \
    HOW(X_T, x, i, end), HOW(T_T, t, i, end), W_AT(HOW, i, end), V_AT(HOW, i, end), c

#define LOSS CAT(loss_, KIND)
#define SLOPE CAT(slope_, KIND)
#define INPUTS                                                                                     \
    __global const STORAGE(X_T) *restrict x, __global const STORAGE(T_T) *restrict t,              \
    __global const STORAGE(W_T) *restrict w, __global const STORAGE(V_T) *restrict v
#define SETTINGS                                                                                   \
    const ulong n, const ulong span, const float c0, const float c1, const float c2, const float c3, \
    const float c4, const float c5
#define C ((float8)(c0, c1, c2, c3, c4, c5, 0.0f, 0.0f))

#ifdef LOSS_SUM
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void loss_sum(INPUTS, __global float *restrict sums,
                                                                       SETTINGS) {
    SCRATCH;
    const float8 c = C;
    const size_t begin = get_group_id(0) * (size_t)span, end = min(begin + span, (size_t)n);
    float16 total = 0;
    // In blocks of 64 steps, whose sums are then added: few roundings even over long spans.
    for (size_t block = begin; block < end; block += WG * 1024) {
        const size_t stop = min(block + WG * 1024, end);
        float16 sum = 0;
        size_t i = block + get_local_id(0) * 16;
        for (; i + 16 <= stop; i += WG * 16) sum += LOSS(OPERANDS_AT(WHOLE, i, stop));
        // Lanes beyond the end hold zeros, where every loss that is summed is 0.
        if (i < stop) sum += LOSS(OPERANDS_AT(PARTLY, i, stop));
        total += sum;
    }
    const float sum = group_sum(sum16(total), scratch);
    if (get_local_id(0) == 0) sums[get_group_id(0)] = sum;
}
#endif

#ifdef LOSS_TERMS
__kernel void loss_terms(INPUTS, __global STORAGE(Y_T) *restrict y, SETTINGS) {
    const float8 c = C;
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)n);
    for (; i + 16 <= end; i += 16) STORE16(Y_T, LOSS(OPERANDS_AT(WHOLE, i, end)), y, i);
    if (i < end) STORE_PART(Y_T, LOSS(OPERANDS_AT(PARTLY, i, end)), y, i, end);
}
#endif

#ifdef LOSS_GRADIENT
#ifdef G_EACH
#define G_AT(HOW, i, end) HOW(G_T, g, i, end)
#else
#define G_AT(HOW, i, end) gradient
#endif

__kernel void loss_gradient(INPUTS, __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx,
                            SETTINGS) {
    const float8 c = C;
    size_t i = get_global_id(0) * (size_t)span;
    const size_t end = min(i + span, (size_t)n);
#ifndef G_EACH
    const float gradient = LOAD(G_T, g, 0);
#endif
    for (; i + 16 <= end; i += 16)
        STORE16(DX_T, SLOPE(OPERANDS_AT(WHOLE, i, end)) * G_AT(WHOLE, i, end), dx, i);
    if (i < end) STORE_PART(DX_T, SLOPE(OPERANDS_AT(PARTLY, i, end)) * G_AT(PARTLY, i, end), dx, i, end);
}
#endif
