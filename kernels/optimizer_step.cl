// optimizer_step.cl: an optimizer's step over many parameters in one launch, and their 16-bit copies.
//
//   slot k     p_k  parameter, float32     rewritten by the rule; not there where h_k, or h_k with r_k, is the parameter
//              g_k  its gradient, float32
//              s_k, t_k  its state         velocity; first and second moment; or s_k alone, both in 8 bits (below)
//              h_k  16-bit copy of p_k     written, if there are copies
//              r_k  16 bits more of it     rewritten, where it is kept in two parts
//   tiles      as in multi_tensor.cl: one work-group a tile, in a shuffled order
//
// The rules are those of netcl's optimizers, operation by operation, and give the same bits: SGD, Adam and AdamW are
// kernels there (netcl/optim/*.py), whose expressions stand here as they stand there, so that a compiler contracts the
// same multiplications and additions. Momentum is computed by numpy there, which contracts none.
//
//   RULE      sgd, sgd_momentum, momentum, adam, adamw, adam_8bit, adamw_8bit; without gradients: none, p_k is copied,
//             or split into parts; and join, p_k is put together of its parts
//   GROUP     of the rules of 8 bits: work-items of a work-group, 1 or a multiple of 16
//   COPY_T    storage type of the copies: f16 or bf16; f32: there are none
//   KEEPS     how a parameter with a copy is kept, from step to step:
//               kept_copy         in float32; the default
//               kept_rounded      in float32, which becomes what the copy holds
//               kept_stochastic   in the copy, rounded up or down by chance
//               kept_kahan        in the copy and, in bfloat16, what rounding it left over
//               kept_remainder    in the copy and 16 bits, which are all of float32
//   TURNS     1: what is kept by chance is rounded so; 0: to nearest, the default without gradients
//   DECADES   of slots.clh: SLOTS = 10, 20 ... 100
//   PIECES    of pieces.clh
//
// A CPU device takes a work-group of one work-item, which runs through its tile 16 elements at a time; on a GPU the
// work-items of a group take turns.

#include "pieces.clh"
#include "slots.clh"

#define COPIES_f32 0
#define COPIES_f16 1
#define COPIES_bf16 1
#define COPIES CAT(COPIES_, COPY_T)

#ifndef KEEPS
#define KEEPS kept_copy
#endif
#define PARTS_kept_copy 0
#define PARTS_kept_rounded 0
#define PARTS_kept_stochastic 1
#define PARTS_kept_kahan 2
#define PARTS_kept_remainder 2
#define PARTS CAT(PARTS_, KEEPS) // of which a parameter consists; 0: it is whole

// Of each rule: how many tensors of state it has (-1: not even a gradient), its numbers, what it does to `value` and to
// the state, `first` and `second`, by `grad`, all of type V, float or float16; and whether that may be contracted.
#define CONTRACTS_none 1
#define STATES_none -1
#define NUMBERS_none
#define UPDATE_none(V)

#define CONTRACTS_join 1
#define STATES_join -2
#define NUMBERS_join
#define UPDATE_join(V)

#define CONTRACTS_sgd 1
#define STATES_sgd 0
#define NUMBERS_sgd , const float lr, const float weight_decay
#define UPDATE_sgd(V)                                       \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    value = value - lr * grad;

#define CONTRACTS_sgd_momentum 1
#define STATES_sgd_momentum 1
#define NUMBERS_sgd_momentum NUMBERS_sgd, const float momentum
#define UPDATE_sgd_momentum(V)                              \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    first = momentum * first + grad;                        \
    value = value - lr * first;

#define CONTRACTS_momentum 0
#define STATES_momentum 1
#define NUMBERS_momentum NUMBERS_sgd_momentum, const int nesterov
#define UPDATE_momentum(V)                                        \
    if (weight_decay != 0.0f) grad = grad + weight_decay * value; \
    first = momentum * first + grad;                              \
    value = value - lr * (nesterov ? grad + momentum * first : first);

#define CONTRACTS_adam 1
#define STATES_adam 2
#define NUMBERS_adam \
    NUMBERS_sgd, const float beta1, const float beta2, const float eps, const float bc1, const float bc2
#define MOMENTS(V)                                                  \
    first = mad((V)(beta1), first, (1.0f - beta1) * grad);          \
    second = mad((V)(beta2), second, (1.0f - beta2) * grad * grad); \
    const V m_hat = first / bc1;                                    \
    const V v_hat = second / bc2;                                   \
    const V upd = m_hat / (sqrt(v_hat) + eps);
