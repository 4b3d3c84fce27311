// norm_planes_backward.cl: gradients of batch norm and group norm, for CPU devices. norm_planes.clh says which elements
// are normalized together, and names the macros. The activation's mask is computed again from x, so forward keeps
// nothing but x and the statistics.
//
//   planes_backward         all gradients of whole sets; or, in three launches,
//   planes_backward_sums    the two sums of each part of a set,
//   batch_backward_merge    those of the sets, which are the gradients of gamma and beta,
//   planes_backward_apply   dx from them

#include "norm_planes.clh"

#if defined PLANES_BACKWARD || defined PLANES_BACKWARD_SUMS
// Sums of the runs of a set, in the levels of LONG_SUM: planes may be small and many.
typedef struct {
    float16 run, block, all;
} ladder;

static inline void climb(ladder *sums, float16 v, size_t number) {
    sums->run += v;
    if (number % RUN_TERMS != RUN_TERMS - 1) return;
    sums->block += sums->run;
    sums->run = 0;
    if (number % (RUN_TERMS * RUN_TERMS) != RUN_TERMS * RUN_TERMS - 1) return;
    sums->all += sums->block;
    sums->block = 0;
}
#define LADDER ((ladder){(float16)(0), (float16)(0), (float16)(0)})
#define TOTAL(sums) sum16((sums).all + ((sums).block + (sums).run))

