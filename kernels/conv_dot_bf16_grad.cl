// conv_dot_bf16_grad.cl: the weight gradient of a bfloat16 convolution by the processor's dot product (dot_bf16.clh).
//
//   partial[m][k] = sum over a chunk of positions j of grad[m][j] * staged[begin(j) + offsets[k]]
//
// Steps of the sum are pairs of positions in one row of outputs, which are neighbours both in the gradient and in the
// staged source: 32 bits of either, moved as they are. The last step of an odd row has zero in its high halves.
//
//      grad_panels [panel][step][row]   uint     12 or 8 output channels at a block of positions, made once for it
//      panel       [step][32]           uint     32 steps k at the same positions, multiplied by all of those
//
//      row of outputs   q0 q1 q2 q3 q4         steps   q0 q1 | q2 q3 | q4 0
//
// Sums of a chunk rest in `partial`, [K/32][rows of all panels][32]; `weight_grad_finish` adds the chunks in their
// order and rounds to storage.
//
// `work` has a slice for each work-item: panel [STEPS + 16][32], then grad_panels of STEPS + 16 steps. Runs and panels
// are packed in ascending order, so that what stores write beyond the end of one is overwritten by the next before it
// is read; the last one's falls into the 16.
//
//   STEPS   steps of a block of positions, at most
//   OUT_T   storage type of the gradient of the weights
//
// M, K: output channels and steps k of one group; all else is as in conv_packed.cl.

#include "dot_bf16.clh"
#include "transpose.clh"

#ifdef WEIGHT_GRAD
typedef __global const ushort *elements;

// 16 pairs that begin at s, as floats, for which the compiler knows how to move them; zero in the high half of the
// pair that the count of elements ends in.
static inline float16 pairs16(elements s, uint16 halves) {
    const uint16 words = (uint16)(as_uint8(LOAD_ANY(ushort16, s)), as_uint8(LOAD_ANY(ushort16, s + 16)));
    return as_float16(words & halves);
}

// The same, one by one, of `count` elements.
static inline float pair_of(elements s, size_t t, size_t count) {
    return as_float(s[2 * t] | (2 * t + 1 < count ? (uint)s[2 * t + 1] << 16 : 0u));
}

// `count` neighbouring elements of 4 rows into a panel whose steps are `distance` floats apart. Loads stay below
// `end`; up to 15 steps behind the last are written too.
static inline void pack_4_rows(elements r0, elements r1, elements r2, elements r3, elements end, size_t count,
                               __global float *panel, size_t distance) {
    const uint16 lane = (uint16)(LANE_NUMBERS);
    for (size_t t = 0; t < count; t += 32, panel += 16 * distance, r0 += 32, r1 += 32, r2 += 32, r3 += 32) {
        if (r3 + 32 <= end && r2 + 32 <= end && r1 + 32 <= end && r0 + 32 <= end) {
            const uint left = min(count - t, (size_t)32);
            const uint16 halves = select((uint16)(0xffffu), (uint16)(~0u), lane * 2 + 1 < left);
            store_columns(pairs16(r0, halves), pairs16(r1, halves), pairs16(r2, halves), pairs16(r3, halves), panel,
                          distance);
            continue;
        }
        for (size_t s = 0; s < 16 && t + 2 * s < count; s++) {
            panel[s * distance] = pair_of(r0, s, count - t);
            panel[s * distance + 1] = pair_of(r1, s, count - t);
            panel[s * distance + 2] = pair_of(r2, s, count - t);
            panel[s * distance + 3] = pair_of(r3, s, count - t);
        }
    }
}

// The same for `runs` runs of elements, one behind the other in the panel; run s begins at[s] elements behind a row.
static inline void pack_runs(elements r0, elements r1, elements r2, elements r3, elements end, const ulong *at,
                             const uint *lengths, size_t runs, __global float *panel, size_t distance) {
    for (size_t s = 0; s < runs; panel += (lengths[s++] + 1) / 2 * distance)
        pack_4_rows(r0 + at[s], r1 + at[s], r2 + at[s], r3 + at[s], end, lengths[s], panel, distance);
}

// Row `index` of an operand of `count`; what lies beyond repeats the last, and is never stored.
#define ROW_OF(index, count) min((size_t)(index), (size_t)(count) - 1)

