// gemm_slices.cl: the second half of a product whose k was cut into slices, because C alone has too few tiles for the
// device: C = epilogue(the slices' sums, added in their order).
//
//   partial [batch][slice][M][N] of float   --+-->  C [batch][M][N], an element a work-item
//
//   OUT_T, BIAS_T   storage types of C and of the bias

#include "epilogue.clh"

// Work-item (element of a matrix, batch).
__kernel void add_slices(__global const float *restrict partial, __global STORAGE(OUT_T) *restrict C,
                         __global const STORAGE(BIAS_T) *restrict bias, const ulong elements, const ulong N,
                         const uint slices, const int has_bias, const int relu) {
    const size_t i = get_global_id(0), batch = get_global_id(1);
    if (i >= elements) return;
    partial += batch * slices * elements + i;
    float sum = 0.0f;
    for (uint s = 0; s < slices; s++) sum += partial[s * elements];
    STORE(OUT_T, EPILOGUE(sum, BIAS(i % N), relu_1), C, batch * elements + i);
}
