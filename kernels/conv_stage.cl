// conv_stage.cl: what a convolution does before and after its sums, on every device.
//
// STAGING. The source (N, C, H, W) is copied into planes where every tap of the kernel is a constant offset away from
// an output position, and neighbouring positions are neighbours in memory, whatever the stride:
//
//      source, padded with zeros            staged [n][c][phase y][phase x][HS][WS]
//
//      x ->                                 phase x = 0    1
//      0 . . . . 0                          +-------+ +-------+      row y of the padded source lies in phase
//      . a b c d .    stride 2 across       | 0 b d | | a c 0 |      y % stride_y, row y / stride_y; columns alike.
//      . e f g h .    ------------------>   | 0 f h | | e g 0 |      Phases that no tap reads are left out.
//      0 . . . . 0                          +-------+ +-------+
//
// An output position (n, r, q) lies at n * image + r * WS + q, and step k = (channel, tap) of its sum at offsets[k]
// from there. `offsets` makes that table.
//
// INTERLEAVING. The input gradient of a strided convolution is computed phase by phase; the phases lie one after the
// other in `phases`, [a][b][n][c][rows of a][columns of b], and are put together row by row.
//
//   X_T, Y_T   storage types of what is read and written
//
// *_rows is for CPU devices: a work-item writes `each` whole rows, 16 elements at a time; what a store writes beyond
// the end of a row is overwritten by the next row. *_elements is for all others, a work-item an element.

#ifdef STAGE_ROWS
// 16 elements of a row, `step` apart, the first at column u (which need not exist): zero outside of 0 .. W-1. The row
// begins at element `row` of a tensor of `size` elements.
inline float16 row16(__global const STORAGE(X_T) *x, long row, long u, long W, uint step, long size) {
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const long at = row + u;
    if (step > 2 || at < 0 || at + 16 * (long)step > size) {
        float lanes[16];
        for (int i = 0; i < 16; i++) {
            const long w = u + i * (long)step;
            lanes[i] = w >= 0 && w < W ? LOAD(X_T, x, row + w) : 0.0f;
        }
        return vload16(0, lanes);
    }
    float16 v = LOAD16(X_T, x, at);
    if (step == 2) v = (float16)(v.even, LOAD16(X_T, x, at + 16).even);
    if (u >= 0 && u + 16 * (long)step <= W) return v;
    const int low = (int)max(-u, 0L), high = (int)min(W - u, 64L);
    const int16 column = lane * (int)step;
    return select((float16)(0.0f), v, column >= low && column < high);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
stage_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong first,
           const ulong size, const ulong rows, const ulong H, const ulong W, const ulong HS, const ulong WS,
           const uint phases_y, const uint phases_x, const uint stride_y, const uint stride_x, const uint pad_y,
           const uint pad_x, const uint each) {
    const size_t begin = (size_t)get_global_id(0) * each, last = min(begin + each, (size_t)rows), end = last * WS;
    size_t line = begin % HS, plane = begin / HS / (phases_x * phases_y), at = begin * WS;
    uint phase_x = begin / HS % phases_x, phase_y = begin / (HS * phases_x) % phases_y;
    for (size_t row = begin; row < last; row++, at += WS) {
        const long h = (long)(line * stride_y + phase_y) - pad_y;
        if (h >= 0 && h < (long)H) {
            const long source = (long)(((first + plane) * H + h) * W);
            long u = (long)phase_x - pad_x;
            for (size_t c = 0; c < WS; c += 16, u += 16 * stride_x)
                STORE_PART(Y_T, row16(x, source, u, W, stride_x, size), y, at + c, end);
        } else {
            for (size_t c = 0; c < WS; c += 16) STORE_PART(Y_T, (float16)(0.0f), y, at + c, end);
        }
        if (++line < HS) continue;
        line = 0;
        if (++phase_x < phases_x) continue;
        phase_x = 0;
        if (++phase_y < phases_y) continue;
        phase_y = 0;
        plane++;
    }
}
#endif

#ifdef STAGE_ELEMENTS
__kernel void stage_elements(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                             const ulong first, const ulong rows, const ulong H, const ulong W, const ulong HS,
                             const ulong WS, const uint phases_y, const uint phases_x, const uint stride_y,
                             const uint stride_x, const uint pad_y, const uint pad_x) {
    const size_t at = get_global_id(0), row = at / WS;
    if (row >= rows) return;
    const uint phase_x = row / HS % phases_x, phase_y = row / (HS * phases_x) % phases_y;
    const size_t plane = row / (HS * phases_x * phases_y);
    const long h = (long)(row % HS * stride_y + phase_y) - pad_y, w = (long)(at % WS * stride_x + phase_x) - pad_x;
    const bool inside = h >= 0 && h < (long)H && w >= 0 && w < (long)W;
    STORE(Y_T, inside ? LOAD(X_T, x, ((first + plane) * H + h) * W + w) : 0.0f, y, at);
}
#endif