#define UPDATE_adam(V)                                      \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    MOMENTS(V)                                              \
    value = value - lr * upd;

#define CONTRACTS_adamw 1
#define STATES_adamw 2
#define NUMBERS_adamw NUMBERS_adam
#define UPDATE_adamw(V)                                           \
    MOMENTS(V)                                                    \
    if (weight_decay != 0.0f) value -= lr * weight_decay * value; \
    value -= lr * upd;

#define CONTRACTS_adam_8bit 1
#define STATES_adam_8bit 3
#define NUMBERS_adam_8bit NUMBERS_adam
#define UPDATE_adam_8bit UPDATE_adam

#define CONTRACTS_adamw_8bit 1
#define STATES_adamw_8bit 3
#define NUMBERS_adamw_8bit NUMBERS_adam
#define UPDATE_adamw_8bit UPDATE_adamw

#if !CAT(CONTRACTS_, RULE)
#pragma OPENCL FP_CONTRACT OFF
#endif
#define STATES CAT(STATES_, RULE)
#define UPDATE CAT(UPDATE_, RULE)

// ------------------------------------------------------------------------------------------------ 16-bit parameters

// What the types of 1 and of 16 elements are called.
#define UINT_float uint
#define UINT_float16 uint16
#define AS_UINT_float as_uint
#define AS_UINT_float16 as_uint16
#define AS_FLOAT_float as_float
#define AS_FLOAT_float16 as_float16
#define AS_INT_float as_int
#define AS_INT_float16 as_int16
#define TO_FLOAT_float convert_float
#define TO_FLOAT_float16 convert_float16
#define TO_INT_float convert_int
#define TO_INT_float16 convert_int16
#define INDEX_float(i) (uint)(i)
#define INDEX_float16(i) (uint)(i) + (uint16)(LANE_NUMBERS)
#define UINT(V) CAT(UINT_, V)
#define AS_UINT(V, v) CAT(AS_UINT_, V)(v)
#define AS_FLOAT(V, v) CAT(AS_FLOAT_, V)(v)

// The words of r: loaded as signed numbers, as bfloat16 shifted back, and stored of 32 bits, the upper 16 of them lost.
#define LOAD_WORDS(V, LD, i) (CAT(AS_INT_, V)(LD(bf16, r, i)) >> 16)
#define STORE_WORDS(V, words, i) CAT(STORE_WORDS_, V)(words, i)
#define STORE_WORDS_float(words, i) r[i] = convert_ushort((words) & 0xffffu);
#define STORE_WORDS_float16(words, i) STORE_ANY(ushort16, convert_ushort16((words) & 0xffffu), r + (i));

#define EXPONENT 0x7f800000u // of a float's bits
#define SIGN 0x80000000u
#define POWER(e) ((127u + (e)) << 23) // the bits of 2^e

// What rounding to hi left over; nothing of inf and nan.
#define REST(V, of, hi) (fabs(hi) < INFINITY ? (of) - (hi) : (V)(0.0f))

// The remainder of bfloat16: the lower half of a float's bits, as a signed number. The upper half goes up by one where
// it is negative, which is rounding to nearest, ties away from zero: 32 bits have no room for where ties went to even.
#define JOIN_remainder_bf16(V, LD, i) \
    AS_FLOAT(V, AS_UINT(V, LD(bf16, h, i)) + AS_UINT(V, LOAD_WORDS(V, LD, i)))
#define SPLIT_remainder_bf16(V, LD, ST, i)                                                 \
    const UINT(V) bits = isnan(value) ? (UINT(V))(0x7fc00000u) : AS_UINT(V, value);        \
    ST(bf16, AS_FLOAT(V, (bits + 0x8000u) & 0xffff0000u), h, i);                           \
    STORE_WORDS(V, bits, i)

// The remainder of float16: what is left over in units of 2^-24 times its power of two, of which a float is a multiple;
// not finer than 2^-40. Below 2^-14, where that takes all 16 bits, ties go up, so that they are from -2^15 to 2^15 - 1.
#define UNIT_BITS(V, hi) (max(AS_UINT(V, hi) & EXPONENT, (UINT(V))(POWER(-16))) - (24u << 23))
#define JOIN_remainder_f16(V, LD, i) \
    LD(f16, h, i) + CAT(TO_FLOAT_, V)(LOAD_WORDS(V, LD, i)) * AS_FLOAT(V, UNIT_BITS(V, LD(f16, h, i)))
