// attention_mma.cl: softmax(Q K' scale) V and its gradients on the matrix units of NVIDIA's GPUs, by mma.sync (compute
// capability 8.0 and later): operands of 16 bits; scores, weights and sums in fp32. (Dao, "FlashAttention-2", 2023.)
//
//   A work-group owns ROWS rows of one head, 16 a warp, and walks over the other side's, COLUMNS at a step. A lane has
//   the scores of two rows, and so what is known of a row (its maximum, say) in four lanes (mma_rows.clh).
//
//     global memory           local memory                    registers of a warp
//
//                             own tiles                       16 rows, over WIDTH
//     own rows    ROWS -----> +-------------+ --------------> +-----------+
//                             | one or two  |                 | fragments |  x others' rows = scores ---+
//                             +-------------+                 +-----------+  16 x COLUMNS               |
//     others'   COLUMNS ----> +------+------+                                                           | weights, in
//     rows, a step on,        | step | s. 1 |  two tiles                     +------------------------+ |    IN_T
//     by copies that go       +------+------+  each           sums           | += weights x others' | <+
//     on meanwhile                                            16 x WIDTH     +------------------------+
//
//   kernel       rows      own    others    scores and the like    sums
//   forward      queries   Q      K, V      S = Q K'               y += P V            and lse
//   delta        queries   Q, G   K, V      S, dP = G V'           delta = sum P dP
//   backward_q   queries   Q, G   K, V      S, dP                  dq += dS K          dS = P (dP - delta)
//   backward_kv  keys      K, V   Q, G      S', dP'                dv += P' G, dk += dS' Q
//
// WHAT IS ROUNDED. P and dS, to IN_T, for the products that they go into: a term by 2^-11 (float16) or 2^-8 of itself.
// Neither overflows nor vanishes in float16: P, 1 at most, is held as P 2^LIFT, and each row of dS as multiples of a
// power of two that follows the row's largest element, as softmax follows its maximum. What is infinite or NaN in fp32
// stays so. Sums of weights, and delta, are of fp32 numbers.
//
// A row's sums are formed in the order of the other side's rows, by one work-group: results do not depend on chance.
//
//   ATTENTION_FORWARD, DELTA, ATTENTION_BACKWARD_Q, ATTENTION_BACKWARD_KV   the kernel
//   IN_T                    storage type of Q, K, V and G, f16 or bf16
//   Y_T, DQ_T, DK_T, DV_T   storage types of the results
//   ROWS, COLUMNS           see above; multiples of 16
//   WIDTH                   D, rounded up to a multiple of 16, 128 at most
//   ALIGNED                 1: rows begin at multiples of 16 bytes; 0: they are copied element by element
//   EMULATE                 as in async_copy.clh

#if ROWS % 16 || COLUMNS % 16 || WIDTH % 16 || WIDTH > 128
#error "ROWS, COLUMNS and WIDTH must be multiples of 16, and WIDTH 128 at most"
#endif

#ifdef ATTENTION_FORWARD
#define OWN_TILES 1
#else
#define OWN_TILES 2
#endif
#define FULL 0
#define LINE (WIDTH <= 32 ? 4 : WIDTH <= 64 ? 8 : 16) // pieces: swizzled lines have as many, whether or not D has
#define OWN_PIECES (ROWS * LINE)
#define OTHER_PIECES (COLUMNS * LINE)
#if OWN_PIECES % (ROWS * 2) || OTHER_PIECES % (ROWS * 2)
#error "COLUMNS must give every work-item as many pieces of a tile as the others"
#endif
#define HELD_GROUPS 2
#define HELD_COPIES ((OWN_TILES * OWN_PIECES + 2 * OTHER_PIECES) / (ROWS * 2))

#include "async_copy.clh"
#include "matrix_tile.clh"
#include "mma.clh"
#include "mma_rows.clh"

#define LIFT_f16 12 // a weight of 2^-37 is not yet lost
#define LIFT_bf16 0 // which reaches as far as float
#define LIFT CAT(LIFT_, IN_T)
#define LOWER (LIFT ? 0x1p-12f : 1.0f) // 2^-LIFT
#define LOG2_E 0x1.715476p0f

