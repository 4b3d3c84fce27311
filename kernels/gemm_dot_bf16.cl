// gemm_dot_bf16.cl: C = epilogue(op(A) op(B)) from panels of bfloat16 pairs (gemm_pack.cl, PAIRS 1), with the x86
// instruction vdpbf16ps: each of 16 float sums takes two products at once. Twice the rate of gemm_packed.cl.
//
//      a_panels [M/12][K/2][12]  uint      registers       zmm24            zmm25        <- a step of a panel of B
//      b_panels [N/32][K/2][32]  uint      zmm26..29     +---------------+---------------+
//                                          a row of A,   | zmm0          | zmm1          |
//                                          broadcast     | zmm2          | zmm3          |   12 x 32 sums
//                                                        |      ...      |      ...      |
//                                                        | zmm22         | zmm23         |
//                                                        +---------------+---------------+
//
// The compilers of CPU devices have no name for this instruction (they compile for older processors, and Intel's takes
// no vector operand in assembly), so one block of assembly, given pointers only, multiplies a column of tiles:
// `panels` panels of A by one of B. It saves and restores every vector register it uses, since not every compiler
// can be told of them. The sums go through memory: `sums`, with a slot of 12 x 32 floats for each tile whose sums must
// outlive the block, then in plain C through the epilogue to C.
//
// vdpbf16ps takes subnormal bfloat16 numbers and results as zero. The host runs it only where the processor has it
// and after a trial has given the right numbers (clamp/ops/gemm_dot_bf16.py).
//
//   KC             steps (pairs of k) between two visits to a tile
//   OUT_T, BIAS_T  storage types of C and of the bias
//
// The third dimension is the batch; a batch stride of 0 (in elements) uses one matrix for all of it.

#define MR 12
#define NR 32
#define TILE (MR * NR)
#define SAVED_FLOATS (30 * 16) // zmm0 .. zmm29

#define LINE(text) text "\n\t"
#define LOAD_REG(n, base) LINE("vmovups 64*" #n "(%[" #base "]), %%zmm" #n)
#define STORE_REG(n, base) LINE("vmovups %%zmm" #n ", 64*" #n "(%[" #base "])")
#define CLEAR_REG(n, base) LINE("vpxord %%zmm" #n ", %%zmm" #n ", %%zmm" #n)
#define EACH_SUM(X, base)                                                                         \
    X(0, base) X(1, base) X(2, base) X(3, base) X(4, base) X(5, base) X(6, base) X(7, base)       \
    X(8, base) X(9, base) X(10, base) X(11, base) X(12, base) X(13, base) X(14, base) X(15, base) \
    X(16, base) X(17, base) X(18, base) X(19, base) X(20, base) X(21, base) X(22, base) X(23, base)
#define EACH_REG(X, base) \
    EACH_SUM(X, base) X(24, base) X(25, base) X(26, base) X(27, base) X(28, base) X(29, base)

