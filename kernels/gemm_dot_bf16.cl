// gemm_dot_bf16.cl: C = epilogue(op(A) op(B)) from panels of bfloat16 pairs (gemm_pack.cl, PAIRS 1), by the processor's
// dot product (dot_bf16.clh). Up to twice the rate of gemm_packed.cl.
//
//      a_panels [M/12][K/2][12]  uint         A work-item multiplies a block of panels of A by a block of panels of B,
//      b_panels [N/32][K/2][32]  uint         KC steps at a time. `sums` has a slot for each tile whose sums must
//                                             outlive that; they go through the epilogue to C.
//
//   KC             steps (pairs of k) between two visits to a tile
//   OUT_T, BIAS_T  storage types of C and of the bias
//
// The third dimension is the batch; a batch stride of 0 (in elements) uses one matrix for all of it.

#include "dot_bf16.clh"
#include "epilogue.clh"

// Work-item (block of rows, block of columns, batch): block_panels_a x block_panels_b tiles of C. It owns
// block_panels_a * slot_columns slots of sums: slot_columns is block_panels_b if K takes several visits, else 1.
__kernel ONE_WORK_ITEM void gemm(
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
            multiply_12(a_panels + (first_a * steps + t) * MR, b_panels + (q * steps + t) * NR, slots,
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
