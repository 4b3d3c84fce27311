// attention_amx.cl: softmax(Q K' scale) V and its gradients in bfloat16 on the matrix unit of x86 processors (amx.clh).
//
// A block is 32 queries of one head. All products have a tile of 32 x 32 sums, of which a row is a query or a key:
//
//                      rows     columns   steps    A, rows that lie ready        B, panels (pairs of k, 32 columns)
//      scores  S       queries  keys      D        Q                             K'   by_rows
//      result  O       queries  of D      keys     P                             V    by_columns
//      dP              queries  keys      D        dO                            V'   by_rows
//      dQ              queries  of D      keys     dS                            K    by_columns
//      dV, dK          keys     of D      queries  P', dS' (transposed tiles)    dO, Q  by_columns
//
// What is not given in bfloat16 but computed, P and dS, is multiplied in two parts, hi + lo, so that it is rounded by
// 2^-17 of itself and not by 2^-9. Everything else is as in attention_blocked.cl: scores, softmax and sums are fp32; in
// forward keys come KEYS at a time, and each query's maximum, sum and result so far are rescaled where a new maximum is
// met; in backward P and dP of a block are kept for all keys; a head that several work-items share has one set of sums dK,
// dV for each, which attention_combine adds up.
//
//   KEYS      keys between two looks at the maximum, a multiple of 32
//   Y_T, DQ_T, DK_T, DV_T   storage types of the result and of the gradients
//   EMULATE   as in amx.clh
//
// Rows beyond the last query or key, and columns beyond D, are zero. A key that a query must not see has the score -inf
// and the weight 0.

#define PARTS 1
#define DOT_F16 0
#define SUMS_SPACE __global
#include "amx.clh"
#include "transpose_16.clh"

typedef __global float *floats;
typedef __global ushort *halves_of; // bits of bfloat16
typedef __global const ushort *bits;

#define ROUND_UP(n, m) (((n) + (m) - 1) / (m) * (m))
#define TILE_OF(p) ((lines_a)(p))
#define FINITE_TOP(top) ((top) == -INFINITY ? 0.0f : (top))

// Rows of D numbers, `pitch` apart, with zeros up to there and in the rows up to `padded`.
APART void stage_rows(bits from, halves_of to, size_t rows, size_t padded, size_t D, size_t pitch) {
    for (size_t row = 0; row < padded; row++, from += D, to += pitch)
        for (size_t d = 0; d < pitch; d += 16) {
            const size_t end = row < rows ? D : 0;
            STORE_ANY(ushort16, d < end ? BITS16(bf16, LOAD_PART(bf16, from, d, end, 0.0f)) : (ushort16)(0), to + d);
        }
}

// Panels of B of which rows are columns, [32 rows][32 of D][pair][row]: a product by them is one by the transposed.
APART void pack_by_rows(bits from, __global float *panels, size_t rows, size_t pitch) {
    for (size_t row = 0; row < rows; row += SIDE)
        for (size_t d = 0; d < pitch; d += SIDE, panels += SUMS / 2)
            for (uint right = 0; right < SIDE; right += 16) {
                float16 v[16];
                bits s = from + (row + right) * pitch + d;
                _Pragma("unroll") for (uint i = 0; i < 16; i++)
                    v[i] = (float16)(as_float8(LOAD_ANY(ushort16, s + i * pitch)),
                                     as_float8(LOAD_ANY(ushort16, s + i * pitch + 16)));
                transpose_16(v);
                _Pragma("unroll") for (uint i = 0; i < 16; i++) STORE_ANY(float16, v[i], panels + i * SIDE + right);
            }
}

// Panels of B of which rows are k, [32 of D][32 rows][pair of rows][of D].
APART void pack_by_columns(bits from, __global uint *panels, size_t rows, size_t pitch) {
    for (size_t d = 0; d < pitch; d += SIDE)
        for (size_t row = 0; row < rows; row += 2)
            for (uint right = 0; right < SIDE; right += 16, panels += 16) {
                bits s = from + row * pitch + d + right;
                const uint16 low = convert_uint16(LOAD_ANY(ushort16, s));
                STORE_ANY(uint16, low | convert_uint16(LOAD_ANY(ushort16, s + pitch)) << 16, panels);
            }
}

// 16 numbers as two parts. The first is not told from a NaN with care, as the second is, which is zero where the first is
// infinite.
static inline void store_parts(float16 v, halves_of hi, halves_of lo) {
    const uint16 high = (as_uint16(v) + 0x8000u) & 0xffff0000u;
    const float16 rest = v - as_float16(high);
    STORE_ANY(ushort16, convert_ushort16(high >> 16), hi);
    STORE_ANY(ushort16, bf16_bits16(select(rest, (float16)(0.0f), (high & 0x7fffffffu) == 0x7f800000u)), lo);
}

