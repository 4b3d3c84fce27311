// conv_tiled.cl: a convolution and its weight gradient with tiles in local memory, for GPUs and every other device.
//
// Both are matrix products whose right-hand operand is never written down: its element for step k = (channel, tap) of
// an output position j = (n, r, q) is staged[begin(j) + offsets[k]] (conv_stage.cl).
//
//      conv          out[m][j]      = epilogue( sum over k of weights[m][k] * staged[begin(j) + offsets[k]] )
//      weight_grad   partial[m][k]  = sum over a chunk of j of grad[m][j] * staged[begin(j) + offsets[k]]
//
// A work-group of SIDE x SIDE work-items computes a tile, TILE = SIDE * PER_ITEM on a side; work-item (x, y) has its
// rows y + SIDE*i and its columns x + SIDE*j. TILE_K steps of both operands are in local memory at a time.
//
//   X_T, G_T, OUT_T, BIAS_T   storage types of the staged source, the output gradient, the output and the bias
//   INDEX                     type of a position's number: uint, which GPUs divide fast, or ulong if there are too many
//
// weights: [group][block of TILE_K steps][M/TILE][step][TILE] floats, zero beyond M. M, K: output channels and steps of
// one group.

#define TILE (SIDE * PER_ITEM)
#define PITCH (TILE + 1) // odd, so that walking along k meets every bank

// The staged element of position j's first tap.
static inline size_t begin_of(INDEX j, INDEX positions, INDEX width, size_t pitch, size_t image) {
    const INDEX p = j % positions;
    return j / positions * image + p / width * pitch + p % width;
}

// The element of position j's result, or gradient, of the first channel.
static inline size_t place_of(INDEX j, INDEX positions, size_t image) { return j / positions * image + j % positions; }

#define CLEAR_SUMS                                \
    float sum[PER_ITEM][PER_ITEM];                \
    for (int i = 0; i < PER_ITEM; i++)            \
        for (int j = 0; j < PER_ITEM; j++) sum[i][j] = 0.0f;

#define MULTIPLY_TILES                                                                          \
    for (int k = 0; k < TILE_K; k++) {                                                          \
        float a[PER_ITEM], b[PER_ITEM];                                                         \
        for (int i = 0; i < PER_ITEM; i++) a[i] = a_tile[k * PITCH + y + SIDE * i];             \
        for (int j = 0; j < PER_ITEM; j++) b[j] = b_tile[k * PITCH + x + SIDE * j];             \
        for (int i = 0; i < PER_ITEM; i++)                                                      \
            for (int j = 0; j < PER_ITEM; j++) sum[i][j] = a[i] * b[j] + sum[i][j];             \
    }