#define SPLIT_remainder_f16(V, LD, ST, i)                                                              \
    const V up = floor(value * 0x1p24f + 0.5f) * 0x1p-24f;                                             \
    ST(f16, fabs(value) < 0x1p-14f ? up : value, h, i);                                                \
    const V hi = LD(f16, h, i);                                                                        \
    const V units = REST(V, value, hi) * AS_FLOAT(V, POWER(127) - UNIT_BITS(V, hi));                   \
    const V whole = rint(clamp(units, (V)(-32768.0f), (V)(32767.0f)));                                 \
    STORE_WORDS(V, AS_UINT(V, CAT(TO_INT_, V)(whole)), i)
#define JOIN_kept_remainder(V, LD, i) CAT(JOIN_remainder_, COPY_T)(V, LD, i)
#define SPLIT_kept_remainder(V, LD, ST, i) CAT(SPLIT_remainder_, COPY_T)(V, LD, ST, i)

// What rounding left over, in bfloat16: float16 would lose it where parameters are small. With it rounded, the sum may
// have another neighbour that is the nearest: both are taken of the sum, whose parts are the same whenever it is split.
#define JOIN_kept_kahan(V, LD, i) LD(COPY_T, h, i) + LD(bf16, r, i)
#define SPLIT_kept_kahan(V, LD, ST, i)                      \
    ST(COPY_T, value, h, i);                           \
    const V first_hi = LD(COPY_T, h, i);               \
    ST(bf16, REST(V, value, first_hi), r, i);          \
    const V sum = first_hi + LD(bf16, r, i);           \
    ST(COPY_T, sum, h, i);                             \
    const V hi = LD(COPY_T, h, i);                     \
    ST(bf16, REST(V, sum, hi), r, i);

// Up or down, with the probability of how near that is. What would become inf by chance is rounded to nearest.
#define JOIN_kept_stochastic(V, LD, i) LD(COPY_T, h, i)
#ifndef TURNS
#define TURNS (STATES >= 0)
#endif
#define BY_CHANCE (PARTS == 1 && TURNS)
#if BY_CHANCE
#define SPLIT_kept_stochastic(V, LD, ST, i)                                                              \
    const UINT(V) random = CAT(random_, V)(CAT(INDEX_, V)(i), key + (uint)((ulong)(i) >> 32), turn); \
    ST(COPY_T, CAT(CAT(by_chance_, COPY_T), CAT(_, V))(value, random), h, i);
#else
#define SPLIT_kept_stochastic(V, LD, ST, i) ST(COPY_T, value, h, i);
#endif

// 32 bits of each element, step (turn) and parameter (key): the integer hash triple32 of Chris Wellons, a bijection
// whose output bits depend on each bit of what goes in.
#define DEFINE_CHANCE(V)                                                                            \
    static inline UINT(V) random_##V(UINT(V) x, uint key, uint turn) {                              \
        x += key;                                                                                   \
        x ^= x >> 17;                                                                               \
        x *= 0xed5ad4bbu;                                                                           \
        x ^= x >> 11;                                                                               \
        x ^= turn;                                                                                  \
        x *= 0xac4c1b51u;                                                                           \
        x ^= x >> 15;                                                                               \
        x *= 0x31848babu;                                                                           \
        return x ^ (x >> 14);                                                                       \
    }                                                                                               \
    static inline V by_chance_bf16_##V(V value, UINT(V) random) {                                   \
        const UINT(V) bits = AS_UINT(V, value) + (random >> 16);                                    \
        const V up = AS_FLOAT(V, bits & 0xffff0000u);                                               \
        return fabs(up) < INFINITY && fabs(value) < INFINITY ? up : value;                          \
    }                                                                                               \
    static inline V by_chance_f16_##V(V value, UINT(V) random) {                                    \
        const UINT(V) ulp = max(AS_UINT(V, value) & EXPONENT, (UINT(V))(POWER(-14))) - (10u << 23); \
        const V ulps = fabs(value) * AS_FLOAT(V, POWER(127) - ulp), below = floor(ulps);            \
        const V chance = CAT(TO_FLOAT_, V)(random >> 8) * 0x1p-24f;                                 \
        const V up = (chance < ulps - below ? below + 1.0f : below) * AS_FLOAT(V, ulp);             \
        return up <= 65504.0f ? AS_FLOAT(V, AS_UINT(V, up) | (AS_UINT(V, value) & SIGN)) : value;   \
    }