typedef float sums_t[WIDTH / 8][4];   // a warp's, of 16 rows
typedef fragment_t own_t[WIDTH / 16]; // of the warp's 16 own rows

// Whether a key comes after a query, by their rows and columns; the other side's rows that some own row meets, BEGIN to
// END; and who begins: those with the most to do, under a causal mask the last queries, and the first keys.
#ifdef ATTENTION_BACKWARD_KV
#define BEFORE(row, column) ((column) < (row))
#define BEGIN (causal ? first : 0)
#define END (int)T
#define GROUP_OF(number, groups) (number)
#else
#define BEFORE(row, column) ((row) < (column))
#define BEGIN 0
#define END (causal ? min(first + ROWS, (int)T) : (int)T)
#define GROUP_OF(number, groups) ((groups) - 1 - (number))
#endif

// What every kernel has. `first` and `row`: the work-group's first own row, and the lane's.
#define SETTING                                                                                                 \
    __local uint4 pool[OWN_TILES * OWN_PIECES + 4 * OTHER_PIECES] __attribute__((aligned(1024)));               \
    DECLARE_EXCHANGE(exchange)                                                                                  \
    const uint lane = get_local_id(0) % 32, warp = get_local_id(0) / 32;                                        \
    const uint groups = ((uint)T + ROWS - 1) / ROWS, head = get_group_id(0) / groups;                           \
    const int first = GROUP_OF(get_group_id(0) % groups, groups) * ROWS, row = first + warp * 16 + lane / 4;    \
    const int begin = BEGIN, steps = (END - begin + COLUMNS - 1) / COLUMNS;                                     \
    const size_t head_row = (size_t)head * T;                                                                   \
    copies_t copies = NO_COPIES;

// Copies of `rows` rows from `row` on.
#define LOAD_ROWS(tile, x, row, rows)                                                                           \
    {                                                                                                           \
        const matrix_t matrix = {(x) + head_row * D, D, T, D};                                                  \
        load_tile(&copies, tile, matrix, row, 0, rows, LINE, LINE, THREADS, ALIGNED);                           \
    }
#define LOAD_OWN(number, x) LOAD_ROWS(pool + (number) * OWN_PIECES, x, first, ROWS)
#define STAGE_OF(step) (pool + OWN_TILES * OWN_PIECES + (step) % 2 * (2 * OTHER_PIECES))
#define LOAD_STAGE(step, x0, x1)                                                                                \
    {                                                                                                           \
        if ((step) < steps) {                                                                                   \
            LOAD_ROWS(STAGE_OF(step), x0, begin + (step) * COLUMNS, COLUMNS)                                    \
            LOAD_ROWS(STAGE_OF(step) + OTHER_PIECES, x1, begin + (step) * COLUMNS, COLUMNS)                     \
        }                                                                                                       \
        copies_commit(&copies);                                                                                 \
    }

// Behind the barrier this step's tiles have arrived, and nobody reads the last step's, which the next may take. `edge`:
// whether some of its scores may not count.
#define NEXT_STEP(step, x0, x1)                                                                                 \
    COPIES_WAIT(&copies, 0);                                                                                    \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                               \
    LOAD_STAGE((step) + 1, x0, x1)                                                                              \
    __local const uint4 *const others0 = STAGE_OF(step), *const others1 = others0 + OTHER_PIECES;               \
    const int column0 = begin + (step) * COLUMNS, column = column0 + (int)(lane % 4 * 2);                       \
    const bool edge = column0 + COLUMNS > (int)T                                                                \
                      || (causal && column0 < first + ROWS && first < column0 + COLUMNS);

static inline void load_own(own_t own, __local const uint4 *tile, uint warp, uint lane) {
    UNROLL for (int d = 0; d < WIDTH; d += 16)
        own[d / 16] = load_fragment(block_at(tile, LINE, warp * 16, d, true, true), lane);
}

