// gemm_wgmma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by wgmma on the matrix units of NVIDIA's
// Hopper (compute capability 9.0). The kernel is matrix_product_kernel.clh's, where its picture is; here a step's tiles
// are multiplied, by warp groups of 64 rows each:
//
//      a_tile                  b_tile                         sums of a work-group
//     +--------+--------+     +--------+--------+            +------------------+
//     |        |        |     |        |        |            |    wgmma 64 x N  | warps 0-3
//     |  block |  block |  x  |  block |  block |   TILE_K   +------------------+
//     |        |        |     |        |        |            |    wgmma 64 x N  | warps 4-7
//     +--------+--------+     +--------+--------+            +------------------+
//        64 of TILE_M            64 of TILE_N                     N = TILE_N
//
// A block has lines of 128 bytes, as the instruction wants them. Drawn are operands whose lines run across k, where a
// tile has as many blocks as it has 64s; lines along k make one block of TILE_M, or TILE_N, lines. A step's instructions
// may still be at work when the next step's begin: it takes a stage more until its tiles are overwritten.
//
//   WARPS_M, WARPS_N   TILE_M / 16 and 1
//   and the macros of matrix_product_kernel.clh but the first three, A_LINE, B_LINE and UNFINISHED

#define UNFINISHED 1
#define A_LINE 8
#define B_LINE 8

#include "matrix_product.clh"

#if TILE_K != 64
#error "TILE_K must be 64: lines of 128 bytes"
#endif
#if TILE_M % 64 || WARPS_M != TILE_M / 16 || WARPS_N != 1
#error "WARPS_M must be TILE_M / 16, of whole warp groups, and WARPS_N 1: a warp group's instruction has 64 rows"
#endif

#include "wgmma.clh"

// Where the rows of a warp's group begin in A's tile, either in lines along k or in blocks of 64.
static inline uint rows_of_group(uint warp) { return warp / 4 * 64 * LINE_BYTES; }

#if EMULATE

// The step that is begun and not done.
typedef struct {
    __local const uint4 *a_tile, *b_tile;
} steps_t;
#define NO_STEPS {0, 0}
#define TILES_ARRIVED()

static inline void multiply_tiles(sums_t sums, __local const uint4 *a_tile, __local const uint4 *b_tile, uint warp,
                                  uint lane) {
    for (uint i = 0; i < TILE_K / 16; i++)
        wgmma(sums[0], a_tile, rows_of_group(warp) + i * NEXT_16(A_K_MAJOR), b_tile, i * NEXT_16(B_K_MAJOR), warp, lane);
}
static inline void finish_steps(steps_t *steps, sums_t sums, uint warp, uint lane) {
    if (steps->a_tile) multiply_tiles(sums, steps->a_tile, steps->b_tile, warp, lane);
}
static inline void multiply_step(steps_t *steps, sums_t sums, __local const uint4 *a_tile, __local const uint4 *b_tile,
                                 uint warp, uint lane) {
#if EMULATE == 1
    finish_steps(steps, sums, warp, lane);
    steps->a_tile = a_tile;
    steps->b_tile = b_tile;
#else
    multiply_tiles(sums, a_tile, b_tile, warp, lane);
#endif
}

#else

typedef int steps_t; // the hardware keeps the books
#define NO_STEPS 0
#define TILES_ARRIVED() TILES_TO_WGMMA()

static inline void multiply_step(steps_t *steps, sums_t sums, __local const uint4 *a_tile, __local const uint4 *b_tile,
                                 uint warp, uint lane) {
    WGMMA_BEGIN();
    UNROLL for (uint i = 0; i < TILE_K / 16; i++)
        wgmma(sums[0], describe(a_tile, rows_of_group(warp) + i * NEXT_16(A_K_MAJOR), DESCRIPTOR_OF(A_K_MAJOR)),
              describe(b_tile, i * NEXT_16(B_K_MAJOR), DESCRIPTOR_OF(B_K_MAJOR)));
    WGMMA_COMMIT();
    WGMMA_WAIT(1);
}
static inline void finish_steps(steps_t *steps, sums_t sums, uint warp, uint lane) { WGMMA_WAIT(0); }

#endif

#include "matrix_product_kernel.clh"
