// conv_winograd_strided.cl: a 3x3 convolution of stride 2 for CPU devices, and its input gradient, with 81
// multiplications for what takes 144. Winograd's sums (conv_winograd.cl) need neighbours: of a source whose even and
// odd rows and columns are taken apart, each quarter d[a][b] is convolved with stride 1, with the taps that meet it
// (D. Huang et al., DWM: A Decomposable Winograd Method for Convolution Acceleration, AAAI 2020):
//
//      g[0][0] | w00 w02 |   g[0][1] | w01 |   g[1][0] | w10 w12 |   g[1][1] | w11 |
//              | w20 w22 |           | w21 |
//
// Two taps are F(4, 2), at the points 0, a, -a, b and infinity, one is F(4, 1), at all points but infinity, with the
// same Bt and At. So the four quarters of a tile of 4x4 outputs, of 5 or 4 rows and columns, make 25 + 20 + 20 + 16
// planes:
//
//      Bt | aab  -aa   -b    1  0 |   F(4, 1) leaves    G | 1    0 |  times | 1/aab        |    At | 1  1   1   1  0 |
//         |  0   -ab  a-b    1  0 |   the last row      0 | 1    a |        | 1/2aa(a-b)   |       | 0  a  -a   b  0 |
//         |  0    ab -a-b    1  0 |   and column out    0 | 1   -a |        | -1/2aa(a+b)  |       | 0 aa  aa  bb  0 |
//         |  0   -aa   0     1  0 |                       | 1    b |        | 1/b(bb-aa)   |       | 0 aaa -aaa bbb 1 |
//         |  0   aab  -aa   -b  1 |                       | 0    1 |        | 1            |
//
// Forward, planes that have the same place in their quarters are summed: 25 places. The input gradient (padding 1) is
// the other way round: each quarter of a tile of 8x8 outputs is a convolution of one and the same tile of the output's
// gradient, of 5x5 elements and so 25 planes, with its own taps: 81 places of sums.
//
// With a = 3/4 and b = 2 all of Bt and At are exact, and the error is the least: 2.1 times that of a direct sum in the
// mean.
//
//   GRADIENT   0 forward, 1 the input gradient, as a convolution with the weights turned round
//
// winograd.clh says the rest.

// Of place (i, j): what planes of a quarter s = 2 a + b begin with, how many a row of them has, and which one it is.
#define BEGIN(s) ((s) == 0 ? 0 : (s) == 1 ? 25 : (s) == 2 ? 45 : 65)
#define WIDTH(s) ((s) % 2 ? 4 : 5)
#define PLANE(s, i, j) (BEGIN(s) + WIDTH(s) * (i) + (j))
#define WEIGHT_PLANES 81
// The place, 5 i + j, of a plane.
#define QUARTER(plane) ((plane) < 25 ? 0 : (plane) < 45 ? 1 : (plane) < 65 ? 2 : 3)
#define IN_QUARTER(plane) ((plane) - BEGIN(QUARTER(plane)))
#define PLACE(plane) (IN_QUARTER(plane) / WIDTH(QUARTER(plane)) * 5 + IN_QUARTER(plane) % WIDTH(QUARTER(plane)))
#define GRAD_PLACES 25
#define GRAD_PLACE(plane) PLACE(plane)

#if GRADIENT
#define EDGE 8
#define SOURCE_EDGE 4
#define READ_PLANES 25
#define PLACES 81
#define TERMS(place) 1
#define WEIGHT_PLANE(place, term) (place)
#define READ_PLANE(place, term) PLACE(place)
#define IS_READ(u, t) (((u) + (t)) % 2)
#define READS(u, t) (((u) + (t) - 1) / 2)
#else
#define EDGE 4
#define SOURCE_EDGE 8
#define READ_PLANES 81
#define PLACES 25
#define TERMS(place) (((place) / 5 < 4 ? 2 : 1) * ((place) % 5 < 4 ? 2 : 1))
#define TERM_QUARTER(place, term) ((place) % 5 < 4 ? (term) : 2 * (term))
#define WEIGHT_PLANE(place, term) PLANE(TERM_QUARTER(place, term), (place) / 5, (place) % 5)
#define READ_PLANE(place, term) WEIGHT_PLANE(place, term)
#define IS_READ(u, t) 1
#define READS(u, t) (2 * (u) + (t))
#endif