#if BY_CHANCE
DEFINE_CHANCE(float)
DEFINE_CHANCE(float16)
#endif

// ------------------------------------------------------------------------------------------------ the kernel

#if PARTS && STATES >= 0
#define P_PARAMETER(k)
#define SLOT_P(k)
#else
#define P_PARAMETER(k) , __global float *p##k
#define SLOT_P(k) p = p##k;
#endif
#if STATES >= 0
#define G_PARAMETER(k) , __global const float *g##k
#define SLOT_G(k) g = g##k;
#else
#define G_PARAMETER(k)
#define SLOT_G(k)
#endif
#if STATES == 3
#define S_PARAMETER(k) , __global uchar *s##k
#define SLOT_S(k) s = s##k;
#elif STATES >= 1
#define S_PARAMETER(k) , __global float *s##k
#define SLOT_S(k) s = s##k;
#else
#define S_PARAMETER(k)
#define SLOT_S(k)
#endif
#if STATES == 2
#define T_PARAMETER(k) , __global float *t##k
#define SLOT_T(k) t = t##k;
#else
#define T_PARAMETER(k)
#define SLOT_T(k)
#endif
#if COPIES
#define H_PARAMETER(k) , __global STORAGE(COPY_T) *h##k
#define SLOT_H(k) h = h##k;
#else
#define H_PARAMETER(k)
#define SLOT_H(k)
#endif
#if PARTS == 2
#define R_PARAMETER(k) , __global ushort *r##k
#define SLOT_R(k) r = r##k;
#else
#define R_PARAMETER(k)
#define SLOT_R(k)
#endif
#define SLOT_CASE(k) case k: SLOT_P(k) SLOT_G(k) SLOT_S(k) SLOT_T(k) SLOT_H(k) SLOT_R(k) break;
#if BY_CHANCE
#define CHANCE_PARAMETERS , __global const uint *keys, const uint turn
#define KEY const uint key = keys[of.tensor];
#else
#define CHANCE_PARAMETERS
#define KEY
#endif

#if STATES == 3
#define LOAD_STATE(V, LD, i) V first = CAT(LOAD_OWN_, V)(m, (i) - mine), second = CAT(LOAD_OWN_, V)(v, (i) - mine);
#define STORE_STATE(ST, i) CAT(ST, _OWN)(first, m, (i) - mine); CAT(ST, _OWN)(second, v, (i) - mine);
#define LOAD_OWN_float(p, i) (p)[i]
#define LOAD_OWN_float16(p, i) LOAD_PRIVATE(float16, (p) + (i))
#define STORE_OWN(value, p, i) (p)[i] = (value)
#define STORE16_OWN(value, p, i) STORE_PRIVATE(float16, value, (p) + (i))
#elif STATES == 2
#define LOAD_STATE(V, LD, i) V first = LD(f32, s, i), second = LD(f32, t, i);
#define STORE_STATE(ST, i) ST(f32, first, s, i); ST(f32, second, t, i);
#elif STATES >= 1
#define LOAD_STATE(V, LD, i) V first = LD(f32, s, i);
#define STORE_STATE(ST, i) ST(f32, first, s, i);
#else
#define LOAD_STATE(V, LD, i)
#define STORE_STATE(ST, i)
#endif

#define STORE_kept_copy(V, LD, ST, i) ST(COPY_T, value, h, i);
#define STORE_kept_rounded(V, LD, ST, i) ST(COPY_T, value, h, i); ST(f32, LD(COPY_T, h, i), p, i);
#define STORE_kept_stochastic SPLIT_kept_stochastic
#define STORE_kept_kahan SPLIT_kept_kahan
#define STORE_kept_remainder SPLIT_kept_remainder
#if PARTS
#define LOAD_VALUE(V, LD, i) CAT(JOIN_, KEEPS)(V, LD, i)
#define STORE_WHOLE(ST, i)
#else
#define LOAD_VALUE(V, LD, i) LD(f32, p, i)
#define STORE_WHOLE(ST, i) ST(f32, value, p, i);
#endif
#if COPIES
#define STORE_COPY(V, LD, ST, i) CAT(STORE_, KEEPS)(V, LD, ST, i)
#else
#define STORE_COPY(V, LD, ST, i)
#endif

// Element i and, if V is float16, the 15 after it.
#if STATES >= 0
#define NAME update
#define STEP(V, LD, ST, i)          \
    V value = LOAD_VALUE(V, LD, i); \
    V grad = LD(f32, g, i);         \
    LOAD_STATE(V, LD, i)            \
    UPDATE(V)                       \
    STORE_WHOLE(ST, i)              \
    STORE_STATE(ST, i)              \
    STORE_COPY(V, LD, ST, i)
