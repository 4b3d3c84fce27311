// elementwise.cl: y[i] = OP(x0[i], x1[i], x2[i], p0, p1), for one to three operands that broadcast as in numpy.
//
// y is contiguous and is written 16 neighbouring elements (a block) at a time. Operands are contiguous too; the
// host merges neighbouring dimensions along which the same operands broadcast, and two layouts are left.
//
//   STRIDED 0   every operand is as large as y, or is a single element:
//
//          work-item 0         work-item 1                      last work-item
//     y  |----- span -----|----- span -----|  ...  |-- blocks of 16 --|-- rest --|
//
//          On a CPU, where every operand is bfloat16 as y is, elements come as 16 words of two (WORDS): a shift widens
//          the lower halves, a mask the upper ones, and one instruction puts the results of both together.
//
//             word 0   word 1         word 15
//             | 0  1 | 2  3 |  ...  | 30 31 |     lower: elements 0, 2, .. 30; upper: 1, 3, .. 31
//
//   STRIDED 1   y is rows of `inner` elements, for example x[3][40] + bias[40]:
//
//             |---16---|---16---|--8--|      A block inside a row reads 16 elements of an operand at once, or one
//     row 0   | block  | block  |  blo|      element for all (STEP 0). A block that reaches into the next row is
//     row 1   |ck | block  | block  | |      gathered one by one. Where the row starts in an operand is the sum of
//     row 2   |block  | block  | block|      index * stride over the outer dimensions.
//
//             |---16---|---16---|--8--|      With PIECES, on GPUs, a work-item has one block, and a row ends with a
//     row 0   | block  | block  |block|      block of what is left of it. (STRIDED 0: y is one row.)
//     row 1   | block  | block  |block|
//
//     dims holds, for each dimension from the innermost on: extent, stride of x0, of x1, of x2 (in elements; 0
//     where the operand broadcasts).
//
//   ARITY           number of operands, 1 to 3
//   OP              the function, one of op_* below (the prefix keeps drivers that #define abs and exp out)
//   PARAMETERS      number of float parameters p0, p1 that OP takes after its operands
//   X0_T .. X2_T    storage types: f32, f16, bf16, i32, or `arg` for a number passed as a kernel argument
//   X0_STEP ..      STRIDED 0 only. 1: as large as y, 0: a single element
//   Y_T             storage type of y
//   INDEX           STRIDED 1 only: type of an element's number, uint, or ulong where there are too many
//   PIECES          of pieces.clh

#include "pieces.clh"

// ------------------------------------------------------------------------------------------------ operators
// Written for float16. Comparisons give lanes of all ones or all zeros, which ?: takes. Comparisons with NaN are
// false, so the order of a choice decides whether NaN passes: as in numpy, it does.

#define VEC(v) ((float16)(v))

static inline float16 op_copy(float16 x) { return x; }
static inline float16 op_neg(float16 x) { return -x; }
static inline float16 op_abs(float16 x) { return fabs(x); }
static inline float16 op_square(float16 x) { return x * x; }
static inline float16 op_exp(float16 x) { return exp(x); }
static inline float16 op_log(float16 x) { return log(x); }
static inline float16 op_log1p(float16 x) { return log1p(x); }
static inline float16 op_sqrt(float16 x) { return sqrt(x); }
static inline float16 op_rsqrt(float16 x) { return rsqrt(x); }
static inline float16 op_pow(float16 x, float exponent) { return pow(x, VEC(exponent)); }