// One element of A, pair of k, times the 32 pairs of B.
#define ROW(i, x, c0, c1)                                   \
    LINE("vpbroadcastd 4*" #i "(%[a_step]), %%zmm" #x)      \
    LINE("vdpbf16ps %%zmm24, %%zmm" #x ", %%zmm" #c0)       \
    LINE("vdpbf16ps %%zmm25, %%zmm" #x ", %%zmm" #c1)

// sums[p] (+)= panel p of A times the panel of B, over `steps` (at least 1), for `panels` (at least 1) panels of A
// that stand `stride` bytes apart.
static inline void multiply_column(__global const uint *a, __global const uint *b, __global float *sums, ulong panels,
                                   ulong stride, ulong steps, uint resume) {
    float saved[SAVED_FLOATS];
    __global const uint *a_step, *b_step;
    ulong left;
    __asm__ volatile(
        EACH_REG(STORE_REG, saved)
        LINE("1:")
        LINE("movq %[a], %[a_step]")
        LINE("movq %[b], %[b_step]")
        LINE("movq %[steps], %[left]")
        LINE("testl %[resume], %[resume]")
        LINE("jnz 2f")
        EACH_SUM(CLEAR_REG, sums)
        LINE("jmp 3f")
        LINE("2:")
        EACH_SUM(LOAD_REG, sums)
        LINE("3:")
        LINE("vmovups (%[b_step]), %%zmm24")
        LINE("vmovups 64(%[b_step]), %%zmm25")
        ROW(0, 26, 0, 1) ROW(1, 27, 2, 3) ROW(2, 28, 4, 5) ROW(3, 29, 6, 7)
        ROW(4, 26, 8, 9) ROW(5, 27, 10, 11) ROW(6, 28, 12, 13) ROW(7, 29, 14, 15)
        ROW(8, 26, 16, 17) ROW(9, 27, 18, 19) ROW(10, 28, 20, 21) ROW(11, 29, 22, 23)
        LINE("addq $48, %[a_step]")
        LINE("addq $128, %[b_step]")
        LINE("decq %[left]")
        LINE("jnz 3b")
        EACH_SUM(STORE_REG, sums)
        LINE("addq $1536, %[sums]")
        LINE("addq %[stride], %[a]")
        LINE("decq %[panels]")
        LINE("jnz 1b")
        EACH_REG(LOAD_REG, saved)
        : [a] "+r"(a), [sums] "+r"(sums), [panels] "+r"(panels), [a_step] "=&r"(a_step), [b_step] "=&r"(b_step),
          [left] "=&r"(left)
        : [b] "r"(b), [stride] "r"(stride), [steps] "r"(steps), [resume] "r"(resume), [saved] "r"(saved)
        : "memory", "cc");
}

// A NaN is not below zero and stays.
static inline float relu_1(float v) { return v < 0.0f ? 0.0f : v; }
static inline float16 relu_16(float16 v) { return select(v, (float16)(0.0f), v < 0.0f); }
#define EPILOGUE(v, b, relu_n) (relu ? relu_n((v) + (b)) : (v) + (b))
#define NO_BIAS (-0.0f) // v + -0 is v for every v, -0 included

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C. It owns
// block_panels_a * slot_columns slots of sums: slot_columns is block_panels_b if K takes several visits, else 1.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void gemm(
    __global const uint *restrict a_panels, __global const uint *restrict b_panels, __global STORAGE(OUT_T) *restrict C,
    __global const STORAGE(BIAS_T) *restrict bias, __global float *restrict sums, const ulong M, const ulong N,
    const ulong steps, const ulong a_batch, const ulong b_batch, const uint block_panels_a, const uint block_panels_b,
    const uint slot_columns, const int has_bias, const int relu) {
    const size_t panels_a = (M + MR - 1) / MR, panels_b = (N + NR - 1) / NR, batch = get_global_id(2);
    const size_t first_a = get_global_id(0) * block_panels_a, end_a = min(first_a + block_panels_a, panels_a);
    const size_t first_b = get_global_id(1) * block_panels_b, end_b = min(first_b + block_panels_b, panels_b);
    a_panels += batch * a_batch;
    b_panels += batch * b_batch;
    C += batch * M * N;
    const size_t work_item = (batch * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0);
    sums += work_item * block_panels_a * slot_columns * TILE;

    for (size_t t = 0; t < steps; t += KC) {
        const size_t count = min((size_t)KC, steps - t);
        for (size_t q = first_b; q < end_b; q++) {
            __global float *slots = sums + (slot_columns == 1 ? 0 : q - first_b) * block_panels_a * TILE;
            multiply_column(a_panels + (first_a * steps + t) * MR, b_panels + (q * steps + t) * NR, slots,
                            end_a - first_a, steps * MR * sizeof(uint), count, t > 0);
            if (t + count < steps) continue;
            for (size_t m = first_a * MR; m < min(end_a * MR, (size_t)M); m++, slots += NR) {
                const size_t n = q * NR, last = min(n + NR, (size_t)N);
                __global STORAGE(OUT_T) *out = C + m * N;
                size_t j = n;
                for (; j + 16 <= last; j += 16) {
                    const float16 b = has_bias ? LOAD16(BIAS_T, bias, j) : (float16)(NO_BIAS);
                    STORE16(OUT_T, EPILOGUE(vload16(0, slots + j - n), b, relu_16), out, j);
                }
                for (; j < last; j++) {
                    const float b = has_bias ? LOAD(BIAS_T, bias, j) : NO_BIAS;
                    STORE(OUT_T, EPILOGUE(slots[j - n], b, relu_1), out, j);
                }
            }
        }
    }
}
