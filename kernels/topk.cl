// topk.cl: the place of the maximum, and the k largest elements, along an axis of a tensor seen as (outer, n, inner).
//
// Elements are compared by an integer key that orders them as their values: -0 and 0 are equal, and the earlier of
// equal elements comes first. NaN has the key NAN_KEY: INT_MAX counts it as the largest (argmax, as numpy), INT_MIN
// puts it last (topk, as netcl).
//
//   argmax_rows      inner == 1: `each` rows a work-group one after the other, 16 elements a work-item at a time
//   argmax_columns   inner > 1: a work-item goes down `width` neighbouring columns, 16 at a time
//   topk_heap        CPU devices: a work-item takes `each` lanes (elements along the axis at one outer and inner) one
//                    after the other. A heap holds the k largest so far, the least of them on top:
//
//                             key 3                heap[i] comes after heap[2i + 1] and heap[2i + 2];
//                           /       \              emptied from the top, it gives the result from its end
//                        key 5     key 4
//
//   topk_select      GPUs: a work-group a lane finds the largest k times, each after the one before
//
//   X_T   storage type
//   WORD  topk: type of an element's bits: ushort or uint
//   WG    work-items of a work-group

static inline int key_of(float v) {
    int bits = as_int(v);
    const int magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return NAN_KEY;
    return bits < 0 ? -magnitude : magnitude;
}

static inline int16 keys_of(float16 v) {
    const int16 bits = as_int16(v), magnitude = bits & 0x7fffffff;
    return select(select(magnitude, -magnitude, bits < 0), (int16)NAN_KEY, magnitude > 0x7f800000);
}

#ifdef ARGMAX_ROWS
// Whether element a, with key `key`, comes before the best so far.
#define BEFORE(key, a, best, best_at) ((key) > (best) || ((key) == (best) && (a) < (best_at)))

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
argmax_rows(__global const STORAGE(X_T) *restrict x, __global int *restrict y, const ulong rows, const uint n,
            const uint each) {
#if WG > 1
    __local int keys[WG];
    __local uint places[WG];
#endif
    const uint lane = get_local_id(0);
    FOR_EACH_OWN(row, each, rows) {
        __global const STORAGE(X_T) *from = x + row * n;
        int16 best16 = INT_MIN;
        uint16 block16 = 0;
        uint i = lane * 16;
        for (; i + 16 <= n && i + 16 > i; i += WG * 16) {
            const int16 key = keys_of(LOAD16(X_T, from, i));
            block16 = select(block16, (uint16)i, key > best16);
            best16 = max(key, best16);
        }
        int key[16];
        uint block[16];
        vstore16(best16, 0, key);
        vstore16(block16, 0, block);
        int best = INT_MIN;
        uint best_at = UINT_MAX;
        for (uint k = 0; k < 16 && lane * 16 + 16 <= n; k++) {
            if (BEFORE(key[k], block[k] + k, best, best_at)) {
                best = key[k];
                best_at = block[k] + k;
            }
        }
        for (; i < n; i++) { // what is left of the row is less than 16, and one work-item's
            const int k = key_of(LOAD(X_T, from, i));
            if (BEFORE(k, i, best, best_at)) {
                best = k;
                best_at = i;
            }
        }
#if WG > 1
        keys[lane] = best;
        places[lane] = best_at;
        for (uint step = WG / 2; step > 0; step /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            if (lane < step && BEFORE(keys[lane + step], places[lane + step], keys[lane], places[lane])) {
                keys[lane] = keys[lane + step];
                places[lane] = places[lane + step];
            }
        }
        if (lane == 0) y[row] = places[0];
        barrier(CLK_LOCAL_MEM_FENCE);
#else
        y[row] = best_at;
#endif
    }
}
#endif

