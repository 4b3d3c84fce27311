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
// from there: a table that the host makes.
//
// INTERLEAVING. The input gradient of a strided convolution is computed phase by phase; the phases lie one after the
// other in `phases`, [a][b][n][c][rows of a][columns of b], and are put together row by row.
//
//   X_T, Y_T   storage types of what is read and written; u16 for both where 16 bits are moved as they are
//   INDEX      of *_elements: type of an element's number: uint, which GPUs divide fast, or ulong if there are too many
//
// *_rows is for CPU devices: a work-item writes `each` whole rows, 16 elements at a time; what a store writes beyond
// the end of a row is overwritten by the next row. *_elements is for all others, a work-item an element.

// 16-bit elements of any kind, neither widened nor rounded.
#define storage_u16 ushort
#define value_u16 ushort
#define value_f32 float
#define value_f16 float
#define value_bf16 float
#define VALUE(T) CAT(value_, T)
#define VALUES(T) CAT(VALUE(T), 16)
static inline ushort load_u16(__global const ushort *p, size_t i) { return p[i]; }
static inline void store_u16(ushort v, __global ushort *p, size_t i) { p[i] = v; }
static inline ushort16 load16_u16(__global const ushort *p, size_t i) { return LOAD_ANY(ushort16, p + i); }
static inline void store16_u16(ushort16 v, __global ushort *p, size_t i) { STORE_ANY(ushort16, v, p + i); }

#ifdef STAGE_ROWS
// `count` elements, `step` apart from x[from] on, into neighbours from y[to] on. Loads stay below `size`, stores below
// `end`; they may go beyond the last element.
static inline void copy_elements(__global const STORAGE(X_T) *x, size_t from, size_t step, __global STORAGE(Y_T) *y,
                                 size_t to, size_t count, size_t size, size_t end) {
    for (size_t c = 0; c < count; c += 16) {
        const size_t i = count < 16 ? 0 : min(c, count - 16); // the last 16 may include some of those before
        const size_t s = from + i * step, d = to + i;
        if (step == 1 && s + 16 <= size && d + 16 <= end) {
            STORE16(Y_T, LOAD16(X_T, x, s), y, d);
        } else if (step == 2 && s + 32 <= size && d + 16 <= end) {
            const VALUES(X_T) low = LOAD16(X_T, x, s), high = LOAD16(X_T, x, s + 16);
            STORE16(Y_T, (VALUES(X_T))(low.even, high.even), y, d);
        } else {
            ONE_BY_ONE for (size_t k = 0; k < 16 && i + k < count; k++)
                STORE(Y_T, LOAD(X_T, x, s + k * step), y, d + k);
        }
    }
}

// Zeros from y[to] to y[stop - 1], and perhaps beyond, but below `end`. Returns where they end.
static inline size_t clear_elements(__global STORAGE(Y_T) *y, size_t to, size_t stop, size_t end) {
    for (; to < stop; to += 16) {
        if (to + 16 <= end) {
            STORE16(Y_T, (VALUES(Y_T))0, y, to);
        } else {
            ONE_BY_ONE for (; to < stop; to++) STORE(Y_T, (VALUE(Y_T))0, y, to);
            return to;
        }
    }
    return to;
}

// How many columns of a phase lie before column `u` of the padded source.
#define COLUMNS_BEFORE(u, phase) ((u) > (phase) ? ((u) - (phase) + stride_x - 1) / stride_x : 0)