static inline float16 op_add(float16 a, float16 b) { return a + b; }
static inline float16 op_sub(float16 a, float16 b) { return a - b; }
static inline float16 op_mul(float16 a, float16 b) { return a * b; }
static inline float16 op_div(float16 a, float16 b) { return a / b; }
static inline int16 first_is_max(float16 a, float16 b) { return (a >= b) | isnan(a); }
static inline int16 first_is_min(float16 a, float16 b) { return (a <= b) | isnan(a); }
static inline float16 op_maximum(float16 a, float16 b) { return first_is_max(a, b) ? a : b; }
static inline float16 op_minimum(float16 a, float16 b) { return first_is_min(a, b) ? a : b; }
static inline float16 op_lt(float16 a, float16 b) { return a < b ? VEC(1.0f) : VEC(0.0f); }
static inline float16 op_le(float16 a, float16 b) { return a <= b ? VEC(1.0f) : VEC(0.0f); }
static inline float16 op_gt(float16 a, float16 b) { return a > b ? VEC(1.0f) : VEC(0.0f); }
static inline float16 op_ge(float16 a, float16 b) { return a >= b ? VEC(1.0f) : VEC(0.0f); }
static inline float16 op_where(float16 condition, float16 a, float16 b) { return condition != 0.0f ? a : b; }

// 1 / (1 + exp(-x)) and its derivative: exp of what is never positive cannot overflow, and neither form
// subtracts nearly equal numbers, so both keep their relative accuracy in the tails.
static inline float16 sigmoid16(float16 x) {
    const float16 e = exp(-fabs(x));
    return (x < 0.0f ? e : VEC(1.0f)) / (1.0f + e);
}

static inline float16 sigmoid_slope(float16 x) {
    const float16 e = exp(-fabs(x));
    return e / ((1.0f + e) * (1.0f + e));
}

// clamp() would pass the bound instead of a NaN.
static inline float16 between(float16 x, float low, float high) {
    const float16 t = x < low ? VEC(low) : x;
    return t > high ? VEC(high) : t;
}

// GELU, tanh form: x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
#define GELU_2U 1.5957691216057308f  // 2 * sqrt(2 / pi)
#define GELU_CUBE 0.044715f
#define SQRT_HALF 0.7071067811865476f
#define INV_SQRT_2PI 0.3989422804014327f

static inline float16 op_relu(float16 x) { return x <= 0.0f ? VEC(0.0f) : x; }
static inline float16 op_leaky_relu(float16 x, float slope) { return x > 0.0f ? x : slope * x; }
static inline float16 op_prelu(float16 x, float16 slope) { return x > 0.0f ? x : slope * x; }
static inline float16 op_sigmoid(float16 x) { return sigmoid16(x); }
static inline float16 op_tanh(float16 x) { return tanh(x); }
static inline float16 op_gelu_tanh(float16 x) { return x * sigmoid16(GELU_2U * (x + GELU_CUBE * x * x * x)); }
static inline float16 op_gelu_erf(float16 x) { return 0.5f * x * erfc(-SQRT_HALF * x); }
static inline float16 op_swish(float16 x) { return x * sigmoid16(x); }
static inline float16 op_elu(float16 x, float alpha) { return x > 0.0f ? x : alpha * expm1(x); }
static inline float16 op_softplus(float16 x) { return fmax(x, VEC(0.0f)) + log1p(exp(-fabs(x))); }
static inline float16 op_hard_sigmoid(float16 x) { return between((x + 2.5f) * 0.2f, 0.0f, 1.0f); }
static inline float16 op_hard_swish(float16 x) { return x * op_hard_sigmoid(x); }
static inline float16 op_clamp(float16 x, float low, float high) { return between(x, low, high); }
static inline float16 op_add_relu(float16 a, float16 b) { return op_relu(a + b); }

// -------------------------------------------------------------------------------- gradients: g is that of y
// A gradient that does not pass is left out, not multiplied by zero: an infinite g stays out as well.

static inline float16 op_abs_grad(float16 g, float16 x) { return x == 0.0f ? VEC(0.0f) : (x < 0.0f ? -g : g); }
static inline float16 op_square_grad(float16 g, float16 x) { return 2.0f * (x * g); } // not 2 x, which may be infinite
static inline float16 op_log1p_grad(float16 g, float16 x) { return g / (1.0f + x); }
static inline float16 op_sqrt_grad(float16 g, float16 y) { return 0.5f * g / y; }
static inline float16 op_rsqrt_grad(float16 g, float16 x) { return -0.5f * g * (rsqrt(x) / x); }
static inline float16 op_pow_grad(float16 g, float16 x, float exponent) {
    return exponent == 0.0f ? VEC(0.0f) : g * exponent * pow(x, VEC(exponent - 1.0f)); // as in op_square_grad
}