#ifdef ARGMAX_COLUMNS
__kernel void argmax_columns(__global const STORAGE(X_T) *restrict x, __global int *restrict y, const uint n,
                             const ulong inner, const ulong width, const uint strips, const ulong planes) {
    const size_t plane = get_global_id(0) / strips;
    if (plane >= planes) return;
    x += plane * n * inner;
    y += plane * inner;
    size_t i = get_global_id(0) % strips * width;
    const size_t last = min(i + width, (size_t)inner);
    for (; i + 16 <= last; i += 16) {
        int16 best = keys_of(LOAD16(X_T, x, i)), best_at = 0;
        for (uint a = 1; a < n; a++) {
            const int16 key = keys_of(LOAD16(X_T, x, a * inner + i));
            best_at = select(best_at, (int16)a, key > best);
            best = max(key, best);
        }
        vstore16(best_at, 0, y + i);
    }
    for (; i < last; i++) {
        int best = key_of(LOAD(X_T, x, i)), best_at = 0;
        for (uint a = 1; a < n; a++) {
            const int key = key_of(LOAD(X_T, x, a * inner + i));
            best_at = key > best ? a : best_at;
            best = max(key, best);
        }
        y[i] = best_at;
    }
}
#endif

#ifdef TOPK
#define BITS(p) ((__global const WORD *)(p))

// Whether (key, a) comes after (other, b) in the result.
static inline bool after(int key, int a, int other, int b) { return key < other || (key == other && a > b); }
#endif

#ifdef TOPK_HEAP
static inline void sift(__global int2 *heap, uint size, uint at, int2 item) {
    for (uint child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && after(heap[child + 1].x, heap[child + 1].y, heap[child].x, heap[child].y)) child++;
        if (!after(heap[child].x, heap[child].y, item.x, item.y)) break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

__kernel void topk_heap(__global const STORAGE(X_T) *restrict x, __global WORD *restrict values,
                        __global int *restrict places, __global int2 *restrict heaps, const uint n, const ulong inner,
                        const uint k, const ulong lanes, const uint each) {
    __global int2 *heap = heaps + get_global_id(0) * (size_t)k;
    const size_t first = get_global_id(0) * (size_t)each, last = min(first + each, (size_t)lanes);
    for (size_t lane = first; lane < last; lane++) {
        const size_t plane = lane / inner, column = lane % inner;
        __global const STORAGE(X_T) *from = x + plane * n * inner + column;
        for (uint a = 0; a < k; a++) heap[a] = (int2)(key_of(LOAD(X_T, from, a * inner)), a);
        for (uint a = k / 2; a-- > 0;) sift(heap, k, a, heap[a]);
        for (uint a = k; a < n;) {
            if (inner == 1 && a + 16 <= n && !any(keys_of(LOAD16(X_T, from, a)) > heap[0].x)) {
                a += 16;
                continue;
            }
            // Later elements are after equal ones: only a larger key displaces the top.
            for (const uint stop = min(a + 16, n); a < stop; a++) {
                const int key = key_of(LOAD(X_T, from, a * inner));
                if (key > heap[0].x) sift(heap, k, 0, (int2)(key, a));
            }
        }
        for (uint slot = k; slot-- > 0;) {
            const size_t to = (plane * k + slot) * inner + column;
            values[to] = BITS(from)[heap[0].y * inner];
            places[to] = heap[0].y;
            sift(heap, slot, 0, heap[slot]);
        }
    }
}
#endif

#ifdef TOPK_SELECT
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
topk_select(__global const STORAGE(X_T) *restrict x, __global WORD *restrict values, __global int *restrict places,
            const uint n, const ulong inner, const uint k) {
    __local int keys[WG], at[WG];
    const uint lane = get_local_id(0);
    const size_t plane = get_group_id(0) / inner, column = get_group_id(0) % inner;
    __global const STORAGE(X_T) *from = x + plane * n * inner + column;
    int last_key = INT_MAX, last_at = -1;
    for (uint slot = 0; slot < k; slot++) {
        int best = INT_MIN, best_at = INT_MAX;
        for (uint a = lane; a < n; a += WG) {
            const int key = key_of(LOAD(X_T, from, a * inner));
            if (after(key, a, last_key, last_at) && after(best, best_at, key, a)) {
                best = key;
                best_at = a;
            }
        }
        keys[lane] = best;
        at[lane] = best_at;
        for (uint step = WG / 2; step > 0; step /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            if (lane < step && after(keys[lane], at[lane], keys[lane + step], at[lane + step])) {
                keys[lane] = keys[lane + step];
                at[lane] = at[lane + step];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        last_key = keys[0];
        last_at = at[0];
        if (lane == 0) {
            const size_t to = (plane * k + slot) * inner + column;
            values[to] = BITS(from)[last_at * inner];
            places[to] = last_at;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif
