// distances.cl: squared distances between the rows of x (rows, n) and of y (columns, n), and gradients of what was
// computed from them.
//
// Distances are sums of squared differences, never |x|^2 + |y|^2 - 2xy, whose digits cancel where rows are close. The
// gradient of any function of them, with slope s for a squared distance, is a sum of s * 2 * (x - y): every row gathers
// its own, so nothing is added atomically and results repeat to the bit.
//
//   ALL_PAIRS        d[i][j] of every row i of x and j of y. A work-item takes TILE rows and goes along `width` columns
//                    TILE at a time, 16 dimensions at a time:
//
//                             columns ->
//                    rows   |-- width --|-- width --| ...      TILE x TILE sums of float16 stay in registers
//
//   GATHER           dx[i] = scale * sum over j of s[i][j] * (x[i] - y[j]). A work-item takes 16 * WIDE dimensions of a
//                    row. Where s is 0 the term is absent, however large the difference.
//
//   TRIPLET, CONTRASTIVE  the loss of each row of an anchor and its partners: losses[row], and slopes[row][2], the
//                    loss's derivatives by the squared distances. A work-group takes `each` rows, one after the other.
//   PARTNERS         dx[i] = scale * (s[i][first] * (x[i] - y[i]) + s[i][1 - first] * (x[i] - z[i])), with PARTNERS 1
//                    only the first of them
//
//   X_T, Y_T, Z_T, S_T, D_T, DX_T, G_T  storage types
//   LABEL_T    CONTRASTIVE: type of labels: i32, i64, or a storage type holding whole numbers
//   ROOT       ALL_PAIRS, TRIPLET: distances are sqrt(squared distance + 1e-8), else squared
//   SYMMETRIC  GATHER: y is x, and s[i][j] + s[j][i] takes the place of s[i][j]
//   G_T        GATHER: if there, scale is multiplied by the loss's gradient, read on the device;
//   COUNTED    GATHER: and divided by a number of terms, read there too
//   WG         work-items of a work-group that shares rows: 1 on CPU devices, else a power of two

#define ROOT_EPSILON 1e-8f

// Ways to load 16 elements: all of them there, or beyond `end` none.
#define WHOLE(T, p, i, end) LOAD16(T, p, i)
#define PARTLY(T, p, i, end) LOAD_PART(T, p, i, end, 0.0f)

// ------------------------------------------------------------------------------------------------- matrices

#ifdef ALL_PAIRS
// Adds 16 dimensions to the tile's sums.
#define TILE_STEP(HOW)                                                                             \
    {                                                                                              \
        float16 a[TILE];                                                                           \
        _Pragma("unroll") for (uint r = 0; r < TILE; r++) a[r] = HOW(X_T, x, x_at[r] + k, x_at[r] + n);  \
        _Pragma("unroll") for (uint c = 0; c < TILE; c++) {                                        \
            const float16 b = HOW(Y_T, y, y_at[c] + k, y_at[c] + n);                               \
            _Pragma("unroll") for (uint r = 0; r < TILE; r++)                                      \
                sums[r][c] += (a[r] - b) * (a[r] - b);                                             \
        }                                                                                          \
    }

__kernel void all_pairs(__global const STORAGE(X_T) *restrict x, __global const STORAGE(Y_T) *restrict y,
                        __global STORAGE(D_T) *restrict d, const ulong rows, const ulong columns, const ulong n,
                        const ulong width) {
    const size_t strips = (columns + width - 1) / width;
    const size_t row = get_global_id(0) / strips * TILE;
    if (row >= rows) return;
    const size_t begin = get_global_id(0) % strips * width, end = min(begin + width, (size_t)columns);
    size_t x_at[TILE], y_at[TILE];
    // A tile that reaches beyond the last row or column computes that one again, and does not store it.
    for (uint r = 0; r < TILE; r++) x_at[r] = min(row + r, (size_t)rows - 1) * n;
    for (size_t column = begin; column < end; column += TILE) {
        for (uint c = 0; c < TILE; c++) y_at[c] = min(column + c, end - 1) * n;
        float totals[TILE][TILE];
        _Pragma("unroll") for (uint r = 0; r < TILE; r++)
            _Pragma("unroll") for (uint c = 0; c < TILE; c++) totals[r][c] = 0.0f;
        for (size_t k = 0; k < n;) { // by blocks, so that rounding does not grow with the dimensions
            const size_t stop = min(k + 4096, (size_t)n);
            float16 sums[TILE][TILE];
            _Pragma("unroll") for (uint r = 0; r < TILE; r++)
                _Pragma("unroll") for (uint c = 0; c < TILE; c++) sums[r][c] = 0.0f;
            for (; k + 16 <= stop; k += 16) TILE_STEP(WHOLE)
            if (k < stop) {
                TILE_STEP(PARTLY)
                k = stop;
            }
            _Pragma("unroll") for (uint r = 0; r < TILE; r++)
                _Pragma("unroll") for (uint c = 0; c < TILE; c++) totals[r][c] += sum16(sums[r][c]);
        }
        _Pragma("unroll") for (uint r = 0; r < TILE; r++)
            _Pragma("unroll") for (uint c = 0; c < TILE; c++) {
                if (row + r >= rows || column + c >= end) continue;
                const float sum = totals[r][c];
#ifdef ROOT
                STORE(D_T, sqrt(sum + ROOT_EPSILON), d, (row + r) * columns + column + c);
#else
                STORE(D_T, sum, d, (row + r) * columns + column + c);
#endif
            }
    }
}
#endif

