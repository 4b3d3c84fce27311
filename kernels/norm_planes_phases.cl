// norm_planes_phases.cl: batch norm and group norm of NCHW tensors and their gradients on GPUs, in two phases, so that few
// channels fill many compute units. norm_planes.clh says which elements are normalized together, and names the macros.
//
//                 part 0              part 1           last part
//   set 0  |-- span blocks --|-- span blocks --| ... |-- - - --|      phase 1: a work-group a part leaves its sums;
//   set 1  |-- span blocks --|-- span blocks --| ... |-- - - --|      phase 2: a work-group a part adds up those of the
//                                                                     set, in the order of the parts, and writes its part
//
//          plane 0        plane 1            A block is 16 neighbouring elements of a plane, or what is left of it.
//   set   |16|16|16|3|   |16|16|16|3| ...    Work-item i of a group takes its blocks i, i + WG, i + 2 WG ...
//
//   planes_moments     phase 1: count, mean and sum of squared deviations of each part
//   planes_normalize   phase 2: statistics and result. RUNNING: group 0 moves the running statistics, and has no part
//   gradient_sums      phase 1 of backward: sum g d and sum g of each part, of a whole set or (GROUPS) of one plane
//   planes_gradient    phase 2 of backward: gradients of gamma and beta, and dx
//
//   PARTS     1: what phase 1 left is there, 0: statistics are given (planes_normalize), no sum is wanted
//             (planes_gradient)
//   RUNNING   1: there are running statistics
//   DX        1: dx is wanted
//   WG        work-items of a work-group, a power of two
//   PIECES    of pieces.clh

#include "pieces.clh"
#include "norm_planes.clh"

#define KERNEL __kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void

// Block of this number of a set, elements i .. end - 1: in its plane the first 16 of them. 32 bits, which GPUs divide
// fast, number a set's blocks.
#define BLOCK_AT(number)                                                                    \
    const uint nth = (number) / blocks;                                                     \
    const size_t plane = (size_t)set * first + (size_t)nth * step;                          \
    const size_t i = plane * hw + ((number) - nth * blocks) * 16, end = (plane + 1) * hw;

#define FOR_EACH_BLOCK(number)                                                              \
    const uint blocks = (hw + 15) / 16, part_end = min((part + 1) * span, planes * blocks); \
    for (uint number = part * span + get_local_id(0); number < part_end; number += WG)

#define GEOMETRY const uint sets, const uint planes, const uint hw, const uint first, const uint step

#ifdef PLANES_MOMENTS
// A work-item moves its mean with each block. Differences are taken from the mean of what came before (from the first
// element in the first block), so nothing large cancels (Chan, Golub and LeVeque, 1983).
KERNEL planes_moments(__global const STORAGE(X_T) *restrict x, __global float4 *restrict moments, GEOMETRY,
                      const uint parts, const uint span) {
    SCRATCH;
    const uint set = get_group_id(0) % sets, part = get_group_id(0) / sets;
    float count = 0, mean = 0, m2 = 0;
    FOR_EACH_BLOCK(number) {
        BLOCK_AT(number)
        if (count == 0) mean = LOAD(X_T, x, i);
        const float16 d = LOAD_PART(X_T, x, i, end, mean) - mean;
        const float sum = sum16(d);
        count += min(end - i, (size_t)16);
        const float shift = sum / count;
        m2 += sum16(d * d) - sum * shift;
        mean += shift;
    }
    BLOCK_AT(part * span)
    const float near = LOAD(X_T, x, i), n = group_sum(count, scratch);
    const float center = near + group_sum(count * (mean - near), scratch) / n, away = mean - center;
    const float spread = group_sum(m2 + count * away * away, scratch);
    if (get_local_id(0) == 0) moments[set * parts + part] = (float4)(n, center, spread, 0);
}
#endif

#ifdef PLANES_NORMALIZE
// Mean and variance of the elements of all parts of a set.
static inline float2 merged(__global const float4 *moments, const uint parts) {
    const float near = moments[0].y;
    float n = 0, sum = 0, m2 = 0;
    for (uint part = 0; part < parts; part++) {
        n += moments[part].x;
        sum += moments[part].x * (moments[part].y - near);
    }
    const float mean = near + sum / n;
    for (uint part = 0; part < parts; part++) {
        const float away = moments[part].y - mean;
        m2 += moments[part].z + moments[part].x * away * away;
    }
    return (float2)(mean, m2 < 0 ? 0 : m2 / n); // not fmax, which would turn NaN into 0
}

#if RUNNING
// Unless a statistic of any channel is not finite.
static inline void move_running(__global const float4 *moments, __global STORAGE(RUNNING_T) *running_mean,
                                __global STORAGE(RUNNING_T) *running_var, const uint sets, const uint parts,
                                const float momentum, __local float *scratch) {
    float bad = 0;
    for (uint c = get_local_id(0); c < sets; c += WG) {
        const float2 batch = merged(moments + c * parts, parts);
        if (!isfinite(batch.x) || !isfinite(batch.y)) bad = 1;
    }
    if (group_max(bad, scratch) != 0) return;
    for (uint c = get_local_id(0); c < sets; c += WG) {
        const float2 batch = merged(moments + c * parts, parts);
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_mean, c) + momentum * batch.x, running_mean, c);
        STORE(RUNNING_T, (1 - momentum) * LOAD(RUNNING_T, running_var, c) + momentum * batch.y, running_var, c);
    }
}
#endif