// Products of own rows with the other side's.
static inline void multiply(tile_t products, own_t own, __local const uint4 *others, uint lane) {
    EACH_SUM(j, EIGHTS, e) products[j][e] = 0.0f;
    UNROLL for (uint d = 0; d < WIDTH; d += 16)
        UNROLL for (uint j = 0; j < EIGHTS; j += 2) {
            const fragment_t b = load_fragment(block_at(others, LINE, j * 8, d, true, false), lane);
            mma(products[j], own[d / 16], b, 0, lane);
            mma(products[j + 1], own[d / 16], b, 1, lane);
        }
}

// sums += weights times the other side's rows
static inline void add_weighted(sums_t sums, tile_t weights, __local const uint4 *others, exchange_t exchange,
                                uint lane) {
    hand_over(exchange, weights, lane);
    UNROLL for (uint k = 0; k < COLUMNS; k += 16) {
        const fragment_t a = operand_of(exchange, weights, k, lane);
        UNROLL for (uint j = 0; j < WIDTH / 8; j += 2) {
            const fragment_t b = load_fragment(block_at(others, LINE, j * 8, k, false, false), lane);
            mma(sums[j], a, b, 0, lane);
            mma(sums[j + 1], a, b, 1, lane);
        }
    }
    TAKE_BACK();
}

static inline void scale_rows(float (*sums)[4], const int eights, const float factor[2]) {
    EACH_SUM(j, eights, e) sums[j][e] *= factor[e / 2];
}

// Scores of products; -inf where a key does not count for a query, or there is none.
static inline void mask(tile_t s, float scale, int row, int column, bool edge, int T, int causal) {
    EACH_SUM(j, EIGHTS, e) {
        const int r = row + e / 2 * 8, c = column + j * 8 + e % 2;
        const bool hidden = edge && (c >= T || (causal && BEFORE(r, c)));
        s[j][e] = hidden ? -INFINITY : s[j][e] * scale;
    }
}

// What to subtract from scores: where there is nothing but -inf, 0, so that their exponentials are 0 and not NaN.
static inline float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }
static inline float lifted_weight(float score, float shift) {
    return power_of_two((score - shift) * LOG2_E + LIFT);
}

// A row's float16 elements are multiples of its unit / LARGEST: the unit is the largest power of two that the row has
// reached, and the row's sums grow smaller as it grows. The inverses of all units are floats: what needs no division,
// which may be off by a bit, is exact.
#define LARGEST 0x1p14f
#define LEAST_UNIT (LIFT ? 0x1p-100f : LARGEST)
#define LARGEST_UNIT 0x7e800000u // 2^126; an infinity stays one
static inline void fit_rows(tile_t rows, float unit[2], sums_t sums, exchange_t exchange) {
    if (!LIFT) return;
    float most[2] = {0.0f, 0.0f}, rescale[2], factor[2];
    EACH_SUM(j, EIGHTS, e) most[e / 2] = fmax(most[e / 2], fabs(rows[j][e]));
    row_max(most, exchange);
    UNROLL for (int h = 0; h < 2; h++) {
        const uint power = min(as_uint(most[h]) & 0x7f800000u, LARGEST_UNIT); // the exponent of most, no digits
        const float grown = fmax(unit[h], as_float(power)), inverse = as_float(0x7f000000u - as_uint(grown));
        rescale[h] = unit[h] * inverse;
        factor[h] = LARGEST * inverse;
        unit[h] = grown;
    }
    scale_rows(sums, WIDTH / 8, rescale);
    scale_rows(rows, EIGHTS, factor);
}
#define UNFIT_ROWS(sums, unit)                                                                                  \
    {                                                                                                           \
        const float lower = LOWER / LARGEST * scale, back[2] = {unit[0] * lower, unit[1] * lower};              \
        scale_rows(sums, WIDTH / 8, back);                                                                      \
    }

// Scores, and what a weight of 1 would add to the gradient: the other operand's products.
#define SCORES_AND_SLOPES                                                                                       \
    {                                                                                                           \
        own_t own; /* fetched at each step: registers are for sums */                                           \
        load_own(own, pool, warp, lane);                                                                        \
        multiply(scores, own, others0, lane);                                                                   \
        load_own(own, pool + OWN_PIECES, warp, lane);                                                           \
        multiply(slopes, own, others1, lane);                                                                   \
        mask(scores, scale, row, column, edge, T, causal);                                                      \
    }