#elif STATES == -1
#define NAME copy
#define STEP(V, LD, ST, i)         \
    const V value = LD(f32, p, i); \
    STORE_COPY(V, LD, ST, i)
#else
#define NAME join
#define STEP(V, LD, ST, i)                \
    const V value = LOAD_VALUE(V, LD, i); \
    ST(f32, value, p, i);
#endif

#if STATES == 3
// MOMENTS OF 8 BITS. 256 neighbouring elements are a block, quantised by what is greatest among them:
//
//   block of 520 bytes   | greatest m, float | greatest v, float | 256 codes of m | 256 codes of v |
//
// A code is the number of a fraction of the greatest, in their order (dynamic quantisation: Dettmers, Lewis, Shleifer,
// Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022). There are 0 and 1 and, in each of seven
// decades from 1e-7 to 1, the middles of n cells of equal width; n doubles from decade to decade. m has them of either
// sign, v, which is never negative, twice as many:
//
//   decade 10^(i-7) .. 10^(i-6)       cells n = C 2^i        C   1 for m, 2 for v
//   codes n - C + 1 .. 2 n - C        0 is 0, the last one 1
//
// A moment gets the nearest one, but v never 0 that is not: m / sqrt(v) would leave all bounds.
#define BLOCK 256
#define BLOCK_BYTES (8 + 2 * BLOCK)
#define SHARERS (GROUP < 16 ? 1 : 16) // work-items that share a block
#define OWN (BLOCK / SHARERS) // elements of it that are a work-item's own

#define DECADE_OF_FRACTIONS(POWER10) decade = n >= at ? (float16)(POWER10) : decade, at *= 2;
APART float16 fraction_of(float16 code, float C) {
    const float16 place = code + (C - 1);
    const uint16 bits = as_uint16(place) & EXPONENT;
    const float16 n = as_float16(bits);
    float16 decade = 1e-6f;
    float at = 2 * C;
    DECADE_OF_FRACTIONS(1e-5f)
    DECADE_OF_FRACTIONS(1e-4f)
    DECADE_OF_FRACTIONS(1e-3f)
    DECADE_OF_FRACTIONS(1e-2f)
    DECADE_OF_FRACTIONS(1e-1f)
    DECADE_OF_FRACTIONS(1.0f)
    const float16 middle = decade * (0.1f + 0.9f * (place - n + 0.5f) * as_float16(POWER(127) - bits));
    return code == 0 ? (float16)(0.0f) : n >= at ? (float16)(1.0f) : middle;
}

// The number of the nearest fraction. x from 0 to 1; nan is 0. In the decade of n cells, place is n at its beginning and
// 2 n at its end; it begins half-way between its first middle and the one before.
#define DECADE_OF_CODES(POWER10, FACTOR)                                                       \
    place = select(place, clamp(floor(n * (8.0f / 9.0f) + x * (n * (FACTOR))), n, 2 * n - 1),  \
                   as_uint16(x >= 0.5f * (last + (POWER10) * (0.1f + 0.45f / n))));            \
    last = (POWER10) * (1.0f - 0.45f / n), n *= 2;
APART float16 code_of(float16 x, float C) {
    float16 place = C - 1, last = 0.0f, n = C;
    DECADE_OF_CODES(1e-6f, 1e6f / 0.9f)
    DECADE_OF_CODES(1e-5f, 1e5f / 0.9f)
    DECADE_OF_CODES(1e-4f, 1e4f / 0.9f)
    DECADE_OF_CODES(1e-3f, 1e3f / 0.9f)
    DECADE_OF_CODES(1e-2f, 1e2f / 0.9f)
    DECADE_OF_CODES(1e-1f, 1e1f / 0.9f)
    DECADE_OF_CODES(1.0f, 1.0f / 0.9f)
    return select(place, n, as_uint16(x >= 0.5f * (last + 1.0f))) - (C - 1);
}
#endif