KERNEL planes_normalize(__global const STORAGE(X_T) *restrict x, __global const STORAGE(SCALE_T) *restrict gamma,
                        __global const STORAGE(SHIFT_T) *restrict beta, __global STORAGE(Y_T) *restrict y,
                        __global float *restrict means, __global float *restrict vars,
                        __global const float4 *restrict moments, __global STORAGE(RUNNING_T) *restrict running_mean,
                        __global STORAGE(RUNNING_T) *restrict running_var, GEOMETRY, const uint channels,
                        const uint parts, const uint span, const float momentum, const float eps, const float slope) {
#if RUNNING
    SCRATCH;
    if (get_group_id(0) == 0) {
        move_running(moments, running_mean, running_var, sets, parts, momentum, scratch);
        return;
    }
#endif
    const uint group = get_group_id(0) - RUNNING, set = group % sets, part = group / sets;
#if PARTS
    __local float2 statistics;
    if (get_local_id(0) == 0) {
        statistics = merged(moments + set * parts, parts);
        if (part == 0) {
            means[set] = statistics.x;
            vars[set] = statistics.y;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float mean = statistics.x, r = 1 / DEVIATION(statistics.y, eps);
#else
    const float mean = means[set], r = 1 / DEVIATION(vars[set], eps);
#endif
    FOR_EACH_BLOCK(number) {
        BLOCK_AT(number)
        const uint c = (uint)plane % channels;
        const float scale = LOAD(SCALE_T, gamma, c) * r, shift = LOAD(SHIFT_T, beta, c);
        const float16 v = (LOAD_PART(X_T, x, i, end, 0.0f) - mean) * scale + shift;
        STORE_PART(Y_T, ACTIVATE(v), y, i, end);
    }
}
#endif

#ifdef GRADIENT_SUMS
// `each` neighbouring sets have one mean and variance.
KERNEL gradient_sums(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                     __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                     __global const float *restrict means, __global const float *restrict vars,
                     __global float2 *restrict sums, GEOMETRY, const uint each, const uint parts, const uint span,
                     const float eps, const float slope) {
    SCRATCH;
    const uint set = get_group_id(0) % sets, part = get_group_id(0) / sets;
    const float mean = means[set / each];
#if ACT
    const float scale = LOAD(SCALE_T, gamma, set) / DEVIATION(vars[set], eps), shift = LOAD(SHIFT_T, beta, set);
#endif
    float sum_gd = 0, sum_g = 0;
    FOR_EACH_BLOCK(number) {
        BLOCK_AT(number)
        const float16 d = LOAD_PART(X_T, x, i, end, mean) - mean;
        const float16 g = MASKED(LOAD_PART(G_T, grad, i, end, 0.0f), d);
        sum_gd += sum16(g * d);
        sum_g += sum16(g);
    }
    const float2 total = (float2)(group_sum(sum_gd, scratch), group_sum(sum_g, scratch));
    if (get_local_id(0) == 0) sums[set * parts + part] = total;
}
#endif

#ifdef PLANES_GRADIENT
// dgamma and dbeta: of batch norm the gradients; of group norm (GROUPS) they are fp32 and hold the sums of each plane,
// to be summed over the samples.
#if GROUPS
#define DGAMMA_T f32
#define DBETA_T f32
#define SUMMED planes // sums of phase 1 that make a set's, each in sum_parts parts
#else
#define DGAMMA_T SCALE_T
#define DBETA_T SHIFT_T
#define SUMMED 1
#endif

#if TRAINING
#define GRADIENT(g, d) ((g) * scale - (constant_part + (d) * linear))
#else
#define GRADIENT(g, d) ((g) * scale)
#endif

KERNEL planes_gradient(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict grad,
                       __global const STORAGE(SCALE_T) *restrict gamma, __global const STORAGE(SHIFT_T) *restrict beta,
                       __global const float *restrict means, __global const float *restrict vars,
                       __global const float2 *restrict sums, __global STORAGE(DX_T) *restrict dx,
                       __global STORAGE(DGAMMA_T) *restrict dgamma, __global STORAGE(DBETA_T) *restrict dbeta,
                       GEOMETRY, const uint channels, const uint sum_parts, const uint span, const float n,
                       const float eps, const float slope) {
    const uint set = get_group_id(0) % sets, part = get_group_id(0) / sets;
    const float mean = means[set], r = 1 / DEVIATION(vars[set], eps);
#if PARTS
    SCRATCH;
    float2 own = 0; // of gamma g d and gamma g
    sums += (size_t)set * SUMMED * sum_parts;
    for (uint k = get_local_id(0); k < SUMMED * sum_parts; k += WG)
        own += LOAD(SCALE_T, gamma, (set * first + k / sum_parts) % channels) * sums[k];
    const float total_gd = group_sum(own.x, scratch), total_g = group_sum(own.y, scratch);
    for (uint k = get_local_id(0); part == 0 && k < SUMMED; k += WG) {
        float2 total = 0;
        for (uint p = 0; p < sum_parts; p++) total += sums[k * sum_parts + p];
        STORE(DGAMMA_T, r * total.x, dgamma, set * SUMMED + k);
        STORE(DBETA_T, total.y, dbeta, set * SUMMED + k);
    }
    const float constant_part = r * (total_g / n), linear = r * (r * (r * total_gd / n));
#endif
#if DX
    FOR_EACH_BLOCK(number) {
        BLOCK_AT(number)
        const float scale = r * LOAD(SCALE_T, gamma, (uint)plane % channels);
#if ACT
        const float shift = LOAD(SHIFT_T, beta, (uint)plane % channels);
#endif
        const float16 d = LOAD_PART(X_T, x, i, end, 0.0f) - mean;
        const float16 g = MASKED(LOAD_PART(G_T, grad, i, end, 0.0f), d);
        STORE_PART(DX_T, GRADIENT(g, d), dx, i, end);
    }
#endif
}
#endif