#define A 0.75f
#define B 2.0f

#include "winograd.clh"

#ifdef TRANSFORM_READ
#define EACH_5(X) EACH_4(X) X(4)
#define ROW_4(X, i) X(i, 0) X(i, 1) X(i, 2) X(i, 3)
#define ROW_5(X, i) ROW_4(X, i) X(i, 4)
#define EACH_4_4(X) ROW_4(X, 0) ROW_4(X, 1) ROW_4(X, 2) ROW_4(X, 3)
#define EACH_5_4(X) EACH_4_4(X) ROW_4(X, 4)
#define EACH_4_5(X) ROW_5(X, 0) ROW_5(X, 1) ROW_5(X, 2) ROW_5(X, 3)
#define EACH_5_5(X) EACH_4_5(X) ROW_5(X, 4)

// Bt d and its like, without infinity and with it: values in place of as many.
#define TRANSFORM_4(d0, d1, d2, d3)                                    \
    {                                                                  \
        const float16 at_b = d3 - A * A * d1;                          \
        const float16 even = d3 - B * d2, odd = d2 - B * d1;           \
        d0 = at_b + B * (A * A * d0 - d2);                             \
        d1 = even + A * odd;                                           \
        d2 = even - A * odd;                                           \
        d3 = at_b;                                                     \
    }
#define TRANSFORM_5(d0, d1, d2, d3, d4)                                \
    {                                                                  \
        d4 = (d4 - A * A * d2) - B * (d3 - A * A * d1);                \
        TRANSFORM_4(d0, d1, d2, d3)                                    \
    }
#define COLUMN_4(j) TRANSFORM_4(t0_##j, t1_##j, t2_##j, t3_##j)
#define COLUMN_5(j) TRANSFORM_5(t0_##j, t1_##j, t2_##j, t3_##j, t4_##j)
#define ROW_OF_4(i) TRANSFORM_4(t##i##_0, t##i##_1, t##i##_2, t##i##_3)
#define ROW_OF_5(i) TRANSFORM_5(t##i##_0, t##i##_1, t##i##_2, t##i##_3, t##i##_4)

// What 16 tiles read of the channel at x, transformed, plane by plane, to `read`.
static inline void transform_read(__global const STORAGE(X_T) *x, const Piece *pieces, size_t WS, size_t ahead,
                                  __global float *read) {
#define WRITE(s, i, j) TO_PIECES(t##i##_##j, read + PLANE(s, i, j) * READ_FLOATS)
#define WRITE_0(i, j) WRITE(0, i, j)
#if GRADIENT
#define READ(i, j) float16 t##i##_##j = FROM_PIECES(i, j);
    EACH_5(PREFETCH_PIECES)
    EACH_5_5(READ)
    EACH_5(COLUMN_5)
    EACH_5(ROW_OF_5)
    EACH_5_5(WRITE_0)
#else
#define READ_0(i, j) float16 t##i##_##j = FROM_PIECES(2 * i, 2 * j);
#define READ_1(i, j) float16 t##i##_##j = FROM_PIECES(2 * i, 2 * j + 1);
#define READ_2(i, j) float16 t##i##_##j = FROM_PIECES(2 * i + 1, 2 * j);
#define READ_3(i, j) float16 t##i##_##j = FROM_PIECES(2 * i + 1, 2 * j + 1);
#define WRITE_1(i, j) WRITE(1, i, j)
#define WRITE_2(i, j) WRITE(2, i, j)
#define WRITE_3(i, j) WRITE(3, i, j)
    EACH_5(PREFETCH_PIECES)
    PREFETCH_PIECES(5) PREFETCH_PIECES(6) PREFETCH_PIECES(7) PREFETCH_PIECES(8)
    { EACH_5_5(READ_0) EACH_5(COLUMN_5) EACH_5(ROW_OF_5) EACH_5_5(WRITE_0) }
    { EACH_5_4(READ_1) EACH_4(COLUMN_5) EACH_5(ROW_OF_4) EACH_5_4(WRITE_1) }
    { EACH_4_5(READ_2) EACH_5(COLUMN_4) EACH_4(ROW_OF_5) EACH_4_5(WRITE_2) }
    { EACH_4_4(READ_3) EACH_4(COLUMN_4) EACH_4(ROW_OF_4) EACH_4_4(WRITE_3) }
#endif
}

