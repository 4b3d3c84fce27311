// gemm_tiled.cl: C = epilogue(op(A) op(B)) on the multiply-adds of every device, for GPUs without matrix units that can
// be used: tiles in local memory, sums in registers.
//
//     global memory            registers       local memory, 2 stages               registers of a work-item
//
//      TILE_K a step                            TILE floats a line of k
//     +-----+-----+--+        +------+         +---------------------+
//  A  |     |     |  | -----> | held | ------> | TILE_K lines of A   | -- PER_ITEM --+
//     +-----+-----+--+ fetch  +------+  put    +---------------------+               |     +------------+
//                      16 bytes        widened                                       +---> | sums       | PER_ITEM
//     +-----+-----+--+ at once+------+ to float+---------------------+               |     +------------+
//  B  |     |     |  | -----> | held | ------> | TILE_K lines of B   | -- PER_ITEM --+        PER_ITEM
//     +-----+-----+--+        +------+         +---------------------+
//                                                                       C: bias, relu, one rounding, 4 columns a store
//
// While one stage is multiplied, the next tiles are on their way to registers, and then to the other stage: one barrier
// a step. A work-group of SIDE x SIDE work-items computes TILE x TILE of C. Rows and columns are dealt out by fours, so
// that neighbours read and store neighbouring vectors: work-item (y, x) has
//
//     rows     4y .. 4y + 3   and   4 (SIDE + y) .. 4 (SIDE + y) + 3        (the second if PER_ITEM is 8)
//     columns  4x .. 4x + 3   and   4 (SIDE + x) .. 4 (SIDE + x) + 3
//
// An operand is fetched along whichever dimension is contiguous in memory, so that NN, NT, TN and TT all read whole
// lines; what is put down of an operand that runs along k is turned (`quad_at`). Beyond the matrices the tiles are zero.
//
//   SIDE       work-items on a side of the work-group: a power of two
//   PER_ITEM   rows and columns of C that a work-item computes: 4 or 8
//   TILE_K     steps of k in local memory at a time: a power of two
//   A_T, B_T, OUT_T, BIAS_T   storage types
//   A_K_MAJOR, B_K_MAJOR      1: k is the contiguous dimension of A, of B; 0: the other one is
//   A_ALIGNED, B_ALIGNED      1: its extent and the strides are multiples of 16 bytes; 0: fetched element by element
//   UNROLLED   1: loops of constant length are unrolled, as GPUs need it (default); 0: quicker to compile

#ifndef UNROLLED
#define UNROLLED 1
#endif

#include "epilogue.clh"

#define TILE (SIDE * PER_ITEM)
#define TILE_M TILE
#define TILE_N TILE
#define THREADS (SIDE * SIDE)
#define QUADS (TILE / 4) // in a line of a tile
#define FOURS (PER_ITEM / 4)

#define BITS_f32 32
#define BITS_f16 16
#define BITS_bf16 16
#define BITS(T) CAT(BITS_, T)
#define IS_HALF_f32 false
#define IS_HALF_f16 true
#define IS_HALF_bf16 false

// Of operand X: elements that are fetched at once, and how often a work-item does so for a tile.
#define PIECE(X) (X##_ALIGNED ? 128 / BITS(X##_T) : 1)
#define FETCHES(X) (TILE * TILE_K / PIECE(X) / THREADS)
#define HELD(X) (FETCHES(X) * (X##_ALIGNED ? 4 : 1)) // 32-bit words

#if PER_ITEM != 4 && PER_ITEM != 8
#error "PER_ITEM must be 4 or 8"
#endif
#if SIDE <= 0 || SIDE & (SIDE - 1)
#error "SIDE must be a power of two"
#endif
#if TILE_K & (TILE_K - 1)
#error "TILE_K must be a power of two"
#endif
#if TILE % 8 || TILE_K % 8 || TILE * TILE_K / 8 % THREADS
#error "TILE_K must give every work-item as many pieces of 16 bytes as the others; SIDE * PER_ITEM must be 8 at least"
#endif