// A tile's transposed, in two parts.
APART void transpose_parts(floats tile, halves_of hi, halves_of lo) {
    for (uint i = 0; i < SIDE; i += 16)
        for (uint j = 0; j < SIDE; j += 16) {
            float16 v[16];
            _Pragma("unroll") for (uint r = 0; r < 16; r++) v[r] = LOAD_ANY(float16, tile + (i + r) * SIDE + j);
            transpose_16(v);
            _Pragma("unroll") for (uint r = 0; r < 16; r++)
                store_parts(v[r], hi + (j + r) * SIDE + i, lo + (j + r) * SIDE + i);
        }
}

// sums (+)= A in two parts, panels of `steps` steps each, by a panel of B.
static inline void multiply_parts(bits hi, bits lo, __global const void *panel, floats sums, size_t steps, uint resume) {
    multiply(TILE_OF(hi), PANEL_A_ROW, STEP_BYTES, (lines_b)panel, sums, steps, resume);
    multiply(TILE_OF(lo), PANEL_A_ROW, STEP_BYTES, (lines_b)panel, sums, steps, 1);
}

// 16 scores from key `key` on, of a query that sees the keys up to `last`.
static inline float16 scores_of(floats tile, int key, int last, float scale) {
    const float16 score = LOAD_ANY(float16, tile) * scale;
    return key + 15 <= last ? score
                            : select(score, (float16)(-INFINITY), (int16)(LANE_NUMBERS) + key > (int16)(last));
}
#define LAST_KEY(row) (causal ? (int)(first + (row)) : (int)T - 1)
#define VISIBLE ((size_t)(causal ? min(first + SIDE, (size_t)T) : T))

// A row of D sums, of tiles that stand next to one another.
#define STORE_ROW(T_, tiles, row, factor, to)                                                               \
    for (size_t d = 0; d < D; d += 16)                                                                       \
        STORE_PART(T_, LOAD_ANY(float16, (tiles) + d / SIDE * SUMS + (row) * SIDE + d % SIDE) * (factor), to, d, D);

