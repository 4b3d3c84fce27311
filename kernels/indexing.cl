// indexing.cl: rows picked out of a tensor by index, and rows added to where an index says.
//
// A tensor is seen as (outer, n, inner) around the indexed axis: `outer` planes of n rows of `inner` elements.
//
//        table (outer, dim, inner)                 rows (outer, n, inner)
//          0 |--------------|        pick            |--------------|   index[0] = 2
//          1 |--------------|      -------->         |--------------|   index[1] = 0
//          2 |--------------|      <--------         |--------------|   index[2] = 2
//            (the same indices        add
//             in every plane)
//
// An index counts from the end if it is negative. What is still no row of the table is read as `fill`, and adds to
// nothing: no access ever leaves a tensor.
//
// ADDING. Every row of the table sums the rows that name it, in fp32, in the order of their positions, and is rounded
// once: the same bits every time, without atomics. Long lists are summed in runs (LONG_SUM), because a table's row that
// all indices name would otherwise round as often as there are indices. How a row finds them depends on the device.
//
//   CPU    add_listed: a work-item owns blocks of the table's rows. It goes through all indices once and hangs each
//          position that names a row of its own onto that row's list, then walks the lists.
//
//              heads  | 1 | - | 0 |        next  | 2 | - | - |        row 2 <- positions 0, 2; row 0 <- position 1
//
//   GPU    a stable radix sort of the positions by the row they name, TILE keys to a work-group, one digit in each
//          round (count_digits, scan_counts, move_keys); find_segments; add_sorted.
//
//   INT, X_T ...  storage types, in the comment of each kernel
//   TILE          GPU: work-items of a work-group that sorts, and values of a digit; a power of two

// The row that an index names; `dim` if it names none.
static inline uint row_of(int index, uint dim) { return min((uint)index + (index < 0 ? dim : 0), dim); }

#ifdef PICK
// y (outer, n, inner) from x (outer, dim, inner). Either words of one type are moved (WORD), or X_T is converted to
// Y_T; `fill` has the bits of two halves or of one float.
// A work-item moves `span` columns of each of `deep` rows; on a GPU, one word. VECTORS, INDEX as in concat.cl.
//
//   SINGLES  1: a row is one word, and a work-item takes many: no loop over columns
#ifdef WORD
#define X WORD
#define Y WORD
#define VECTOR CAT(WORD, 16)
#define MOVE(from, to, i) ((to)[i] = (from)[i])
#define MOVE16(from, to, i) STORE_ANY(VECTOR, LOAD_ANY(VECTOR, (from) + (i)), (to) + (i))
#define FILL(to, i) ((to)[i] = (WORD)(fill))
#else
#define X STORAGE(X_T)
#define Y STORAGE(Y_T)
#define MOVE(from, to, i) STORE(Y_T, LOAD(X_T, from, i), to, i)
#define MOVE16(from, to, i) STORE16(Y_T, LOAD16(X_T, from, i), to, i)
#define FILL(to, i) STORE(Y_T, as_float(fill), to, i)
#endif

__kernel void pick(__global const X *restrict x, __global const int *restrict index, __global Y *restrict y,
                   const uint dim, const uint n, const ulong inner, const ulong rows, const ulong span,
                   const ulong deep, const uint fill) {
    const INDEX across = (inner + span - 1) / span;
    const INDEX item = get_global_id(0), line = item / across;
    const size_t column = (item - line * across) * span, count = min((size_t)span, (size_t)inner - column);
    const INDEX top = line * (INDEX)deep, bottom = min(top + (INDEX)deep, (INDEX)rows);
    if (top >= bottom) return;
    INDEX plane = top / n;
    uint at = top - plane * n;
#if SINGLES
    for (INDEX r = top; r < bottom; plane++, at = 0) {
        __global const X *from = x + (size_t)plane * dim;
        for (const INDEX stop = min(bottom, (plane + 1) * n); r < stop; r++, at++) {
            const uint row = row_of(index[at], dim);
            MOVE(from + min(row, dim - 1), y + r, 0);
            if (row == dim) FILL(y, r);
        }
    }
#else
    y += top * inner + column;
    for (INDEX r = top; r < bottom; r++, y += inner) {
        const uint row = row_of(index[at], dim);
        __global const X *from = x + ((size_t)plane * dim + row) * inner + column;
        size_t i = 0;
        if (row == dim) {
            for (; i < count; i++) FILL(y, i);
        } else {
#if VECTORS
            for (; i + 16 <= count; i += 16) MOVE16(from, y, i);
            if (i < count && count >= 16) { // the rest, with some words a second time
                MOVE16(from, y, count - 16);
                i = count;
            }
#endif
            for (; i < count; i++) MOVE(from, y, i);
        }
        if (++at == n) {
            at = 0;
            plane++;
        }
    }
#endif
}
#endif