#endif

#ifdef WINOGRAD
// At s: four values of four, and of five.
#define SUM_4(y0, y1, y2, y3, s0, s1, s2, s3)                          \
    {                                                                  \
        const float16 plus = s1 + s2, minus = s1 - s2, at_b = s3;      \
        y0 = s0 + plus + at_b;                                         \
        y1 = A * minus + B * at_b;                                     \
        y2 = A * A * plus + B * B * at_b;                              \
        y3 = A * A * A * minus + B * B * B * at_b;                     \
    }
#define SUM_5(y0, y1, y2, y3, s0, s1, s2, s3, s4)                      \
    {                                                                  \
        SUM_4(y0, y1, y2, y3, s0, s1, s2, s3)                          \
        y3 += s4;                                                      \
    }
// A column of the sums of quarter s, of four or five rows.
#define SUM(s, i, j) LOAD16(f32, sums, PLANE(s, i, j) * SUM_FLOATS)
#define SUM_COLUMN_4(s, j)                                                                                  \
    float16 y##s##_0_##j, y##s##_1_##j, y##s##_2_##j, y##s##_3_##j;                                         \
    {                                                                                                       \
        const float16 s0 = SUM(s, 0, j), s1 = SUM(s, 1, j), s2 = SUM(s, 2, j), s3 = SUM(s, 3, j);           \
        SUM_4(y##s##_0_##j, y##s##_1_##j, y##s##_2_##j, y##s##_3_##j, s0, s1, s2, s3)                       \
    }
#define SUM_COLUMN_5(s, j)    \
    SUM_COLUMN_4(s, j)        \
    y##s##_3_##j += SUM(s, 4, j);
#define SUM_ROW_4(s, i)                                                                            \
    SUM_4(v##s##_0, v##s##_1, v##s##_2, v##s##_3, y##s##_##i##_0, y##s##_##i##_1, y##s##_##i##_2, \
          y##s##_##i##_3)
#define SUM_ROW_5(s, i)                \
    SUM_ROW_4(s, i)                    \
    v##s##_3 += y##s##_##i##_4;
#define TOTAL(s) ((v##s##_0 + v##s##_1) + (v##s##_2 + v##s##_3))

// Turns the sums of 16 tiles into rows of outputs. Returns for each tile a number that is finite only if all its
// outputs are: neither inf nor nan goes away in a sum.
static inline float16 transform_sums(__global const float *sums, float bias, int relu, ushort *rows) {
    float16 total = 0.0f;
#if GRADIENT
// Row 2 i + (1 - s / 2) of 8, from row i of the quarters s and s + 1, which have the odd and the even columns.
#define STORE_2(k, l, at)                                                                                             \
    STORE_PRIVATE(ushort16,                                                                                           \
                  as_ushort16((uint8)(p0.s##k, p1.s##k, p2.s##k, p3.s##k, p0.s##l, p1.s##l, p2.s##l, p3.s##l)),       \
                  row + at);
#define STORE_ROW(s, odd, even, i)                                                                        \
    {                                                                                                     \
        float16 v##odd##_0, v##odd##_1, v##odd##_2, v##odd##_3, v##even##_0, v##even##_1, v##even##_2, v##even##_3; \
        SUM_ROW_5(odd, i)                                                                                 \
        SUM_ROW_4(even, i)                                                                                \
        total += TOTAL(odd) + TOTAL(even);                                                                \
        const uint16 p0 = BITS_OF_2(v##even##_0, v##odd##_0), p1 = BITS_OF_2(v##even##_1, v##odd##_1);    \
        const uint16 p2 = BITS_OF_2(v##even##_2, v##odd##_2), p3 = BITS_OF_2(v##even##_3, v##odd##_3);    \
        ushort *const row = rows + (2 * i + 1 - s / 2) * ROW;                                             \
        STORE_2(0, 1, 0) STORE_2(2, 3, 16) STORE_2(4, 5, 32) STORE_2(6, 7, 48)                            \
        STORE_2(8, 9, 64) STORE_2(a, b, 80) STORE_2(c, d, 96) STORE_2(e, f, 112)                          \
    }
    {
        SUM_COLUMN_5(0, 0) SUM_COLUMN_5(0, 1) SUM_COLUMN_5(0, 2) SUM_COLUMN_5(0, 3) SUM_COLUMN_5(0, 4)
        SUM_COLUMN_5(1, 0) SUM_COLUMN_5(1, 1) SUM_COLUMN_5(1, 2) SUM_COLUMN_5(1, 3)
        STORE_ROW(0, 0, 1, 0) STORE_ROW(0, 0, 1, 1) STORE_ROW(0, 0, 1, 2) STORE_ROW(0, 0, 1, 3)
    }
    {
        SUM_COLUMN_4(2, 0) SUM_COLUMN_4(2, 1) SUM_COLUMN_4(2, 2) SUM_COLUMN_4(2, 3) SUM_COLUMN_4(2, 4)
        SUM_COLUMN_4(3, 0) SUM_COLUMN_4(3, 1) SUM_COLUMN_4(3, 2) SUM_COLUMN_4(3, 3)
        STORE_ROW(2, 2, 3, 0) STORE_ROW(2, 2, 3, 1) STORE_ROW(2, 2, 3, 2) STORE_ROW(2, 2, 3, 3)
    }
#else
#define STORE_ROW(i)                                                                      \
    {                                                                                     \
        float16 v0_0, v0_1, v0_2, v0_3;                                                   \
        SUM_ROW_5(0, i)                                                                   \
        total += TOTAL(0);                                                                \
        STORE_4(v0_0, v0_1, v0_2, v0_3, rows + i * ROW)                                   \
    }
    SUM_COLUMN_5(0, 0) SUM_COLUMN_5(0, 1) SUM_COLUMN_5(0, 2) SUM_COLUMN_5(0, 3) SUM_COLUMN_5(0, 4)
    EACH_4(STORE_ROW)
#endif
    return total;
}
#endif

#ifdef TRANSFORM_WEIGHTS
// G g: four values of one, and five of two.
#define TRANSFORM_1(u, g0)                                                 \
    {                                                                      \
        u[0] = g0 * (1.0f / (A * A * B));                                  \
        u[1] = g0 * (1.0f / (2.0f * A * A * (A - B)));                     \
        u[2] = g0 * (-1.0f / (2.0f * A * A * (A + B)));                    \
        u[3] = g0 * (1.0f / (B * (B * B - A * A)));                        \
    }
#define TRANSFORM_2(u, g0, g1)                                             \
    {                                                                      \
        u[0] = g0 * (1.0f / (A * A * B));                                  \
        u[1] = (g0 + A * g1) * (1.0f / (2.0f * A * A * (A - B)));          \
        u[2] = (g0 - A * g1) * (-1.0f / (2.0f * A * A * (A + B)));         \
        u[3] = (g0 + B * g1) * (1.0f / (B * (B * B - A * A)));             \
        u[4] = g1;                                                         \
    }

// G g Gt of 16 elements of a panel, `distance` apart, to panels[e] and the following, less than `end`.
static inline void transform_taps(const float16 *g, __global float *panels, size_t distance, size_t e, size_t end) {
    float16 u[2][3][5], v[2][5];
    for (int j = 0; j < 3; j++) {
        TRANSFORM_2(u[0][j], g[j], g[6 + j])
        TRANSFORM_1(u[1][j], g[3 + j])
    }
    for (int a = 0; a < 2; a++)
        for (int i = 0; i < 5 - a; i++) {
            TRANSFORM_2(v[0], u[a][0][i], u[a][2][i])
            TRANSFORM_1(v[1], u[a][1][i])
            for (int b = 0; b < 2; b++)
                for (int j = 0; j < 5 - b; j++)
                    STORE_PART(f32, v[b][j], panels + PLANE(2 * a + b, i, j) * distance, e, end);
        }
}
#endif

#ifdef WEIGHT_GRAD
// A e: five values of four.
#define TRANSFORM_GRAD(u, i, e0, e1, e2, e3)                                          \
    const float16 u##0_##i = e0, u##4_##i = e3;                                       \
    float16 u##1_##i, u##2_##i;                                                       \
    GRAD_AT(u##1_##i, u##2_##i, A, e0, e1, e2, e3)                                    \
    const float16 u##3_##i = e0 + B * (e1 + B * (e2 + B * e3));
#define GRAD_COLUMN(j) TRANSFORM_GRAD(u, j, GRAD(0, j), GRAD(1, j), GRAD(2, j), GRAD(3, j))

// A e At of the gradient of a tile's outputs, of 16 channels.
static inline void transform_grad(__global const float *e, __global float *grads) {
#define WRITE_GRAD(i, j) STORE16(f32, v##j##_##i, grads, (5 * i + j) * GRAD_FLOATS);
#define GRAD_ROW(i)                                                                             \
    {                                                                                           \
        TRANSFORM_GRAD(v, i, u##i##_0, u##i##_1, u##i##_2, u##i##_3)                            \
        WRITE_GRAD(i, 0) WRITE_GRAD(i, 1) WRITE_GRAD(i, 2) WRITE_GRAD(i, 3) WRITE_GRAD(i, 4)    \
    }
    EACH_4(GRAD_COLUMN)
    EACH_5(GRAD_ROW)
}
#endif

#ifdef WEIGHT_GRAD_FINISH
// Gt s: one value of four, and two of five.
#define TRANSFORM_FILTER(t, s0, s1, s2, s3)                                                                \
    t = s0 * (1.0f / (A * A * B)) + s1 * (1.0f / (2.0f * A * A * (A - B))) -                              \
        s2 * (1.0f / (2.0f * A * A * (A + B))) + s3 * (1.0f / (B * (B * B - A * A)));
#define TRANSFORM_SECOND(t, s1, s2, s3, s4)                                                                \
    t = s1 * (A / (2.0f * A * A * (A - B))) + s2 * (A / (2.0f * A * A * (A + B))) +                       \
        s3 * (B / (B * (B * B - A * A))) + s4;

// Gt s G: nine taps of the sums of all planes.
static inline void transform_filter(const float16 *s, float16 *taps) {
    for (int quarter = 0; quarter < 4; quarter++) {
        const int a = quarter / 2, b = quarter % 2;
        const float16 *plane = s + BEGIN(quarter);
        float16 t[2][5];
        for (int j = 0; j < WIDTH(quarter); j++) {
            const int width = WIDTH(quarter);
            TRANSFORM_FILTER(t[0][j], plane[j], plane[width + j], plane[2 * width + j], plane[3 * width + j])
            if (a == 0)
                TRANSFORM_SECOND(t[1][j], plane[width + j], plane[2 * width + j], plane[3 * width + j],
                                 plane[4 * width + j])
        }
        for (int i = 0; i < 2 - a; i++) {
            float16 *const row = taps + 3 * (a + 2 * i);
            TRANSFORM_FILTER(row[b], t[i][0], t[i][1], t[i][2], t[i][3])
            if (b == 0) TRANSFORM_SECOND(row[2], t[i][1], t[i][2], t[i][3], t[i][4])
        }
    }
}
#endif

#include "winograd_kernels.clh"
#include "winograd_grad_kernels.clh"