static inline float16 op_div_grad(float16 g, float16 a, float16 b) { return -(g / b) * (a / b); }
static inline float16 op_maximum_grad_a(float16 g, float16 a, float16 b) { return first_is_max(a, b) ? g : VEC(0.0f); }
static inline float16 op_maximum_grad_b(float16 g, float16 a, float16 b) { return first_is_max(a, b) ? VEC(0.0f) : g; }
static inline float16 op_minimum_grad_a(float16 g, float16 a, float16 b) { return first_is_min(a, b) ? g : VEC(0.0f); }
static inline float16 op_minimum_grad_b(float16 g, float16 a, float16 b) { return first_is_min(a, b) ? VEC(0.0f) : g; }
static inline float16 op_where_grad_a(float16 g, float16 condition) { return condition != 0.0f ? g : VEC(0.0f); }
static inline float16 op_where_grad_b(float16 g, float16 condition) { return condition != 0.0f ? VEC(0.0f) : g; }

static inline float16 op_relu_grad(float16 g, float16 y) { return y <= 0.0f ? VEC(0.0f) : g; }
static inline float16 op_leaky_relu_grad(float16 g, float16 x, float slope) { return x > 0.0f ? g : slope * g; }
static inline float16 op_prelu_grad(float16 g, float16 x, float16 slope) { return x > 0.0f ? g : slope * g; }
static inline float16 op_prelu_grad_slope(float16 g, float16 x) { return x > 0.0f ? VEC(0.0f) : g * x; }
static inline float16 op_sigmoid_grad(float16 g, float16 x) { return g * sigmoid_slope(x); }
static inline float16 op_tanh_grad(float16 g, float16 x) { return g * (4.0f * sigmoid_slope(2.0f * x)); }
static inline float16 op_softplus_grad(float16 g, float16 x) { return g * sigmoid16(x); }
static inline float16 op_elu_grad(float16 g, float16 x, float alpha) { return x > 0.0f ? g : g * (alpha * exp(x)); }

// x * slope(x) vanishes for large |x|; clamping x there keeps infinity * 0 out.
static inline float16 op_gelu_tanh_grad(float16 g, float16 x) {
    const float16 u2 = GELU_2U * (x + GELU_CUBE * x * x * x);
    const float16 c = between(x, -64.0f, 64.0f);
    return g * (sigmoid16(u2) + c * sigmoid_slope(u2) * (GELU_2U + 3.0f * GELU_2U * GELU_CUBE * c * c));
}

static inline float16 op_gelu_erf_grad(float16 g, float16 x) {
    const float16 c = between(x, -64.0f, 64.0f);
    return g * (0.5f * erfc(-SQRT_HALF * x) + c * INV_SQRT_2PI * exp(-0.5f * c * c));
}

static inline float16 op_swish_grad(float16 g, float16 x) {
    const float16 c = between(x, -256.0f, 256.0f);
    return g * (sigmoid16(x) * (1.0f + c * sigmoid16(-c)));
}

static inline float16 op_hard_sigmoid_grad(float16 g, float16 x) {
    return ((x > -2.5f) & (x < 2.5f)) ? 0.2f * g : VEC(0.0f);
}

static inline float16 op_hard_swish_grad(float16 g, float16 x) {
    return x <= -2.5f ? VEC(0.0f) : (x >= 2.5f ? g : g * ((x + 1.25f) * 0.4f));
}

static inline float16 op_clamp_grad(float16 g, float16 x, float low, float high) {
    return ((x >= low) & (x <= high)) ? g : VEC(0.0f);
}

