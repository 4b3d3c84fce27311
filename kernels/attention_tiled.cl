// attention_tiled.cl: softmax(Q K' scale) V and its gradients with tiles in local memory, for GPUs and other devices.
//
//   A work-group is SIDE x SIDE work-items and owns TILE = SIDE * PER_ITEM rows of one head, and TILE columns of D of
//   the result: it walks over the rows of the other side (keys for a query's rows), a tile of TILE scores at a time.
//
//                        other rows ->                                  columns of D
//                    +------+------+------+                           +-------------+
//       own rows     | TILE | TILE | ...  |  scores: products of D    |  sums of    |  weighted rows of V, K, Q or dY
//       (TILE)       +------+------+------+                           +-------------+
//
//   forward        rows: queries, others: keys      y, lse (Milakov and Gimelshein 2018; Dao et al. 2022)
//   backward_q     rows: queries, others: keys      dq, delta
//   backward_kv    rows: keys, others: queries      dk, dv
//
// Work-item (x, y) holds rows y + SIDE * i and columns x + SIDE * j of every tile. Scores exist only as one tile, in
// local memory. D beyond TILE columns takes several work-groups, which all compute the scores. Work-groups are numbered
// in one direction, by head, tile of rows, tile of columns: NVIDIA's devices take at most 65,535 in the others.
//
// With delta = sum_j p_j dp_j known only when all keys have been met, dq = sum_j p_j (dp_j - delta) k_j scale is
// formed from two sums: (sum_j p_j dp_j k_j - delta sum_j p_j k_j) scale.
//
//   SIDE, PER_ITEM          see above; PER_ITEM divides SIDE
//   STEP                    steps of a product in local memory at a time
//   Q_T, K_T, V_T, G_T      storage types of the operands and of the result's gradient
//   Y_T, DQ_T, DK_T, DV_T   storage types of the result and of the gradients

#define TILE (SIDE * PER_ITEM)
#define PITCH (TILE + 1) // odd, so that walking down a column meets every bank
#define PARTS (SIDE / PER_ITEM) // work-items that share a row when rows are summed
#define GROUP __attribute__((reqd_work_group_size(SIDE, SIDE, 1)))
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE);

#define EACH(i) for (int i = 0; i < PER_ITEM; i++)
#define CLEAR(sum) EACH(i) EACH(j) sum[i][j] = 0.0f;
#define WEIGHT(i, j) weights[(y + SIDE * (i)) * PITCH + x + SIDE * (j)]

#define SETTING                                                                                                 \
    __local float weights[TILE * PITCH], a_tile[STEP * PITCH], b_tile[STEP * PITCH], row_values[TILE];          \
    __local float scratch[SIDE * SIDE];                                                                         \
    const int x = get_local_id(0), y = get_local_id(1), item = y * SIDE + x;                                    \
    const int row = item / PARTS, part = item % PARTS;                                                          \
    const size_t across = (D + TILE - 1) / TILE, down = (T + TILE - 1) / TILE, tile = get_group_id(0) / across; \
    const size_t column0 = get_group_id(0) % across * TILE, first = tile % down * TILE, head = tile / down;     \
    const size_t rows = min((size_t)TILE, (size_t)T - first);

// sum = product of rows of a with rows of b, over all D
#define PRODUCT(sum, A_T, a, a_rows, B_T, b, b_rows)                                                               \
    CLEAR(sum)                                                                                                     \
    for (size_t d0 = 0; d0 < D; d0 += STEP) {                                                                      \
        BARRIER                                                                                                    \
        for (int e = item; e < TILE * STEP; e += SIDE * SIDE) {                                                    \
            const size_t r = e / STEP, d = d0 + e % STEP;                                                          \
            a_tile[e % STEP * PITCH + r] = r < (a_rows) && d < D ? LOAD(A_T, a, r * D + d) : 0.0f;                 \
            b_tile[e % STEP * PITCH + r] = r < (b_rows) && d < D ? LOAD(B_T, b, r * D + d) : 0.0f;                 \
        }                                                                                                          \
        BARRIER                                                                                                    \
        for (int k = 0; k < STEP; k++)                                                                             \
            EACH(i) EACH(j) sum[i][j] += a_tile[k * PITCH + y + SIDE * i] * b_tile[k * PITCH + x + SIDE * j];      \
    }

