// conv_packed.cl: a convolution and its weight gradient for CPU devices, register-blocked as gemm_packed.cl.
//
// Both are matrix products whose right-hand operand is never written down: its element for step k = (channel, tap) of
// an output position j = (n, r, q) is staged[begin(j) + offsets[k]] (conv_stage.cl). Positions of one row of outputs
// are neighbours there, so that 16 of them are one load, or one for each row that they lie in.
//
//   conv          out[m][j] = epilogue( sum over k of weights[m][k] * staged[begin(j) + offsets[k]] )
//
//      weights, blocked by KC      panel [KC][NR]                 A work-item copies KC steps of NR positions into its
//                                   NR positions                  panel, where they stay in the first-level cache for
//      m  0   k ->               k  +-----------+                 all its panels of the weights, then does the next
//      |  +-------------+        |  | row q  |r+|  from one or    steps. Its sums rest in between (`sums`), and are
//      v  | panel 0     |        v  | of r   |1 |  two rows       rounded to storage once.
//      MR +-------------+           +-----------+
//
//   weight_grad   partial[k][m] = sum over a chunk of j of staged[begin(j) + offsets[k]] * grad[m][j]
//
//      The panel holds the output gradient, [JC positions][NR output channels]. MR steps k are MR streams through the
//      staged source: a tile's rows are broadcast from there. Sums of a chunk rest in `partial`, laid out tile by
//      tile; `weight_grad_finish` adds the chunks in their order and rounds to storage. The sum of the gradient over
//      positions, the bias's gradient, is taken from the panels on the way: `partial_bias`, NR floats a panel.
//
//   MR, NR   the register tile. With 32 vector registers of 16 floats 6 x 64: ten loads for 24 multiplications (12 x 32
//            takes 14; it serves weight gradients of few channels). Else 6 x 16.
//   SHORT    rows of the last panels of weights, fewer than MR, so that hardly a row is computed in vain
//   KC, JC   steps or positions of a panel
//   X_T, G_T, OUT_T, BIAS_T   storage types of staged source (floats in weight_grad), gradient, output, bias
//
// M, K: output channels and steps of one group; `columns`: output positions of the batch, `positions`: of an image,
// in rows of `width` that lie `pitch` apart. `work` is a workspace with a slice for each work-item.

#include "register_tile.clh"
#include "transpose.clh"

#ifdef CONV
#define PAIRS 0
#include "conv_positions.clh"

#define SPILL_VECTOR(i, v) STORE_PRIVATE(float16, c##i##_##v, tile + i * NR + v * 16);
#define SPILL(i) EACH_VECTOR(SPILL_VECTOR, i)
#define FINISH_VECTOR(i, v) STORE16(OUT_T, epilogue(c##i##_##v, bias##i, relu), out, at[v] + row + i * positions);
#define FINISH(i)                           \
    const float bias##i = BIAS(channel + i); \
    EACH_VECTOR(FINISH_VECTOR, i)
// The sums of a panel of weights, `rows` rows high: stored, if whole, or spilled to `tile`.
#define MULTIPLY_PANEL(ROWS, rows)        \
    {                                     \
        ROWS(CLEAR)                       \
        MULTIPLY_STEPS(ROWS, rows)        \
        if (k0 > 0) { ROWS(ADD_RESTING) } \
        if (!is_last) {                   \
            ROWS(SUSPEND)                 \
        } else if (is_whole) {            \
            ROWS(FINISH)                  \
        } else {                          \
            ROWS(SPILL)                   \
        }                                 \
    }

