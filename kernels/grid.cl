// grid.cl: bilinear sampling of images at the places that a grid names, affine grids, and their gradients.
//
//     x     [n][c][h][w]           the image
//     grid  [n][oh * ow][2]        where each position of the result lies: across, down; -1 .. 1 is the image
//     y     [n][c][oh * ow]        the result
//
// A position lies between four pixels, its taps, (row, row + 1) x (column, column + 1):
//
//     tap 0 --- tap 1      weight of tap 0 = (1 - down) * (1 - right), of tap 3 = down * right, ...
//       |  (down, |        A tap outside the image is zero (BORDER 0) or the nearest pixel of the image (BORDER 1).
//       |   right)|        Its place in the plane is in at[tap][position]; -1: outside, it has no part.
//     tap 2 --- tap 3
//
// Coordinates are limited to just outside the image before they become integers, so that huge ones, infinities and
// NaNs lead to no address outside it. A NaN stays in the weights: what it samples is NaN.
//
//   X_T, GRID_T, G_T, Y_T   storage types of image, grid, the result's gradient and what is written
//   BORDER                  padding mode: 0 zeros, 1 border
//   SPAN                    positions that a work-item takes at a time: 16 on a CPU, 1 on a GPU

// Coordinate -1 .. 1 as a pixel's number; align_corners as PyTorch has it.
static inline float pixel(const float coordinate, const int size, const int align_corners) {
    if (!align_corners) return ((coordinate + 1.0f) * (float)size - 1.0f) * 0.5f;
    return size > 1 ? (coordinate + 1.0f) * 0.5f * (float)(size - 1) : 0.0f;
}

// Derivative of pixel().
static inline float pixel_slope(const int size, const int align_corners) {
    return 0.5f * (float)(align_corners ? max(size - 1, 0) : size);
}

// Output number i of `size` as a coordinate.
static inline float8 coordinate(const float8 i, const uint size, const int align_corners) {
    if (!align_corners) return (2.0f * i + 1.0f) / (float)size - 1.0f;
    return size > 1 ? 2.0f * i / (float)(size - 1) - 1.0f : (float8)(0.0f);
}

#ifdef SPAN

#if SPAN == 16
#define LOAD_SPAN(T, lanes, p, i, end) vstore16(LOAD_PART(T, p, i, end, 0.0f), 0, lanes)
#define STORE_SPAN(T, lanes, p, i, end) STORE_PART(T, vload16(0, lanes), p, i, end)
#elif SPAN == 1
#define LOAD_SPAN(T, lanes, p, i, end) (lanes)[0] = LOAD(T, p, i)
#define STORE_SPAN(T, lanes, p, i, end) STORE(T, (lanes)[0], p, i)
#else
#error "SPAN must be 16 or 1"
#endif

typedef struct {
    int at[4][SPAN];
    float right[SPAN], down[SPAN];
} taps_t;

// Taps of the positions p .. p + SPAN - 1; those that lie in rows top .. bottom - 1 of the image.
static inline void find_taps(taps_t *taps, __global const STORAGE(GRID_T) *grid, const size_t p, const size_t end,
                             const int h, const int w, const int align_corners, const int top, const int bottom) {
    for (uint k = 0; k < SPAN; k++) {
        const size_t position = min(p + k, end - 1);
        const float across = pixel(LOAD(GRID_T, grid, 2 * position), w, align_corners);
        const float along = pixel(LOAD(GRID_T, grid, 2 * position + 1), h, align_corners);
        const float column = fmin(fmax(across, -2.0f), (float)w + 1.0f), left = floor(column);
        const float row = fmin(fmax(along, -2.0f), (float)h + 1.0f), upper = floor(row);
        taps->right[k] = isnan(across) ? across : column - left;
        taps->down[k] = isnan(along) ? along : row - upper;
        for (uint t = 0; t < 4; t++) {
            int i = (int)upper + (int)(t / 2), j = (int)left + (int)(t % 2);
#if BORDER
            i = clamp(i, 0, h - 1);
            j = clamp(j, 0, w - 1);
#endif
            const int inside = (i >= top) & (i < bottom) & (j >= 0) & (j < w) & (p + k < end);
            taps->at[t][k] = inside ? i * w + j : -1;
        }
    }
}

