// pool_rows.cl: max and average pooling of NCHW tensors without padding, and their gradients, for CPU devices.
// (pool_elements.cl is for the others, pool_2x2.cl for the most common windows.)
//
// A tensor is a stack of planes (n, c). Window (oh, ow) of a plane covers KERNEL x KERNEL elements from row
// oh * STRIDE, column ow * STRIDE on; there are out_height x out_width of them, all inside the plane. A work-item takes
// many rows and computes 16 columns at a time:
//
//   x, rows of one window row        a line (private)                      y
//   |a b c d e f g h . . .|    max   phase 0  |a c e g . .|   max over     |0 1 2 3 . .|
//   |a b c d e f g h . . .|   ---->  phase 1  |b d f h . .|   KERNEL taps
//   |a b c d e f g h . . .|  of rows           column = STRIDE * q + phase
//
// Split into phases, a line has tap kw of 16 neighbouring windows side by side, whatever the stride:
// from element kw / STRIDE of phase kw % STRIDE on.
//
// Rows are written in order, 16 elements at a time. What the last 16 of a row hold beyond it is overwritten by the
// next row; only at the end of a work-item's rows is a store cut short.
//
// A gradient runs back through the same two steps: each row of windows gives its gradient to rows of x, and each row
// of x spreads it over the columns, every input gathering from its windows: nothing is added in an order that varies.
//
//   X_T, Y_T, G_T, DX_T   storage types of input, result, gradient of the result, gradient of the input
//   MAX                   1: maximum, 0: average
//   KERNEL, STRIDE        numbers for the common sizes; without them the arguments of the kernel

#ifndef KERNEL
#define KERNEL kernel_size
#define STRIDE stride
#endif

// Helpers of the inner loops: around a call PoCL's compiler saves and restores every vector register.
#define ALWAYS_INLINE static inline __attribute__((always_inline))

#define LINE 2048 // elements of a line
#define LINES 8   // lines at a time, at most
#define TILE 4096 // elements of a tile of lines, in max_pool_tiles_backward

// -------------------------------------------------------------------------------------------------- maximum
// Maxima are taken among keys (ordered_keys.clh). NaNs of either sign have the largest key, so that they win.

#ifdef X_T
#include "ordered_keys.clh"

// -0, whose key is -1, made equal to 0: of equal numbers the first gets the gradient.
static inline KEYS level(KEYS v) { return v == (KEY)-1 ? (KEYS)0 : v; }

static inline KEYS load_keys(__global const STORAGE(X_T) *p, size_t i, size_t end) {
    __global const WORD *words = (__global const WORD *)p;
    WORDS bits;
    if (i + 16 <= end) {
        bits = LOAD_ANY(WORDS, words + i);
    } else {
        WORD lanes[16];
        for (uint k = 0; k < 16; k++) lanes[k] = i + k < end ? words[i + k] : 0;
        bits = vload16(0, lanes);
    }
    const KEYS v = AS_KEYS(bits);
    return (v & LARGEST) > INFINITE ? (KEYS)LARGEST : turn(v);
}

static inline void store_keys(KEYS keys, __global STORAGE(X_T) *p, size_t i, size_t end) {
    __global WORD *words = (__global WORD *)p;
    const WORDS bits = AS_WORDS(turn(keys));
    if (i + 16 <= end) {
        STORE_ANY(WORDS, bits, words + i);
        return;
    }
    WORD lanes[16];
    vstore16(bits, 0, lanes);
    for (uint k = 0; k < 16 && i + k < end; k++) words[i + k] = lanes[k];
}
#endif

// -------------------------------------------------------------------------------------------- rows to a line
#if defined(POOL_ROWS) || defined(MAX_POOL_TILES_BACKWARD)
#if MAX
#define VALUE WORD // keys, moved as unsigned words
#define VALUES WORDS
#ifdef MAX_POOL_TILES_BACKWARD
#define READ(i, end) AS_WORDS(level(load_keys(x, i, end)))
#else
#define READ(i, end) AS_WORDS(load_keys(x, i, end))
#endif
#define COMBINE(a, b) AS_WORDS(max(AS_KEYS(a), AS_KEYS(b)))
#define WRITE(v, i, end) store_keys(AS_KEYS(v), y, i, end)
#else
#define VALUE float
#define VALUES float16
#define READ(i, end) LOAD_PART(X_T, x, i, end, 0.0f)
#define COMBINE(a, b) ((a) + (b))
#define WRITE(v, i, end) STORE_PART(Y_T, (v) * scale, y, i, end)
#endif

