// attention_decode.cl: one query a head against the first `length` keys and values of a cache.
//
//      q (heads, D)      k, v (heads, capacity, D)                    y (heads, D)
//
//      q . k, KEYS of them at a time  ->  weights  ->  sum of rows of v, rescaled where a larger score is met
//
// A work-group does a head: its work-items share the keys of the dot products, then the columns of the sum. The sum
// rests in `sums` (heads, D) floats between two times.
//
//   WG                  work-items of a work-group: 1 on CPU devices, else a power of two
//   KEYS                keys at a time, a multiple of 16
//   Q_T, K_T, V_T, Y_T  storage types

#if KEYS % 16
#error "KEYS must be a multiple of 16"
#endif
#if WG == 1
#define SHARED
#define BARRIER
#else
#define SHARED __local
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE);
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
attention_decode(__global const STORAGE(Q_T) *restrict q, __global const STORAGE(K_T) *restrict k,
                 __global const STORAGE(V_T) *restrict v, __global STORAGE(Y_T) *restrict y,
                 __global float *restrict sums, const ulong length, const ulong capacity, const ulong D,
                 const float scale) {
    SHARED float weights[KEYS];
    SCRATCH;
    const size_t head = get_group_id(0), lane = get_local_id(0);
    q += head * D;
    k += head * capacity * D;
    v += head * capacity * D;
    sums += head * D;
    float top = -INFINITY, total = 0.0f;
    for (size_t key = 0; key < length; key += KEYS) {
        const size_t count = min((size_t)KEYS, (size_t)length - key);
        BARRIER
        for (size_t j = lane; j < KEYS; j += WG) {
            float16 products = 0.0f;
            for (size_t d = 0, at = (key + j) * D; j < count && d < D; d += 16)
                products += LOAD_PART(Q_T, q, d, D, 0.0f) * LOAD_PART(K_T, k, at + d, at + D, 0.0f);
            weights[j] = j < count ? sum16(products) * scale : -INFINITY;
        }
        BARRIER
        float most = top;
        for (size_t j = lane * 16; j < KEYS; j += WG * 16) most = fmax(most, max16(vload16(0, weights + j)));
        most = group_max(most, scratch);
        // With nothing but -inf among the scores their exponentials are to be 0, not NaN.
        const float shift = most == -INFINITY ? 0.0f : most, rescale = exp(top - shift);
        top = most;
        float added = 0.0f;
        for (size_t j = lane * 16; j < KEYS; j += WG * 16) {
            const float16 p = exp16(vload16(0, weights + j) - shift);
            added += sum16(p);
            vstore16(p, 0, weights + j);
        }
        total = total * rescale + group_sum(added, scratch);
        BARRIER
        for (size_t d = lane * 16; d < D; d += WG * 16) {
            float16 sum = 0.0f;
            for (size_t j = 0, at = key * D; j < count; j++, at += D)
                sum += LOAD_PART(V_T, v, at + d, at + D, 0.0f) * weights[j];
            if (key > 0) sum += LOAD_PART(f32, sums, d, D, 0.0f) * rescale;
            STORE_PART(f32, sum, sums, d, D);
        }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total; // no key seen: the result is 0
    for (size_t d = lane * 16; d < D; d += WG * 16)
        STORE_PART(Y_T, length > 0 ? LOAD_PART(f32, sums, d, D, 0.0f) * inverse : (float16)(0.0f), y + head * D, d, D);
}
