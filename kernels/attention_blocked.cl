// attention_blocked.cl: softmax(Q K' scale) V and its gradients for CPU devices, block by block in registers.
//
// A block is LANES queries of one head, and lies transposed: one query in each lane of the vectors. The softmax of
// every query then needs no sum or maximum across lanes, and all products run through one register tile:
//
//                         b, a row for each step: [steps][LANES]
//                            +------------------------------+
//      a, one element for    |  k ->  0 .. LANES-1          |
//      each row and step     +------------------------------+
//         +-----+                 +------------------------------+
//    ROWS |     |   * (all lanes) |  tile: ROWS x LANES sums     |
//         +-----+                 +------------------------------+
//          steps
//                      rows     lanes     steps        a                 b
//      scores  S'      keys     queries   D            K  [T][pitch]     Q' [D][LANES]
//      result  O'      of D     queries   keys         V  [T][pitch]     P' [keys][LANES]
//      dP'             keys     queries   D            V                 dO'
//      dQ'             of D     queries   keys         K                 dS'
//      dV, dK          keys     of D      queries      P', dS'           dO, Q [LANES][pitch]
//
// forward: keys come KEYS at a time; each query's maximum, sum and result so far are rescaled where a new maximum is
// met (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
// 2022). What backward needs is the logarithm of the sum of the exponentials (lse), one float a query.
//
// backward: P' and dP' of one block are kept for all keys, LANES x T floats each, so that the row sums of P dP are
// exact to fp32 and the result of forward is not needed; dK and dV are added up in floats from block to block.
// Everything that a work-item keeps lies in its own part of `workspace`; a head that several work-items share has
// one set of sums dK, dV for each, which attention_combine adds up in a fixed order.
//
//   LANES, ROWS   queries of a block and rows of the tile: 32 and 8 with 32 vector registers of 16 floats, else 16, 4
//   KEYS          keys between two looks at the maximum, a multiple of ROWS
//   Q_T, K_T, V_T, G_T      storage types of the operands and of the result's gradient
//   Y_T, DQ_T, DK_T, DV_T   storage types of the result and of the gradients
//
// Lanes beyond the last query hold zeros, as do rows beyond the last key and columns beyond D; nothing of them is
// stored. A key that a query must not see has the score -inf and the weight 0.