// ---------------------------------------------------------------------------------------------- the kernel

static inline float load_i32(__global const int *p, size_t i) { return convert_float(p[i]); }
static inline float16 load16_i32(__global const int *p, size_t i) { return convert_float16(vload16(0, p + i)); }
#define load_arg(p, i) (p)
#define load16_arg(p, i) VEC(p)
#define load16_pieces_arg load16_arg
static inline float16 load_part_i32(__global const int *p, size_t i, size_t end, float fill) {
    if (i + 16 <= end) return LOAD16(i32, p, i);
    float lanes[16];
    for (uint k = 0; k < 16; k++) lanes[k] = i + k < end ? load_i32(p, i + k) : fill;
    return vload16(0, lanes);
}
#define load_part_arg(p, i, end, fill) VEC(p)
#define load_part_pieces_i32 load_part_i32
#define load_part_pieces_arg load_part_arg

#define input_f32(x) __global const float *x
#define input_f16(x) __global const half *x
#define input_bf16(x) __global const ushort *x
#define input_i32(x) __global const int *x
#define input_arg(x) const float x

#if STRIDED  // read from dims, so that one program serves every way to broadcast
#define X0_STEP dims[1]
#define X1_STEP dims[2]
#define X2_STEP dims[3]
#endif

// M(storage type, step, operand, where its row starts, its block of 16, its block one by one, column in dims)
#define EACH_1(M) M(X0_T, X0_STEP, x0, at0, v0, lanes0, 1)
#define EACH_2(M) EACH_1(M) M(X1_T, X1_STEP, x1, at1, v1, lanes1, 2)
#define EACH_3(M) EACH_2(M) M(X2_T, X2_STEP, x2, at2, v2, lanes2, 3)
#define EACH CAT(EACH_, ARITY)
#define VALUES_1 v0
#define VALUES_2 v0, v1
#define VALUES_3 v0, v1, v2

#define PARAMETERS_0
#define PARAMETERS_1 const float p0,
#define PARAMETERS_2 const float p0, const float p1,
#define GIVEN_0
#define GIVEN_1 , p0
#define GIVEN_2 , p0, p1
#define RESULT OP(CAT(VALUES_, ARITY) CAT(GIVEN_, PARAMETERS))

#define INPUT(T, STEP, x, at, v, lanes, column) CAT(input_, T)(x),
#define DECLARE(T, STEP, x, at, v, lanes, column) \
    size_t at = 0;                                \
    float16 v;
#define LOAD_BLOCK(T, STEP, x, at, v, lanes, column) v = STEP ? LOAD16(T, x, at + col) : VEC(LOAD(T, x, at));
#define LOAD_REST(T, STEP, x, at, v, lanes, column) \
    v = STEP ? LOAD_PART(T, x, at + col, at + inner, 0.0f) : VEC(LOAD(T, x, at));
#define DECLARE_LANES(T, STEP, x, at, v, lanes, column) float lanes[16] = {0.0f};
#define LOAD_LANE(T, STEP, x, at, v, lanes, column) lanes[k] = LOAD(T, x, at + col * STEP);
#define LANES_TO_BLOCK(T, STEP, x, at, v, lanes, column) v = vload16(0, lanes);
#define AT_ZERO(T, STEP, x, at, v, lanes, column) at = 0;
#define ADD_STRIDE(T, STEP, x, at, v, lanes, column) at += index * dims[4 * d + column];

// Sets where each operand's row starts.
#define LOCATE_ROW                               \
    {                                            \
        EACH(AT_ZERO)                            \
        INDEX rest = row;                        \
        for (uint d = 1; d < rank; d++) {        \
            const INDEX extent = dims[4 * d];    \
            const INDEX index = rest % extent;   \
            rest /= extent;                      \
            EACH(ADD_STRIDE)                     \
        }                                        \
    }

