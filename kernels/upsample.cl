// upsample.cl: planes of h x w elements, contiguous, resized to oh x ow, and the gradient of that.
//
// Both axes are resized one after the other, by a table for each that the host makes. An output o of an axis lies
// between the inputs i = index[o] and i + 1, a fraction[o] of the way; fraction is 0 for nearest neighbours and at
// the last input. index never falls, so the outputs that lean on input i are neighbours:
//
//     table   | index: one for each output | fraction (bits of a float) | first: one for each input, and the end |
//
//     index[o] == i    for o in first[i] .. first[i + 1] - 1
//
// A work-item takes units one after the other. A unit is a strip of columns over a band of rows of one plane:
//
//             strip                     forward:  strip and band of the result. The input rows above and below the
//           |-------|                             current one are kept resized in lines[row & 1]; each is resized
//      +----+-------+-----+  -                    once a unit.
//      |    | unit  |     |  | band     backward: strip and band of the input. A row of the gradient is gathered
//      |    |       |     |  |                    into columns and added to the rows it came from, which wait in
//      +----+-------+-----+  -                    sums[row & 1]. Nothing is scattered: the sums have one order.
//      |            plane |
//
//   X_T, Y_T    storage types of what is read (input; gradient of the result) and written
//   BILINEAR    1: interpolate, 0: nearest neighbour
//   DOUBLE      1: ow is 2 * w and, if bilinear, corners are not aligned: whole vectors are interleaved
//   STRIP       columns of a unit, a multiple of 32: many on a CPU, few on a GPU

#define INDEX(table, outputs, o) ((table)[o])
#define FRACTION(table, outputs, o) as_float((table)[(outputs) + (o)])
#define FIRST(table, outputs, i) ((uint)(table)[2 * (outputs) + (i)])
#define BLOCKS (STRIP / 16)

// Sets band, strip, plane and the extents of unit u.
#define LOCATE_UNIT(rows, columns)                                          \
    const uint left = (uint)(u % strips) * STRIP;                           \
    const uint count = min((uint)STRIP, (columns) - left);                  \
    const uint top = (uint)(u / strips % bands) * band;                     \
    const uint bottom = min(top + band, (rows));                            \
    const size_t plane = u / strips / bands;

#ifdef UPSAMPLE_FORWARD

// Resizes a row of the input to `count` columns of the result from `left` on.
static inline void stretch(__global const STORAGE(X_T) *x, float16 *line, __global const int *columns, const uint left,
                           const uint count, const uint w, const uint ow) {
#if DOUBLE && BILINEAR
    // result[2j] = x[j-1]/4 + 3x[j]/4, result[2j+1] = 3x[j]/4 + x[j+1]/4; the row goes on with its end elements.
    const float last = LOAD(X_T, x, w - 1);
    for (uint k = 0; k < count; k += 32) {
        const uint j = (left + k) / 2;
        const float16 here = LOAD_PART(X_T, x, j, w, last);
        float16 before = here.s00123456789abcde;
        if (j) before = LOAD_PART(X_T, x, j - 1, w, last);
        const float16 after = LOAD_PART(X_T, x, j + 1, w, last);
        const float16 even = 0.25f * before + 0.75f * here, odd = 0.75f * here + 0.25f * after;
        line[k / 16].even = even.lo;
        line[k / 16].odd = odd.lo;
        line[k / 16 + 1].even = even.hi;
        line[k / 16 + 1].odd = odd.hi;
    }
#elif DOUBLE
    for (uint k = 0; k < count; k += 32) {
        const float16 here = LOAD_PART(X_T, x, (left + k) / 2, w, 0.0f);
        line[k / 16] = here.s0011223344556677;
        line[k / 16 + 1] = here.s8899aabbccddeeff;
    }
#else
    for (uint k = 0; k < count; k++) {
        const int i = INDEX(columns, ow, left + k);
        float v = LOAD(X_T, x, i);
#if BILINEAR
        const float f = FRACTION(columns, ow, left + k);
        if (f != 0.0f) v = (1.0f - f) * v + f * LOAD(X_T, x, i + 1);
#endif
        ((float *)line)[k] = v;
    }
#endif
}

