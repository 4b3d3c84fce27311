// conv_winograd.cl: a 3x3 convolution of stride 1 for CPU devices, with 36 multiplications for 16 outputs, not 144.
// Winograd's F(4x4, 3x3): A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
//
// The outputs fall into tiles of 4x4, each of which reads 6x6 elements d of every channel:
//
//      out = At [ sum over channels of (G g Gt) * (Bt d B) ] A          g: the 3x3 weights; * element by element
//
// It multiplies polynomials by their values at 0, a, -a, b, -b and infinity (the rows of Bt, the columns of At):
//
//      Bt | aabb  0  -aa-bb   0     1  0 |    G | 1/aabb  0   0   |    At | 1  1    1   1    1   0 |
//         |  0  -abb   -bb    a     1  0 |      | p      pa   paa |       | 0  a   -a   b   -b   0 |
//         |  0   abb   -bb   -a     1  0 |      | p     -pa   paa |       | 0  aa  aa   bb   bb  0 |
//         |  0  -aab   -aa    b     1  0 |      | q      qb   qbb |       | 0 aaa -aaa  bbb -bbb 1 |
//         |  0   aab   -aa   -b     1  0 |      | q     -qb   qbb |
//         |  0   aabb   0   -aa-bb  0  1 |      | 0      0    1   |    p = 1/2aa(aa-bb), q = 1/2bb(bb-aa)
//
// With a = 5/8 and b = 3/2 all of Bt and At are exact, and the error is the least: 1.8 times that of a direct sum in
// the mean, where the usual 1 and 2 make it 4 times (B. Barabasz et al., Error Analysis and Improving the Accuracy of
// Winograd Convolution for Deep Neural Networks, ACM TOMS 46(4), 2020, on the choice of points).
//
// winograd.clh says the rest.

#define EDGE 4
#define SOURCE_EDGE 4
#define READ_PLANES 36
#define PLACES 36
#define WEIGHT_PLANES 36
#define TERMS(place) 1
#define READ_PLANE(place, term) (place)
#define WEIGHT_PLANE(place, term) (place)
#define GRAD_PLACES 36
#define GRAD_PLACE(plane) (plane)
#define IS_READ(u, t) 1
#define READS(u, t) ((u) + (t))

#define A 0.625f
#define B 1.5f

#include "winograd.clh"

#define EACH_6(X) EACH_4(X) X(4) X(5)

#ifdef TRANSFORM_READ
// Bt d and its like: six values in place of six.
#define TRANSFORM(d0, d1, d2, d3, d4, d5)                                                        \
    {                                                                                            \
        const float16 even_a = d4 - B * B * d2, odd_a = d3 - B * B * d1;                         \
        const float16 even_b = d4 - A * A * d2, odd_b = d3 - A * A * d1;                         \
        d0 = A * A * B * B * d0 + (d4 - (A * A + B * B) * d2);                                   \
        d5 = A * A * B * B * d1 + (d5 - (A * A + B * B) * d3);                                   \
        d1 = even_a + A * odd_a;                                                                 \
        d2 = even_a - A * odd_a;                                                                 \
        d3 = even_b + B * odd_b;                                                                 \
        d4 = even_b - B * odd_b;                                                                 \
    }

// What 16 tiles read of the channel at x, transformed, place by place, to `read`.
static inline void transform_read(__global const STORAGE(X_T) *x, const Piece *pieces, size_t WS, size_t ahead,
                                  __global float *read) {
#define READ(i) float16 d##i = FROM_PIECES(i, j);
#define KEEP(i) t[i][j] = d##i;
#define KEPT(j) float16 d##j = t[i][j];
#define WRITE(j) TO_PIECES(d##j, read + (6 * i + j) * READ_FLOATS)
    float16 t[6][6];
    EACH_6(PREFETCH_PIECES)
    ONE_BY_ONE for (int j = 0; j < 6; j++) {
        EACH_6(READ)
        TRANSFORM(d0, d1, d2, d3, d4, d5)
        EACH_6(KEEP)
    }
    ONE_BY_ONE for (int i = 0; i < 6; i++) {
        EACH_6(KEPT)
        TRANSFORM(d0, d1, d2, d3, d4, d5)
        EACH_6(WRITE)
    }
}
#endif

#ifdef WINOGRAD
// Turns the sums of 16 tiles into four rows of 64 outputs. Returns for each tile a number that is finite only if all
// its outputs are: neither inf nor nan goes away in a sum.
static inline float16 transform_sums(__global const float *sums, float bias, int relu, ushort *rows) {
#define SUM_4(y0, y1, y2, y3, s0, s1, s2, s3, s4, s5)          \
    {                                                          \
        const float16 plus_a = s1 + s2, minus_a = s1 - s2;     \
        const float16 plus_b = s3 + s4, minus_b = s3 - s4;     \
        y0 = s0 + plus_a + plus_b;                             \
        y1 = A * minus_a + B * minus_b;                        \
        y2 = A * A * plus_a + B * B * plus_b;                  \
        y3 = A * A * A * minus_a + (B * B * B * minus_b + s5); \
    }
#define SUM(i) const float16 s##i = LOAD16(f32, sums, (6 * i + j) * SUM_FLOATS);
#define OF_COLUMN(j) const float16 s##j = y[i][j];
    float16 y[4][6], total = 0.0f;
    ONE_BY_ONE for (int j = 0; j < 6; j++) {
        EACH_6(SUM)
        SUM_4(y[0][j], y[1][j], y[2][j], y[3][j], s0, s1, s2, s3, s4, s5)
    }
    ONE_BY_ONE for (int i = 0; i < 4; i++) {
        EACH_6(OF_COLUMN)
        float16 v0, v1, v2, v3;
        SUM_4(v0, v1, v2, v3, s0, s1, s2, s3, s4, s5)
        total += (v0 + v1) + (v2 + v3);
        STORE_4(v0, v1, v2, v3, rows + i * ROW)
    }
    return total;
}
#endif

#ifdef TRANSFORM_WEIGHTS
// G g: six values of three.
#define TRANSFORM_TAPS(u, g0, g1, g2)                                  \
    {                                                                  \
        const float16 t0 = g0, t1 = g1, t2 = g2;                       \
        const float p = 1.0f / (2.0f * A * A * (A * A - B * B));       \
        const float q = 1.0f / (2.0f * B * B * (B * B - A * A));       \
        const float16 even_a = p * (t0 + A * A * t2), odd_a = p * A * t1; \
        const float16 even_b = q * (t0 + B * B * t2), odd_b = q * B * t1; \
        u[0] = t0 * (1.0f / (A * A * B * B));                          \
        u[1] = even_a + odd_a;                                         \
        u[2] = even_a - odd_a;                                         \
        u[3] = even_b + odd_b;                                         \
        u[4] = even_b - odd_b;                                         \
        u[5] = t2;                                                     \
    }

// G g Gt of 16 elements of a panel, `distance` apart, to panels[e] and the following, less than `end`.
static inline void transform_taps(const float16 *g, __global float *panels, size_t distance, size_t e, size_t end) {
    float16 u[3][6], v[6];
    for (int j = 0; j < 3; j++) TRANSFORM_TAPS(u[j], g[j], g[3 + j], g[6 + j])
    for (int i = 0; i < 6; i++) {
        TRANSFORM_TAPS(v, u[0][i], u[1][i], u[2][i])
        for (int j = 0; j < 6; j++) STORE_PART(f32, v[j], panels + (6 * i + j) * distance, e, end);
    }
}
#endif

#ifdef WEIGHT_GRAD
// A e: six values of four.
#define TRANSFORM_GRAD(u0, u1, u2, u3, u4, u5, e0, e1, e2, e3) \
    {                                                          \
        u0 = e0;                                               \
        u5 = e3;                                               \
        GRAD_AT(u1, u2, A, e0, e1, e2, e3)                     \
        GRAD_AT(u3, u4, B, e0, e1, e2, e3)                     \
    }

// A e At of the gradient of a tile's outputs, of 16 channels.
static inline void transform_grad(__global const float *e, __global float *grads) {
#define WRITE_GRAD(j) STORE16(f32, v##j, grads, (6 * i + j) * GRAD_FLOATS);
    float16 u[6][4];
    for (int j = 0; j < 4; j++) {
        const float16 e0 = GRAD(0, j), e1 = GRAD(1, j), e2 = GRAD(2, j), e3 = GRAD(3, j);
        TRANSFORM_GRAD(u[0][j], u[1][j], u[2][j], u[3][j], u[4][j], u[5][j], e0, e1, e2, e3)
    }
    for (int i = 0; i < 6; i++) {
        float16 v0, v1, v2, v3, v4, v5;
        TRANSFORM_GRAD(v0, v1, v2, v3, v4, v5, u[i][0], u[i][1], u[i][2], u[i][3])
        EACH_6(WRITE_GRAD)
    }
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// Gt s: three values of six.
#define TRANSFORM_FILTER(t0, t1, t2, s0, s1, s2, s3, s4, s5)           \
    {                                                                  \
        const float p = 1.0f / (2.0f * A * A * (A * A - B * B));       \
        const float q = 1.0f / (2.0f * B * B * (B * B - A * A));       \
        const float16 plus_a = p * (s1 + s2), minus_a = p * (s1 - s2); \
        const float16 plus_b = q * (s3 + s4), minus_b = q * (s3 - s4); \
        t0 = s0 * (1.0f / (A * A * B * B)) + plus_a + plus_b;          \
        t1 = A * minus_a + B * minus_b;                                \
        t2 = A * A * plus_a + B * B * plus_b + s5;                     \
    }

// Gt s G: nine taps of the sums of all places.
static inline void transform_filter(const float16 *s, float16 *taps) {
    float16 t[3][6];
    for (int j = 0; j < 6; j++)
        TRANSFORM_FILTER(t[0][j], t[1][j], t[2][j], s[j], s[6 + j], s[12 + j], s[18 + j], s[24 + j], s[30 + j])
    for (int i = 0; i < 3; i++)
        TRANSFORM_FILTER(taps[3 * i], taps[3 * i + 1], taps[3 * i + 2], t[i][0], t[i][1], t[i][2], t[i][3], t[i][4],
                         t[i][5])
}
#endif

#include "winograd_kernels.clh"
#include "winograd_grad_kernels.clh"