// Work-item (share of the panels of positions, share of the panels of output channels, `each_m` at most; group).
__kernel ONE_WORK_ITEM WIDE_VECTORS void
conv(__global const float *restrict weights, __global const STORAGE(X_T) *restrict x,
     __global const ulong *restrict offsets, __global STORAGE(OUT_T) *restrict out,
     __global const STORAGE(BIAS_T) *restrict bias, __global float *restrict work, const ulong out_begin,
     const ulong columns, const ulong M, const ulong K, const ulong positions, const ulong width, const ulong pitch,
     const ulong image, const ulong group_size, const ulong size, const ulong reach, const ulong out_image,
     const uint panels_m, const uint tall, const uint each_m, const int has_bias, const int relu) {
    const size_t panels_j = (columns + NR - 1) / NR, group = get_global_id(2);
    const size_t first_j = SHARE(0, 0, panels_j), last_j = SHARE(0, 1, panels_j);
    const size_t first_m = SHARE(1, 0, panels_m), last_m = SHARE(1, 1, panels_m);
    const size_t item = (group * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    __global float *panel = work + item * (KC * NR + (size_t)each_m * TILE), *rest = panel + KC * NR;
    weights += group * K * ROWS_BEFORE(panels_m, MR);
    out += out_begin;
    for (size_t J = first_j; J < last_j; J++) {
        const size_t j = J * NR;
        long at[NR / 16];
        bool together = true;
        for (int v = 0; v < NR / 16; v++) {
            at[v] = together_at(j + v * 16, columns, positions, out_image);
            together = together && at[v] >= 0;
        }
        size_t k0 = 0;
        do { // once for K = 0 too: the epilogue of nothing
            const int steps = (int)min((size_t)KC, (size_t)K - k0);
            for (int v = 0; v < NR; v += 16) {
                if (j + v < columns)
                    pack_positions(x, offsets + k0, steps, panel + v, j + v, columns, positions, width, pitch, image,
                                   group * group_size, size, reach);
                else // never stored, but multiplied: memory's last content, if subnormal, would take 100 times as long
                    for (int k = 0; k < steps; k++) STORE16(f32, (float16)(0), panel, k * NR + v);
            }
            const bool is_last = k0 + steps >= K;
            for (size_t p = first_m; p < last_m; p++) {
                const size_t m = ROWS_BEFORE(p, MR), most = p < tall ? MR : SHORT, rows = min(most, (size_t)M - m);
                const size_t channel = group * M + m, row = channel * positions;
                const bool is_whole = together && rows == most;
                __global const float *a = weights + k0 * ROWS_BEFORE(panels_m, MR) + m * steps, *b = panel;
                __global float *sums = rest + (p - first_m) * TILE;
                float tile[TILE];
                if (p < tall) MULTIPLY_PANEL(EACH_ROW, MR) else MULTIPLY_PANEL(CAT(ROWS_, SHORT), SHORT)
                if (!is_last || is_whole) continue;
                for (size_t i = 0; i < rows; i++)
                    for (int v = 0; v < NR / 16; v++) {
                        const float16 sum = LOAD_PRIVATE(float16, tile + i * NR + v * 16);
                        store_positions(epilogue(sum, BIAS(channel + i), relu), out, row + i * positions, j + v * 16,
                                        columns, positions, out_image, at[v]);
                    }
            }
            k0 += steps;
        } while (k0 < K);
    }
}
#endif

#ifdef WEIGHT_GRAD
// The gradient of positions j0 .. j1-1 of NR output channels, transposed; zero from channel `rows` on. Blocks of 4
// channels by 16 positions go through registers; what they write beyond j1 is never read.
APART void pack_grad(__global const STORAGE(G_T) *g, __global float *panel, size_t rows,
                             size_t j0, size_t j1, size_t positions, size_t grad_image, size_t begin, size_t size) {
    size_t n = j0 / positions, p = j0 % positions;
    while (j0 < j1) {
        const size_t count = min(positions - p, j1 - j0), at = begin + n * grad_image + p;
        for (size_t t = 0; t < count; t += 16)
            for (size_t i = 0; i < NR; i += 4) {
                __global float *d = panel + t * NR + i;
                const size_t s = at + i * positions + t;
                if (i + 4 <= rows && s + 3 * positions + 16 <= size && count >= 4) {
                    const float16 r0 = LOAD16(G_T, g, s), r1 = LOAD16(G_T, g, s + positions);
                    const float16 r2 = LOAD16(G_T, g, s + 2 * positions), r3 = LOAD16(G_T, g, s + 3 * positions);
                    store_columns(r0, r1, r2, r3, d, NR);
                } else {
                    const size_t rest = min(count - t, (size_t)16);
                    for (size_t e = 0; e < rest * 4; e++) {
                        const size_t row = e % 4, step = e / 4;
                        d[step * NR + row] = i + row < rows ? LOAD(G_T, g, s + row * positions + step) : 0.0f;
                    }
                }
            }
        panel += count * NR;
        j0 += count;
        p = 0;
        n++;
    }
}

#define CLEAR_BIAS(i, v) float16 bias##v = 0.0f;
#define ADD_BIAS(i, v) bias##v += LOAD16(f32, panel, j * NR + v * 16);
#define RESUME_BIAS(i, v) bias##v += LOAD16(f32, sums, v * 16);
#define SUSPEND_BIAS(i, v) STORE16(f32, bias##v, sums, v * 16);

// Adds the positions of a panel to `sums`, which begin with it unless `resume`.
static inline void sum_positions(__global const float *panel, size_t count, __global float *sums, bool resume) {
    EACH_VECTOR(CLEAR_BIAS, )
    for (size_t j = 0; j < count; j++) { EACH_VECTOR(ADD_BIAS, ) }
    if (resume) { EACH_VECTOR(RESUME_BIAS, ) }
    EACH_VECTOR(SUSPEND_BIAS, )
}

#define STREAM(i) __global const float *const x##i = x + offsets[min(k + i, (size_t)K - 1)];
#define FACTOR(i) x##i[at + step]
// Of the next panel of steps: streams are too short for the processor to guess.
#define PREFETCH_STREAM(i) \
    for (size_t t = at; t < stop; t += 16) PREFETCH(x + offsets[min(k + MR + i, (size_t)K - 1)] + t);

// Work-item (`each_k` panels of steps, `each` positions, in blocks of `block`, at most JC; group).
__kernel ONE_WORK_ITEM WIDE_VECTORS void
weight_grad(__global const float *restrict x, __global const ulong *restrict offsets,
            __global const STORAGE(G_T) *restrict grad, __global float *restrict partial,
            __global float *restrict partial_bias, __global float *restrict work, const ulong grad_begin,
            const ulong columns, const ulong M, const ulong K, const ulong positions,
            const ulong width, const ulong pitch, const ulong image, const ulong group_size, const ulong grad_image,
            const ulong grad_size, const uint each_k, const ulong each, const ulong block, const int accumulate,
            const int has_bias) {
    const size_t panels_k = (K + MR - 1) / MR, panels_m = (M + NR - 1) / NR, group = get_global_id(2);
    const size_t first_k = get_global_id(0) * each_k, last_k = min(first_k + each_k, panels_k);
    const size_t item = (get_global_id(1) * get_global_size(2) + group) * get_global_size(0) + get_global_id(0);
    __global float *panel = work + item * (JC + 16) * NR;
    const size_t part = get_global_id(1) * get_global_size(2) + group;
    partial += part * panels_k * panels_m * TILE;
    partial_bias += part * panels_m * NR;
    x += group * group_size;
    ulong run_at[JC];
    uint run_length[JC];
    size_t j0 = get_global_id(1) * each;
    const size_t end = min(j0 + each, (size_t)columns);
    bool resume = accumulate;
    for (; j0 < end; j0 += block, resume = true) {
        const size_t j1 = min(j0 + block, end), p0 = j0 % positions;
        // the rows of outputs that the block lies in
        int runs = 0;
        size_t n = j0 / positions, r = p0 / width, q = p0 % width;
        for (size_t j = j0; j < j1; runs++) {
            run_at[runs] = n * image + r * pitch + q;
            run_length[runs] = (uint)min(width - q, j1 - j);
            j += run_length[runs];
            q = 0;
            if (++r * width >= positions) {
                r = 0;
                n++;
            }
        }
        for (size_t P = 0; P < panels_m; P++) {
            pack_grad(grad, panel, min((size_t)NR, (size_t)M - P * NR), j0, j1, positions, grad_image,
                      grad_begin + (group * M + P * NR) * positions, grad_size);
            if (has_bias && first_k == 0) sum_positions(panel, j1 - j0, partial_bias + P * NR, resume);
            for (size_t Q = first_k; Q < last_k; Q++) {
                __global float *sums = partial + (Q * panels_m + P) * TILE;
                const size_t k = Q * MR;
                EACH_ROW(STREAM)
                __global const float *b = panel;
                EACH_ROW(CLEAR)
                for (int s = 0; s < runs; s++) {
                    size_t at = run_at[s];
                    const size_t stop = at + run_length[s];
                    EACH_ROW(PREFETCH_STREAM)
                    for (; at + 4 <= stop; at += 4, b += 4 * NR) {
                        STEP(EACH_ROW, 0) STEP(EACH_ROW, 1) STEP(EACH_ROW, 2) STEP(EACH_ROW, 3)
                    }
                    for (; at < stop; at++, b += NR) { STEP(EACH_ROW, 0) }
                }
                if (resume) { EACH_ROW(ADD_RESTING) }
                EACH_ROW(SUSPEND)
            }
        }
    }
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// grad[group][m][k] = sum of `chunks` partial tiles; bias_grad[group][m] = sum of as many partial sums of positions.
// Work-item (panel of steps, panel of output channels, group).
__kernel ONE_WORK_ITEM void weight_grad_finish(__global const float *restrict partial,
                                               __global const float *restrict partial_bias,
                                               __global STORAGE(OUT_T) *restrict grad,
                                               __global STORAGE(BIAS_T) *restrict bias_grad, const ulong M,
                                               const ulong K, const uint chunks, const int has_bias) {
    const size_t panels_m = get_global_size(1), groups = get_global_size(2), group = get_global_id(2);
    const size_t k = get_global_id(0) * MR, m = get_global_id(1) * NR;
    const size_t stride = groups * get_global_size(0) * panels_m * TILE;
    partial += ((group * get_global_size(0) + get_global_id(0)) * panels_m + get_global_id(1)) * TILE;
    const size_t rows = min((size_t)MR, (size_t)K - k), lanes = min((size_t)NR, (size_t)M - m);
    float sums[TILE];
    for (size_t i = 0; i < TILE; i += 16) {
        float16 v = LOAD16(f32, partial, i);
        for (uint c = 1; c < chunks; c++) v += LOAD16(f32, partial, c * stride + i);
        STORE_PRIVATE(float16, v, sums + i);
    }
    for (size_t l = 0; l < lanes; l++)
        for (size_t i = 0; i < rows; i++) STORE(OUT_T, sums[i * NR + l], grad, (group * M + m + l) * K + k + i);
    for (size_t l = 0; l < lanes && has_bias && k == 0; l++) {
        float sum = 0.0f;
        for (uint c = 0; c < chunks; c++) sum += partial_bias[((c * groups + group) * panels_m) * NR + m + l];
        STORE(BIAS_T, sum, bias_grad, group * M + m + l);
    }
}
#endif
