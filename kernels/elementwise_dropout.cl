// elementwise_dropout.cl: y[i] = keep(seed, i) ? x[i] * scale : 0.
//
// keep is a pure function of the seed and the element's index, so a mask is never stored: backward computes it
// again. The random bits come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011), which turns a counter and a key into four words. A block of 64 elements takes sixteen
// counters, held in the lanes of a uint16:
//
//     counter   16b      16b+1    ...   16b+15       (b: number of the block)
//     word 0    elem 0   elem 1   ...   elem 15
//     word 1    elem 16  elem 17  ...   elem 31
//     word 2    elem 32  ...
//     word 3    elem 48  ...
//
//   X_T, Y_T   storage types: f32, f16 or bf16
//   dropped    an element is dropped when its word is below: p * 2^32
//   span       elements a work-item, a multiple of 64

#define PHILOX_M0 0xD2511F53u  // the multipliers and key increments of the paper
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

// mul_hi is one lane at a time on some CPU compilers; this is a widening multiply everywhere.
static inline uint16 high_word(uint16 a, uint b) { return convert_uint16((convert_ulong16(a) * (ulong)b) >> 32); }

typedef struct {
    uint16 word[4];
} random_block;

static inline random_block philox(ulong block, uint key0, uint key1) {
    const ulong first = block * 16;
    uint16 c0 = (uint)first + (uint16)(LANE_NUMBERS);
    uint16 c1 = (uint)(first >> 32);  // first is a multiple of 16: the lanes carry nothing into it
    uint16 c2 = 0u, c3 = 0u;
    for (int round = 0; round < 10; round++) {
        const uint16 high0 = high_word(c0, PHILOX_M0), low0 = c0 * PHILOX_M0;
        const uint16 high1 = high_word(c2, PHILOX_M1), low1 = c2 * PHILOX_M1;
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += PHILOX_W0;
        key1 += PHILOX_W1;
    }
    const random_block result = {{c0, c1, c2, c3}};
    return result;
}

__kernel void dropout(__global const STORAGE(X_T) *x, __global STORAGE(Y_T) *y, const uint dropped, const float scale,
                      const uint key0, const uint key1, const ulong span, const ulong n) {
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)n);
    while (i < end) {
        const random_block random = philox(i / 64, key0, key1);
        for (int w = 0; w < 4 && i < end; w++, i += 16) {
            const int16 keep = random.word[w] >= dropped;
            const float16 v = LOAD_PART(X_T, x, i, end, 0.0f) * scale;
            STORE_PART(Y_T, keep ? v : (float16)(0.0f), y, i, end);
        }
    }
}
