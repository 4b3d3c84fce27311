// gemm_mma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, on the matrix units of NVIDIA's GPUs
// (compute capability 8.0 and later).
//
//       global memory                local memory                    registers of a warp
//
//       TILE_K a step                STAGES stages
//      +-----+-----+---+             +-----+-----+---+               16 x 16
//   A  |  s  | s+1 |   | TILE_M ---> |  s  | s+1 |   | --ldmatrix--> +---+          WARP_N
//      +-----+-----+---+   copy_     +-----+-----+---+               | a |       +---------+
//   B  |  s  | s+1 |   | TILE_N ---> |  s  | s+1 |   | --ldmatrix--> +---+ -mma->|  sums   | WARP_M
//      +-----+-----+---+   async     +-----+-----+---+               | b |       +---------+
//                                                                    +---+            |
//      +---------+---------+                                                          |
//   C  | warp 0  | warp 1  | TILE_M  <--- slabs, 16 rows of sums a warp  <------------+
//      +---------+---------+              (bias, relu, rounding, 16 bytes a store)
//            TILE_N
//
// One barrier a step: behind it tile s has arrived (each work-item has waited for its own copies), and everybody has
// left tile s - 1, whose stage takes the next copies. (CUTLASS: "multistage" main loop of its SM80 kernels.)
//
//   TILE_M, TILE_N, TILE_K   the tiles; STAGES of them are held
//   WARPS_M, WARPS_N         warps of a work-group, by rows and columns of C; 32 work-items each
//   IN_T                     storage type of A and B, f16 or bf16
//   OUT_T, BIAS_T            storage types of C and of the bias
//   A_K_MAJOR, B_K_MAJOR     1: k is the contiguous dimension; 0: the other one is
//   A_ALIGNED, B_ALIGNED     1: what is contiguous begins at multiples of 16 bytes; 0: copied element by element
//   FULL                     1: M, N and k are whole tiles; 0: zero beyond the matrices
//   EMULATE                  0: NVIDIA's instructions (default). 1, 2: the same in plain C for any device, with copies
//                            that arrive at once, or as late as they may (async_copy.clh)

#ifndef EMULATE
#define EMULATE 0
#endif

#if TILE_K % 16
#error "TILE_K must be a multiple of 16, the k of an mma"
#endif
#if TILE_M % (16 * WARPS_M) || TILE_N % (16 * WARPS_N)
#error "TILE_M and TILE_N must give each of WARPS_M and WARPS_N whole blocks of 16"
#endif
#if STAGES < 2
#error "STAGES must be 2 at least: one that is read, and one that is copied to"
#endif

#define THREADS (WARPS_M * WARPS_N * 32)
#define WARP_M (TILE_M / WARPS_M)
#define WARP_N (TILE_N / WARPS_N)
#define BLOCKS_M (WARP_M / 16)
#define BLOCKS_N (WARP_N / 16)
#if WARP_N != 16 && WARP_N != 32 && WARP_N != 64 && WARP_N != 128
#error "TILE_N / WARPS_N must be 16, 32, 64 or 128, so that 32 lanes store whole rows"
#endif

// In pieces of 16 bytes.
#define A_LINE ((A_K_MAJOR ? TILE_K : TILE_M) / 8)
#define B_LINE ((B_K_MAJOR ? TILE_K : TILE_N) / 8)
#define A_PIECES (TILE_M * TILE_K / 8)
#define B_PIECES (TILE_N * TILE_K / 8)
#define STAGE_PIECES (A_PIECES + B_PIECES)
#if A_PIECES % THREADS || B_PIECES % THREADS
#error "TILE_K must give every work-item as many pieces of a tile as the others"
#endif
#define HELD_GROUPS STAGES
#define HELD_COPIES (STAGE_PIECES / THREADS)

#if EMULATE
#define UNROLL _Pragma("nounroll") // quicker to compile
#else
#define UNROLL _Pragma("unroll")
#endif

#include "async_copy.clh"
#include "matrix_tile.clh"
#include "mma.clh"
#include "matrix_store.clh"

// Local memory: the stages, and then the warps' slabs of sums.
#define SLAB_PIECES (WARPS_M * WARPS_N * SLAB_FLOATS / 4)
#define POOL_PIECES (STAGES * STAGE_PIECES > SLAB_PIECES ? STAGES * STAGE_PIECES : SLAB_PIECES)

// Tiles of C that run together should share what the second-level cache holds: they are walked in bands of BAND rows of
// tiles, each down its columns (Triton's "grouped ordering").
#define BAND 8

static inline void tile_of_group(uint group, uint tiles_m, uint tiles_n, long *m, long *n) {
    const uint band = group / (BAND * tiles_n), first = band * BAND, height = min(tiles_m - first, (uint)BAND);
    const uint within = group - band * BAND * tiles_n;
    *m = (long)(first + within % height) * TILE_M;
    *n = (long)(within / height) * TILE_N;
}

// The matrix behind an operand: op(A) has `rows` rows of k elements, op(B) as many columns.
static inline matrix_t matrix_of(__global const ushort *elements, const bool k_major, long pitch, long rows, long k) {
    const matrix_t matrix = {elements, pitch, k_major ? rows : k, k_major ? k : rows};
    return matrix;
}