#if UNROLLED
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("nounroll")
#endif
// What a function is given of a layout and of counts is constant, once it is part of the kernel: so it must become one
// before loops are unrolled, and private arrays then are registers.
#define PART_OF_KERNEL static inline __attribute__((always_inline))

#include "tile_order.clh"

// How an operand is stored; constants, of which the compiler keeps what they choose.
typedef struct {
    bool k_major, aligned;
    uint bits, piece;
    bool is_half;
} layout_t;
#define LAYOUT(X) ((layout_t){X##_K_MAJOR, X##_ALIGNED, BITS(X##_T), PIECE(X), CAT(IS_HALF_, X##_T)})

// Row and step of k, in a tile, where piece `number` begins. Counts are powers of two: the place of number p + q, of
// which no bit is in both, is the sum of their places.
PART_OF_KERNEL uint2 place_of(layout_t layout, uint number) {
    return layout.k_major ? (uint2)(number / (TILE_K / layout.piece), number % (TILE_K / layout.piece) * layout.piece)
                          : (uint2)(number % (TILE / layout.piece) * layout.piece, number / (TILE / layout.piece));
}

PART_OF_KERNEL size_t offset_of(layout_t layout, ulong row, ulong k, ulong pitch) {
    return layout.k_major ? row * pitch + k : k * pitch + row;
}

// An operand in global memory, from the first piece on that a work-item fetches of a tile.
typedef struct {
    __global const uchar *from;
    size_t pitch;    // elements from one line to the next
    int rows, steps; // of the tile, and of k, that lie inside of the matrix
} source_t;

// Where a work-item's part of the tiles from (row, k) on begins, of which no step is known yet.
PART_OF_KERNEL source_t source_of(layout_t layout, __global const void *matrix, size_t pitch, ulong rows, ulong row,
                                  ulong k, uint item) {
    const uint2 place = place_of(layout, item);
    const size_t offset = offset_of(layout, row + place.x, k + place.y, pitch);
    const source_t source = {(__global const uchar *)matrix + offset * (layout.bits / 8), pitch,
                             (int)min(rows - row, (ulong)TILE) - (int)place.x, 0};
    return source;
}

// A work-item's part of a tile to registers, as it is stored.
PART_OF_KERNEL void fetch(uint *held, const uint fetches, layout_t layout, source_t source) {
    UNROLL for (uint i = 0; i < fetches; i++) {
        const uint2 place = place_of(layout, i * THREADS);
        const bool inside = (int)place.x < source.rows && (int)place.y < source.steps;
        __global const uchar *const from =
            source.from + offset_of(layout, place.x, place.y, source.pitch) * (layout.bits / 8);
        if (layout.aligned) {
            uint4 words = 0;
            if (inside) words = *(__global const uint4 *)from;
            held[i * 4] = words.x, held[i * 4 + 1] = words.y, held[i * 4 + 2] = words.z, held[i * 4 + 3] = words.w;
        } else {
            held[i] = !inside ? 0 : layout.bits == 32 ? *(__global const uint *)from : *(__global const ushort *)from;
        }
    }
}

// Element e of a piece that is held.
PART_OF_KERNEL float widened(const uint *words, layout_t layout, uint e) {
    if (layout.bits == 32) return as_float(words[e]);
    const ushort bits = words[e / 2] >> e % 2 * 16;
    return layout.is_half ? vload_half(0, (const half *)&bits) : as_float((uint)bits << 16);
}