__kernel void upsample_forward(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                       __global const int *restrict rows, __global const int *restrict columns, const uint h,
                       const uint w, const uint oh, const uint ow, const uint band, const uint bands,
                       const uint strips, const uint each, const ulong units) {
    float16 lines[1 + BILINEAR][BLOCKS];
    const size_t end = min(((size_t)get_global_id(0) + 1) * each, (size_t)units);
    for (size_t u = (size_t)get_global_id(0) * each; u < end; u++) {
        LOCATE_UNIT(oh, ow)
        __global const STORAGE(X_T) *from = x + plane * h * w;
        int held = -2;  // the lower row that lines hold
        for (uint o = top; o < bottom; o++) {
            const int i = INDEX(rows, oh, o);
            const size_t begin = (plane * oh + o) * ow + left;
#if BILINEAR
            const float f = FRACTION(rows, oh, o);
            const float16 *upper = lines[i & 1], *lower = lines[(i + 1) & 1];
            for (int row = max(i, held + 1); row <= min(i + 1, (int)h - 1); row++) {
                stretch(from + (size_t)row * w, lines[row & 1], columns, left, count, w, ow);
                held = row;
            }
            for (uint k = 0; k < count; k += 16) {
                const float16 v = upper[k / 16];
                STORE_PART(Y_T, f == 0.0f ? v : (1.0f - f) * v + f * lower[k / 16], y, begin + k, begin + count);
            }
#else
            if (i != held) stretch(from + (size_t)i * w, lines[0], columns, left, count, w, ow);
            held = i;
            for (uint k = 0; k < count; k += 16) STORE_PART(Y_T, lines[0][k / 16], y, begin + k, begin + count);
#endif
        }
    }
}
#endif

#ifdef UPSAMPLE_BACKWARD

// What a row of the result's gradient gives to the input's columns c .. c+15.
static inline float16 gather(__global const STORAGE(X_T) *g, __global const int *columns, const uint c, const uint w,
                             const uint ow) {
#if DOUBLE
    const float16 low = LOAD_PART(X_T, g, 2 * c, ow, 0.0f);
    const float16 high = 2 * c + 16 < ow ? LOAD_PART(X_T, g, 2 * c + 16, ow, 0.0f) : (float16)(0.0f);
    const float16 even = (float16)(low.even, high.even), odd = (float16)(low.odd, high.odd);
#if BILINEAR
    // g[2j-1]/4 + 3 g[2j]/4 + 3 g[2j+1]/4 + g[2j+2]/4; the row goes on with its end elements.
    float16 before = odd.s00123456789abcde, after = even.s123456789abcdeff;
    before.s0 = c ? LOAD(X_T, g, 2 * c - 1) : even.s0;
    if (c + 16 < w) after.sf = LOAD(X_T, g, 2 * c + 32);
    const int16 column = (int)c + (int16)(LANE_NUMBERS);
    after = column == (int)w - 1 ? odd : after;
    return 0.25f * (before + after) + 0.75f * (even + odd);
#else
    return even + odd;
#endif
#else
    float lanes[16] = {0.0f};
    for (uint k = 0; k < 16 && c + k < w; k++) {
        const uint first = FIRST(columns, ow, c + k), last = FIRST(columns, ow, c + k + 1);
        float sum = 0.0f;
#if BILINEAR
        if (c + k > 0) {
            for (uint o = FIRST(columns, ow, c + k - 1); o < first; o++) {
                const float f = FRACTION(columns, ow, o);
                if (f != 0.0f) sum += f * LOAD(X_T, g, o);
            }
        }
        for (uint o = first; o < last; o++) sum += (1.0f - FRACTION(columns, ow, o)) * LOAD(X_T, g, o);
#else
        for (uint o = first; o < last; o++) sum += LOAD(X_T, g, o);
#endif
        lanes[k] = sum;
    }
    return vload16(0, lanes);
#endif
}

__kernel void upsample_backward(__global const STORAGE(X_T) *restrict g, __global STORAGE(Y_T) *restrict dx,
                                __global const int *restrict rows, __global const int *restrict columns,
                                const uint h, const uint w, const uint oh, const uint ow, const uint band,
                                const uint bands, const uint strips, const uint each, const ulong units) {
    float16 sums[1 + BILINEAR][BLOCKS];
    const size_t end = min(((size_t)get_global_id(0) + 1) * each, (size_t)units);
    for (size_t u = (size_t)get_global_id(0) * each; u < end; u++) {
        LOCATE_UNIT(h, w)
        for (uint k = 0; k < BLOCKS; k++) {
            sums[0][k] = 0.0f;
            sums[BILINEAR][k] = 0.0f;
        }
        // The row above the band has outputs that lean on the band's first row too.
        for (uint i = BILINEAR && top ? top - 1 : top; i < bottom; i++) {
            float16 *upper = sums[i & BILINEAR];
            for (uint o = FIRST(rows, oh, i); o < FIRST(rows, oh, i + 1); o++) {
                __global const STORAGE(X_T) *from = g + (plane * oh + o) * ow;
#if BILINEAR
                float16 *lower = sums[(i + 1) & 1];
                const float f = FRACTION(rows, oh, o);
                for (uint k = 0; k < count; k += 16) {
                    const float16 v = gather(from, columns, left + k, w, ow);
                    upper[k / 16] += (1.0f - f) * v;
                    if (f != 0.0f) lower[k / 16] += f * v;
                }
#else
                for (uint k = 0; k < count; k += 16) upper[k / 16] += gather(from, columns, left + k, w, ow);
#endif
            }
            const size_t begin = (plane * h + i) * w + left;
            for (uint k = 0; k < count; k += 16) {
                if (i >= top) STORE_PART(Y_T, upper[k / 16], dx, begin + k, begin + count);
                upper[k / 16] = 0.0f;
            }
        }
    }
}
#endif
