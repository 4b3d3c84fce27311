// transfer.cl: fills and copies as kernels, because a recording takes launches and nothing else.
//
//   dst  | . . . . | w w w w w w w w | . . . |     n words from word dst_begin on
//   src  | . . | w w w w w w w w | . . . . . |     n words from word src_begin on (copy)
//
//   WORD   the unit: uchar, ushort, uint or ulong. Offsets and lengths are multiples of it.
//   SPAN   words a work-item

#ifdef FILL

__kernel void fill(__global WORD *restrict dst, const ulong dst_begin, const ulong pattern, const ulong n) {
    const size_t begin = get_global_id(0) * SPAN;
    const size_t end = min((size_t)n, begin + SPAN);
    for (size_t i = begin; i < end; ++i) dst[dst_begin + i] = (WORD)pattern;
}

#else

__kernel void copy(__global const WORD *restrict src, const ulong src_begin, __global WORD *restrict dst,
                   const ulong dst_begin, const ulong n) {
    const size_t begin = get_global_id(0) * SPAN;
    const size_t end = min((size_t)n, begin + SPAN);
    for (size_t i = begin; i < end; ++i) dst[dst_begin + i] = src[src_begin + i];
}

#endif