// Where the four rows from 4 * quad on lie in a line of a tile that was turned. Work-items that hold different pieces of
// the same rows put these to lines that are whole rounds of banks apart; turned as far as their k is, they meet in none.
//
//     k, in pieces   quads of a line, PIECE(X) being 8 and TILE_K 16
//          0         0 1 2 3  4 5 6 7  8 ...      32 neighbours put 16 rows of 2 pieces: quads 0 to 3 of one line, and
//          1         4 5 6 7  0 1 2 3  12 ...     of another one, which are in banks 0 to 15, and in 16 to 31
PART_OF_KERNEL uint quad_at(layout_t layout, uint k, uint quad) {
    if (!layout.k_major) return quad;
    const uint pieces = TILE_K / layout.piece, turn = k / layout.piece * (pieces < 8 ? 8 / pieces : 1);
    return quad ^ (turn & min(SIDE - 1, 7));
}

// What is held to local memory.
PART_OF_KERNEL void put(__local float4 *tile, const uint *held, const uint fetches, layout_t layout, uint item) {
    UNROLL for (uint i = 0; i < fetches; i++) {
        const uint2 place = place_of(layout, item + i * THREADS);
        const uint *const words = held + (layout.aligned ? i * 4 : i);
        if (layout.k_major || !layout.aligned) {
            __local float *const row = (__local float *)(tile + quad_at(layout, place.y, place.x / 4)) + place.x % 4;
            UNROLL for (uint e = 0; e < layout.piece; e++) row[(place.y + e) * TILE] = widened(words, layout, e);
        } else {
            UNROLL for (uint e = 0; e < layout.piece; e += 4)
                tile[place.y * QUADS + (place.x + e) / 4] =
                    (float4)(widened(words, layout, e), widened(words, layout, e + 1), widened(words, layout, e + 2),
                             widened(words, layout, e + 3));
        }
    }
}

// A work-item's rows, or columns, of a line of a tile.
PART_OF_KERNEL void read_line(float *values, __local const float4 *tile, layout_t layout, uint k, uint place) {
    UNROLL for (uint four = 0; four < FOURS; four++) {
        const float4 v = tile[k * QUADS + four * SIDE + quad_at(layout, k, place)];
        values[four * 4] = v.x, values[four * 4 + 1] = v.y, values[four * 4 + 2] = v.z, values[four * 4 + 3] = v.w;
    }
}

// Four neighbouring elements at an address that is a multiple of their size.
static inline ushort half_bits_1(float v) {
    ushort bits;
    vstore_half_rte(v, 0, (half *)&bits);
    return bits;
}
static inline void store4_f32(float4 v, __global float *p) { *(__global float4 *)p = v; }
#define DEFINE_STORE4(T, BITS_1)                                                                                      \
    static inline void store4_##T(float4 v, __global STORAGE(T) *p) {                                                 \
        *(__global uint2 *)p = (uint2)(BITS_1(v.x) | (uint)BITS_1(v.y) << 16, BITS_1(v.z) | (uint)BITS_1(v.w) << 16); \
    }
DEFINE_STORE4(f16, half_bits_1)
DEFINE_STORE4(bf16, bf16_bits)