// sum += weights times rows of b, TILE of their columns
#define ADD_WEIGHTED(sum, B_T, b, b_rows)                                                                          \
    for (int k0 = 0; k0 < TILE; k0 += STEP) {                                                                      \
        BARRIER                                                                                                    \
        for (int e = item; e < TILE * STEP; e += SIDE * SIDE) {                                                    \
            const size_t r = k0 + e / TILE, d = column0 + e % TILE;                                                \
            b_tile[e / TILE * PITCH + e % TILE] = r < (b_rows) && d < D ? LOAD(B_T, b, r * D + d) : 0.0f;          \
        }                                                                                                          \
        BARRIER                                                                                                    \
        for (int k = 0; k < STEP; k++)                                                                             \
            EACH(i) EACH(j) sum[i][j] += weights[(y + SIDE * i) * PITCH + k0 + k] * b_tile[k * PITCH + x + SIDE * j]; \
    }

#define STORE_TILE(T_, to, VALUE)                                                                 \
    EACH(i) EACH(j) {                                                                             \
        const size_t r = y + SIDE * i, d = column0 + x + SIDE * j;                                \
        if (r < rows && d < D) STORE(T_, VALUE, to, (head * T + first + r) * D + d);              \
    }

// What to subtract from scores: where there is nothing but -inf, 0, so that their exponentials are 0 and not NaN.
static inline float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

#define HIDDEN(query, key) ((key) >= T || (query) >= T || (causal && (key) > (query)))

#if SIDE % PER_ITEM
#error "PER_ITEM must divide SIDE"
#endif
#ifdef ATTENTION_FORWARD
__kernel GROUP void attention_forward(__global const STORAGE(Q_T) *restrict q,
                                      __global const STORAGE(K_T) *restrict k,
                                      __global const STORAGE(V_T) *restrict v, __global STORAGE(Y_T) *restrict out,
                                      __global float *restrict lse, const ulong T, const ulong D, const float scale,
                                      const int causal) {
    SETTING
    float sum[PER_ITEM][PER_ITEM], result[PER_ITEM][PER_ITEM], top = -INFINITY, total = 0.0f;
    CLEAR(result)
    const size_t visible = causal ? min(first + TILE, (size_t)T) : T;
    for (size_t key = 0; key < visible; key += TILE) {
        const size_t keys = min((size_t)TILE, (size_t)T - key), at = (head * T + key) * D;
        PRODUCT(sum, Q_T, q + (head * T + first) * D, rows, K_T, k + at, keys)
        EACH(i) EACH(j) {
            const bool hidden = HIDDEN(first + y + SIDE * i, key + x + SIDE * j);
            WEIGHT(i, j) = hidden ? -INFINITY : sum[i][j] * scale;
        }
        BARRIER
        float most = top;
        __local float *mine = weights + row * PITCH;
        for (int c = part; c < TILE; c += PARTS) most = fmax(most, mine[c]);
        scratch[item] = most;
        BARRIER
        for (int p = 0; p < PARTS; p++) most = fmax(most, scratch[row * PARTS + p]);
        const float shift = finite_top(most), rescale = exp(top - shift);
        top = most;
        total *= rescale;
        for (int c = part; c < TILE; c += PARTS) {
            mine[c] = exp(mine[c] - shift);
            total += mine[c];
        }
        if (part == 0) row_values[row] = rescale;
        BARRIER
        EACH(i) EACH(j) result[i][j] *= row_values[y + SIDE * i];
        ADD_WEIGHTED(result, V_T, v + at, keys)
    }
    BARRIER
    scratch[item] = total;
    BARRIER
    total = 0.0f;
    for (int p = 0; p < PARTS; p++) total += scratch[row * PARTS + p];
    if (part == 0) {
        row_values[row] = total == 0.0f ? 0.0f : 1.0f / total; // no key seen: the result is 0
        if ((size_t)row < rows && column0 == 0) lse[head * T + first + row] = finite_top(top) + log(total);
    }
    BARRIER
    STORE_TILE(Y_T, out, result[i][j] * row_values[y + SIDE * i])
}
#endif

