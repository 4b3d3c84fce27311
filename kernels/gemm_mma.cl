// gemm_mma.cl: C = epilogue(op(A) op(B)) of 16-bit operands with fp32 sums, by mma.sync on the matrix units of NVIDIA's
// GPUs (compute capability 8.0 and later). The kernel is matrix_product_kernel.clh's, where its picture is; here a
// step's tiles are multiplied:
//
//      a_tile                b_tile                    of a warp, for each 16 of k
//     +------------+        +------------+
//     |  +---+     |        |  +---+     |    BLOCKS_M fragments of A, 16 x 16  ---+
//     |  |16 | ... | WARP_M |  |16 | ... |                                         +--> BLOCKS_M x EIGHTS_N mma
//     |  +---+     |        |  +---+     |    EIGHTS_N / 2 of B, two mma each   ---+
//     +------------+        +------------+
//         TILE_K                TILE_K        fetched by ldmatrix (mma.clh)
//
//   the macros of matrix_product_kernel.clh but the first three, A_LINE, B_LINE and UNFINISHED

#define UNFINISHED 0 // mma.sync is done when it returns
#define A_LINE ((A_K_MAJOR ? TILE_K : TILE_M) / 8)
#define B_LINE ((B_K_MAJOR ? TILE_K : TILE_N) / 8)

#include "matrix_product.clh"
#include "mma.clh"

typedef int steps_t;
#define NO_STEPS 0
#define TILES_ARRIVED()

static inline void multiply_step(steps_t *steps, sums_t sums, __local const uint4 *a_tile, __local const uint4 *b_tile,
                                 uint warp, uint lane) {
    const uint warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;
    UNROLL for (uint k = 0; k < TILE_K; k += 16) {
        fragment_t a[BLOCKS_M], b[EIGHTS_N / 2];
        UNROLL for (int i = 0; i < BLOCKS_M; i++)
            a[i] = load_fragment(block_at(a_tile, A_LINE, warp_m + i * 16, k, A_K_MAJOR, true), lane);
        UNROLL for (int j = 0; j < EIGHTS_N / 2; j++)
            b[j] = load_fragment(block_at(b_tile, B_LINE, warp_n + j * 16, k, B_K_MAJOR, false), lane);
        UNROLL for (int i = 0; i < BLOCKS_M; i++)
            UNROLL for (int j = 0; j < EIGHTS_N; j++) mma(sums[i][j], a[i], b[j / 2], j % 2, lane);
    }
}
static inline void finish_steps(steps_t *steps, sums_t sums, uint warp, uint lane) {}

#include "matrix_product_kernel.clh"