// The tile's code, written once for each row; a row is one vector of 16 lanes or two.
#if KEYS % ROWS
#error "KEYS must be a multiple of ROWS"
#endif
#define ROWS_4(X) X(0) X(1) X(2) X(3)
#define ROWS_8(X) ROWS_4(X) X(4) X(5) X(6) X(7)
#define EACH_ROW(X) CAT(ROWS_, ROWS)(X)
#define VECTORS_16(first, second) first
#define VECTORS_32(first, second) first second
#define FIRST_AND_SECOND(first, second) CAT(VECTORS_, LANES)(first, second)
#define CLEAR(i) FIRST_AND_SECOND(float16 c##i##_0 = 0.0f;, float16 c##i##_1 = 0.0f;)
#define MULTIPLY_ADD(i)                                                          \
    FIRST_AND_SECOND(c##i##_0 = (float16)(a_k[(i) * a_row]) * b0 + c##i##_0;,    \
                     c##i##_1 = (float16)(a_k[(i) * a_row]) * b1 + c##i##_1;)
#define STEP(k)                                                                  \
    {                                                                            \
        floats a_k = a + (k) * a_step, b_k = b + (k) * b_step;                   \
        const float16 b0 = LOAD_ANY(float16, b_k);                               \
        FIRST_AND_SECOND(, const float16 b1 = LOAD_ANY(float16, b_k + 16);)      \
        EACH_ROW(MULTIPLY_ADD)                                                   \
    }
// Adds to the tile the product of a (element of row i and step k at i * A_ROW + k * A_STEP) and b.
#define MULTIPLY(A, A_ROW, A_STEP, B, B_STEP, STEPS)                             \
    {                                                                            \
        floats a = (A), b = (B);                                                 \
        const size_t a_row = (A_ROW), a_step = (A_STEP), b_step = (B_STEP);      \
        size_t left = (STEPS);                                                   \
        for (; left >= 4; left -= 4, a += 4 * a_step, b += 4 * b_step) {         \
            STEP(0) STEP(1) STEP(2) STEP(3)                                      \
        }                                                                        \
        for (; left > 0; left--, a += a_step, b += b_step) { STEP(0) }           \
    }
#define PUT(p, v0, v1) { STORE_ANY(float16, v0, p); FIRST_AND_SECOND(, STORE_ANY(float16, v1, (p) + 16);) }

typedef __global float *floats;

#define ROUND_UP(n, m) (((n) + (m) - 1) / (m) * (m))
#include "transpose_16.clh"

// to[column][row] = from[row][column]; rows and columns are multiples of 16.
APART void transpose(floats from, size_t from_pitch, floats to, size_t to_pitch, size_t rows, size_t columns) {
    for (size_t column = 0; column < columns; column += 16)
        for (size_t row = 0; row < rows; row += 16) {
            float16 m[16];
#pragma unroll
            for (int i = 0; i < 16; i++) m[i] = LOAD_ANY(float16, from + (row + i) * from_pitch + column);
            transpose_16(m);
#pragma unroll
            for (int i = 0; i < 16; i++) STORE_ANY(float16, m[i], to + (column + i) * to_pitch + row);
        }
}

// widen_<type>: rows of D elements of a tensor as floats, `pitch` apart, with zeros up to there and in the rows up to
// `padded`. narrow_<type>: back. What operands have the same type for, is compiled once.
#define DEFINE_WIDEN_AND_NARROW(T)                                                                                  \
    APART void widen_##T(__global const STORAGE(T) *from, floats to, size_t rows, size_t padded, size_t D,          \
                         size_t pitch) {                                                                            \
        for (size_t row = 0; row < padded; row++, from += D, to += pitch)                                           \
            for (size_t d = 0; d < pitch; d += 16) {                                                                \
                const size_t end = row < rows ? D : 0;                                                              \
                STORE_ANY(float16, d < end ? LOAD_PART(T, from, d, end, 0.0f) : (float16)(0.0f), to + d);           \
            }                                                                                                       \
    }                                                                                                               \
    APART void narrow_##T(floats from, __global STORAGE(T) *to, size_t rows, size_t D, size_t pitch) {              \
        for (size_t row = 0; row < rows; row++, from += pitch, to += D)                                             \
            for (size_t d = 0; d < D; d += 16) STORE_PART(T, LOAD_ANY(float16, from + d), to, d, D);                \
    }
DEFINE_WIDEN_AND_NARROW(f32)
DEFINE_WIDEN_AND_NARROW(f16)
DEFINE_WIDEN_AND_NARROW(bf16)
#define WIDEN(T) CAT(widen_, T)
#define NARROW(T) CAT(narrow_, T)