// VALUE, at `at`, of the lane's two rows.
#define LOAD_ROW_VALUES(values, VALUE)                                                                          \
    UNROLL for (int h = 0; h < 2; h++) {                                                                        \
        const size_t at = head_row + row + h * 8;                                                               \
        values[h] = row + h * 8 < (int)T ? VALUE : 0.0f;                                                        \
    }

#define STORE_ROWS(T_, sums, to)                                                                                \
    EACH_SUM(j, WIDTH / 8, e) {                                                                                 \
        const int r = row + e / 2 * 8, d = j * 8 + lane % 4 * 2 + e % 2;                                        \
        if (r < (int)T && d < (int)D) STORE(T_, sums[j][e], to, (head_row + r) * D + d);                        \
    }

#define GROUP __attribute__((reqd_work_group_size(THREADS, 1, 1)))
#define OPERAND(x) __global const ushort *restrict x
#define RESULT(T_, x) __global STORAGE(T_) *restrict x
#define EXTENTS const ulong T, const ulong D, const float scale, const int causal

// Work-groups are numbered (head, own rows), the last the fastest.

#ifdef ATTENTION_FORWARD
__kernel GROUP void attention_forward(OPERAND(q), OPERAND(k), OPERAND(v), RESULT(Y_T, y), RESULT(f32, lse), EXTENTS) {
    SETTING
    LOAD_OWN(0, q)
    LOAD_STAGE(0, k, v)
    own_t own;
    sums_t result;
    EACH_SUM(j, WIDTH / 8, e) result[j][e] = 0.0f;
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    for (int step = 0; step < steps; step++) {
        NEXT_STEP(step, k, v)
        if (step == 0) load_own(own, pool, warp, lane);
        tile_t weights;
        multiply(weights, own, others0, lane);
        mask(weights, scale, row, column, edge, T, causal);
        float most[2] = {top[0], top[1]}, shift[2], rescale[2], added[2] = {0.0f, 0.0f};
        EACH_SUM(j, EIGHTS, e) most[e / 2] = fmax(most[e / 2], weights[j][e]);
        row_max(most, exchange);
        UNROLL for (int h = 0; h < 2; h++) {
            shift[h] = finite_top(most[h]);
            rescale[h] = power_of_two((top[h] - shift[h]) * LOG2_E);
            top[h] = most[h];
        }
        EACH_SUM(j, EIGHTS, e) {
            weights[j][e] = lifted_weight(weights[j][e], shift[e / 2]);
            added[e / 2] += weights[j][e];
        }
        UNROLL for (int h = 0; h < 2; h++) total[h] = total[h] * rescale[h] + added[h];
        scale_rows(result, WIDTH / 8, rescale);
        add_weighted(result, weights, others1, exchange, lane);
    }
    row_sum(total, exchange);
    float inverse[2];
    UNROLL for (int h = 0; h < 2; h++) {
        inverse[h] = total[h] == 0.0f ? 0.0f : 1.0f / total[h]; // no key seen: the result is 0
        if (lane % 4 == 0 && row + h * 8 < (int)T)
            lse[head_row + row + h * 8] = finite_top(top[h]) + log(total[h] * LOWER);
    }
    scale_rows(result, WIDTH / 8, inverse);
    STORE_ROWS(Y_T, result, y)
}
#endif

#ifdef DELTA
__kernel GROUP void attention_delta(OPERAND(q), OPERAND(k), OPERAND(v), OPERAND(g), __global const float *restrict lse,
                                    RESULT(f32, delta), EXTENTS) {
    SETTING
    LOAD_OWN(0, q)
    LOAD_OWN(1, g)
    LOAD_STAGE(0, k, v)
    float shift[2], total[2] = {0.0f, 0.0f};
    LOAD_ROW_VALUES(shift, finite_top(lse[at]))
    for (int step = 0; step < steps; step++) {
        NEXT_STEP(step, k, v)
        tile_t scores, slopes;
        SCORES_AND_SLOPES
        float added[2] = {0.0f, 0.0f};
        EACH_SUM(j, EIGHTS, e)
            added[e / 2] += scores[j][e] == -INFINITY ? 0.0f : lifted_weight(scores[j][e], shift[e / 2]) * slopes[j][e];
        UNROLL for (int h = 0; h < 2; h++) total[h] += added[h];
    }
    row_sum(total, exchange);
    UNROLL for (int h = 0; h < 2; h++)
        if (lane % 4 == 0 && row + h * 8 < (int)T) delta[head_row + row + h * 8] = total[h] * LOWER;
}
#endif

