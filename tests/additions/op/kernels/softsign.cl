// softsign.cl: y = x / (1 + |x|), and the gradient of x from the gradient g of y: dx = g / (1 + |x|)^2.
//
//              work-item 0         work-item 1                      last work-item
//     x, y  |----- span -----|----- span -----|  ...  |-- blocks of 16 --|-- rest --|
//
//   X_T, Y_T, G_T, DX_T   storage types

#ifdef SOFTSIGN
__kernel void softsign(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong n,
                       const ulong span) {
    const size_t begin = get_global_id(0) * span, end = min(begin + span, (size_t)n);
    for (size_t i = begin; i < end; i += 16) {
        const float16 v = LOAD_PART(X_T, x, i, end, 0.0f);
        STORE_PART(Y_T, v / (1.0f + fabs(v)), y, i, end);
    }
}
#endif

#ifdef SOFTSIGN_BACKWARD
__kernel void softsign_backward(__global const STORAGE(G_T) *restrict g, __global const STORAGE(X_T) *restrict x,
                                __global STORAGE(DX_T) *restrict dx, const ulong n, const ulong span) {
    const size_t begin = get_global_id(0) * span, end = min(begin + span, (size_t)n);
    for (size_t i = begin; i < end; i += 16) {
        const float16 slope = 1.0f / (1.0f + fabs(LOAD_PART(X_T, x, i, end, 0.0f)));
        STORE_PART(DX_T, LOAD_PART(G_T, g, i, end, 0.0f) * slope * slope, dx, i, end);
    }
}
#endif