// y (outer, dim, inner) = base + the rows of x (outer, n, inner) that name each row. Without BASE_T there is no base.
//
//   X_T, BASE_T, Y_T  storage types
//   IN_PLACE          1: base and y are the same, so that rows that nothing is added to are left alone
#ifdef ADD
#ifdef BASE_T
#define BASE_ARGUMENT , __global const STORAGE(BASE_T) *base
#define BASE_GIVEN , base
#define BASE(i) LOAD(BASE_T, base, i)
#define BASE16(i) LOAD16(BASE_T, base, i)
#else
#define BASE_ARGUMENT
#define BASE_GIVEN
#define BASE(i) 0.0f
#define BASE16(i) (float16)(0.0f)
#endif
#define END 0xffffffffu
#endif

#ifdef ADD_LISTED
// Work-item (slice, owner) owns, in the planes of one of `slices` slices, every `owners`-th block of 2^block rows: rows
// that many indices name are often neighbours. `lists` holds dim heads and n links for every slice. `owners` is a
// power of two.
#define FOR_OWN_BLOCKS(first, last)                                                                               \
    for (ulong first = (ulong)owner << block, last; last = min(first + (1ul << block), (ulong)dim), first < dim; \
         first += (ulong)owners << block)

// The next RUN_TERMS rows of a list, from `at` on, are added up and then to `sums`: 64, 16 or one column of x. Returns
// where the list goes on.
#define DEFINE_ADD_RUN(COLUMNS, TYPE, VECTORS, LOAD_AT)                                                              \
    static inline uint add_run_##COLUMNS(__global const STORAGE(X_T) *x, uint at, __global const uint *next,         \
                                         size_t inner, TYPE *sums) {                                                 \
        TYPE run[VECTORS];                                                                                           \
        for (uint v = 0; v < VECTORS; v++) run[v] = 0.0f;                                                            \
        for (uint k = 0; k < RUN_TERMS && at != END; k++, at = next[at])                                             \
            for (uint v = 0; v < VECTORS; v++) run[v] += LOAD_AT(X_T, x, at * inner + 16 * v);                       \
        for (uint v = 0; v < VECTORS; v++) sums[v] += run[v];                                                        \
        return at;                                                                                                   \
    }
DEFINE_ADD_RUN(64, float16, 4, LOAD16)
DEFINE_ADD_RUN(16, float16, 1, LOAD16)
DEFINE_ADD_RUN(1, float, 1, LOAD)

// The sum of a list, in the levels of LONG_SUM, added to what the base has at `begin` and stored there in y.
#define ADD_LIST(COLUMNS, TYPE, VECTORS, BASE_AT, STORE_AT, x, begin)                                                \
    {                                                                                                                \
        TYPE sums[VECTORS];                                                                                          \
        for (uint v = 0; v < VECTORS; v++) sums[v] = BASE_AT((begin) + 16 * v);                                      \
        for (uint at = head; at != END;) {                                                                           \
            TYPE runs[VECTORS];                                                                                      \
            for (uint v = 0; v < VECTORS; v++) runs[v] = 0.0f;                                                       \
            for (uint k = 0; k < RUN_TERMS && at != END; k++) at = add_run_##COLUMNS(x, at, next, inner, runs);      \
            for (uint v = 0; v < VECTORS; v++) sums[v] += runs[v];                                                   \
        }                                                                                                            \
        for (uint v = 0; v < VECTORS; v++) STORE_AT(Y_T, sums[v], y, (begin) + 16 * v);                              \
    }

