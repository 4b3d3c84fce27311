// cast.cl: y[i] = (Y_T) x[i] over n contiguous elements.
//
//        work-item 0         work-item 1                       last work-item
//   x  |----- span -----|----- span -----|  ...  |-- 16 at a time --|.| one at a time
//
// One work-item converts `span` neighbouring elements, a multiple of 16: on a CPU device a work-item per element costs
// more in scheduling than in converting (15 against 71 GB/s on PoCL), on a GPU it is 16. It is no macro: one program
// serves tensors of every size.
//
//   X_T, Y_T   storage types: f32, f16 or bf16
//   PIECES     of pieces.clh

#include "pieces.clh"

__kernel void cast(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y, const ulong n,
                   const uint span) {
    size_t i = (size_t)get_global_id(0) * span;
    const size_t end = min(i + span, (size_t)n);
    for (; i + 16 <= end; i += 16) STORE16(Y_T, LOAD16(X_T, x, i), y, i);
    for (; i < end; i++) STORE(Y_T, LOAD(X_T, x, i), y, i);
}
