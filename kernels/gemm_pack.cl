// gemm_pack.cl: copies op(A) or op(B) into the panels that the GEMM kernels for CPU devices read.
//
//      op(A), rows walk down              panels, one after the other            an element
//
//           k ->                          [rows/WIDTH][steps][WIDTH]             PAIRS 0: a float, step = k
//      +---------------+   WIDTH rows     +-----------------------+
//      |    panel 0    |  ------------->  | step 0 | step 1 | ... |              PAIRS 1: the bfloat16 of k = 2 step in
//      +---------------+                  +-----------------------+              the low and of k + 1 in the high half
//      |    panel 1    |                  | step 0 | step 1 | ... |              of a uint, for dot products of pairs
//      +---------------+                  +-----------------------+
//
// For op(B) a "row" is a column of B. What lies beyond the matrix (the last panel's missing rows, the last pair's odd
// k) is zero. Two fast paths, for neighbouring rows or neighbouring k contiguous in memory, cover every transposition
// of a dense matrix; element by element goes the rest.
//
//   WIDTH        rows of a panel: 6, 12, 16 or 32
//   STEP_SPAN    steps that a work-item packs
//   SRC_T        storage type of the matrix; bf16 if PAIRS
//   PAIRS        0 or 1, see above
//
// Strides are in elements of the matrix; a batch stride of 0 goes with a batch of one.

#if PAIRS
#define ELEMENT uint
#define K_PER_STEP 2
#else
#define ELEMENT float
#define K_PER_STEP 1
#endif
#define ELEMENT16 CAT(ELEMENT, 16)
#define AS_ELEMENT16 CAT(as_, ELEMENT16)

typedef __global const STORAGE(SRC_T) * matrix;
typedef __global ELEMENT *panel;

// One element: row i of the matrix at s, step t; zero from k = K on.
static inline ELEMENT element(matrix s, size_t i, size_t t, size_t stride_row, size_t stride_k, size_t K) {
    const size_t at = i * stride_row + t * K_PER_STEP * stride_k;
#if PAIRS
    return s[at] | (t * 2 + 1 < K ? (uint)s[at + stride_k] << 16 : 0);
#else
    return LOAD(SRC_T, s, at);
#endif
}

// 16 neighbouring rows at one step, whose first element is at s.
static inline ELEMENT16 rows16(matrix s, size_t stride_k) {
#if PAIRS
    return convert_uint16(vload16(0, s)) | convert_uint16(vload16(0, s + stride_k)) << 16;
#else
    return LOAD16(SRC_T, s, 0);
#endif
}

// 16 neighbouring steps of one row.
static inline ELEMENT16 steps16(matrix s) {
#if PAIRS
    return (uint16)(as_uint8(vload16(0, s)), as_uint8(vload16(1, s)));
#else
    return LOAD16(SRC_T, s, 0);
#endif
}

// The first WIDTH elements of v (of 16 if there are more).
static inline void store_row(ELEMENT16 v, panel d) {
#if WIDTH == 6
    vstore4(v.lo.lo, 0, d);
    vstore2(v.lo.hi.lo, 0, d + 4);
#elif WIDTH == 12
    vstore8(v.lo, 0, d);
    vstore4(v.hi.lo, 0, d + 8);
#elif WIDTH % 16 == 0
    vstore16(v, 0, d);
#else
#error "WIDTH must be 6, 12 or a multiple of 16"
#endif
}

// Neighbouring rows are neighbours in memory: copy WIDTH of them at each step.
static inline void pack_rows_together(matrix s, panel d, size_t stride_k, size_t begin, size_t end) {
    for (size_t t = begin; t < end; t++)
        for (size_t i = 0; i < WIDTH; i += 16)
            store_row(rows16(s + t * K_PER_STEP * stride_k + i, stride_k), d + t * WIDTH + i);
}