// Adds this work-item's sum of g, and of g (x - mean), over the run of this number in its set to sum_g and sum_gd.
static inline void add_sums(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *grad, const size_t begin,
                            const size_t end, const float mean, const float scale, const float shift, const float slope,
                            const size_t number, ladder *sum_g, ladder *sum_gd) {
    float16 g0 = 0, g1 = 0, gd0 = 0, gd1 = 0; // of this run only, so that rounding grows with runs, not with elements
    float16 pieces_g = 0, pieces_gd = 0;
    size_t i = begin;
    while (i + 32 <= end) {
        const size_t stop = min(i + PIECE, end);
        for (; i + 32 <= stop; i += 32) {
            const float16 d = LOAD16(X_T, x, i) - mean, g = MASKED(LOAD16(G_T, grad, i), d);
            const float16 e = LOAD16(X_T, x, i + 16) - mean, h = MASKED(LOAD16(G_T, grad, i + 16), e);
            g0 += g;
            g1 += h;
            gd0 += g * d;
            gd1 += h * e;
        }
        pieces_g += g0 + g1;
        pieces_gd += gd0 + gd1;
        g0 = g1 = gd0 = gd1 = 0;
    }
    for (; i + 16 <= end; i += 16) {
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
    climb(sum_g, pieces_g + (g0 + g1), number);
    climb(sum_gd, pieces_gd + (gd0 + gd1), number);
}
#endif

#if defined PLANES_BACKWARD || defined PLANES_BACKWARD_APPLY
// dx = scale g - constant - linear d
static inline void gradient_run(__global const STORAGE(X_T) *x, __global const STORAGE(G_T) *grad,
                                __global STORAGE(DX_T) *dx, const size_t begin, const size_t end, const float mean,
                                const float scale, const float shift, const float slope, const float constant_part,
                                const float linear) {
#if TRAINING
#define GRADIENT(g, d) ((g) * scale - (constant_part + (d) * linear))
#else
#define GRADIENT(g, d) ((g) * scale)
#endif
    size_t i = begin;
    for (; i + 16 <= end; i += 16) {
        const float16 d = LOAD16(X_T, x, i) - mean, g = MASKED(LOAD16(G_T, grad, i), d);
        STORE16(DX_T, GRADIENT(g, d), dx, i);
    }
    if (i >= end) return;
    if (end - begin >= 16) {
        const float16 d = LOAD16(X_T, x, end - 16) - mean, g = MASKED(LOAD16(G_T, grad, end - 16), d);
        STORE16(DX_T, GRADIENT(g, d), dx, end - 16);
        return;
    }
    const float16 d = LOAD_PART(X_T, x, i, end, 0.0f) - mean, g = MASKED(LOAD_PART(G_T, grad, i, end, 0.0f), d);
    STORE_PART(DX_T, GRADIENT(g, d), dx, i, end);
}
#endif

// One set a work-item. Batch norm: `dgamma` and `dbeta` are the gradients. Group norm (GROUPS): they are fp32 and hold
// the sums of each plane, to be summed over the samples.
#ifdef PLANES_BACKWARD
#if GROUPS
#define DGAMMA_T f32
#define DBETA_T f32
#else
#define DGAMMA_T SCALE_T
#define DBETA_T SHIFT_T
#endif
__kernel ONE_WORK_ITEM void
planes_backward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                __global const float *restrict mean, __global const float *restrict var,
                __global STORAGE(DX_T) *restrict dx, __global STORAGE(DGAMMA_T) *restrict dgamma,
                __global STORAGE(DBETA_T) *restrict dbeta, const ulong sets, const ulong planes, const ulong hw,
                const ulong first, const ulong step, const ulong channels, const uint each, const float eps,
                const float slope) {
    const float n = (float)(planes * hw);
#if GROUPS
    FOR_EACH_OWN(set, each, sets) {
        const float center = mean[set], r = 1 / DEVIATION(var[set], eps);
        float set_g = 0, set_gd = 0, block_g = 0, block_gd = 0;
        for (size_t nth = 0; nth < planes; nth++) {
            const size_t plane = set * first + nth * step, c = plane % channels;
            ladder sum_g = LADDER, sum_gd = LADDER;
            add_sums(x, grad, plane * hw, (plane + 1) * hw, center, 0, 0, slope, 0, &sum_g, &sum_gd);
            const float plane_g = TOTAL(sum_g), plane_gd = TOTAL(sum_gd);
            block_g += LOAD(SCALE_T, gamma, c) * plane_g;
            block_gd += LOAD(SCALE_T, gamma, c) * plane_gd;
            if (nth % RUN_TERMS == RUN_TERMS - 1 || nth == planes - 1) {
                set_g += block_g;
                set_gd += block_gd;
                block_g = block_gd = 0;
            }
            dgamma[plane] = r * plane_gd;
            dbeta[plane] = plane_g;
        }
        const float constant_part = r * (set_g / n), linear = r * (r * (r * set_gd / n));
        for (size_t nth = 0; nth < planes; nth++) {
            const size_t plane = set * first + nth * step;
            gradient_run(x, grad, dx, plane * hw, (plane + 1) * hw, center,
                         r * LOAD(SCALE_T, gamma, plane % channels), 0, slope, constant_part, linear);
        }
    }
#else
    const size_t stop = min((size_t)(get_group_id(0) + 1) * each, (size_t)sets);
    for (size_t set = (size_t)get_group_id(0) * each; set < stop; set += WIDTH) {
        const uint width = min((size_t)WIDTH, stop - set);
        float scale[WIDTH], shift[WIDTH], constant_part[WIDTH], linear[WIDTH];
        ladder sum_g[WIDTH], sum_gd[WIDTH];
        for (uint k = 0; k < width; k++) {
            scale[k] = LOAD(SCALE_T, gamma, set + k) / DEVIATION(var[set + k], eps);
            shift[k] = LOAD(SHIFT_T, beta, set + k);
            sum_g[k] = sum_gd[k] = LADDER;
        }
        for (size_t nth = 0; nth < planes; nth++) {
            for (uint k = 0; k < width; k++) {
                const size_t plane = set * first + nth * step + k;
                add_sums(x, grad, plane * hw, (plane + 1) * hw, mean[set + k], scale[k], shift[k], slope, nth,
                         &sum_g[k], &sum_gd[k]);
            }
        }
        for (uint k = 0; k < width; k++) {
            const float r = 1 / DEVIATION(var[set + k], eps);
            const float total_g = TOTAL(sum_g[k]);
            const float total_gz = r * TOTAL(sum_gd[k]);
            STORE(DGAMMA_T, total_gz, dgamma, set + k);
            STORE(DBETA_T, total_g, dbeta, set + k);
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
__kernel ONE_WORK_ITEM void
planes_backward_sums(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                     __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                     __global const float *restrict mean, __global const float *restrict var,
                     __global float *restrict partial_gd, __global float *restrict partial_g, const ulong sets,
                     const ulong planes, const ulong hw, const ulong first, const ulong step, const ulong span,
                     const uint parts, const uint each, const float eps, const float slope) {
    FOR_EACH_OWN(job, each, (size_t)sets * parts) {
        const size_t set = job / parts, from = job % parts * span, to = min(from + span, (size_t)(planes * hw));
        const float scale = LOAD(SCALE_T, gamma, set) / DEVIATION(var[set], eps);
        ladder sum_g = LADDER, sum_gd = LADDER;
        for (size_t at = from, number = 0; at < to; number++) {
            RUN_OF_PLANE(at, to)
            add_sums(x, grad, begin, end, mean[set], scale, LOAD(SHIFT_T, beta, set), slope, number, &sum_g, &sum_gd);
            at += end - begin;
        }
        partial_g[job] = TOTAL(sum_g);
        partial_gd[job] = TOTAL(sum_gd);
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
    sum_gd /= DEVIATION(var[c], eps);
    sums[2 * c] = sum_gd;
    sums[2 * c + 1] = sum_g;
    STORE(SCALE_T, sum_gd, dgamma, c);
    STORE(SHIFT_T, sum_g, dbeta, c);
}
#endif

// `sums` is not read if TRAINING is 0.
#ifdef PLANES_BACKWARD_APPLY
__kernel ONE_WORK_ITEM void
planes_backward_apply(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                      __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                      __global const float *restrict mean, __global const float *restrict var,
                      __global const float *restrict sums, __global STORAGE(DX_T) *restrict dx, const ulong planes,
                      const ulong hw, const ulong channels, const uint each, const float n, const float eps,
                      const float slope) {
    FOR_EACH_OWN(plane, each, planes) {
        const size_t c = plane % channels;
        const float r = 1 / DEVIATION(var[c], eps), scale = r * LOAD(SCALE_T, gamma, c);
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
