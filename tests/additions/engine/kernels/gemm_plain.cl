// gemm_plain.cl: C = relu(op(A) op(B) + bias), a work-item for each element of C: column, row, matrix of the batch.
//
//   A_T, B_T, OUT_T, BIAS_T   storage types
//
// Strides are in elements. A batch stride of 0 uses one matrix for the whole batch.

__kernel void gemm(__global const STORAGE(A_T) *restrict A, __global const STORAGE(B_T) *restrict B,
                   __global STORAGE(OUT_T) *restrict C, __global const STORAGE(BIAS_T) *restrict bias, const ulong K,
                   const ulong a_row, const ulong a_k, const ulong a_batch, const ulong b_col, const ulong b_k,
                   const ulong b_batch, const int has_bias, const int relu) {
    const size_t column = get_global_id(0), row = get_global_id(1), batch = get_global_id(2);
    const size_t M = get_global_size(1), N = get_global_size(0);
    A += batch * a_batch + row * a_row;
    B += batch * b_batch + column * b_col;
    float sum = 0;
    for (size_t k = 0; k < K; k++) sum += LOAD(A_T, A, k * a_k) * LOAD(B_T, B, k * b_k);
    if (has_bias) sum += LOAD(BIAS_T, bias, column);
    STORE(OUT_T, relu && sum < 0.0f ? 0.0f : sum, C, (batch * M + row) * N + column);
}