// Work-group (matrix of the batch, slice of k, tile of C), the last the fastest, of THREADS work-items. `pitch` and
// `batch`, in elements, lead to the next line and to the next matrix; a batch of 0 uses one matrix for all. A slice
// sums `slice` of k, whole tiles; C then has a matrix for each, which gemm_slices.cl adds up. Of one slice, `slice` is
// K at least.
__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void gemm(
    __global const STORAGE(A_T) *restrict A, __global const STORAGE(B_T) *restrict B,
    __global STORAGE(OUT_T) *restrict C, __global const STORAGE(BIAS_T) *restrict bias, const ulong M, const ulong N,
    const ulong K, const ulong a_pitch, const ulong a_batch, const ulong b_pitch, const ulong b_batch,
    const ulong slice, const uint slices, const int has_bias, const int relu) {
    __local float4 a_tiles[2][TILE_K * QUADS], b_tiles[2][TILE_K * QUADS];
    const layout_t a_layout = LAYOUT(A), b_layout = LAYOUT(B);

    // A warp is 4 rows of 8 work-items: it reads 4 different vectors of A, and 8 of B.
    const uint item = get_local_id(0), wide = min(SIDE, 8);
    const uint y = item / wide % SIDE, x = item / (wide * SIDE) * wide + item % wide;

    const uint tiles_m = (M + TILE - 1) / TILE, tiles_n = (N + TILE - 1) / TILE;
    const uint matrix = get_group_id(0) / (tiles_m * tiles_n), batch = matrix / slices;
    long m0, n0;
    tile_of_group(get_group_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, &m0, &n0);
    const size_t k_begin = matrix % slices * slice, k_end = min(K, k_begin + slice);
    source_t a_source = source_of(a_layout, A + batch * a_batch, a_pitch, M, m0, k_begin, item);
    source_t b_source = source_of(b_layout, B + batch * b_batch, b_pitch, N, n0, k_begin, item);
    const size_t a_bytes = offset_of(a_layout, 0, TILE_K, a_pitch) * (BITS(A_T) / 8); // to the tile of the next step
    const size_t b_bytes = offset_of(b_layout, 0, TILE_K, b_pitch) * (BITS(B_T) / 8);

    float sums[PER_ITEM][PER_ITEM];
    UNROLL for (int i = 0; i < PER_ITEM; i++)
        UNROLL for (int j = 0; j < PER_ITEM; j++) sums[i][j] = 0.0f;

    // Round `step` multiplies the tiles of the step before it; there is nothing to multiply in the first, and nothing to
    // fetch in the last.
    const uint steps = (k_end - k_begin + TILE_K - 1) / TILE_K;
    for (uint step = 0; step <= steps; step++) {
        uint a_held[HELD(A)], b_held[HELD(B)];
        if (step < steps) {
            const int left = min(k_end - k_begin - (size_t)step * TILE_K, (ulong)TILE_K);
            a_source.steps = left - (int)place_of(a_layout, item).y;
            b_source.steps = left - (int)place_of(b_layout, item).y;
            fetch(a_held, FETCHES(A), a_layout, a_source);
            fetch(b_held, FETCHES(B), b_layout, b_source);
            a_source.from += a_bytes;
            b_source.from += b_bytes;
        }
        if (step > 0) {
            __local const float4 *const a_tile = a_tiles[(step - 1) % 2], *const b_tile = b_tiles[(step - 1) % 2];
            UNROLL for (uint k = 0; k < TILE_K; k++) {
                float a[PER_ITEM], b[PER_ITEM];
                read_line(a, a_tile, a_layout, k, y);
                read_line(b, b_tile, b_layout, k, x);
                UNROLL for (int i = 0; i < PER_ITEM; i++)
                    UNROLL for (int j = 0; j < PER_ITEM; j++) sums[i][j] = a[i] * b[j] + sums[i][j];
            }
        }
        if (step < steps) {
            put(a_tiles[step % 2], a_held, FETCHES(A), a_layout, item);
            put(b_tiles[step % 2], b_held, FETCHES(B), b_layout, item);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    C += matrix * M * N;
    UNROLL for (uint four_n = 0; four_n < FOURS; four_n++) {
        const size_t n = n0 + (four_n * SIDE + x) * 4;
        const int columns = clamp((long)(N - n), 0L, 4L);
        float b[4];
        UNROLL for (int j = 0; j < 4; j++) b[j] = j < columns ? BIAS(n + j) : NO_BIAS;
        UNROLL for (uint i = 0; i < PER_ITEM; i++) {
            const size_t m = m0 + (i / 4 * SIDE + y) * 4 + i % 4;
            float v[4];
            UNROLL for (int j = 0; j < 4; j++) v[j] = EPILOGUE(sums[i][four_n * 4 + j], b[j], relu_1);
            if (m >= M) continue;
            if (N % 4 == 0 && columns == 4) {
                CAT(store4_, OUT_T)((float4)(v[0], v[1], v[2], v[3]), C + m * N + n);
            } else {
                UNROLL for (int j = 0; j < 4; j++)
                    if (j < columns) STORE(OUT_T, v[j], C, m * N + n + j);
            }
        }
    }
}