// The sum of the rows on a list, beginning at `head`, into y from `begin` on; 64 columns at a time.
static inline void add_row(__global const STORAGE(X_T) *x, uint head, __global const uint *next,
                           __global STORAGE(Y_T) *y, size_t begin, size_t inner BASE_ARGUMENT) {
    size_t i = 0;
    for (; i + 64 <= inner; i += 64) ADD_LIST(64, float16, 4, BASE16, STORE16, x + i, begin + i)
    for (; i + 16 <= inner; i += 16) ADD_LIST(16, float16, 1, BASE16, STORE16, x + i, begin + i)
    for (; i < inner; i++) ADD_LIST(1, float, 1, BASE, STORE, x + i, begin + i)
}

// Rows that nothing is added to: the base's.
static inline void keep_rows(__global STORAGE(Y_T) *y, size_t begin, size_t count BASE_ARGUMENT) {
#if !IN_PLACE
    size_t i = begin;
    for (; i + 16 <= begin + count; i += 16) STORE16(Y_T, BASE16(i), y, i);
    for (; i < begin + count; i++) STORE(Y_T, BASE(i), y, i);
#endif
}

__kernel void add_listed(__global const STORAGE(X_T) *restrict x, __global const int *restrict index,
                         __global STORAGE(Y_T) *y, __global uint *restrict lists, const uint dim, const uint n,
                         const ulong inner, const ulong outer, const uint slices, const uint owners,
                         const uint block BASE_ARGUMENT) {
    const ulong slice = get_global_id(0) / owners;
    const uint owner = get_global_id(0) % owners;
    if (slice >= slices) return;
    __global uint *heads = lists + slice * ((size_t)dim + n), *next = heads + dim;
    FOR_OWN_BLOCKS(first, last)
        for (uint row = first; row < last; row++) heads[row] = END;
    for (uint at = n; at-- > 0;) { // from the last, so that lists begin with the first
        const uint row = row_of(index[at], dim);
        if ((row >> block & (owners - 1)) == owner && row < dim) {
            next[at] = heads[row];
            heads[row] = at;
        }
    }
    for (ulong plane = slice * outer / slices; plane < (slice + 1) * outer / slices; plane++) {
        __global const STORAGE(X_T) *source = x + plane * n * inner;
        FOR_OWN_BLOCKS(first, last) {
            for (uint row = first; row < last;) {
                uint named = row; // the next row that an index names
                while (named < last && heads[named] == END) named++;
                if (named > row) {
                    keep_rows(y, (plane * dim + row) * inner, (ulong)(named - row) * inner BASE_GIVEN);
                    row = named;
                } else {
                    add_row(source, heads[row], next, y, (plane * dim + row) * inner, inner BASE_GIVEN);
                    row++;
                }
            }
        }
    }
}
#endif

#ifdef SORT
#if TILE <= 0 || TILE & (TILE - 1)
#error "TILE must be a power of two"
#endif
// Keys are the rows named, `dim` for none; the first round (shift 0) makes them of the indices. Digit d of tile t is
// counted at counts[d * tiles + t], so that a running sum over all counts is where each digit of each tile goes.
static inline uint digit_of(uint key, uint shift) { return key >> shift & (TILE - 1); }

__kernel __attribute__((reqd_work_group_size(TILE, 1, 1))) void
count_digits(__global const int *restrict keys, __global uint *restrict counts, const uint dim, const uint n,
             const uint shift, const uint tiles) {
    __local uint digits[TILE];
    const uint lane = get_local_id(0), tile = get_group_id(0), at = tile * TILE + lane;
    digits[lane] = at < n ? digit_of(row_of(keys[at], dim), shift) : TILE;
    barrier(CLK_LOCAL_MEM_FENCE);
    uint count = 0;
    for (uint k = 0; k < TILE; k++) count += digits[k] == lane;
    counts[lane * tiles + tile] = count;
}

// The sum of all counts before each, by one work-group.
__kernel __attribute__((reqd_work_group_size(TILE, 1, 1))) void
scan_counts(__global uint *restrict counts, const uint tiles) {
    __local uint sums[TILE];
    const uint lane = get_local_id(0);
    uint sum = 0;
    for (uint k = 0; k < tiles; k++) sum += counts[lane * tiles + k];
    sums[lane] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    uint before = 0;
    for (uint k = 0; k < lane; k++) before += sums[k];
    for (uint k = 0; k < tiles; k++) {
        const uint count = counts[lane * tiles + k];
        counts[lane * tiles + k] = before;
        before += count;
    }
}