ALWAYS_INLINE VALUES down(__global const STORAGE(X_T) *x, size_t i, size_t size, uint width, uint rows) {
    VALUES v = READ(i, size);
    for (uint k = 1; k < rows; k++) {
        i += width;
        v = COMBINE(v, READ(i, size));
    }
    return v;
}

// `columns` columns from element i on, combined over `rows` rows, split into phases of `pitch` elements each.
ALWAYS_INLINE void fill_line(VALUE *line, __global const STORAGE(X_T) *x, size_t i, size_t size, uint width,
                             uint rows, uint columns, uint stride, uint pitch) {
    if (STRIDE == 1) {
        for (uint k = 0; k < columns; k += 16) STORE_PRIVATE(VALUES, down(x, i + k, size, width, rows), line + k);
    } else if (STRIDE == 2) {
        for (uint k = 0; k < columns; k += 32) {
            const VALUES a = down(x, i + k, size, width, rows), b = down(x, i + k + 16, size, width, rows);
            STORE_PRIVATE(VALUES, ((VALUES)(a.even, b.even)), line + k / 2);
            STORE_PRIVATE(VALUES, ((VALUES)(a.odd, b.odd)), line + pitch + k / 2);
        }
    } else {
        uint phase = 0, q = 0;
        for (uint k = 0; k < columns; k += 16) {
            VALUE lanes[16];
            vstore16(down(x, i + k, size, width, rows), 0, lanes);
            for (uint lane = 0; lane < 16 && k + lane < columns; lane++) {
                line[phase * pitch + q] = lanes[lane];
                if (++phase == STRIDE) phase = 0, q++;
            }
        }
    }
}
#define TAP(kw) ((kw) % STRIDE * pitch + (kw) / STRIDE) // where tap kw of the line's first window lies
#endif

// ------------------------------------------------------------------------------------- forward, a CPU's rows
#ifdef POOL_ROWS
// `lines` rows at a time: what was just written to a line is not read at once, for which a CPU would have to wait. Rows
// too long for a line are done `tile` windows (a multiple of 16) at a time, one by one.
__kernel ONE_WORK_ITEM void
pool_rows(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong size,
          const ulong rows, const uint each, const uint height, const uint width, const uint out_height,
          const uint out_width, const uint kernel_size, const uint stride, const uint tile, const uint pitch,
          const uint lines, const float scale) {
    VALUE line[LINE];
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)rows);
    const size_t end = last * out_width;
    size_t plane = first / out_height, row = first;
    uint oh = first - plane * out_height;
    while (row < last) {
        const uint count = min(min(lines, out_height - oh), (uint)(last - row));
        const size_t from = (plane * height + (size_t)oh * STRIDE) * width;
        for (uint begin = 0; begin < out_width; begin += tile) {
            const uint windows = min(tile, out_width - begin), columns = (windows - 1) * STRIDE + KERNEL;
            const size_t to = row * out_width + begin;
            for (uint r = 0; r < count; r++) {
                const size_t at = from + (size_t)r * STRIDE * width + (size_t)begin * STRIDE;
                fill_line(line + r * STRIDE * pitch, x, at, size, width, KERNEL, columns, stride, pitch);
            }
            for (uint r = 0; r < count; r++) {
                const VALUE *taps = line + r * STRIDE * pitch;
                for (uint ow = 0; ow < windows; ow += 16) {
                    VALUES v = LOAD_PRIVATE(VALUES, taps + ow);
                    for (uint kw = 1; kw < KERNEL; kw++) v = COMBINE(v, LOAD_PRIVATE(VALUES, taps + TAP(kw) + ow));
                    WRITE(v, to + (size_t)r * out_width + ow, end);
                }
            }
        }
        row += count, oh += count;
        if (oh == out_height) oh = 0, plane++;
    }
}
#endif

// ------------------------------------------------------------------------------------ backward, a CPU's rows
#if defined(AVG_POOL_ROWS_BACKWARD) || defined(MAX_POOL_TILES_BACKWARD)
// 16 * STRIDE neighbouring elements of dx from column STRIDE * q on: PHASE(r) gives those of phase r.
#define STORE_PHASES(PHASE, at, columns, end)                                                       \
    if (STRIDE == 1) {                                                                              \
        STORE_PART(DX_T, PHASE(0), dx, (at), (end));                                                \
    } else if (STRIDE == 2) {                                                                       \
        const float16 even = PHASE(0), odd = PHASE(1);                                              \
        float16 v;                                                                                  \
        v.even = even.lo, v.odd = odd.lo;                                                           \
        STORE_PART(DX_T, v, dx, (at), (end));                                                       \
        v.even = even.hi, v.odd = odd.hi;                                                           \
        if ((columns) > 16) STORE_PART(DX_T, v, dx, (at) + 16, (end));                              \
    } else {                                                                                        \
        for (uint r = 0; r < STRIDE; r++) {                                                         \
            float lanes[16];                                                                        \
            vstore16(PHASE(r), 0, lanes);                                                           \
            for (uint k = 0; k < 16 && k * STRIDE + r < (columns); k++)                             \
                STORE(DX_T, lanes[k], dx, (at) + k * STRIDE + r);                                   \
        }                                                                                           \
    }
#endif

#ifdef AVG_POOL_ROWS_BACKWARD
ALWAYS_INLINE float16 spread(const float *line, uint r, uint kernel_size, uint stride, float scale) {
    float16 v = 0;
    for (uint kw = r; kw < KERNEL; kw += STRIDE) v += LOAD_PRIVATE(float16, line - kw / STRIDE);
    return v * scale;
}

// A line holds the sum of the rows of dy whose windows cover a row of x, zeros where there is no window; `above` to
// `below` are those rows. Columns are counted in groups of STRIDE, `count` of them from `begin` on.
ALWAYS_INLINE void sum_windows(float *line, __global const STORAGE(G_T) *dy, size_t plane, size_t size, uint above,
                               uint below, uint out_width, uint begin, uint count, uint margin) {
    uint q = max((int)begin - (int)margin, 0), filled = margin - (begin - q);
    const uint stop = min(begin + count, out_width);
    for (uint i = 0; i < filled; i += 16) STORE_PRIVATE(float16, (float16)(0), line + i);
    const size_t top = plane + (size_t)above * out_width;
    if (top + (size_t)(below - above) * out_width + stop + 16 <= size) {
        for (; q < stop && above <= below; q += 16, filled += 16) {
            float16 v = LOAD16(G_T, dy, top + q);
            for (uint k = 1; k <= below - above; k++) v += LOAD16(G_T, dy, top + (size_t)k * out_width + q);
            STORE_PRIVATE(float16, v, line + filled);
        }
    } else {
        for (; q < stop && above <= below; q += 16, filled += 16) {
            float16 v = LOAD_PART(G_T, dy, top + q, size, 0.0f);
            for (uint k = 1; k <= below - above; k++)
                v += LOAD_PART(G_T, dy, top + (size_t)k * out_width + q, size, 0.0f);
            STORE_PRIVATE(float16, v, line + filled);
        }
    }
    if (above <= below && q > out_width) filled -= q - out_width;
    for (; filled < margin + count; filled += 16) STORE_PRIVATE(float16, (float16)(0), line + filled);
}