// Pixel of a tap. The load is never left out, so that the loop over positions can become vectors.
static inline float tap_value(__global const STORAGE(X_T) *x, const int at) {
    const float v = LOAD(X_T, x, max(at, 0));
    return at < 0 ? 0.0f : v;
}

#define WEIGHT(taps, t, k)                                                    \
    (((t) / 2 ? (taps).down[k] : 1.0f - (taps).down[k]) *                     \
     ((t) % 2 ? (taps).right[k] : 1.0f - (taps).right[k]))

#ifdef GRID_SAMPLE
// A unit is a run of SPAN positions in `block` channels of one image.
__kernel void grid_sample(__global const STORAGE(X_T) *restrict x, __global const STORAGE(GRID_T) *restrict grid,
                          __global STORAGE(Y_T) *restrict y, const uint channels, const int h, const int w,
                          const ulong positions, const int align_corners, const uint block, const uint blocks,
                          const ulong spans, const uint each, const ulong units) {
    const size_t plane = (size_t)h * w, stop = min(((size_t)get_global_id(0) + 1) * each, (size_t)units);
    for (size_t u = (size_t)get_global_id(0) * each; u < stop; u++) {
        const size_t p = u % spans * SPAN, n = u / spans / blocks;
        const uint first = (uint)(u / spans % blocks) * block, last = min(first + block, channels);
        taps_t taps;
        find_taps(&taps, grid + n * positions * 2, p, positions, h, w, align_corners, 0, h);
        for (uint c = first; c < last; c++) {
            __global const STORAGE(X_T) *from = x + (n * channels + c) * plane;
            float lanes[SPAN];
            for (uint k = 0; k < SPAN; k++) {
                const float right = taps.right[k], down = taps.down[k];
                const float upper =
                    (1.0f - right) * tap_value(from, taps.at[0][k]) + right * tap_value(from, taps.at[1][k]);
                const float lower =
                    (1.0f - right) * tap_value(from, taps.at[2][k]) + right * tap_value(from, taps.at[3][k]);
                lanes[k] = (1.0f - down) * upper + down * lower;
            }
            const size_t begin = (n * channels + c) * positions;
            STORE_SPAN(Y_T, lanes, y, begin + p, begin + positions);
        }
    }
}
#endif

#ifdef GRID_SAMPLE_BACKWARD_GRID
// Gradient of the grid. A unit is a run of SPAN positions of one image; it goes through all channels.
__kernel void grid_sample_backward_grid(__global const STORAGE(G_T) *restrict g,
                                        __global const STORAGE(X_T) *restrict x,
                                        __global const STORAGE(GRID_T) *restrict grid,
                                        __global STORAGE(Y_T) *restrict dgrid, const uint channels, const int h,
                                        const int w, const ulong positions, const int align_corners,
                                        const ulong spans, const uint each, const ulong units) {
    const size_t plane = (size_t)h * w, stop = min(((size_t)get_global_id(0) + 1) * each, (size_t)units);
    for (size_t u = (size_t)get_global_id(0) * each; u < stop; u++) {
        const size_t p = u % spans * SPAN, n = u / spans;
        taps_t taps;
        find_taps(&taps, grid + n * positions * 2, p, positions, h, w, align_corners, 0, h);
        float across[SPAN], along[SPAN], lanes[SPAN];
        for (uint k = 0; k < SPAN; k++) across[k] = along[k] = 0.0f;
        for (uint c = 0; c < channels; c++) {
            __global const STORAGE(X_T) *from = x + (n * channels + c) * plane;
            const size_t begin = (n * channels + c) * positions;
            LOAD_SPAN(G_T, lanes, g, begin + p, begin + positions);
            for (uint k = 0; k < SPAN; k++) {
                const float v0 = tap_value(from, taps.at[0][k]), v1 = tap_value(from, taps.at[1][k]);
                const float v2 = tap_value(from, taps.at[2][k]), v3 = tap_value(from, taps.at[3][k]);
                const float right = taps.right[k], down = taps.down[k];
                across[k] += lanes[k] * ((1.0f - down) * (v1 - v0) + down * (v3 - v2));
                along[k] += lanes[k] * ((1.0f - right) * (v2 - v0) + right * (v3 - v1));
            }
        }
        for (uint k = 0; k < SPAN && p + k < positions; k++) {
            const size_t at = (n * positions + p + k) * 2;
            STORE(Y_T, across[k] * pixel_slope(w, align_corners), dgrid, at);
            STORE(Y_T, along[k] * pixel_slope(h, align_corners), dgrid, at + 1);
        }
    }
}
#endif