#ifdef ATTENTION_FORWARD
// Unit u is the blocks u % chunks, u % chunks + chunks, ... of head u / chunks; a work-item does `each` units.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
attention_forward(bits q, bits k, bits v, __global STORAGE(Y_T) *restrict y, __global float *restrict lse,
                  __global float *restrict workspace, const ulong heads, const ulong T, const ulong D,
                  const float scale, const int causal, const ulong chunks, const ulong each, const ulong item_floats) {
    const size_t pitch = ROUND_UP(D, SIDE), padded = ROUND_UP(T, SIDE), panel = padded * SIDE / 2;
    floats keys = workspace + get_group_id(0) * item_floats, values = keys + padded * pitch / 2;
    floats scores = values + padded * pitch / 2, result = scores + KEYS * SIDE;
    halves_of weights = (halves_of)(result + SIDE * pitch), low_weights = weights + KEYS * SIDE;
    halves_of queries = low_weights + KEYS * SIDE, rows = queries + SIDE * pitch;
    const size_t begin = get_group_id(0) * each, end = min(begin + each, (size_t)(heads * chunks));
    begin_tiles();
    for (size_t unit = begin; unit < end; unit++) {
        const size_t head = unit / chunks;
        if (unit == begin || unit % chunks == 0) {
            stage_rows(k + head * T * D, rows, T, padded, D, pitch);
            pack_by_rows(rows, keys, padded, pitch);
            stage_rows(v + head * T * D, rows, T, padded, D, pitch);
            pack_by_columns(rows, (__global uint *)values, padded, pitch);
        }
        for (size_t first = unit % chunks * SIDE; first < T; first += chunks * SIDE) {
            const size_t at = head * T + first, inside = min((size_t)SIDE, (size_t)T - first), visible = VISIBLE;
            stage_rows(q + at * D, queries, inside, SIDE, D, pitch);
            float top[SIDE], sum[SIDE];
            for (uint row = 0; row < SIDE; row++) {
                top[row] = -INFINITY;
                sum[row] = 0.0f;
            }
            for (size_t key0 = 0; key0 < visible; key0 += KEYS) {
                const size_t tiles = ROUND_UP(min((size_t)KEYS, visible - key0), SIDE) / SIDE;
                for (size_t tile = 0; tile < tiles; tile++)
                    multiply(TILE_OF(queries), 2 * pitch, PANEL_A_ROW,
                             (lines_b)(keys + (key0 / SIDE + tile) * pitch * SIDE / 2), scores + tile * SUMS,
                             pitch / SIDE, 0);
                for (uint row = 0; row < SIDE; row++) {
                    const int last = LAST_KEY(row);
                    float16 highest = -INFINITY, added = 0.0f;
                    for (size_t i = 0; i < tiles * SIDE; i += 16) {
                        floats s = scores + i / SIDE * SUMS + row * SIDE + i % SIDE;
                        const float16 score = scores_of(s, (int)(key0 + i), last, scale);
                        highest = fmax(highest, score);
                        STORE_ANY(float16, score, s);
                    }
                    const float before = top[row], now = fmax(before, max16(highest)), shift = FINITE_TOP(now);
                    for (size_t i = 0; i < tiles * SIDE; i += 16) {
                        const size_t place = i / SIDE * SUMS + row * SIDE + i % SIDE;
                        const float16 p = exp16(LOAD_ANY(float16, scores + place) - shift);
                        added += p;
                        store_parts(p, weights + place, low_weights + place);
                    }
                    const float rescale = exp16((float16)(before - shift)).s0;
                    top[row] = now;
                    sum[row] = sum[row] * rescale + sum16(added);
                    for (size_t d = 0; d < pitch && key0 > 0 && before != now; d += 16) {
                        floats r = result + d / SIDE * SUMS + row * SIDE + d % SIDE;
                        STORE_ANY(float16, LOAD_ANY(float16, r) * rescale, r);
                    }
                }
                for (size_t d = 0; d < pitch; d += SIDE)
                    multiply_parts(weights, low_weights, values + d / SIDE * panel + key0 / SIDE * SUMS / 2,
                                   result + d * SIDE, tiles, key0 > 0);
            }
            // A query that sees no key has the sum 0 and the result 0, and adds nothing to a gradient.
            for (uint row = 0; row < inside; row++) {
                const float inverse = sum[row] == 0.0f ? 0.0f : 1.0f / sum[row];
                STORE_ROW(Y_T, result, row, inverse, y + (at + row) * D)
            }
            for (uint row = 0; row < inside; row += 16) {
                float shifts[16];
                for (uint i = 0; i < 16; i++) shifts[i] = FINITE_TOP(top[row + i]);
                STORE_PART(f32, vload16(0, shifts) + log(vload16(0, sum + row)), lse, at + row, at + inside);
            }
        }
    }
    end_tiles();
}
#endif