// Begins to copy the tiles of A and B from (row, k) on to a stage.
#define LOAD_OPERAND(X, tile, matrix, row, k, extent)                                                         \
    load_tile(&copies, tile, matrix, X##_K_MAJOR ? (row) : (k), X##_K_MAJOR ? (k) : (row),                    \
              X##_K_MAJOR ? (extent) : TILE_K, X##_LINE, THREADS, X##_ALIGNED)
#define LOAD_STAGE(step)                                                                                      \
    {                                                                                                         \
        __local uint4 *const stage = pool + (step) % STAGES * STAGE_PIECES;                                   \
        LOAD_OPERAND(A, stage, a_matrix, m0, k_begin + (long)(step) * TILE_K, TILE_M);                        \
        LOAD_OPERAND(B, stage + A_PIECES, b_matrix, n0, k_begin + (long)(step) * TILE_K, TILE_N);             \
    }

// Work-group (matrix of the batch, slice of k, tile of C), the last the fastest, of THREADS work-items. `pitch` and
// `batch`, in elements, lead to the next line and to the next matrix; a batch of 0 uses one matrix for all. A slice
// sums `slice` of k, whole tiles; C then has a matrix for each, which gemm_slices.cl adds up. Of one slice, `slice` is
// K at least.
__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void gemm(
    __global const ushort *restrict A, __global const ushort *restrict B, __global STORAGE(OUT_T) *restrict C,
    __global const STORAGE(BIAS_T) *restrict bias, const ulong M, const ulong N, const ulong K, const ulong a_pitch,
    const ulong a_batch, const ulong b_pitch, const ulong b_batch, const ulong slice, const uint slices,
    const int has_bias, const int relu) {
    __local uint4 pool[POOL_PIECES] __attribute__((aligned(128))); // begins at the first bank
    const uint lane = get_local_id(0) % 32, warp = get_local_id(0) / 32;
    const uint warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;
    const uint tiles_m = (M + TILE_M - 1) / TILE_M, tiles_n = (N + TILE_N - 1) / TILE_N;
    const uint matrix = get_group_id(0) / (tiles_m * tiles_n), batch = matrix / slices;
    long m0, n0;
    tile_of_group(get_group_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, &m0, &n0);

    const long k_begin = matrix % slices * slice, k_end = min(K, k_begin + slice);
    const matrix_t a_matrix = matrix_of(A + batch * a_batch, A_K_MAJOR, a_pitch, M, k_end);
    const matrix_t b_matrix = matrix_of(B + batch * b_batch, B_K_MAJOR, b_pitch, N, k_end);
    const int steps = (k_end - k_begin + TILE_K - 1) / TILE_K;

    float4 sums[BLOCKS_M][2 * BLOCKS_N];
    UNROLL for (int i = 0; i < BLOCKS_M; i++)
        UNROLL for (int j = 0; j < 2 * BLOCKS_N; j++) sums[i][j] = 0.0f;

    // A group of copies a step, empty or not, so that to count groups is to count steps.
    copies_t copies = NO_COPIES;
    UNROLL for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) LOAD_STAGE(step)
        copies_commit(&copies);
    }
    for (int step = 0; step < steps; step++) {
        COPIES_WAIT(&copies, STAGES - 2);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (step + STAGES - 1 < steps) LOAD_STAGE(step + STAGES - 1)
        copies_commit(&copies);

        __local const uint4 *const a_tile = pool + step % STAGES * STAGE_PIECES, *const b_tile = a_tile + A_PIECES;
        UNROLL for (uint k = 0; k < TILE_K; k += 16) {
            fragment_t a[BLOCKS_M], b[BLOCKS_N];
            UNROLL for (int i = 0; i < BLOCKS_M; i++)
                a[i] = load_fragment(block_at(a_tile, A_LINE, warp_m + i * 16, k, A_K_MAJOR, true), lane);
            UNROLL for (int j = 0; j < BLOCKS_N; j++)
                b[j] = load_fragment(block_at(b_tile, B_LINE, warp_n + j * 16, k, B_K_MAJOR, false), lane);
            UNROLL for (int i = 0; i < BLOCKS_M; i++)
                UNROLL for (int j = 0; j < 2 * BLOCKS_N; j++)
                    sums[i][j] = mma(sums[i][j], a[i], b[j / 2], j % 2, lane);
        }
    }

    // Every group of copies that was not empty has been waited for: local memory is free once all are here.
    barrier(CLK_LOCAL_MEM_FENCE);
    __local float *const slab = (__local float *)pool + warp * SLAB_FLOATS;
    __local float2 *const scattered = (__local float2 *)(slab + lane / 4 * SLAB_PITCH + lane % 4 * 2);
    const long m = m0 + warp_m, n = n0 + warp_n + lane % LANES_OF_A_ROW * 8;
    const int columns = clamp((long)N - n, 0L, 8L);
    const float8 bias8 = load_bias(bias, has_bias, n, columns);
    UNROLL for (int i = 0; i < BLOCKS_M; i++) {
        UNROLL for (int j = 0; j < 2 * BLOCKS_N; j++) {
            scattered[j * 4] = sums[i][j].lo;
            scattered[j * 4 + 8 * SLAB_PITCH / 2] = sums[i][j].hi;
        }
        WARP_BARRIER();
        store_slab(slab, lane, C + matrix * M * N, N, m + i * 16, M, n, columns, bias8, relu);
        WARP_BARRIER(); // the slab is read, and takes the next rows
    }
}