#ifdef ATTENTION_BACKWARD_Q
__kernel GROUP void attention_backward_q(__global const STORAGE(Q_T) *restrict q,
                                         __global const STORAGE(K_T) *restrict k,
                                         __global const STORAGE(V_T) *restrict v,
                                         __global const STORAGE(G_T) *restrict dy, __global const float *restrict lse,
                                         __global STORAGE(DQ_T) *restrict dq, __global float *restrict delta,
                                         const ulong T, const ulong D, const float scale, const int causal) {
    SETTING
    float sum[PER_ITEM][PER_ITEM], p[PER_ITEM][PER_ITEM], keys_p[PER_ITEM][PER_ITEM], keys_pdp[PER_ITEM][PER_ITEM];
    float total = 0.0f;
    CLEAR(keys_p)
    CLEAR(keys_pdp)
    if (part == 0) row_values[row] = (size_t)row < rows ? finite_top(lse[head * T + first + row]) : 0.0f;
    const size_t visible = causal ? min(first + TILE, (size_t)T) : T, own = (head * T + first) * D;
    for (size_t key = 0; key < visible; key += TILE) {
        const size_t keys = min((size_t)TILE, (size_t)T - key), at = (head * T + key) * D;
        PRODUCT(sum, Q_T, q + own, rows, K_T, k + at, keys)
        EACH(i) EACH(j) {
            const bool hidden = HIDDEN(first + y + SIDE * i, key + x + SIDE * j);
            p[i][j] = hidden ? 0.0f : exp(sum[i][j] * scale - row_values[y + SIDE * i]);
            WEIGHT(i, j) = p[i][j];
        }
        ADD_WEIGHTED(keys_p, K_T, k + at, keys)
        PRODUCT(sum, G_T, dy + own, rows, V_T, v + at, keys)
        EACH(i) EACH(j) WEIGHT(i, j) = p[i][j] * sum[i][j];
        BARRIER
        for (int c = part; c < TILE; c += PARTS) total += weights[row * PITCH + c];
        ADD_WEIGHTED(keys_pdp, K_T, k + at, keys)
        BARRIER
    }
    scratch[item] = total;
    BARRIER
    total = 0.0f;
    for (int s = 0; s < PARTS; s++) total += scratch[row * PARTS + s];
    if (part == 0) {
        row_values[row] = total;
        if ((size_t)row < rows && column0 == 0) delta[head * T + first + row] = total;
    }
    BARRIER
    STORE_TILE(DQ_T, dq, (keys_pdp[i][j] - row_values[y + SIDE * i] * keys_p[i][j]) * scale)
}
#endif

#ifdef ATTENTION_BACKWARD_KV
__kernel GROUP void attention_backward_kv(__global const STORAGE(Q_T) *restrict q,
                                          __global const STORAGE(K_T) *restrict k,
                                          __global const STORAGE(V_T) *restrict v,
                                          __global const STORAGE(G_T) *restrict dy, __global const float *restrict lse,
                                          __global const float *restrict delta, __global STORAGE(DK_T) *restrict dk,
                                          __global STORAGE(DV_T) *restrict dv, const ulong T, const ulong D,
                                          const float scale, const int causal) {
    SETTING
    float sum[PER_ITEM][PER_ITEM], p[PER_ITEM][PER_ITEM], sum_k[PER_ITEM][PER_ITEM], sum_v[PER_ITEM][PER_ITEM];
    CLEAR(sum_k)
    CLEAR(sum_v)
    const size_t own = (head * T + first) * D;
    for (size_t query = causal ? first : 0; query < T; query += TILE) {
        const size_t queries = min((size_t)TILE, (size_t)T - query), at = (head * T + query) * D;
        if (item < TILE && (size_t)item < queries) {
            row_values[item] = finite_top(lse[head * T + query + item]);
            scratch[item] = delta[head * T + query + item];
        }
        PRODUCT(sum, K_T, k + own, rows, Q_T, q + at, queries)
        EACH(i) EACH(j) {
            const bool hidden = HIDDEN(query + x + SIDE * j, first + y + SIDE * i);
            p[i][j] = hidden ? 0.0f : exp(sum[i][j] * scale - row_values[x + SIDE * j]);
            WEIGHT(i, j) = p[i][j];
        }
        ADD_WEIGHTED(sum_v, G_T, dy + at, queries)
        PRODUCT(sum, V_T, v + own, rows, G_T, dy + at, queries)
        EACH(i) EACH(j) {
            const bool hidden = HIDDEN(query + x + SIDE * j, first + y + SIDE * i);
            WEIGHT(i, j) = hidden ? 0.0f : p[i][j] * (sum[i][j] - scratch[x + SIDE * j]) * scale;
        }
        ADD_WEIGHTED(sum_k, Q_T, q + at, queries)
        BARRIER
    }
    STORE_TILE(DK_T, dk, sum_k[i][j])
    STORE_TILE(DV_T, dv, sum_v[i][j])
}
#endif