#ifdef GRID_SAMPLE_BACKWARD_INPUT
// Moves elements begin .. end - 1 of `count` planes, the first of which is at `at`, from `recent` to the sums in dx.
static inline void add_up(__global float *dx, __global float *recent, size_t at, uint count, size_t plane, size_t begin,
                          size_t end) {
    for (uint c = 0; c < count; c++)
        for (size_t i = at + c * plane + begin; i < at + c * plane + end; i++) {
            dx[i] += recent[i];
            recent[i] = 0.0f;
        }
}

// Gradient of the image. Any position may reach any pixel. A unit is a band of rows in `block` channels of one image:
// one work-item owns it, goes through all positions in order and adds what falls into the band. Nothing is shared,
// and each sum has one order. Where positions are many times as many as `interval`, pixels are summed over so many in
// `recent`, and these sums in dx, so that rounding does not grow with the positions that fall on one pixel; else
// `recent` is dx.
__kernel void grid_sample_backward_input(__global const STORAGE(G_T) *restrict g,
                                         __global const STORAGE(GRID_T) *restrict grid, __global float *dx,
                                         __global float *recent, const ulong interval, const uint channels,
                                         const int h, const int w, const ulong positions, const int align_corners,
                                         const uint block, const uint blocks, const uint band, const uint bands,
                                         const ulong units) {
    const size_t u = get_global_id(0);
    if (u >= units) return;
    const size_t plane = (size_t)h * w, n = u / blocks / bands;
    const uint first = (uint)(u % blocks) * block, last = min(first + block, channels);
    const int top = (int)(u / blocks % bands * band), bottom = min(top + (int)band, h);
    for (uint c = first; c < last; c++) {
        __global float *to = dx + (n * channels + c) * plane, *first_to = recent + (n * channels + c) * plane;
        for (size_t i = (size_t)top * w; i < (size_t)bottom * w; i++) to[i] = first_to[i] = 0.0f;
    }
    const size_t owned = (n * channels + first) * plane, begin = (size_t)top * w, end = (size_t)bottom * w;
    size_t pause = interval;
    for (size_t p = 0; p < positions; p += SPAN) {
        if (p >= pause) {
            add_up(dx, recent, owned, last - first, plane, begin, end);
            pause += interval;
        }
        taps_t taps;
        find_taps(&taps, grid + n * positions * 2, p, positions, h, w, align_corners, top, bottom);
        for (uint c = first; c < last; c++) {
            __global float *to = recent + (n * channels + c) * plane;
            const size_t begin = (n * channels + c) * positions;
            float lanes[SPAN];
            LOAD_SPAN(G_T, lanes, g, begin + p, begin + positions);
            for (uint k = 0; k < SPAN; k++) {
                for (uint t = 0; t < 4; t++)
                    if (taps.at[t][k] >= 0) to[taps.at[t][k]] += lanes[k] * WEIGHT(taps, t, k);
            }
        }
    }
    if (recent != dx) add_up(dx, recent, owned, last - first, plane, begin, end);
}
#endif

#endif  // SPAN

// ------------------------------------------------------------------------------------------------- affine grids
// grid[n][oh][ow] = theta[n] (2 x 3) times (across, down, 1), the coordinates of output (oh, ow).

#define LANES8 (float8)(0, 1, 2, 3, 4, 5, 6, 7)