// Work-item (`each_k` panels of steps k, `each` positions, in blocks of `block`; group).
__kernel ONE_WORK_ITEM void
weight_grad(__global const ushort *restrict x, __global const ulong *restrict offsets,
            __global const ushort *restrict grad, __global float *restrict partial, __global float *restrict work,
            const ulong grad_begin, const ulong columns, const ulong M, const ulong K, const ulong positions,
            const ulong width, const ulong pitch, const ulong image, const ulong group_size, const ulong grad_image,
            const ulong size, const ulong grad_size, const uint panels_m, const uint tall, const uint each_k,
            const ulong each, const ulong block, const int accumulate) {
    const size_t panels_k = (K + NR - 1) / NR, rows = ROWS_BEFORE(panels_m), group = get_global_id(2);
    const size_t first_k = get_global_id(0) * each_k, last_k = min(first_k + each_k, panels_k);
    const size_t part = get_global_id(1) * get_global_size(2) + group;
    const size_t item = part * get_global_size(0) + get_global_id(0);
    __global float *panel = work + item * (STEPS + 16) * (NR + rows), *grad_panels = panel + (STEPS + 16) * NR;
    partial += part * panels_k * rows * NR;
    ulong run_at[STEPS], run_grad[STEPS];
    uint run_length[STEPS];
    size_t j = get_global_id(1) * each;
    const size_t end = min(j + each, (size_t)columns);
    for (bool resume = accumulate; j < end; resume = true) {
        // the rows of outputs, or parts of them, that the block consists of
        size_t runs = 0, steps = 0, n = j / positions, r = j % positions / width, q = j % positions % width;
        for (size_t left = block; left > 0 && j < end && steps < STEPS; runs++) {
            const size_t length = min(min((size_t)width - q, end - j), min(left, 2 * (STEPS - steps)));
            run_at[runs] = group * group_size + n * image + r * pitch + q;
            run_grad[runs] = grad_begin + n * grad_image + group * M * positions + r * width + q;
            run_length[runs] = length;
            steps += (length + 1) / 2;
            j += length;
            left -= length;
            q += length;
            if (q < width) continue;
            q = 0;
            if (++r * width < positions) continue;
            r = 0;
            n++;
        }
        for (size_t p = 0, m = 0; m < rows; m += 4, p += m == ROWS_BEFORE(p + 1)) { // heights are multiples of 4
            const size_t begin = ROWS_BEFORE(p), height = p < tall ? MR : SHORT;
            pack_runs(grad + ROW_OF(m, M) * positions, grad + ROW_OF(m + 1, M) * positions,
                      grad + ROW_OF(m + 2, M) * positions, grad + ROW_OF(m + 3, M) * positions, grad + grad_size,
                      run_grad, run_length, runs, grad_panels + begin * steps + m - begin, height);
        }
        for (size_t Q = first_k; Q < last_k; Q++) {
            for (size_t i = 0, k = Q * NR; i < NR; i += 4, k += 4)
                pack_runs(x + offsets[ROW_OF(k, K)], x + offsets[ROW_OF(k + 1, K)], x + offsets[ROW_OF(k + 2, K)],
                          x + offsets[ROW_OF(k + 3, K)], x + size, run_at, run_length, runs, panel + i, NR);
            multiply_column((__global const uint *)grad_panels, (__global const uint *)panel, partial + Q * rows * NR,
                            0, panels_m, tall, steps, resume);
        }
    }
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// grad[group][m][k] = sum of `chunks` partial ones, each [group][K/32][rows][32]. Work-item (32 steps k, MR output
// channels, group).
__kernel ONE_WORK_ITEM void
weight_grad_finish(__global const float *restrict partial, __global STORAGE(OUT_T) *restrict grad, const ulong M,
                   const ulong K, const ulong rows, const uint chunks) {
    const size_t group = get_global_id(2), k = get_global_id(0) * NR, m = get_global_id(1) * MR;
    const size_t chunk = get_global_size(2) * get_global_size(0) * rows * NR;
    partial += ((group * get_global_size(0) + get_global_id(0)) * rows + m) * NR;
    for (size_t i = 0; i < min((size_t)MR, M - m); i++, partial += NR) {
        const size_t at = (group * M + m + i) * K + k, end = at - k + K;
        for (size_t l = 0; l < NR && k + l < K; l += 16) {
            float16 sum = LOAD16(f32, partial, l);
            for (size_t c = 1; c < chunks; c++) sum += LOAD16(f32, partial, c * chunk + l);
            STORE_PART(OUT_T, sum, grad, at + l, end);
        }
    }
}
#endif
