// rope.cl: rotary positions. Neighbouring elements of a row are a pair (a, b) and turn by an angle:
//
//      x (leads, T, D)                            a work-item's part of x
//
//      D ->                                       lead   |      SPAN positions, D elements each      |
//      a0 b0 a1 b1 a2 b2 ...                      lead+1 |      the same positions                   |
//                                                 ...    `leads_each` of them
//      a' = a cos - b sin
//      b' = a sin + b cos                         angle of pair t: position * theta_t
//      the other way round: sin changes its sign  theta_t = base^(-2t/D), from the host
//
// A work-item computes cosines and sines once, for BLOCKS times 16 pairs of its positions at a time, and uses them for
// all its leads. The angle is the float product of the position and theta; it is reduced to a quarter turn exactly, so
// cosine and sine are right for the largest.
//
//   SPAN, BLOCKS  size of the table: SPAN positions, BLOCKS times 16 pairs
//   X_T, Y_T      storage types of input and result
//   P_T           storage type of the positions: i32 or a floating type

static inline int load_i32(__global const int *p, size_t i) { return p[i]; }

// Cosine and sine for |a| up to 1e5: three parts of pi/2 leave no error in the reduction (Cody and Waite, 1980), the
// polynomials are those of Moshier's Cephes. The device's own functions, several times slower, take what is beyond.
static inline void turn(float16 a, float16 *cosine, float16 *sine) {
    if (any(!(fabs(a) <= 1e5f))) {
        *cosine = cos(a);
        *sine = sin(a);
        return;
    }
    const float16 n = rint(a * 0.636619772f);
    float16 r = fma(n, (float16)(-0x1.921fb4p+0f), a);
    r = fma(n, (float16)(-0x1.4442d2p-24f), r);
    r = fma(n, (float16)(0x1.ee59dap-50f), r);
    const float16 z = r * r;
#define HORNER(sum, coefficient) fma(sum, z, (float16)(coefficient))
    const float16 s = fma(HORNER(HORNER((float16)(-1.9515295891e-4f), 8.3321608736e-3f), -1.6666654611e-1f) * z, r, r);
    const float16 c = HORNER(HORNER(HORNER(HORNER((float16)(2.443315711809948e-5f), -1.388731625493765e-3f),
                                           4.166664568298827e-2f), -0.5f), 1.0f);
    const int16 quarter = convert_int16(n);
    const int16 swap = (quarter & 1) != 0;
    *cosine = as_float16(as_int16(select(c, s, swap)) ^ (((quarter + 1) & 2) << 30));
    *sine = as_float16(as_int16(select(s, c, swap)) ^ ((quarter & 2) << 30));
}

#define TWICE8(v) ((float16)((v).s0, (v).s0, (v).s1, (v).s1, (v).s2, (v).s2, (v).s3, (v).s3, \
                             (v).s4, (v).s4, (v).s5, (v).s5, (v).s6, (v).s6, (v).s7, (v).s7))
#define SIGNS ((float16)(-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1))
// 8 pairs: (a, b) (cos, cos) + (b, a) (-sin, sin), the latter two from the table
static inline float16 rotate8(float16 x, const float *entry) {
    return x * LOAD_PRIVATE(float16, entry) + x.s1032547698badcfe * LOAD_PRIVATE(float16, entry + 16);
}

// Work-item (span of positions, group of leads), counted along the spans first.
__kernel void rope(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                   __global const STORAGE(P_T) *restrict positions, __global const float *restrict theta,
                   const ulong leads, const ulong T, const ulong D, const ulong leads_each, const float sign) {
    const size_t spans = (T + SPAN - 1) / SPAN, blocks = (D + 31) / 32;
    const size_t first = get_global_id(0) % spans * SPAN, count = min((size_t)SPAN, (size_t)T - first);
    const size_t lead0 = get_global_id(0) / spans * leads_each, lead1 = min(lead0 + leads_each, (size_t)leads);
    float turns[SPAN * BLOCKS * 64]; // of a position and a block: (cos, cos), (-sin, sin) of 8 pairs, then of 8 more
    for (size_t block0 = 0; block0 < blocks; block0 += BLOCKS) {
        const size_t width = min((size_t)BLOCKS, blocks - block0);
        for (size_t s = 0; s < count; s++)
            for (size_t block = 0; block < width; block++) {
                float *entry = turns + (s * BLOCKS + block) * 64;
                const float position = (float)LOAD(P_T, positions, first + s);
                float16 cosine, sine;
                turn(LOAD16(f32, theta, (block0 + block) * 16) * position, &cosine, &sine);
                sine *= sign;
                STORE_PRIVATE(float16, TWICE8(cosine.lo), entry);
                STORE_PRIVATE(float16, TWICE8(sine.lo) * SIGNS, entry + 16);
                STORE_PRIVATE(float16, TWICE8(cosine.hi), entry + 32);
                STORE_PRIVATE(float16, TWICE8(sine.hi) * SIGNS, entry + 48);
            }
        for (size_t lead = lead0; lead < lead1; lead++)
            for (size_t s = 0; s < count; s++) {
                const size_t row = (lead * T + first + s) * D, end = row + D;
                for (size_t block = 0, at = row + block0 * 32; block < width; block++, at += 32) {
                    const float *entry = turns + (s * BLOCKS + block) * 64;
                    if (at + 32 <= end) {
                        STORE16(Y_T, rotate8(LOAD16(X_T, x, at), entry), y, at);
                        STORE16(Y_T, rotate8(LOAD16(X_T, x, at + 16), entry + 32), y, at + 16);
                        continue;
                    }
                    STORE_PART(Y_T, rotate8(LOAD_PART(X_T, x, at, end, 0.0f), entry), y, at, end);
                    if (at + 16 < end) {
                        const float16 rest = LOAD_PART(X_T, x, at + 16, end, 0.0f);
                        STORE_PART(Y_T, rotate8(rest, entry + 32), y, at + 16, end);
                    }
                }
            }
    }
}
