// concat.cl: parts of a tensor along one axis, joined into the whole or taken out of it.
//
// The whole is `rows` rows of `row` words. Part k is a tensor of `rows` rows of `length` words, and lies in each row
// of the whole from `offset` on:
//
//          |-- part 0 --|------ part 1 ------|-- part 2 --|     row 0
//          |-- part 0 --|------ part 1 ------|-- part 2 --|     row 1
//                       ^ offset1            ^ offset2
//
//   join    whole <- parts    cat, write_into, and the gradients of narrow, split and chunk; a part without a tensor
//                             (its bit in `zeros` is set) is filled with zeros
//   split   parts <- whole    narrow, split, chunk, getitem, and the gradient of cat
//
// A launch moves up to PARTS parts. Work-items are numbered through all parts: those of part k end before `end`.
// Each moves up to `span` words: pieces of one row where rows are longer, else as many whole rows as fit.
// On a GPU `span` is 1, and neighbouring work-items move neighbouring words.
//
//   PARTS         parts of a launch
//   JOIN          the direction: 1 join, 0 split
//   WORD          type of the words moved, where nothing is converted: ushort, uint, uint2 or uint4; or
//   FROM_T, TO_T  the storage types to convert between
//   VECTORS       1: spans are long enough for 16 words at a time (WORD is ushort or uint)
//   INDEX         type of a work-item's number: uint, or ulong where there are too many

#ifdef WORD
#define FROM WORD
#define TO WORD
#define VECTOR CAT(WORD, 16)
#define MOVE(from, to, i) ((to)[i] = (from)[i])
#define MOVE16(from, to, i) STORE_ANY(VECTOR, LOAD_ANY(VECTOR, (from) + (i)), (to) + (i))
#define CLEAR(to, i) ((to)[i] = (WORD)(0))
#define CLEAR16(to, i) STORE_ANY(VECTOR, (VECTOR)(0), (to) + (i))
#else
#define FROM STORAGE(FROM_T)
#define TO STORAGE(TO_T)
#define MOVE(from, to, i) STORE(TO_T, LOAD(FROM_T, from, i), to, i)
#define MOVE16(from, to, i) STORE16(TO_T, LOAD16(FROM_T, from, i), to, i)
#define CLEAR(to, i) STORE(TO_T, 0.0f, to, i)
#define CLEAR16(to, i) STORE16(TO_T, (float16)(0.0f), to, i)
#endif

#if JOIN
#define WHOLE TO
#define PART const FROM
#else
#define WHOLE const FROM
#define PART TO
#endif

#define PART_ARGUMENTS(k) \
    , __global PART *restrict p##k, const ulong length##k, const ulong offset##k, const ulong end##k

// The part of work-item `item`, and the item's number in it.
#define TAKE_PART(k, before)           \
    if (item >= (INDEX)end##before) {  \
        part = p##k;                   \
        length = length##k;            \
        offset = offset##k;            \
        first = end##before;           \
        last = end##k;                 \
        number = k;                    \
    }

#if VECTORS && defined(WORD)
// 4 and 8 words at any address, as LOAD_ANY and STORE_ANY (common.clh) move 16.
#ifdef POCL_DEVICE_ADDRESS_BITS
typedef CAT(WORD, 4) __attribute__((aligned(sizeof(WORD)), may_alias)) any4;
typedef CAT(WORD, 8) __attribute__((aligned(sizeof(WORD)), may_alias)) any8;
#define MOVE_FEW(K, from, to, i) (*(__global any##K *)((to) + (i)) = *(__global const any##K *)((from) + (i)))
#else
#define MOVE_FEW(K, from, to, i) vstore##K(vload##K(0, (from) + (i)), 0, (to) + (i))
#endif
#endif

static inline void move_run(__global const FROM *from, __global TO *to, size_t count) {
    size_t i = 0;
#if VECTORS
    for (; i + 16 <= count; i += 16) MOVE16(from, to, i);
    if (count >= 16) { // the rest, with some words a second time
        if (i < count) MOVE16(from, to, count - 16);
        return;
    }
#ifdef WORD
    if (count >= 8) {
        MOVE_FEW(8, from, to, 0);
        MOVE_FEW(8, from, to, count - 8);
        return;
    }
    if (count >= 4) {
        MOVE_FEW(4, from, to, 0);
        MOVE_FEW(4, from, to, count - 4);
        return;
    }
#endif
#endif
    ONE_BY_ONE for (; i < count; i++) MOVE(from, to, i);
}

static inline void clear_run(__global TO *to, size_t count) {
    size_t i = 0;
#if VECTORS
    for (; i + 16 <= count; i += 16) CLEAR16(to, i);
#endif
    ONE_BY_ONE for (; i < count; i++) CLEAR(to, i);
}

__kernel void move_parts(__global WHOLE *restrict whole, const ulong row, const ulong rows, const ulong span,
                         const uint zeros PART_ARGUMENTS(0)
#if PARTS > 1
                             PART_ARGUMENTS(1)
#endif
#if PARTS > 2
                                 PART_ARGUMENTS(2)
#endif
#if PARTS > 3
                                     PART_ARGUMENTS(3)
#endif
#if PARTS > 4
                                         PART_ARGUMENTS(4) PART_ARGUMENTS(5) PART_ARGUMENTS(6) PART_ARGUMENTS(7)
#endif
) {
    const INDEX item = get_global_id(0);
    __global PART *part = p0;
    size_t length = length0, offset = offset0;
    INDEX first = 0, last = end0;
    uint number = 0;
#if PARTS > 1
    TAKE_PART(1, 0)
#endif
#if PARTS > 2
    TAKE_PART(2, 1)
#endif
#if PARTS > 3
    TAKE_PART(3, 2)
#endif
#if PARTS > 4
    TAKE_PART(4, 3) TAKE_PART(5, 4) TAKE_PART(6, 5) TAKE_PART(7, 6)
#endif
    if (item >= last) return;
    const INDEX across = (length + span - 1) / span, line = (item - first) / across;
    const size_t column = (item - first - line * across) * span, count = min((size_t)span, length - column);
    const size_t deep = across > 1 ? 1 : max((size_t)1, (size_t)span / length);
    const size_t top = line * deep, bottom = min(top + deep, (size_t)rows);
    whole += top * row + offset + column;
    part += top * length + column;
    for (size_t r = top; r < bottom; r++, whole += row, part += length) {
#if JOIN
        if (zeros >> number & 1)
            clear_run(whole, count);
        else
            move_run(part, whole, count);
#else
        move_run(whole, part, count);
#endif
    }
}