#ifdef CONV
// Work-item (position, output channel, group).
__kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1))) void
conv(__global const float *restrict weights, __global const STORAGE(X_T) *restrict staged,
     __global const ulong *restrict offsets, __global STORAGE(OUT_T) *restrict out,
     __global const STORAGE(BIAS_T) *restrict bias, const ulong out_begin, const ulong columns, const ulong M,
     const ulong K, const ulong positions, const ulong width, const ulong pitch, const ulong image,
     const ulong group_size, const ulong out_image, const int has_bias, const int relu) {
    __local float a_tile[TILE_K * PITCH], b_tile[TILE_K * PITCH];
    __local ulong begin[TILE];
    const int x = get_local_id(0), y = get_local_id(1), item = y * SIDE + x;
    const size_t m0 = get_group_id(1) * TILE, j0 = get_group_id(0) * TILE, group = get_group_id(2);
    weights += group * get_num_groups(1) * K * TILE;
    staged += group * group_size;
    for (int j = item; j < TILE; j += SIDE * SIDE)
        begin[j] = begin_of(min(j0 + j, (size_t)columns - 1), positions, width, pitch, image);
    barrier(CLK_LOCAL_MEM_FENCE);

    CLEAR_SUMS
    for (size_t k0 = 0; k0 < K; k0 += TILE_K) {
        const size_t steps = min((size_t)TILE_K, (size_t)K - k0);
        __global const float *panel = weights + (k0 * get_num_groups(1) + get_group_id(1) * steps) * TILE;
        for (int e = item; e < TILE * TILE_K; e += SIDE * SIDE) {
            const int i = e % TILE, k = e / TILE;
            const bool inside = k0 + k < K;
            a_tile[k * PITCH + i] = inside ? panel[k * TILE + i] : 0.0f;
            b_tile[k * PITCH + i] = inside ? LOAD(X_T, staged, begin[i] + offsets[k0 + k]) : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        MULTIPLY_TILES
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    for (int j = 0; j < PER_ITEM; j++) {
        const size_t column = j0 + x + SIDE * j;
        if (column >= columns) continue;
        const size_t at = out_begin + place_of(column, positions, out_image);
        for (int i = 0; i < PER_ITEM; i++) {
            const size_t m = m0 + y + SIDE * i;
            if (m >= M) continue;
            const float v = has_bias ? sum[i][j] + LOAD(BIAS_T, bias, group * M + m) : sum[i][j];
            // a NaN is not below zero and stays
            STORE(OUT_T, relu && v < 0.0f ? 0.0f : v, out, at + (group * M + m) * positions);
        }
    }
}
#endif

#ifdef WEIGHT_GRAD
// Work-item (step k, output channel, group and chunk of `chunk` positions); adds to `partial` if told to.
__kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1))) void
weight_grad(__global const STORAGE(X_T) *restrict staged, __global const ulong *restrict offsets,
            __global const STORAGE(G_T) *restrict grad, __global float *restrict partial, const ulong grad_begin,
            const ulong columns, const ulong M, const ulong K, const ulong positions, const ulong width,
            const ulong pitch, const ulong image, const ulong group_size, const ulong grad_image, const ulong chunk,
            const uint groups, const int accumulate) {
    __local float a_tile[TILE_K * PITCH], b_tile[TILE_K * PITCH];
    __local ulong begin[TILE_K], grad_at[TILE_K];
    const int x = get_local_id(0), y = get_local_id(1), item = y * SIDE + x;
    const size_t m0 = get_group_id(1) * TILE, k0 = get_group_id(0) * TILE;
    const size_t group = get_group_id(2) % groups, first = get_group_id(2) / groups * chunk;
    const size_t last = min(first + chunk, (size_t)columns);
    staged += group * group_size;
    grad += grad_begin + group * M * positions;
    partial += get_group_id(2) * M * K;

    CLEAR_SUMS
    for (size_t j0 = first; j0 < last; j0 += TILE_K) {
        for (int j = item; j < TILE_K; j += SIDE * SIDE) {
            const size_t column = min(j0 + j, (size_t)columns - 1);
            begin[j] = begin_of(column, positions, width, pitch, image);
            grad_at[j] = place_of(column, positions, grad_image);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int e = item; e < TILE * TILE_K; e += SIDE * SIDE) {
            const int i = e / TILE_K, j = e % TILE_K;
            const bool inside = j0 + j < last;
            a_tile[j * PITCH + i] = inside && m0 + i < M ? LOAD(G_T, grad, grad_at[j] + (m0 + i) * positions) : 0.0f;
            b_tile[j * PITCH + i] = inside && k0 + i < K ? LOAD(X_T, staged, begin[j] + offsets[k0 + i]) : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        MULTIPLY_TILES
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    for (int i = 0; i < PER_ITEM; i++)
        for (int j = 0; j < PER_ITEM; j++) {
            const size_t m = m0 + y + SIDE * i, k = k0 + x + SIDE * j;
            if (m >= M || k >= K) continue;
            partial[m * K + k] = accumulate ? partial[m * K + k] + sum[i][j] : sum[i][j];
        }
}
#endif
