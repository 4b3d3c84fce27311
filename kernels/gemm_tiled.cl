// gemm_tiled.cl: C = epilogue(op(A) op(B)) with tiles in local memory, for GPUs and every other device.
//
//            TILE                      TILE                       TILE
//          +------+                  +------+                   +------+
//     TILE |  A   |  -> a[k][m]   K  |  B   |  -> b[k][n]   TILE |  C   |  work-item (x, y) of SIDE x SIDE computes
//          +------+   TILE_K of     TILE_K  |    each step       +------+  rows y + SIDE*i, columns x + SIDE*j
//             K       them a step    +------+
//
// A work-group computes a TILE x TILE tile of C, SIDE * PER_ITEM on a side. Neighbouring work-items store neighbouring
// columns. Both operands are widened to float when they enter local memory, zero beyond the matrix. Loading walks along
// whichever of the two dimensions is contiguous in memory, so all of NN, NT, TN and TT read whole lines.
//
//   SIDE       work-items on a side of the work-group
//   PER_ITEM   rows and columns of C a work-item computes
//   TILE_K     steps of k in local memory at a time
//   A_T, B_T, OUT_T, BIAS_T   storage types
//
// Strides are in elements. The third dimension is the batch; a batch stride of 0 uses one matrix for all of it.

#define TILE (SIDE * PER_ITEM)
#define PITCH (TILE + 1) // odd, so that walking along k meets every bank

// One TILE x TILE_K piece of an operand into tile[k][row]; `rows` and `steps` count what lies inside the matrix.
#define LOAD_TILE(T, tile, src, stride_row, stride_k, rows, steps)                                                  \
    for (int e = item; e < TILE * TILE_K; e += SIDE * SIDE) {                                                       \
        const int r = (stride_k) == 1 ? e / TILE_K : e % TILE, k = (stride_k) == 1 ? e % TILE_K : e / TILE;         \
        tile[k * PITCH + r] =                                                                                       \
            (size_t)r < (rows) && (size_t)k < (steps) ? LOAD(T, src, (stride_row) * r + (stride_k) * k) : 0.0f;     \
    }

// Work-item (column, row, batch) of a grid that covers C with whole tiles.
__kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1))) void gemm(
    __global const STORAGE(A_T) *restrict A, __global const STORAGE(B_T) *restrict B,
    __global STORAGE(OUT_T) *restrict C, __global const STORAGE(BIAS_T) *restrict bias, const ulong M, const ulong N,
    const ulong K, const ulong a_row, const ulong a_k, const ulong a_batch, const ulong b_col, const ulong b_k,
    const ulong b_batch, const int has_bias, const int relu) {
    __local float a_tile[TILE_K * PITCH], b_tile[TILE_K * PITCH];
    const int x = get_local_id(0), y = get_local_id(1), item = y * SIDE + x;
    const size_t m0 = get_group_id(1) * TILE, n0 = get_group_id(0) * TILE, batch = get_group_id(2);
    A += batch * a_batch + m0 * a_row;
    B += batch * b_batch + n0 * b_col;
    C += batch * M * N;

    float sum[PER_ITEM][PER_ITEM];
    for (int i = 0; i < PER_ITEM; i++)
        for (int j = 0; j < PER_ITEM; j++) sum[i][j] = 0.0f;

    for (size_t k0 = 0; k0 < K; k0 += TILE_K) {
        LOAD_TILE(A_T, a_tile, A + k0 * a_k, a_row, a_k, M - m0, K - k0)
        LOAD_TILE(B_T, b_tile, B + k0 * b_k, b_col, b_k, N - n0, K - k0)
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < TILE_K; k++) {
            float a[PER_ITEM], b[PER_ITEM];
            for (int i = 0; i < PER_ITEM; i++) a[i] = a_tile[k * PITCH + y + SIDE * i];
            for (int j = 0; j < PER_ITEM; j++) b[j] = b_tile[k * PITCH + x + SIDE * j];
            for (int i = 0; i < PER_ITEM; i++)
                for (int j = 0; j < PER_ITEM; j++) sum[i][j] = a[i] * b[j] + sum[i][j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    for (int i = 0; i < PER_ITEM; i++)
        for (int j = 0; j < PER_ITEM; j++) {
            const size_t m = m0 + y + SIDE * i, n = n0 + x + SIDE * j;
            if (m >= M || n >= N) continue;
            const float v = has_bias ? sum[i][j] + LOAD(BIAS_T, bias, n) : sum[i][j];
            STORE(OUT_T, relu && v < 0.0f ? 0.0f : v, C, m * N + n); // a NaN is not below zero and stays
        }
}