// x0 y0 x1 y1 ... of two vectors of 8, in elements and in pairs of elements
#define ZIP4(x, y) (x).s0, (y).s0, (x).s1, (y).s1, (x).s2, (y).s2, (x).s3, (y).s3
#define ZIP(x, y) ((ELEMENT16)(ZIP4((x).lo, (y).lo), ZIP4((x).hi, (y).hi)))
#define ZIP_PAIRS(x, y) AS_ELEMENT16((ulong8)(ZIP4(as_ulong4(x), as_ulong4(y))))

static inline void store_4_steps(ELEMENT16 v, panel d) {
    vstore4(v.lo.lo, 0, d);
    vstore4(v.lo.hi, 0, d + WIDTH);
    vstore4(v.hi.lo, 0, d + 2 * WIDTH);
    vstore4(v.hi.hi, 0, d + 3 * WIDTH);
}

// Neighbouring k are neighbours in memory: transpose blocks of 4 rows by 16 steps in registers.
static inline void pack_k_together(matrix s, panel d, size_t stride_row, size_t begin, size_t end) {
    for (size_t t = begin; t < end; t += 16)
        for (size_t i = 0; i < WIDTH; i += 4) {
            const size_t row = min(i, (size_t)(WIDTH - 4)); // 6 rows: the second block repeats two of the first
            matrix r = s + row * stride_row + t * K_PER_STEP;
            const ELEMENT16 r0 = steps16(r), r1 = steps16(r + stride_row);
            const ELEMENT16 r2 = steps16(r + 2 * stride_row), r3 = steps16(r + 3 * stride_row);
            const ELEMENT16 lo01 = ZIP(r0.lo, r1.lo), lo23 = ZIP(r2.lo, r3.lo);
            const ELEMENT16 hi01 = ZIP(r0.hi, r1.hi), hi23 = ZIP(r2.hi, r3.hi);
            panel e = d + t * WIDTH + row;
            store_4_steps(ZIP_PAIRS(lo01.lo, lo23.lo), e);
            store_4_steps(ZIP_PAIRS(lo01.hi, lo23.hi), e + 4 * WIDTH);
            store_4_steps(ZIP_PAIRS(hi01.lo, hi23.lo), e + 8 * WIDTH);
            store_4_steps(ZIP_PAIRS(hi01.hi, hi23.hi), e + 12 * WIDTH);
        }
}

static inline void pack_elements(matrix s, panel d, size_t stride_row, size_t stride_k, size_t rows, size_t K,
                                 size_t begin, size_t end) {
    for (size_t t = begin; t < end; t++)
        for (size_t i = 0; i < WIDTH; i++)
            d[t * WIDTH + i] = i < rows ? element(s, i, t, stride_row, stride_k, K) : 0;
}

// Work-item (panel, block of STEP_SPAN steps, batch).
__kernel ONE_WORK_ITEM void pack(
    __global const STORAGE(SRC_T) *restrict src, __global ELEMENT *restrict panels, const ulong rows, const ulong K,
    const ulong stride_row, const ulong stride_k, const ulong stride_batch) {
    const size_t row = get_global_id(0) * WIDTH, steps = (K + K_PER_STEP - 1) / K_PER_STEP;
    const size_t begin = get_global_id(1) * STEP_SPAN, end = min(begin + STEP_SPAN, steps);
    matrix s = src + get_global_id(2) * stride_batch + row * stride_row;
    panel d = panels + (get_global_id(2) * get_global_size(0) + get_global_id(0)) * WIDTH * steps;

    const size_t whole = min(end, (size_t)(K / K_PER_STEP)); // an odd k has no partner
    size_t done = begin;
    if (stride_row == 1 && row + (WIDTH + 15) / 16 * 16 <= rows) {
        pack_rows_together(s, d, stride_k, begin, whole);
        done = whole;
    } else if (stride_k == 1 && row + WIDTH <= rows) {
        done = begin + (whole - begin) / 16 * 16;
        pack_k_together(s, d, stride_row, begin, done);
    }
    pack_elements(s, d, stride_row, stride_k, min(rows - row, (ulong)WIDTH), K, done, end);
}