// `lines` rows at a time, as in pool_rows; rows with the same windows share a line.
__kernel ONE_WORK_ITEM void
avg_pool_rows_backward(__global const STORAGE(G_T) *restrict dy, __global STORAGE(DX_T) *restrict dx, const ulong size,
                       const ulong rows, const uint each, const uint height, const uint width,
                       const uint out_height, const uint out_width, const uint kernel_size, const uint stride,
                       const uint tile, const uint pitch, const uint lines, const float scale) {
    float line[LINE];
    uint start[LINES];
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)rows);
    const size_t end = last * width;
    const uint margin = (KERNEL - 1) / STRIDE, groups = (width + STRIDE - 1) / STRIDE;
    size_t plane = first / height, row = first;
    uint ih = first - plane * height;
    while (row < last) {
        const uint count = min(min(lines, height - ih), (uint)(last - row));
        for (uint begin = 0; begin < groups; begin += tile) {
            const uint wide = min(tile, groups - begin);
            uint last_above = 0, last_below = 0;
            for (uint r = 0; r < count; r++) {
                const uint h = ih + r, above = h < KERNEL ? 0 : (h - KERNEL) / STRIDE + 1;
                const uint below = min(h / STRIDE, out_height - 1);
                const bool is_same = r > 0 && above == last_above && below == last_below;
                start[r] = is_same ? start[r - 1] : r * pitch;
                if (!is_same)
                    sum_windows(line + r * pitch, dy, plane * out_height * out_width, size, above, below, out_width,
                                begin, wide, margin);
                last_above = above, last_below = below;
            }
            for (uint r = 0; r < count; r++) {
                for (uint k = 0; k < wide; k += 16) {
                    const float *at = line + start[r] + margin + k;
                    const uint column = (begin + k) * STRIDE;
                    const size_t to = (row + r) * width + column;
#define SPREAD(phase) spread(at, phase, kernel_size, stride, scale)
                    STORE_PHASES(SPREAD, to, width - column, end)
                }
            }
        }
        row += count, ih += count;
        if (ih == height) ih = 0, plane++;
    }
}
#endif

#ifdef MAX_POOL_TILES_BACKWARD
// A tile is `band` rows of dx by `tile` groups of STRIDE columns (`tile` a multiple of 16, unless it is all groups).
// For each row of x that its windows touch, and each window column:
//   best, where   largest key of the row within the window, and its tap -kw (the first, if several are equal). Taps
//                 are negative because Oclgrind makes 255 of a choice between 1 and 0
//   give          what the windows' gradients give to that element: a window chooses the first of its best rows
// Element `margin` of a line belongs to window column q of the tile's first group; zeros to both sides of the windows.
ALWAYS_INLINE float16 take(const float *give, const WORD *where, uint r, uint kernel_size, uint stride) {
    float16 v = 0;
    for (uint kw = r; kw < KERNEL; kw += STRIDE) {
        const int16 tap = convert_int16(AS_KEYS(LOAD_PRIVATE(WORDS, where - kw / STRIDE)));
        v += tap == -(int)kw ? LOAD_PRIVATE(float16, give - kw / STRIDE) : (float16)(0);
    }
    return v;
}

