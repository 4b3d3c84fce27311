// optimizer_step.cl: an optimizer's step over many parameters in one launch, and their 16-bit copies.
//
//   slot k     p_k  parameter, float32     rewritten by the rule
//              g_k  its gradient, float32
//              s_k, t_k  its state         velocity; first and second moment
//              h_k  16-bit copy of p_k     written, if there are copies
//   tiles      as in multi_tensor.cl: one work-group a tile, in a shuffled order
//
// The rules are those of netcl's optimizers, operation by operation, and give the same bits: SGD, Adam and AdamW are
// kernels there (netcl/optim/*.py), whose expressions stand here as they stand there, so that a compiler contracts the
// same multiplications and additions. Momentum is computed by numpy there, which contracts none.
//
//   RULE      sgd, sgd_momentum, momentum, adam, adamw; none: the parameters are only copied, and have no gradients here
//   COPY_T    storage type of the copies: f16 or bf16; f32: there are none
//   ROUNDED   1: a parameter becomes what its copy holds; 0, the default: it keeps its precision
//   DECADES   of slots.clh: SLOTS = 10, 20 ... 100
//   PIECES    of pieces.clh
//
// A CPU device takes a work-group of one work-item, which runs through its tile 16 elements at a time; on a GPU the
// work-items of a group take turns.

#include "pieces.clh"
#include "slots.clh"

#define COPIES_f32 0
#define COPIES_f16 1
#define COPIES_bf16 1
#define COPIES CAT(COPIES_, COPY_T)

// Of each rule: how many tensors of state it has (-1: not even a gradient), its numbers, what it does to `value` and to
// the state, `first` and `second`, by `grad`, all of type V, float or float16; and whether that may be contracted.
#define CONTRACTS_none 1
#define STATES_none -1
#define NUMBERS_none
#define UPDATE_none(V)

#define CONTRACTS_sgd 1
#define STATES_sgd 0
#define NUMBERS_sgd , const float lr, const float weight_decay
#define UPDATE_sgd(V)                                       \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    value = value - lr * grad;

#define CONTRACTS_sgd_momentum 1
#define STATES_sgd_momentum 1
#define NUMBERS_sgd_momentum NUMBERS_sgd, const float momentum
#define UPDATE_sgd_momentum(V)                              \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    first = momentum * first + grad;                        \
    value = value - lr * first;

#define CONTRACTS_momentum 0
#define STATES_momentum 1
#define NUMBERS_momentum NUMBERS_sgd_momentum, const int nesterov
#define UPDATE_momentum(V)                                        \
    if (weight_decay != 0.0f) grad = grad + weight_decay * value; \
    first = momentum * first + grad;                              \
    value = value - lr * (nesterov ? grad + momentum * first : first);

#define CONTRACTS_adam 1
#define STATES_adam 2
#define NUMBERS_adam \
    NUMBERS_sgd, const float beta1, const float beta2, const float eps, const float bc1, const float bc2
#define MOMENTS(V)                                                  \
    first = mad((V)(beta1), first, (1.0f - beta1) * grad);          \
    second = mad((V)(beta2), second, (1.0f - beta2) * grad * grad); \
    const V m_hat = first / bc1;                                    \
    const V v_hat = second / bc2;                                   \
    const V upd = m_hat / (sqrt(v_hat) + eps);
#define UPDATE_adam(V)                                      \
    if (weight_decay != 0.0f) grad += weight_decay * value; \
    MOMENTS(V)                                              \
    value = value - lr * upd;

#define CONTRACTS_adamw 1
#define STATES_adamw 2
#define NUMBERS_adamw NUMBERS_adam
#define UPDATE_adamw(V)                                           \
    MOMENTS(V)                                                    \
    if (weight_decay != 0.0f) value -= lr * weight_decay * value; \
    value -= lr * upd;

#if !CAT(CONTRACTS_, RULE)
#pragma OPENCL FP_CONTRACT OFF
#endif
#define STATES CAT(STATES_, RULE)
#define UPDATE CAT(UPDATE_, RULE)

#define P_PARAMETER(k) , __global float *p##k
#define SLOT_P(k) p = p##k;
#if STATES >= 0
#define G_PARAMETER(k) , __global const float *g##k
#define SLOT_G(k) g = g##k;
#else
#define G_PARAMETER(k)
#define SLOT_G(k)
#endif
#if STATES >= 1
#define S_PARAMETER(k) , __global float *s##k
#define SLOT_S(k) s = s##k;
#else
#define S_PARAMETER(k)
#define SLOT_S(k)
#endif
#if STATES >= 2
#define T_PARAMETER(k) , __global float *t##k
#define SLOT_T(k) t = t##k;
#else
#define T_PARAMETER(k)
#define SLOT_T(k)
#endif
#if COPIES
#define H_PARAMETER(k) , __global STORAGE(COPY_T) *h##k
#define SLOT_H(k) h = h##k;
#else
#define H_PARAMETER(k)
#define SLOT_H(k)
#endif
#define SLOT_CASE(k) case k: SLOT_P(k) SLOT_G(k) SLOT_S(k) SLOT_T(k) SLOT_H(k) break;

#if STATES >= 2
#define LOAD_STATE(V, LD, i) V first = LD(f32, s, i), second = LD(f32, t, i);
#define STORE_STATE(ST, i) ST(f32, first, s, i); ST(f32, second, t, i);
#elif STATES >= 1
#define LOAD_STATE(V, LD, i) V first = LD(f32, s, i);
#define STORE_STATE(ST, i) ST(f32, first, s, i);
#else
#define LOAD_STATE(V, LD, i)
#define STORE_STATE(ST, i)
#endif
#ifndef ROUNDED
#define ROUNDED 0
#endif
#if COPIES && ROUNDED
#define STORE_COPY(LD, ST, i) ST(COPY_T, value, h, i); ST(f32, LD(COPY_T, h, i), p, i);
#elif COPIES
#define STORE_COPY(LD, ST, i) ST(COPY_T, value, h, i);
#else
#define STORE_COPY(LD, ST, i)
#endif

// Element i and, if V is float16, the 15 after it.
#if STATES >= 0
#define NAME update
#define STEP(V, LD, ST, i)        \
    V value = LD(f32, p, i);      \
    V grad = LD(f32, g, i);       \
    LOAD_STATE(V, LD, i)          \
    UPDATE(V)                     \
    ST(f32, value, p, i);         \
    STORE_STATE(ST, i)            \
    STORE_COPY(LD, ST, i)
#else
#define NAME copy
#define STEP(V, LD, ST, i)             \
    const V value = LD(f32, p, i);     \
    STORE_COPY(LD, ST, i)
#endif

__kernel void NAME(__global const tile *restrict tiles CAT(NUMBERS_, RULE) EACH_SLOT(P_PARAMETER)
                       EACH_SLOT(G_PARAMETER) EACH_SLOT(S_PARAMETER) EACH_SLOT(T_PARAMETER) EACH_SLOT(H_PARAMETER)) {
    const tile of = tiles[get_group_id(0)];
    __global float *p;
    __global const float *g;
    __global float *s, *t;
    __global STORAGE(COPY_T) *h;
    switch (of.tensor) {
        EACH_SLOT(SLOT_CASE)
        default: return;
    }
    const size_t end = of.begin + of.count, last = end - of.count % 16;
    for (size_t i = of.begin + 16 * get_local_id(0); i < last; i += 16 * get_local_size(0)) {
        STEP(float16, LOAD16, STORE16, i)
    }
    for (size_t i = last + get_local_id(0); i < end; i += get_local_size(0)) {
        STEP(float, LOAD, STORE, i)
    }
}