#ifdef OFFSETS
// Tap (i, j) of a channel is at row first_y + i * step_y and column first_x + j * step_x of the padded source.
__kernel void offsets(__global ulong *restrict table, const ulong K, const uint taps_y, const uint taps_x,
                      const int first_y, const int first_x, const int step_y, const int step_x, const uint stride_y,
                      const uint stride_x, const uint phases_y, const uint phases_x, const ulong HS, const ulong WS) {
    const size_t k = get_global_id(0);
    if (k >= K) return;
    const uint taps = taps_y * taps_x, tap = k % taps;
    const uint y = first_y + (int)(tap / taps_x) * step_y, x = first_x + (int)(tap % taps_x) * step_x;
    const size_t phase = (k / taps * phases_y + y % stride_y) * phases_x + x % stride_x;
    table[k] = (phase * HS + y / stride_y) * WS + x / stride_x;
}
#endif

// Where phase (a, b) begins in `phases`, and how many of `extent` positions phase p of `stride` has.
#define POSITIONS(extent, p, stride) (((extent) + (stride) - 1 - (p)) / (stride))
#define BEFORE(extent, p, stride) ((p) * ((extent) / (stride)) + min((size_t)(p), (size_t)((extent) % (stride))))
#define PHASE_BEGIN(a, b, rows_a) \
    (planes * (BEFORE(H, a, stride_y) * (size_t)W + (rows_a) * BEFORE(W, b, stride_x)))

#ifdef INTERLEAVE_ROWS
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
interleave_rows(__global const STORAGE(Y_T) *restrict phases, __global STORAGE(Y_T) *restrict y, const ulong planes,
                const ulong H, const ulong W, const uint stride_y, const uint stride_x, const uint each) {
    const size_t begin = (size_t)get_global_id(0) * each, last = min(begin + each, (size_t)(planes * H));
    const size_t end = last * W, size = planes * H * W;
    for (size_t row = begin; row < last; row++) {
        const size_t plane = row / H, h = row % H, a = h % stride_y, rows_a = POSITIONS(H, a, stride_y);
        const size_t at = plane * rows_a + h / stride_y;
        size_t w = 0;
        if (stride_x == 2) {
            const size_t even = PHASE_BEGIN(a, 0, rows_a) + at * POSITIONS(W, 0, 2);
            const size_t odd = PHASE_BEGIN(a, 1, rows_a) + at * POSITIONS(W, 1, 2);
            for (; w < W && odd + w / 2 + 16 <= size && even + w / 2 + 16 <= size; w += 32) {
                const float16 e = LOAD16(Y_T, phases, even + w / 2), o = LOAD16(Y_T, phases, odd + w / 2);
                float16 low, high;
                low.even = e.lo;
                low.odd = o.lo;
                high.even = e.hi;
                high.odd = o.hi;
                STORE_PART(Y_T, low, y, row * W + w, end);
                if (w + 16 < W) STORE_PART(Y_T, high, y, row * W + w + 16, end);
            }
        }
        for (; w < W; w++) {
            const size_t b = w % stride_x, columns_b = POSITIONS(W, b, stride_x);
            STORE(Y_T, LOAD(Y_T, phases, PHASE_BEGIN(a, b, rows_a) + at * columns_b + w / stride_x), y, row * W + w);
        }
    }
}
#endif

#ifdef INTERLEAVE_ELEMENTS
__kernel void interleave_elements(__global const STORAGE(Y_T) *restrict phases, __global STORAGE(Y_T) *restrict y,
                                  const ulong planes, const ulong H, const ulong W, const uint stride_y,
                                  const uint stride_x) {
    const size_t at = get_global_id(0);
    if (at >= planes * H * W) return;
    const size_t w = at % W, h = at / W % H, plane = at / (H * W), a = h % stride_y, b = w % stride_x;
    const size_t rows_a = POSITIONS(H, a, stride_y), columns_b = POSITIONS(W, b, stride_x);
    const size_t from = (plane * rows_a + h / stride_y) * columns_b + w / stride_x;
    STORE(Y_T, LOAD(Y_T, phases, PHASE_BEGIN(a, b, rows_a) + from), y, at);
}
#endif
