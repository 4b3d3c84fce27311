// conv_amx_weights.cl: a convolution's weights in panels of B for the matrix unit (conv_amx.cl).
//
//      weights of a group                          [panel][tap][32 channels][PARTS][pair of channels][row] of pairs
//      m  0   channel, tap ->                      Bits are moved as they are; rows beyond M and channels beyond C are
//      v  [ 32 rows ]                              zero.
//
//   PARTS   as in amx.clh
//
// Row m, channel c, tap (i, j) is the weight at group * stride_group + m * stride_m + c * stride_c + first + i * step_y
// + j * step_x. Work-item (panel, 32 channels, group).
#if PARTS == 2
static inline uint upper_bits(ushort bits) { return as_uint(vload_half(0, (const half *)&bits)) & 0xffff0000u; }
static inline uint lower_bits(ushort bits) {
    return as_uint(vload_half(0, (const half *)&bits) - as_float(upper_bits(bits)));
}
#endif

__kernel ONE_WORK_ITEM void
pack_weights(__global const ushort *restrict w, __global uint *restrict panels, const ulong begin, const ulong M, const ulong C,
             const uint taps_y, const uint taps_x, const ulong stride_group, const ulong stride_m,
             const ulong stride_c, const uint first, const uint step_y, const uint step_x) {
    const size_t m = get_global_id(0) * 32, c = get_global_id(1) * 32, taps = taps_y * taps_x;
    const size_t rows = min((size_t)32, (size_t)M - m), channels = min((size_t)32, (size_t)C - c);
    panels += begin + ((get_global_id(2) * get_global_size(0) + get_global_id(0)) * taps * get_global_size(1) +
               get_global_id(1)) * 512 * PARTS;
    w += get_global_id(2) * stride_group + m * stride_m + c * stride_c + first;
    for (size_t pair = 0; pair < 16; pair++)
        for (size_t i = 0; i < 32; i++) {
            __global const ushort *from = w + i * stride_m + 2 * pair * stride_c;
            for (size_t tap = 0; tap < taps; tap++) {
                const size_t at = tap / taps_x * step_y + tap % taps_x * step_x;
                const ushort low = i < rows && 2 * pair < channels ? from[at] : 0;
                const ushort high = i < rows && 2 * pair + 1 < channels ? from[at + stride_c] : 0;
                __global uint *to = panels + tap * get_global_size(1) * 512 * PARTS + pair * 32 + i;
#if PARTS == 2
                to[0] = upper_bits(low) >> 16 | upper_bits(high);
                to[512] = lower_bits(low) >> 16 | (lower_bits(high) & 0xffff0000u);
#else
                to[0] = low | (uint)high << 16;
#endif
            }
        }
}