#define WORDS 0
#if defined(ON_CPU) && !STRIDED && ARITY >= 1 && ARITY <= 3
#define IN_WORDS_f32 0
#define IN_WORDS_f16 0
#define IN_WORDS_i32 0
#define IN_WORDS_bf16 1
#define IN_WORDS_arg 1
#define AND_IN_WORDS(T, STEP, x, at, v, lanes, column) && CAT(IN_WORDS_, T)
#if CAT(IN_WORDS_, Y_T) EACH(AND_IN_WORDS)
#undef WORDS
#define WORDS 1
#endif
#endif

#if WORDS
#define lower_bf16(p, i) as_float16(LOAD_ANY(uint16, (__global const uint *)((p) + (i))) << 16)
#define upper_bf16(p, i) as_float16(LOAD_ANY(uint16, (__global const uint *)((p) + (i))) & 0xffff0000u)
#define lower_arg load16_arg
#define upper_arg load16_arg
#define LOAD_LOWER(T, STEP, x, at, v, lanes, column) v = STEP ? CAT(lower_, T)(x, i) : VEC(LOAD(T, x, at));
#define LOAD_UPPER(T, STEP, x, at, v, lanes, column) v = STEP ? CAT(upper_, T)(x, i) : VEC(LOAD(T, x, at));

// As bf16_bits16, in the upper halves of words.
static inline uint16 round_words(float16 v) {
    const uint16 u = as_uint16(v);
    return select(u + 0x7fffu + ((u >> 16) & 1u), u | 0x400000u, as_uint16(isnan(v)));
}
#endif

__kernel void elementwise(EACH(INPUT) __global STORAGE(Y_T) *y, CAT(PARAMETERS_, PARAMETERS) const ulong span,
                          const ulong n
#if STRIDED
                          , const uint rank, __global const ulong *dims
#endif
) {
#if PIECES
#if STRIDED
    const INDEX inner = dims[0], blocks = (inner + 15) / 16, block = get_global_id(0), row = block / blocks;
    const size_t col = (block - row * blocks) * 16, begin = (size_t)row * inner;
#else
    const size_t inner = n, col = get_global_id(0) * 16, begin = 0;
#endif
    if (begin + col >= n) return;
    EACH(DECLARE)
#if STRIDED
    LOCATE_ROW
#endif
    EACH(LOAD_REST)
    STORE_PART(Y_T, RESULT, y, begin + col, begin + inner);
#else
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)n);
    if (i >= end) return;
    EACH(DECLARE)
#if STRIDED
    const INDEX inner = dims[0];
    INDEX row = (INDEX)i / inner, col = (INDEX)i % inner;
    LOCATE_ROW
    for (; i < end; i += 16) {
        const uint count = (uint)min(end - i, (size_t)16);
        if (count == 16 && col + 16 <= inner) {
            EACH(LOAD_BLOCK)
            col += 16;
        } else {
            EACH(DECLARE_LANES)
            for (uint k = 0; k < count; k++, col++) {
                if (col == inner) {
                    col = 0;
                    row++;
                    LOCATE_ROW
                }
                EACH(LOAD_LANE)
            }
            EACH(LANES_TO_BLOCK)
        }
        if (col == inner) {
            col = 0;
            row++;
            LOCATE_ROW
        }
        STORE_PART(Y_T, RESULT, y, i, end);
    }
#else
#if WORDS
    for (; i + 32 <= end; i += 32) {
        EACH(LOAD_LOWER)
        const uint16 lower = round_words(RESULT);
        EACH(LOAD_UPPER)
        STORE_ANY(uint16, lower >> 16 | (round_words(RESULT) & 0xffff0000u), (__global uint *)(y + i));
    }
#else
    for (; i + 16 <= end; i += 16) {
        const size_t col = i;
        EACH(LOAD_BLOCK)
        STORE16(Y_T, RESULT, y, i);
    }
#endif
    for (; i < end; i += 16) {
        const size_t col = i, inner = n;
        EACH(LOAD_REST)
        STORE_PART(Y_T, RESULT, y, i, end);
    }
#endif
#endif
}