__kernel ONE_WORK_ITEM void
stage_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong first,
           const ulong size, const ulong rows, const ulong H, const ulong W, const ulong HS, const ulong WS,
           const uint phases_y, const uint phases_x, const uint stride_y, const uint stride_x, const uint pad_y,
           const uint pad_x, const uint each) {
    const size_t begin = (size_t)get_global_id(0) * each, last = min(begin + each, (size_t)rows), end = last * WS;
    size_t zeros = 0; // where those end that were written last: they reach into the next row
    for (size_t row = begin; row < last;) {
        // the rows of one phase of a plane
        const size_t phase_x = row / HS % phases_x, phase_y = row / HS / phases_x % phases_y;
        const size_t plane = first + row / HS / (phases_x * phases_y), stop = min((row / HS + 1) * HS, last);
        // its columns from `left` to `right` - 1 come from the source
        const size_t right = min((size_t)COLUMNS_BEFORE(W + pad_x, phase_x), (size_t)WS);
        const size_t left = min((size_t)COLUMNS_BEFORE((size_t)pad_x, phase_x), right);
        const size_t column = phase_x + left * stride_x - pad_x;
        size_t h = row % HS * stride_y + phase_y;
        for (; row < stop; row++, h += stride_y) {
            const size_t at = row * WS;
            const bool inside = h >= pad_y && h - pad_y < H && left < right;
            zeros = clear_elements(y, max(at, zeros), at + (inside ? left : WS), end);
            if (!inside) continue;
            copy_elements(x, (plane * H + h - pad_y) * W + column, stride_x, y, at + left, right - left, size, end);
            zeros = clear_elements(y, at + right, at + WS, end);
        }
    }
}
#endif

#ifdef STAGE_ELEMENTS
__kernel void stage_elements(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                             const INDEX first, const INDEX rows, const INDEX H, const INDEX W, const INDEX HS,
                             const INDEX WS, const uint phases_y, const uint phases_x, const uint stride_y,
                             const uint stride_x, const uint pad_y, const uint pad_x) {
    const INDEX at = get_global_id(0), row = at / WS;
    if (row >= rows) return;
    const uint phase_x = row / HS % phases_x, phase_y = row / (HS * phases_x) % phases_y;
    const INDEX plane = row / (HS * phases_x * phases_y);
    // what lies before the source wraps around to numbers beyond it
    const INDEX h = row % HS * stride_y + phase_y - pad_y, w = at % WS * stride_x + phase_x - pad_x;
    STORE(Y_T, h < H && w < W ? LOAD(X_T, x, ((first + plane) * H + h) * W + w) : (VALUE(X_T))0, y, at);
}
#endif

// Where phase (a, b) begins in `phases`, and how many of `extent` positions phase p of `stride` has.
#define POSITIONS(extent, p, stride) (((extent) + (stride) - 1 - (p)) / (stride))
#define BEFORE(extent, p, stride) ((p) * ((extent) / (stride)) + min((size_t)(p), (size_t)((extent) % (stride))))
#define PHASE_BEGIN(a, b, rows_a) \
    (planes * (BEFORE(H, a, stride_y) * (size_t)W + (rows_a) * BEFORE(W, b, stride_x)))

#ifdef INTERLEAVE_ROWS
__kernel ONE_WORK_ITEM void
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
            for (; w < W && odd + w / 2 + 16 <= size && even + w / 2 + 16 <= size && row * W + w + 32 <= end; w += 32) {
                const VALUES(Y_T) e = LOAD16(Y_T, phases, even + w / 2), o = LOAD16(Y_T, phases, odd + w / 2);
                VALUES(Y_T) low, high;
                low.even = e.lo;
                low.odd = o.lo;
                high.even = e.hi;
                high.odd = o.hi;
                STORE16(Y_T, low, y, row * W + w);
                STORE16(Y_T, high, y, row * W + w + 16);
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
                                  const INDEX planes, const INDEX H, const INDEX W, const uint stride_y,
                                  const uint stride_x) {
    const INDEX at = get_global_id(0);
    if (at >= planes * H * W) return;
    const INDEX w = at % W, h = at / W % H, plane = at / (H * W), a = h % stride_y, b = w % stride_x;
    const INDEX rows_a = POSITIONS(H, a, stride_y), columns_b = POSITIONS(W, b, stride_x);
    const INDEX from = (plane * rows_a + h / stride_y) * columns_b + w / stride_x;
    STORE(Y_T, LOAD(Y_T, phases, PHASE_BEGIN(a, b, rows_a) + from), y, at);
}
#endif