#ifdef ATTENTION_BACKWARD
// Units as in attention_forward. The sums of dK and of dV of a unit, as rows, become `partial`; with one chunk a head, dK
// and dV.
__kernel ONE_WORK_ITEM WIDE_VECTORS void
attention_backward(bits q, bits k, bits v, bits dy, __global const float *restrict lse,
                   __global STORAGE(DQ_T) *restrict dq, __global STORAGE(DK_T) *restrict dk,
                   __global STORAGE(DV_T) *restrict dv, __global float *restrict partial,
                   __global float *restrict workspace, const ulong heads, const ulong T, const ulong D,
                   const float scale, const int causal, const ulong chunks, const ulong each, const ulong item_floats) {
    const size_t pitch = ROUND_UP(D, SIDE), padded = ROUND_UP(T, SIDE), panel = padded * SIDE / 2;
    const size_t wide = pitch / SIDE; // tiles of a row
    floats keys = workspace + get_group_id(0) * item_floats, key_columns = keys + padded * pitch / 2;
    floats values = key_columns + padded * pitch / 2, sums_k = values + padded * pitch / 2;
    floats sums_v = sums_k + padded * pitch, weights = sums_v + padded * pitch, slopes = weights + padded * SIDE;
    floats sums_q = slopes + padded * SIDE, query_columns = sums_q + SUMS, gradient_columns = query_columns + SIDE * pitch / 2;
    halves_of high = (halves_of)(gradient_columns + SIDE * pitch / 2), low = high + padded * SIDE;
    halves_of queries = low + padded * SIDE, gradients = queries + SIDE * pitch;
    halves_of turned = gradients + SIDE * pitch, low_turned = turned + SUMS, rows = low_turned + SUMS;
    const size_t begin = get_group_id(0) * each, end = min(begin + each, (size_t)(heads * chunks));
    begin_tiles();
    for (size_t unit = begin; unit < end; unit++) {
        const size_t head = unit / chunks;
        if (unit == begin || unit % chunks == 0) {
            stage_rows(k + head * T * D, rows, T, padded, D, pitch);
            pack_by_rows(rows, keys, padded, pitch);
            pack_by_columns(rows, (__global uint *)key_columns, padded, pitch);
            stage_rows(v + head * T * D, rows, T, padded, D, pitch);
            pack_by_rows(rows, values, padded, pitch);
        }
        for (size_t i = 0; i < 2 * padded * pitch; i += 16) STORE_ANY(float16, (float16)(0.0f), sums_k + i);
        for (size_t first = unit % chunks * SIDE; first < T; first += chunks * SIDE) {
            const size_t at = head * T + first, inside = min((size_t)SIDE, (size_t)T - first);
            const size_t tiles = ROUND_UP(VISIBLE, SIDE) / SIDE;
            stage_rows(q + at * D, queries, inside, SIDE, D, pitch);
            stage_rows(dy + at * D, gradients, inside, SIDE, D, pitch);
            pack_by_columns(queries, (__global uint *)query_columns, SIDE, pitch);
            pack_by_columns(gradients, (__global uint *)gradient_columns, SIDE, pitch);
            for (size_t tile = 0; tile < tiles; tile++) {
                multiply(TILE_OF(queries), 2 * pitch, PANEL_A_ROW, (lines_b)(keys + tile * pitch * SIDE / 2),
                         weights + tile * SUMS, wide, 0);
                multiply(TILE_OF(gradients), 2 * pitch, PANEL_A_ROW, (lines_b)(values + tile * pitch * SIDE / 2),
                         slopes + tile * SUMS, wide, 0);
            }
            for (uint row = 0; row < SIDE; row++) {
                const int last = LAST_KEY(row);
                const bool is_real = row < inside; // the others have no part in the keys' sums
                const float sum_of = is_real ? lse[at + row] : 0.0f, shift = FINITE_TOP(sum_of);
                float16 products = 0.0f;
                for (size_t i = 0; i < tiles * SIDE; i += 16) {
                    floats w = weights + i / SIDE * SUMS + row * SIDE + i % SIDE;
                    const float16 p = is_real ? exp16(scores_of(w, (int)i, last, scale) - shift) : (float16)(0.0f);
                    products = p * LOAD_ANY(float16, w - weights + slopes) + products;
                    STORE_ANY(float16, p, w);
                }
                const float delta = sum16(products);
                for (size_t i = 0; i < tiles * SIDE; i += 16) {
                    const size_t place = i / SIDE * SUMS + row * SIDE + i % SIDE;
                    const float16 p = LOAD_ANY(float16, weights + place);
                    const float16 dp = LOAD_ANY(float16, slopes + place);
                    const float16 slope = is_real ? p * (dp - delta) * scale : (float16)(0.0f);
                    STORE_ANY(float16, slope, slopes + place);
                    store_parts(slope, high + place, low + place);
                }
            }
            for (size_t tile = 0; tile < tiles; tile++) {
                transpose_parts(slopes + tile * SUMS, turned, low_turned);
                for (size_t d = 0; d < wide; d++)
                    multiply_parts(turned, low_turned, query_columns + d * SUMS / 2, sums_k + (tile * wide + d) * SUMS, 1, 1);
                transpose_parts(weights + tile * SUMS, turned, low_turned);
                for (size_t d = 0; d < wide; d++)
                    multiply_parts(turned, low_turned, gradient_columns + d * SUMS / 2,
                                   sums_v + (tile * wide + d) * SUMS, 1, 1);
            }
            for (size_t d = 0; d < D; d += SIDE) {
                multiply_parts(high, low, key_columns + d / SIDE * panel, sums_q, tiles, 0);
                for (uint row = 0; row < inside; row++)
                    for (size_t i = d; i < min(d + SIDE, (size_t)D); i += 16)
                        STORE_PART(DQ_T, LOAD_ANY(float16, sums_q + row * SIDE + i % SIDE), dq + (at + row) * D, i, D);
            }
        }
        for (size_t row = 0; row < T; row++) {
            floats k_row = sums_k + row / SIDE * wide * SUMS, v_row = sums_v + row / SIDE * wide * SUMS;
            if (chunks == 1) {
                STORE_ROW(DK_T, k_row, row % SIDE, 1.0f, dk + (head * T + row) * D)
                STORE_ROW(DV_T, v_row, row % SIDE, 1.0f, dv + (head * T + row) * D)
            } else {
                floats to = partial + unit * 2 * padded * pitch + row * pitch;
                STORE_ROW(f32, k_row, row % SIDE, 1.0f, to)
                STORE_ROW(f32, v_row, row % SIDE, 1.0f, to + padded * pitch)
            }
        }
    }
    end_tiles();
}
#endif