#ifdef GATHER
#define GATHER_STEP(HOW)                                                                            \
    {                                                                                               \
        float16 own[WIDE], sums[WIDE], blocks[WIDE], block[WIDE];                                   \
        _Pragma("unroll") for (uint v = 0; v < WIDE; v++) {                                         \
            own[v] = HOW(X_T, x, row * n + k + 16 * v, (row + 1) * n);                              \
            sums[v] = blocks[v] = 0.0f;                                                             \
        }                                                                                           \
        for (size_t j = 0; j < columns;) { /* in the levels of LONG_SUM */                          \
            const size_t stop = min(j + RUN_TERMS, (size_t)columns);                                \
            _Pragma("unroll") for (uint v = 0; v < WIDE; v++) block[v] = 0.0f;                      \
            for (; j < stop; j++) {                                                                 \
                const float slope = SLOPE(row, j);                                                  \
                if (slope == 0.0f) continue;                                                        \
                _Pragma("unroll") for (uint v = 0; v < WIDE; v++)                                   \
                    block[v] += slope * (own[v] - HOW(Y_T, y, j * n + k + 16 * v, (j + 1) * n));    \
            }                                                                                       \
            const int full = stop % (RUN_TERMS * RUN_TERMS) == 0 || stop == columns;                \
            _Pragma("unroll") for (uint v = 0; v < WIDE; v++) {                                     \
                blocks[v] += block[v];                                                              \
                if (full) sums[v] += blocks[v], blocks[v] = 0.0f;                                   \
            }                                                                                       \
        }                                                                                           \
        _Pragma("unroll") for (uint v = 0; v < WIDE; v++)                                           \
            STORE_PART(DX_T, sums[v] * factor, dx, row * n + k + 16 * v, (row + 1) * n);            \
    }

#ifdef SYMMETRIC
#define SLOPE(i, j) (LOAD(S_T, s, (i) * row_step + (j) * step) + LOAD(S_T, s, (j) * row_step + (i) * step))
#else
#define SLOPE(i, j) LOAD(S_T, s, (i) * row_step + (j) * step)
#endif

__kernel void gather(__global const STORAGE(X_T) *restrict x, __global const STORAGE(Y_T) *restrict y,
                     __global const STORAGE(S_T) *restrict s,
#ifdef G_T
                     __global const STORAGE(G_T) *restrict g,
#endif
#ifdef COUNTED
                     __global const float *restrict count,
#endif
                     __global STORAGE(DX_T) *restrict dx, const ulong rows, const ulong columns, const ulong n,
                     const ulong row_step, const ulong step, const float scale) {
    const size_t pieces = (n + 16 * WIDE - 1) / (16 * WIDE);
    const size_t row = get_global_id(0) / pieces, k = get_global_id(0) % pieces * (16 * WIDE);
    if (row >= rows) return;
    float factor = scale;
#ifdef G_T
    factor *= LOAD(G_T, g, 0);
#endif
#ifdef COUNTED
    factor /= count[0];
#endif
    if (k + 16 * WIDE <= n) GATHER_STEP(WHOLE)
    else GATHER_STEP(PARTLY)
}
#endif

// ----------------------------------------------------------------------------------------------------- rows

#if defined(TRIPLET) || defined(CONTRASTIVE)

#define SQUARES(HOW, B_T, b) square16(HOW(X_T, x, i, end) - HOW(B_T, b, i, end))
static inline float16 square16(float16 d) { return d * d; }