__kernel ONE_WORK_ITEM void
max_pool_tiles_backward(__global const STORAGE(X_T) *restrict x, __global const STORAGE(G_T) *restrict dy,
                        __global STORAGE(DX_T) *restrict dx, const ulong size, const ulong out_size, const ulong tiles,
                        const uint each, const uint height, const uint width, const uint out_height,
                        const uint out_width, const uint kernel_size, const uint stride, const uint band,
                        const uint tile) {
    WORD line[LINE];
    WORD best[TILE + 16], where[TILE + 16]; // the last 16 of the last line may reach beyond it
    float give[TILE + 16];
    const uint margin = (KERNEL - 1) / STRIDE, groups = (width + STRIDE - 1) / STRIDE;
    const uint bands = (height + band - 1) / band, across = (groups + tile - 1) / tile;
    const uint step = margin + (tile + 15) / 16 * 16; // elements of a row of best, where, give
    const size_t first = (size_t)get_group_id(0) * each, last = min(first + each, (size_t)tiles);
    const size_t last_plane = last / across / bands, last_band = last / across - last_plane * bands;
    const size_t range_end = (last_plane * height + last_band * band) * width; // if tiles are whole rows
    for (size_t unit = first; unit < last; unit++) {
        const size_t plane = unit / across / bands;
        const uint row_begin = (unit / across - plane * bands) * band, row_end = min(row_begin + band, height);
        const uint q_begin = (unit % across) * tile, q_end = min(q_begin + tile, groups);
        // windows: rows oh_begin .. oh_end - 1, columns ow_begin .. ow_begin + windows - 1
        const uint oh_begin = row_begin < KERNEL ? 0 : (row_begin - KERNEL) / STRIDE + 1;
        const uint oh_end = min((row_end - 1) / STRIDE + 1, out_height);
        const uint ow_begin = max((int)q_begin - (int)margin, 0), ow_end = min(q_end, out_width);
        const uint windows = ow_end > ow_begin && oh_end > oh_begin ? ow_end - ow_begin : 0;
        const uint lines = windows > 0 ? (oh_end - oh_begin - 1) * STRIDE + KERNEL : 0;
        const uint base = margin - (q_begin - ow_begin), top = oh_begin * STRIDE;
        const uint columns = (windows - 1) * STRIDE + KERNEL, pitch = windows + margin + 32;

        for (uint k = 0; k < lines * step; k += 16) STORE_PRIVATE(float16, (float16)(0), give + k);
        const uint at_once = min((uint)LINES, max(LINE / (STRIDE * pitch), 1u));
        for (uint done = 0; done < lines; done += at_once) {
            const uint now = min(at_once, lines - done);
            for (uint r = 0; r < now; r++) {
                const size_t from = (plane * height + top + done + r) * width + (size_t)ow_begin * STRIDE;
                fill_line(line + r * STRIDE * pitch, x, from, size, width, 1, columns, stride, pitch);
            }
            for (uint r = 0; r < now; r++) {
                const WORD *taps = line + r * STRIDE * pitch;
                const uint to = (done + r) * step + base;
                for (uint k = 0; k < windows; k += 16) {
                    KEYS most = AS_KEYS(LOAD_PRIVATE(WORDS, taps + k)), tap = 0;
                    for (uint kw = 1; kw < KERNEL; kw++) {
                        const KEYS v = AS_KEYS(LOAD_PRIVATE(WORDS, taps + TAP(kw) + k));
                        tap = v > most ? (KEYS)(KEY)(-(int)kw) : tap;
                        most = max(v, most);
                    }
                    STORE_PRIVATE(WORDS, AS_WORDS(most), best + to + k);
                    STORE_PRIVATE(WORDS, AS_WORDS(tap), where + to + k);
                }
            }
        }
        for (uint oh = oh_begin; lines > 0 && oh < oh_end; oh++) {
            const uint row = (oh - oh_begin) * STRIDE * step + base;
            const size_t from = (plane * out_height + oh) * out_width + ow_begin;
            for (uint k = 0; k < windows; k += 16) {
                KEYS most = AS_KEYS(LOAD_PRIVATE(WORDS, best + row + k)), tap = 0;
                for (uint kh = 1; kh < KERNEL; kh++) {
                    const KEYS v = AS_KEYS(LOAD_PRIVATE(WORDS, best + row + kh * step + k));
                    tap = v > most ? (KEYS)(KEY)(-(int)kh) : tap;
                    most = max(v, most);
                }
                float16 grad = LOAD_PART(G_T, dy, from + k, out_size, 0.0f);
                if (k + 16 > windows) {
                    const int16 lane = (int16)(LANE_NUMBERS);
                    grad = lane < (int)(windows - k) ? grad : (float16)(0);
                }
                const int16 chosen = convert_int16(tap);
                for (uint kh = 0; kh < KERNEL; kh++) {
                    float *at = give + row + kh * step + k;
                    STORE_PRIVATE(float16, LOAD_PRIVATE(float16, at) + (chosen == -(int)kh ? grad : (float16)(0)), at);
                }
            }
        }
        for (uint ih = row_begin; ih < row_end; ih++) {
            const size_t start = (plane * height + ih) * width;
            const size_t end = across == 1 ? range_end : start + min(q_end * STRIDE, width);
            const bool has_windows = ih >= top && ih - top < lines;
            for (uint q = q_begin; q < q_end; q += 16) {
                const uint at = (ih - top) * step + margin + (q - q_begin);
#define NONE(phase) ((float16)(0))
#define TAKE(phase) take(give + at, where + at, phase, kernel_size, stride)
                const size_t to = start + (size_t)q * STRIDE;
                if (has_windows) {
                    STORE_PHASES(TAKE, to, width - q * STRIDE, end)
                } else {
                    STORE_PHASES(NONE, to, width - q * STRIDE, end)
                }
            }
        }
    }
}
#endif