__kernel void NAME(__global const tile *restrict tiles CHANCE_PARAMETERS CAT(NUMBERS_, RULE) EACH_SLOT(P_PARAMETER)
                       EACH_SLOT(G_PARAMETER) EACH_SLOT(S_PARAMETER) EACH_SLOT(T_PARAMETER) EACH_SLOT(H_PARAMETER)
                           EACH_SLOT(R_PARAMETER)) {
    const tile of = tiles[get_group_id(0)];
    __global float *p;
    __global const float *g;
#if STATES == 3
    __global uchar *s;
    __local float maxima[2 * GROUP];
#else
    __global float *s, *t;
#endif
    __global STORAGE(COPY_T) *h;
    __global ushort *r;
    switch (of.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    KEY
    const size_t end = of.begin + of.count;
#if STATES == 3
    const uint item = get_local_id(0), place = item % SHARERS;
    // All of a group go through as many blocks, for they wait for each other.
    for (size_t done = 0; done < of.count; done += BLOCK * (GROUP / SHARERS)) {
        const size_t block = of.begin + done + BLOCK * (item / SHARERS), mine = block + OWN * place;
        const size_t own_end = clamp(end, mine, mine + OWN), last = own_end - (own_end - mine) % 16;
        __global uchar *const codes = s + block / BLOCK * BLOCK_BYTES;
        __global float *const greatest = (__global float *)codes;
        float m[OWN], v[OWN], most_m = 0, most_v = 0;
        for (uint k = 0; k < OWN; k++) m[k] = v[k] = 0;
        for (uint k = 0; k < own_end - mine; k++) {
            m[k] = (float)codes[8 + OWN * place + k] - 127.0f;
            v[k] = (float)codes[8 + BLOCK + OWN * place + k];
        }
        for (uint k = 0; k < own_end - mine; k += 16) {
            const float16 code_m = LOAD_PRIVATE(float16, m + k), code_v = LOAD_PRIVATE(float16, v + k);
            const float16 fraction = fraction_of(fabs(code_m), 1);
            STORE_PRIVATE(float16, greatest[0] * (code_m < 0 ? -fraction : fraction), m + k);
            STORE_PRIVATE(float16, greatest[1] * fraction_of(code_v, 2), v + k);
        }
        for (size_t i = mine; i < last; i += 16) {
            STEP(float16, LOAD16, STORE16, i)
        }
        for (size_t i = last; i < own_end; i++) {
            STEP(float, LOAD, STORE, i)
        }
        for (uint k = 0; k < OWN; k += 16) {
            most_m = fmax(most_m, max16(fabs(LOAD_PRIVATE(float16, m + k))));
            most_v = fmax(most_v, max16(LOAD_PRIVATE(float16, v + k)));
        }
#if GROUP > 1
        maxima[2 * item] = most_m, maxima[2 * item + 1] = most_v;
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); // all have read what is greatest
        for (uint other = item - place; other < item - place + SHARERS; other++) {
            most_m = fmax(most_m, maxima[2 * other]), most_v = fmax(most_v, maxima[2 * other + 1]);
        }
        barrier(CLK_LOCAL_MEM_FENCE); // before another block's
#endif
        const float per_m = most_m > 0 ? 1 / most_m : 0, per_v = most_v > 0 ? 1 / most_v : 0;
        for (uint k = 0; k < own_end - mine; k += 16) {
            const float16 of_m = LOAD_PRIVATE(float16, m + k), of_v = LOAD_PRIVATE(float16, v + k);
            const float16 magnitude = code_of(fmin(fabs(of_m) * per_m, 1.0f), 1);
            // The codes of what is negative are below 127, that of -1 is not there.
            const int16 code_m = 127 + convert_int16(select(magnitude, -fmin(magnitude, 127.0f), as_uint16(of_m < 0)));
            const float16 least_v = select((float16)(0), (float16)(1), as_uint16(of_v > 0));
            const int16 code_v = convert_int16(fmax(code_of(fmin(of_v * per_v, 1.0f), 2), least_v));
            int words_m[16], words_v[16];
            vstore16(code_m, 0, words_m);
            vstore16(code_v, 0, words_v);
            for (uint lane = 0; lane < 16 && k + lane < own_end - mine; lane++) {
                codes[8 + OWN * place + k + lane] = words_m[lane];
                codes[8 + BLOCK + OWN * place + k + lane] = words_v[lane];
            }
        }
        if (place == 0 && block < end) greatest[0] = most_m, greatest[1] = most_v;
    }
#else
    EACH_VECTOR(i, of.begin, of.count) {
        STEP(float16, LOAD16, STORE16, i)
    }
    for (size_t i = end - of.count % 16 + get_local_id(0); i < end; i += get_local_size(0)) {
        STEP(float, LOAD, STORE, i)
    }
#endif
}