#ifdef ATTENTION_BACKWARD_Q
__kernel GROUP void attention_backward_q(OPERAND(q), OPERAND(k), OPERAND(v), OPERAND(g),
                                         __global const float *restrict lse, __global const float *restrict delta,
                                         RESULT(DQ_T, dq), EXTENTS) {
    SETTING
    LOAD_OWN(0, q)
    LOAD_OWN(1, g)
    LOAD_STAGE(0, k, v)
    sums_t sums;
    EACH_SUM(j, WIDTH / 8, e) sums[j][e] = 0.0f;
    float shift[2], mean[2], unit[2] = {LEAST_UNIT, LEAST_UNIT};
    LOAD_ROW_VALUES(shift, finite_top(lse[at]))
    LOAD_ROW_VALUES(mean, delta[at])
    for (int step = 0; step < steps; step++) {
        NEXT_STEP(step, k, v)
        tile_t scores, slopes;
        SCORES_AND_SLOPES
        EACH_SUM(j, EIGHTS, e) {
            const float weight = lifted_weight(scores[j][e], shift[e / 2]);
            slopes[j][e] = scores[j][e] == -INFINITY ? 0.0f : weight * (slopes[j][e] - mean[e / 2]);
        }
        fit_rows(slopes, unit, sums, exchange);
        add_weighted(sums, slopes, others0, exchange, lane);
    }
    UNFIT_ROWS(sums, unit)
    STORE_ROWS(DQ_T, sums, dq)
}
#endif

#ifdef ATTENTION_BACKWARD_KV
__kernel GROUP void attention_backward_kv(OPERAND(q), OPERAND(k), OPERAND(v), OPERAND(g),
                                          __global const float *restrict lse, __global const float *restrict delta,
                                          RESULT(DK_T, dk), RESULT(DV_T, dv), EXTENTS) {
    SETTING
    LOAD_OWN(0, k)
    LOAD_OWN(1, v)
    LOAD_STAGE(0, q, g)
    sums_t sums_k, sums_v;
    EACH_SUM(j, WIDTH / 8, e) sums_k[j][e] = sums_v[j][e] = 0.0f;
    float unit[2] = {LEAST_UNIT, LEAST_UNIT};
    for (int step = 0; step < steps; step++) {
        NEXT_STEP(step, q, g)
        float shift[EIGHTS][2], mean[EIGHTS][2]; // of queries, which are columns here
        UNROLL for (int j = 0; j < EIGHTS; j++)
            UNROLL for (int e = 0; e < 2; e++) {
                const int query = column + j * 8 + e;
                shift[j][e] = query < (int)T ? finite_top(lse[head_row + query]) : 0.0f;
                mean[j][e] = query < (int)T ? delta[head_row + query] : 0.0f;
            }
        tile_t scores, slopes;
        SCORES_AND_SLOPES
        EACH_SUM(j, EIGHTS, e) {
            const bool counts = scores[j][e] != -INFINITY;
            scores[j][e] = counts ? lifted_weight(scores[j][e], shift[j][e % 2]) : 0.0f;
            slopes[j][e] = counts ? scores[j][e] * (slopes[j][e] - mean[j][e % 2]) : 0.0f;
        }
        add_weighted(sums_v, scores, others1, exchange, lane);
        fit_rows(slopes, unit, sums_k, exchange);
        add_weighted(sums_k, slopes, others0, exchange, lane);
    }
    const float lower[2] = {LOWER, LOWER};
    scale_rows(sums_v, WIDTH / 8, lower);
    STORE_ROWS(DV_T, sums_v, dv)
    UNFIT_ROWS(sums_k, unit)
    STORE_ROWS(DK_T, sums_k, dk)
}
#endif