__kernel __attribute__((reqd_work_group_size(TILE, 1, 1))) void
move_keys(__global const int *restrict keys, __global const uint *restrict positions,
          __global const uint *restrict counts, __global int *restrict to_keys, __global uint *restrict to_positions,
          const uint dim, const uint n, const uint shift, const uint tiles) {
    __local uint digits[TILE];
    const uint lane = get_local_id(0), tile = get_group_id(0), at = tile * TILE + lane;
    const uint key = at < n ? row_of(keys[at], dim) : 0, digit = digit_of(key, shift);
    digits[lane] = digit;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (at >= n) return;
    uint to = counts[digit * tiles + tile];
    for (uint k = 0; k < lane; k++) to += digits[k] == digit;
    to_keys[to] = key;
    to_positions[to] = shift ? positions[at] : at;
}

// Where the positions of each row begin: those of `row` are starts[row] .. starts[row + 1] - 1.
__kernel void find_segments(__global const int *restrict keys, __global uint *restrict starts, const uint dim,
                            const uint n) {
    const uint row = get_global_id(0);
    if (row > dim) return;
    uint low = 0, high = n;
    while (low < high) {
        const uint middle = low + (high - low) / 2;
        if ((uint)keys[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    starts[row] = low;
}
#endif

#ifdef ADD_SORTED
//   LANES    work-items that share a column: 1, or a power of two where rows have many positions each
//   COLUMNS  columns of a work-group, if LANES > 1
#if LANES > 1
__kernel __attribute__((reqd_work_group_size(COLUMNS, LANES, 1))) void
#else
__kernel void
#endif
add_sorted(__global const STORAGE(X_T) *restrict x, __global const uint *restrict positions,
           __global const uint *restrict starts, __global STORAGE(Y_T) *y, const uint dim, const uint n,
           const ulong inner, const ulong outer BASE_ARGUMENT) {
#if LANES > 1
    __local float sums[LANES][COLUMNS];
    const size_t strips = (inner + COLUMNS - 1) / COLUMNS;
    const size_t line = get_group_id(0) / strips, column = get_group_id(0) % strips * COLUMNS + get_local_id(0);
    const uint lane = get_local_id(1);
#else
    const size_t line = get_global_id(0) / inner, column = get_global_id(0) % inner;
    const uint lane = 0;
    if (line >= outer * dim) return;
#endif
    const size_t plane = line / dim;
    const uint row = line % dim, end = starts[row + 1];
    float sum = 0.0f;
    uint at = starts[row] + lane;
    if (column < inner) LONG_SUM(float, sum, at, end, LANES, LOAD(X_T, x, (plane * n + positions[at]) * inner + column))
#if LANES > 1
    sums[lane][get_local_id(0)] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane > 0) return;
    for (uint k = 1; k < LANES; k++) sum += sums[k][get_local_id(0)];
#endif
    if (column >= inner) return;
#if IN_PLACE
    if (starts[row] == end) return;
#endif
    const size_t to = line * inner + column;
    STORE(Y_T, BASE(to) + sum, y, to);
}
#endif

#ifdef ONE_HOT
// Ones into y (n, classes), which holds zeros. No index counts from the end here.
__kernel void one_hot(__global const int *restrict index, __global STORAGE(Y_T) *restrict y, const uint n,
                      const uint classes, const uint span) {
    const size_t first = get_global_id(0) * (size_t)span, last = min(first + span, (size_t)n);
    for (size_t at = first; at < last; at++)
        if (index[at] >= 0 && index[at] < classes) STORE(Y_T, 1.0f, y, at * classes + index[at]);
}
#endif

#ifdef TO_INDEX
// Whole numbers stored as floats, cut off towards zero, or as longs (X_T i64). What no int is becomes the nearest, which
// is no index of anything, and not 0.
#define storage_i64 long
#define int_f32 convert_int_sat_rtz
#define int_f16 convert_int_sat_rtz
#define int_bf16 convert_int_sat_rtz
#define load_i64(p, i) (p)[i]
static inline int int_i64(long v) { return v > INT_MAX ? INT_MAX : v < INT_MIN ? INT_MIN : (int)v; }

__kernel void to_index(__global const STORAGE(X_T) *restrict x, __global int *restrict index, const ulong n,
                       const uint span) {
    const size_t first = get_global_id(0) * (size_t)span, last = min(first + span, (size_t)n);
    for (size_t at = first; at < last; at++) index[at] = CAT(int_, X_T)(LOAD(X_T, x, at));
}
#endif