// The score of a key for its lanes: -inf beyond the last key that each may see.
#define SCORE(i, half) \
    (edge ? select(c##i##_##half * scale, (float16)(-INFINITY), (int16)(key + i) > last##half) : c##i##_##half * scale)
// The last key of each lane, and whether the tile of keys from `key` on holds one that a lane must not see.
#define LAST_KEYS                                                                                                   \
    const int16 lanes = (int16)(LANE_NUMBERS) + (int)first;                 \
    const int16 last0 = causal ? lanes : (int16)((int)T - 1);                                                       \
    FIRST_AND_SECOND(, const int16 last1 = causal ? lanes + 16 : (int16)((int)T - 1);)                              \
    const int seen_by_all = causal ? (int)first : (int)T - 1, visible = (int)(causal ? min(first + LANES, T) : T);
#define IS_EDGE(key) ((key) + ROWS - 1 > seen_by_all)

// What to subtract from scores: with nothing but -inf among them, 0, so that their exponentials are 0 and not NaN.
#define FINITE_TOP(top) select(top, (float16)(0.0f), (top) == -INFINITY)

#ifdef ATTENTION_FORWARD
// Unit u is the blocks u % chunks, u % chunks + chunks, ... of head u / chunks; a work-item does `each` units.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
attention_forward(__global const STORAGE(Q_T) *restrict q, __global const STORAGE(K_T) *restrict k,
                  __global const STORAGE(V_T) *restrict v, __global STORAGE(Y_T) *restrict y,
                  __global float *restrict lse, __global float *restrict workspace, const ulong heads,
                  const ulong T, const ulong D, const float scale, const int causal, const ulong chunks,
                  const ulong each, const ulong item_floats) {
    const size_t pitch = ROUND_UP(D, 32), padded = ROUND_UP(T, ROWS);
    floats keys = workspace + get_group_id(0) * item_floats, values = keys + padded * pitch;
    floats rows = values + padded * pitch, queries = rows + LANES * pitch, result = queries + pitch * LANES;
    floats weights = result + pitch * LANES; // [KEYS][LANES]: scores, then their exponentials
    const size_t begin = get_group_id(0) * each, end = min(begin + each, (size_t)(heads * chunks));
    for (size_t unit = begin; unit < end; unit++) {
        const size_t head = unit / chunks;
        if (unit == begin || unit % chunks == 0) {
            WIDEN(K_T)(k + head * T * D, keys, T, padded, D, pitch);
            WIDEN(V_T)(v + head * T * D, values, T, padded, D, pitch);
        }
        for (size_t first = unit % chunks * LANES; first < T; first += chunks * LANES) {
            const size_t at = head * T + first, inside = min((size_t)LANES, (size_t)T - first);
            WIDEN(Q_T)(q + at * D, rows, inside, LANES, D, pitch);
            transpose(rows, pitch, queries, LANES, LANES, pitch);
            LAST_KEYS
            float16 top0 = -INFINITY, sum0 = 0.0f;
            FIRST_AND_SECOND(, float16 top1 = -INFINITY; float16 sum1 = 0.0f;)
            for (int key0 = 0; key0 < visible; key0 += KEYS) {
                const int count = min(KEYS, visible - key0);
                float16 new0 = top0;
                FIRST_AND_SECOND(, float16 new1 = top1;)
                for (int j = 0; j < count; j += ROWS) {
                    const int key = key0 + j;
                    const bool edge = IS_EDGE(key);
                    EACH_ROW(CLEAR)
                    MULTIPLY(keys + key * pitch, pitch, 1, queries, LANES, D)
#define KEEP_SCORE(i)                                                                       \
    FIRST_AND_SECOND(c##i##_0 = SCORE(i, 0); new0 = fmax(new0, c##i##_0);,                  \
                     c##i##_1 = SCORE(i, 1); new1 = fmax(new1, c##i##_1);)                  \
    PUT(weights + (j + i) * LANES, c##i##_0, c##i##_1)
                    EACH_ROW(KEEP_SCORE)
                }
                const float16 shift0 = FINITE_TOP(new0), rescale0 = exp16(top0 - shift0);
                FIRST_AND_SECOND(, const float16 shift1 = FINITE_TOP(new1);
                                 const float16 rescale1 = exp16(top1 - shift1);)
                top0 = new0;
                float16 added0 = 0.0f; // a block of keys by itself: rounding grows with blocks, not with keys
                FIRST_AND_SECOND(, top1 = new1; float16 added1 = 0.0f;)
                for (int j = 0; j < count; j++) {
                    floats w = weights + j * LANES;
                    const float16 p0 = exp16(LOAD_ANY(float16, w) - shift0);
                    FIRST_AND_SECOND(, const float16 p1 = exp16(LOAD_ANY(float16, w + 16) - shift1);)
                    added0 += p0;
                    FIRST_AND_SECOND(, added1 += p1;)
                    PUT(w, p0, p1)
                }
                sum0 = sum0 * rescale0 + added0;
                FIRST_AND_SECOND(, sum1 = sum1 * rescale1 + added1;)
                for (size_t d = 0; d < D; d += ROWS) {
                    floats sums = result + d * LANES;
                    EACH_ROW(CLEAR)
                    MULTIPLY(values + key0 * pitch + d, 1, pitch, weights, LANES, count)
                    if (key0 > 0) {
#define ADD_RESTING(i)                                                            \
    FIRST_AND_SECOND(c##i##_0 += LOAD_ANY(float16, sums + i * LANES) * rescale0;, \
                     c##i##_1 += LOAD_ANY(float16, sums + i * LANES + 16) * rescale1;)
                        EACH_ROW(ADD_RESTING)
                    }
#define KEEP_SUM(i) PUT(sums + i * LANES, c##i##_0, c##i##_1)
                    EACH_ROW(KEEP_SUM)
                }
            }
            // A query that sees no key has the sum 0 and the result 0, and adds nothing to a gradient.
            const float16 inverse0 = select(1.0f / sum0, (float16)(0.0f), sum0 == 0.0f);
            FIRST_AND_SECOND(, const float16 inverse1 = select(1.0f / sum1, (float16)(0.0f), sum1 == 0.0f);)
            for (size_t d = 0; d < D; d++) {
                floats r = result + d * LANES;
                PUT(r, LOAD_ANY(float16, r) * inverse0, LOAD_ANY(float16, r + 16) * inverse1)
            }
            transpose(result, LANES, rows, pitch, pitch, LANES);
            NARROW(Y_T)(rows, y + at * D, inside, D, pitch);
            STORE_PART(f32, FINITE_TOP(top0) + log(sum0), lse, at, at + inside);
            FIRST_AND_SECOND(, if (inside > 16)
                                   STORE_PART(f32, FINITE_TOP(top1) + log(sum1), lse, at + 16, at + inside);)
        }
    }
}
#endif

#ifdef ATTENTION_BACKWARD
// A product to the tile at `to`, whose rows are `pitch` apart; added to what is there, if it is to `resume`.
APART void multiply_to(floats to, size_t pitch, bool resume, floats from_a, size_t a_each_row, size_t a_each_step,
                       floats from_b, size_t b_each_step, size_t steps) {
#define CLEAR_OR_GET(i)                                                                           \
    FIRST_AND_SECOND(float16 c##i##_0 = 0.0f;, float16 c##i##_1 = 0.0f;)                          \
    if (resume) {                                                                                 \
        FIRST_AND_SECOND(c##i##_0 = LOAD_ANY(float16, to + i * pitch);,                           \
                         c##i##_1 = LOAD_ANY(float16, to + i * pitch + 16);)                      \
    }
#define KEEP(i) PUT(to + i * pitch, c##i##_0, c##i##_1)
    EACH_ROW(CLEAR_OR_GET)
    MULTIPLY(from_a, a_each_row, a_each_step, from_b, b_each_step, steps)
    EACH_ROW(KEEP)
}

// Units as in attention_forward. The sums of dK and of dV, [padded][pitch] each, lie in `partial`, one pair for each
// unit; with one chunk a head, in the workspace, and become dK and dV here.
__kernel ONE_WORK_ITEM WIDE_VECTORS void attention_backward(
    __global const STORAGE(Q_T) *restrict q, __global const STORAGE(K_T) *restrict k,
    __global const STORAGE(V_T) *restrict v, __global const STORAGE(G_T) *restrict dy,
    __global const float *restrict lse, __global STORAGE(DQ_T) *restrict dq, __global STORAGE(DK_T) *restrict dk,
    __global STORAGE(DV_T) *restrict dv, __global float *restrict partial, __global float *restrict workspace,
    const ulong heads, const ulong T, const ulong D, const float scale, const int causal, const ulong chunks,
    const ulong each, const ulong item_floats) {
    const size_t pitch = ROUND_UP(D, 32), padded = ROUND_UP(T, ROWS);
    floats keys = workspace + get_group_id(0) * item_floats, values = keys + padded * pitch;
    floats rows_q = values + padded * pitch, rows_g = rows_q + LANES * pitch;
    floats queries = rows_g + LANES * pitch, gradients = queries + pitch * LANES;
    floats weights = gradients + pitch * LANES, slopes = weights + padded * LANES; // P' and dP', then dS', [T][LANES]
    floats own_sums = slopes + padded * LANES;
    const size_t begin = get_group_id(0) * each, end = min(begin + each, (size_t)(heads * chunks));
    for (size_t unit = begin; unit < end; unit++) {
        const size_t head = unit / chunks;
        if (unit == begin || unit % chunks == 0) {
            WIDEN(K_T)(k + head * T * D, keys, T, padded, D, pitch);
            WIDEN(V_T)(v + head * T * D, values, T, padded, D, pitch);
        }
        floats sums_k = chunks == 1 ? own_sums : partial + unit * 2 * padded * pitch, sums_v = sums_k + padded * pitch;
        for (size_t i = 0; i < 2 * padded * pitch; i += 16) STORE_ANY(float16, (float16)(0.0f), sums_k + i);
        for (size_t first = unit % chunks * LANES; first < T; first += chunks * LANES) {
            const size_t at = head * T + first, inside = min((size_t)LANES, (size_t)T - first);
            WIDEN(Q_T)(q + at * D, rows_q, inside, LANES, D, pitch);
            WIDEN(G_T)(dy + at * D, rows_g, inside, LANES, D, pitch);
            transpose(rows_q, pitch, queries, LANES, LANES, pitch);
            transpose(rows_g, pitch, gradients, LANES, LANES, pitch);
            LAST_KEYS
            const float16 shift0 = FINITE_TOP(LOAD_PART(f32, lse, at, at + inside, 0.0f));
            float16 delta0 = 0.0f;
            FIRST_AND_SECOND(, const float16 shift1 =
                             FINITE_TOP(inside > 16 ? LOAD_PART(f32, lse, at + 16, at + inside, 0.0f)
                                                    : (float16)(0.0f));
                             float16 delta1 = 0.0f;)
            for (int key = 0; key < visible; key += ROWS) {
                const bool edge = IS_EDGE(key);
                {
                    EACH_ROW(CLEAR)
                    MULTIPLY(keys + key * pitch, pitch, 1, queries, LANES, D)
#define KEEP_WEIGHT(i) PUT(weights + (key + i) * LANES, exp16(SCORE(i, 0) - shift0), exp16(SCORE(i, 1) - shift1))
                    EACH_ROW(KEEP_WEIGHT)
                }
                EACH_ROW(CLEAR)
                MULTIPLY(values + key * pitch, pitch, 1, gradients, LANES, D)
#define KEEP_SLOPE(i)                                                                                \
    {                                                                                                \
        floats w = weights + (key + i) * LANES;                                                      \
        FIRST_AND_SECOND(delta0 = LOAD_ANY(float16, w) * c##i##_0 + delta0;,                         \
                         delta1 = LOAD_ANY(float16, w + 16) * c##i##_1 + delta1;)                    \
        PUT(slopes + (key + i) * LANES, c##i##_0, c##i##_1)                                          \
    }
                EACH_ROW(KEEP_SLOPE)
            }
            for (int key = 0; key < visible; key += ROWS) {
#define SCORE_SLOPE(half) \
    LOAD_ANY(float16, w + 16 * half) * (LOAD_ANY(float16, s + 16 * half) - delta##half) * scale
                for (int j = key; j < key + ROWS; j++) {
                    floats w = weights + j * LANES, s = slopes + j * LANES;
                    PUT(s, SCORE_SLOPE(0), SCORE_SLOPE(1))
                }
                for (size_t d = 0; d < D; d += LANES) {
                    floats to_k = sums_k + key * pitch + d, to_v = sums_v + key * pitch + d;
                    multiply_to(to_k, pitch, true, slopes + key * LANES, LANES, 1, rows_q + d, pitch, LANES);
                    multiply_to(to_v, pitch, true, weights + key * LANES, LANES, 1, rows_g + d, pitch, LANES);
                }
            }
            for (size_t d = 0; d < D; d += ROWS)
                multiply_to(queries + d * LANES, LANES, false, keys + d, 1, pitch, slopes, LANES, visible);
            transpose(queries, LANES, rows_q, pitch, pitch, LANES);
            NARROW(DQ_T)(rows_q, dq + at * D, inside, D, pitch);
        }
        if (chunks == 1) {
            NARROW(DK_T)(sums_k, dk + head * T * D, T, D, pitch);
            NARROW(DV_T)(sums_v, dv + head * T * D, T, D, pitch);
        }
    }
}
#endif

#ifdef ATTENTION_COMBINE
// Adds up the sums of a head's chunks: row `row` of dK and of dV, all heads' rows counted through.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
attention_combine(__global const float *restrict partial, __global STORAGE(DK_T) *restrict dk,
                  __global STORAGE(DV_T) *restrict dv, const ulong rows, const ulong T, const ulong D,
                  const ulong chunks, const ulong each) {
    const size_t pitch = ROUND_UP(D, 32), padded = ROUND_UP(T, ROWS), begin = get_group_id(0) * each;
    for (size_t row = begin; row < min(begin + each, (size_t)rows); row++)
        for (size_t d = 0; d < D; d += 16) {
            __global const float *from = partial + ((row / T) * chunks * 2 * padded + row % T) * pitch + d;
            float16 sum_k = 0.0f, sum_v = 0.0f;
            for (size_t chunk = 0; chunk < chunks; chunk++, from += 2 * padded * pitch) {
                sum_k += LOAD_ANY(float16, from);
                sum_v += LOAD_ANY(float16, from + padded * pitch);
            }
            STORE_PART(DK_T, sum_k, dk + row * D, d, D);
            STORE_PART(DV_T, sum_v, dv + row * D, d, D);
        }
}
#endif
