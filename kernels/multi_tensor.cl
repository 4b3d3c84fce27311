// multi_tensor.cl: one launch over many tensors, y_k[i] = x_k[i] * multiplier, and flags for inf and nan.
//
//   tensors   x_0 |--------|--------|---|    x_1 |----|    x_2 |--------|-------|   ...   SLOTS of them
//   tiles         (0, 0)    (0, T)   (0, 2T)     (1, 0)        (2, 0)    (2, T)
//
//   tile table  | 2 @ T | 0 @ 2T | 1 @ 0 | 0 @ 0 | ...    one work-group a tile, in a shuffled order
//
// The pointers are kernel arguments, because OpenCL has no arrays of pointers to buffers; a tile's tensor is
// found by a switch over them. The order is shuffled on the host: drivers that give each thread a contiguous
// range of work-groups would otherwise give one thread all of the large tensors. Every element is written,
// whatever the flag says.
//
//   X_T        storage type of the sources: f32, f16 or bf16. The targets are f32
//   IN_PLACE   1: the sources are the targets and are passed once, 0: both are passed, sources first
//   ONLY_CHECK 1: nothing is multiplied or written, only the flags are set; the sources alone are passed
//   DECADES    of slots.clh: SLOTS = 10, 20 ... 100
//   PIECES     of pieces.clh
//
// A CPU device takes a work-group of one work-item, which runs through its tile 16 elements at a time; on a
// GPU the work-items of a group take turns, so that neighbours touch neighbouring memory.

#include "pieces.clh"
#include "slots.clh"

#define TARGET_PARAMETER(k) , __global float *y##k
#define SOURCE_PARAMETER(k) , __global const STORAGE(X_T) *x##k
#if ONLY_CHECK
#undef TARGET_PARAMETER
#define TARGET_PARAMETER(k)
#define SLOT_CASE(k) case k: x = x##k; break;
#elif IN_PLACE
#undef SOURCE_PARAMETER
#define SOURCE_PARAMETER(k)
#define SLOT_CASE(k) case k: x = y = y##k; break;
#else
#define SLOT_CASE(k) case k: x = x##k; y = y##k; break;
#endif

// How the loss scale's state begins (loss_scale.cl has the rest).
typedef struct {
    float multiplier;
    int found;
} unscale_state;

#define FOUND_INF 1
#define FOUND_NAN 2

// By the bits, so that no compiler setting can assume inf and nan away.
#define INFINITE 0x7f800000
#define MAGNITUDE 0x7fffffff

#if ONLY_CHECK
#define MULTIPLIED(v) (v)
#define WRITE(STORE_ANY, v, i)
#define RESULT(i) LOAD(X_T, x, i)
#else
#define MULTIPLIED(v) ((v) * factor)
#define WRITE(STORE_ANY, v, i) STORE_ANY(f32, v, y, i)
#define RESULT(i) y[i]
#endif
#define KIND(bits)                                             \
    (((bits) & MAGNITUDE) == INFINITE ? FOUND_INF : ((bits) & MAGNITUDE) > INFINITE ? FOUND_NAN : 0)

// The multiplier is word 0 of a loss scale's state: of `state` itself, or of the scale as it was earlier.
__kernel void unscale(__global const tile *restrict tiles, __global unscale_state *state,
                      __global const float *multiplier EACH_SLOT(SOURCE_PARAMETER) EACH_SLOT(TARGET_PARAMETER)) {
    const tile t = tiles[get_group_id(0)];
    __global const STORAGE(X_T) *x;
#if !ONLY_CHECK
    __global float *y;
    const float factor = *multiplier;
#endif
    switch (t.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    x += t.begin;
#if !ONLY_CHECK
    y += t.begin;
#endif

    int16 bad16 = 0;
    EACH_VECTOR(i, 0, t.count) {
        const float16 v = MULTIPLIED(LOAD16(X_T, x, i));
        bad16 |= (as_int16(v) & INFINITE) == INFINITE;
        WRITE(STORE16, v, i);
    }
    int bad = any(bad16);
    ONE_BY_ONE for (size_t i = t.count / 16 * 16 + get_local_id(0); i < t.count; i += get_local_size(0)) {
        const float v = MULTIPLIED(LOAD(X_T, x, i));
        bad |= (as_int(v) & INFINITE) == INFINITE;
        WRITE(STORE, v, i);
    }
    if (!bad) return;
    // Which of the two it was is asked of the few tiles that have one.
    int found = 0;
    EACH_VECTOR(i, 0, t.count) ONE_BY_ONE for (size_t k = i; k < i + 16; k++) found |= KIND(as_int(RESULT(k)));
    ONE_BY_ONE for (size_t i = t.count / 16 * 16 + get_local_id(0); i < t.count; i += get_local_size(0))
        found |= KIND(as_int(RESULT(i)));
    atomic_or(&state->found, found);
}