// The squared distance of row `row` of x and of b, as a value of the whole work-group.
#define ROW_DISTANCE(name, B_T, b)                                                                 \
    float name;                                                                                    \
    {                                                                                              \
        const size_t end = (row + 1) * n;                                                          \
        float16 sums = 0.0f;                                                                       \
        size_t i = row * n + get_local_id(0) * 16;                                                 \
        LONG_SUM(float16, sums, i, max(end, (size_t)15) - 15, WG * 16, SQUARES(WHOLE, B_T, b))     \
        if (i < end) sums += SQUARES(PARTLY, B_T, b);                                              \
        name = group_sum(sum16(sums), scratch);                                                    \
    }
#endif

#ifdef TRIPLET
// max(0, d(x, y) - d(x, z) + margin)
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
triplet(__global const STORAGE(X_T) *restrict x, __global const STORAGE(Y_T) *restrict y,
        __global const STORAGE(Z_T) *restrict z, __global float *restrict losses, __global float *restrict slopes,
        const ulong rows, const ulong n, const uint each, const float margin) {
    SCRATCH;
    FOR_EACH_OWN(row, each, rows) {
        ROW_DISTANCE(near, Y_T, y)
        ROW_DISTANCE(far, Z_T, z)
#ifdef ROOT
        near = sqrt(near + ROOT_EPSILON);
        far = sqrt(far + ROOT_EPSILON);
#endif
        const float over = (near - far) + margin;
        const float active = over <= 0.0f ? 0.0f : isnan(over) ? over : 1.0f; // NaN: both may be infinite
        if (get_local_id(0) == 0) {
            losses[row] = active != 0.0f ? over : 0.0f;
#ifdef ROOT
            slopes[2 * row] = active * (0.5f / near);
            slopes[2 * row + 1] = active * (-0.5f / far);
#else
            slopes[2 * row] = active;
            slopes[2 * row + 1] = -active;
#endif
        }
    }
}
#endif

#ifdef CONTRASTIVE
#define storage_i64 long
#define label_i32(p, i) ((float)(p)[i])
#define label_i64(p, i) ((float)(p)[i])
#define label_f32(p, i) trunc(LOAD(f32, p, i))
#define label_f16(p, i) trunc(LOAD(f16, p, i))
#define label_bf16(p, i) trunc(LOAD(bf16, p, i))

// label * d^2 + (1 - label) * max(0, margin - d)^2
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
contrastive(__global const STORAGE(X_T) *restrict x, __global const STORAGE(Y_T) *restrict y,
            __global const STORAGE(LABEL_T) *restrict labels, __global float *restrict losses,
            __global float *restrict slopes, const ulong rows, const ulong n, const uint each, const float margin) {
    SCRATCH;
    FOR_EACH_OWN(row, each, rows) {
        ROW_DISTANCE(square, Y_T, y)
        const float distance = sqrt(square + ROOT_EPSILON), label = CAT(label_, LABEL_T)(labels, row);
        const float rest = margin - distance;
        const float gap = rest <= 0.0f ? 0.0f : rest; // a NaN stays
        // An absent half of the loss is left out, not multiplied by 0: its distance may be infinite.
        const float alike = label == 0.0f ? 0.0f : label * square;
        const float apart = label == 1.0f ? 0.0f : (1.0f - label) * gap * gap;
        if (get_local_id(0) == 0) {
            losses[row] = alike + apart;
            slopes[2 * row] = label - (1.0f - label) * (gap / distance);
            slopes[2 * row + 1] = 0.0f;
        }
    }
}
#endif

#ifdef PARTNERS
__kernel void partners(__global const STORAGE(X_T) *restrict x, __global const STORAGE(Y_T) *restrict y,
                       __global const STORAGE(Z_T) *restrict z, __global const float *restrict s,
                       __global const STORAGE(G_T) *restrict g, __global STORAGE(DX_T) *restrict dx, const ulong rows,
                       const ulong n, const uint each, const uint first, const float scale) {
    const size_t begin = get_global_id(0) * (size_t)each, last = min(begin + each, (size_t)rows);
    const float factor = scale * LOAD(G_T, g, 0);
    for (size_t row = begin; row < last; row++) {
        const float y_slope = s[2 * row + first];
        const size_t end = (row + 1) * n;
        for (size_t i = row * n; i < end; i += 16) {
            const float16 own = LOAD_PART(X_T, x, i, end, 0.0f);
            float16 sum = 0.0f;
            if (y_slope != 0.0f) sum = y_slope * (own - LOAD_PART(Y_T, y, i, end, 0.0f));
#if PARTNERS == 2
            const float z_slope = s[2 * row + 1 - first];
            if (z_slope != 0.0f) sum += z_slope * (own - LOAD_PART(Z_T, z, i, end, 0.0f));
#elif PARTNERS != 1
#error "PARTNERS must be 1 or 2"
#endif
            STORE_PART(DX_T, sum * factor, dx, i, end);
        }
    }
}
#endif