#ifdef AFFINE_GRID
// A work-item takes `each` rows of grids.
__kernel void affine_grid(__global const STORAGE(X_T) *restrict theta, __global STORAGE(Y_T) *restrict grid,
                          const uint oh, const uint ow, const int align_corners, const uint each, const ulong rows) {
    const size_t stop = min(((size_t)get_global_id(0) + 1) * each, (size_t)rows);
    for (size_t row = (size_t)get_global_id(0) * each; row < stop; row++) {
        const size_t t = row / oh * 6;
        const float down = coordinate((float8)(float)(row % oh), oh, align_corners).s0;
        const float x1 = LOAD(X_T, theta, t), x0 = LOAD(X_T, theta, t + 1) * down + LOAD(X_T, theta, t + 2);
        const float y1 = LOAD(X_T, theta, t + 3), y0 = LOAD(X_T, theta, t + 4) * down + LOAD(X_T, theta, t + 5);
        for (uint j = 0; j < ow; j += 8) {
            const float8 across = coordinate((float)j + LANES8, ow, align_corners);
            float16 v;
            v.even = x1 * across + x0;
            v.odd = y1 * across + y0;
            STORE_PART(Y_T, v, grid, (row * ow + j) * 2, (row + 1) * ow * 2);
        }
    }
}
#endif

#ifdef AFFINE_GRID_BACKWARD
// Sums for theta's gradient over a part of the rows of one grid: sums[n][part][2][3].
__kernel void affine_grid_backward(__global const STORAGE(G_T) *restrict g, __global float *restrict sums,
                                   const uint oh, const uint ow, const int align_corners, const uint span,
                                   const uint parts, const ulong all) {
    const size_t u = get_global_id(0);
    if (u >= all) return;
    const size_t n = u / parts;
    const uint first = (uint)(u % parts) * span, last = min(first + span, oh);
    float16 times_across = 0, times_down = 0, plain = 0;  // even lanes: of x, odd lanes: of y
    for (uint i = first; i < last; i++) {
        const size_t begin = (n * oh + i) * ow * 2, end = begin + 2 * (size_t)ow;
        float16 row = 0, row_across = 0; // by themselves, so that rounding grows with rows, not with elements
        for (uint j = 0; j < ow; j += 8) {
            const float8 across = coordinate((float)j + LANES8, ow, align_corners);
            const float16 v = LOAD_PART(G_T, g, begin + 2 * (size_t)j, end, 0.0f);
            row_across.even += across * v.even;
            row_across.odd += across * v.odd;
            row += v;
        }
        plain += row;
        times_across += row_across;
        times_down += coordinate((float8)(float)i, oh, align_corners).s0 * row;
    }
    const float16 sources[3] = {times_across, times_down, plain};
    for (uint k = 0; k < 3; k++) {
        sums[u * 6 + k] = sum16((float16)(sources[k].even, (float8)(0.0f)));
        sums[u * 6 + 3 + k] = sum16((float16)(sources[k].odd, (float8)(0.0f)));
    }
}
#endif

// ---------------------------------------------------------------------------------------------------- rotations
// theta[n] = (cos a, sin a, 0), (-sin a, cos a, 0), of one angle for each n, or one for all.

#ifdef ROTATION
__kernel void rotation(__global const STORAGE(X_T) *restrict angles, __global float *restrict theta,
                       const ulong count, const ulong n) {
    const size_t i = get_global_id(0);
    if (i >= n) return;
    const float angle = LOAD(X_T, angles, count == 1 ? 0 : i), c = cos(angle), s = sin(angle);
    const float values[6] = {c, s, 0.0f, -s, c, 0.0f};
    for (uint k = 0; k < 6; k++) theta[i * 6 + k] = values[k];
}
#endif

#ifdef ROTATION_BACKWARD
__kernel void rotation_backward(__global const STORAGE(G_T) *restrict g, __global const STORAGE(X_T) *restrict angles,
                                __global STORAGE(Y_T) *restrict dangles, const ulong count, const ulong n) {
    const size_t a = get_global_id(0);
    if (a >= count) return;
    const float angle = LOAD(X_T, angles, a), c = cos(angle), s = sin(angle);
    float sum = 0.0f;
    for (size_t i = a; i < n; i += count) {
        sum += c * (LOAD(G_T, g, i * 6 + 1) - LOAD(G_T, g, i * 6 + 3));
        sum -= s * (LOAD(G_T, g, i * 6) + LOAD(G_T, g, i * 6 + 4));
    }
    STORE(Y_T, sum, dangles, a);
}
#endif
