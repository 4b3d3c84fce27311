// probe.cl: small kernels that show what a device really can do. Each sets *flag to 1 when the device computed
// what it should. Each stands in a program of its own (-DPROBE_...), so that one the compiler refuses does not
// take the others with it. scratch: 4096 bytes.

#ifdef PROBE_HALF_STORAGE
// 1 + 2^-11 lies halfway between two halves and must go to the even one, 1; 65520 to infinity; 2^-24 stays.
__kernel void half_storage(__global half *scratch, __global int *flag) {
    vstore_half_rte(1.00048828125f, 0, scratch);
    vstore_half_rte(65520.0f, 1, scratch);
    vstore_half_rte(5.9604645e-8f, 2, scratch);
    *flag = vload_half(0, scratch) == 1.0f && isinf(vload_half(1, scratch)) && vload_half(2, scratch) == 5.9604645e-8f;
}
#endif

#ifdef PROBE_DOT_BF16
#define PARTS 1
#include "dot_bf16.clh"
#include "dot_bf16_tile.clh"
#define STEPS 3 // of which two are one visit to a tile, and one is another

// Small integers by their places, whose sums are exact, stored as pairs of bfloat16.
static int element(size_t row, size_t k) { return (int)((5 * row + 3 * k) % 15) - 7; }
static uint pair(size_t row, size_t step) {
    return as_uint((float)element(row, 2 * step)) >> 16 | (as_uint((float)element(row, 2 * step + 1)) & 0xffff0000);
}

#define DEFINE_IS_RIGHT(HEIGHT)                                                                                        \
    /* Whether two panels of A, of HEIGHT rows, by one of B give their sums. Rows of B are those from 100 on. */       \
    static bool is_right_##HEIGHT(__global uint *a, __global uint *b, __global float *sums) {                          \
        const ulong stride = STEPS * HEIGHT * sizeof(uint);                                                            \
        for (size_t i = 0; i < 2 * STEPS * HEIGHT; i++)                                                                \
            a[i] = pair(i / (STEPS * HEIGHT) * HEIGHT + i % HEIGHT, i / HEIGHT % STEPS);                               \
        for (size_t j = 0; j < STEPS * NR; j++) b[j] = pair(100 + j % NR, j / NR);                                     \
        multiply_##HEIGHT(a, b, sums, 2, stride, STEPS - 1, 0);                                                        \
        multiply_##HEIGHT(a + (STEPS - 1) * HEIGHT, b + (STEPS - 1) * NR, sums, 2, stride, 1, 1);                      \
        bool right = true;                                                                                             \
        for (size_t i = 0; i < 2 * HEIGHT * NR; i++) {                                                                 \
            int sum = 0;                                                                                               \
            for (size_t k = 0; k < 2 * STEPS; k++) sum += element(i / NR, k) * element(100 + i % NR, k);               \
            right = right && sums[i] == sum;                                                                           \
        }                                                                                                              \
        return right;                                                                                                  \
    }
DEFINE_IS_RIGHT(12)
DEFINE_IS_RIGHT(8)

// Whether some rows of a tile are right, two steps of the same 1024 pairs as A and as B.
static bool is_right_tile(__global uint *numbers, ulong rows) {
    float sums[SUMS] __attribute__((aligned(64)));
    for (uint i = 0; i < 1024; i++) numbers[i] = pair(i * i % 101, i % 7);
    multiply_rows((lines_a)numbers, PANEL_A_ROW, STEP_BYTES, (lines_b)numbers, sums, 2, rows);
    bool right = true;
    for (uint i = 0; i < rows * SIDE; i++) {
        float sum = 0;
        for (uint k = 0; k < 32; k++) {
            const uint a = numbers[k / 16 * 512 + i / SIDE * 16 + k % 16], b = numbers[k * SIDE + i % SIDE];
            sum += as_float(a << 16) * as_float(b << 16) + as_float(a & 0xffff0000) * as_float(b & 0xffff0000);
        }
        right = right && sums[i] == sum;
    }
    return right;
}

__kernel ONE_WORK_ITEM void dot_bf16(__global uint *scratch, __global int *flag) {
    __global uint *a = scratch, *b = a + 2 * STEPS * MR;
    __global float *sums = (__global float *)(b + STEPS * NR); // 2 MR x NR: all three are 936 words
    *flag = is_right_12(a, b, sums) && is_right_8(a, b, sums) && is_right_tile(scratch, SIDE) &&
            is_right_tile(scratch, 13);
}
#endif

#ifdef PROBE_GROUP_SUMS
// Of 64 work-items, each of which must get the same.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void group_sums(__global uint *unused, __global int *flag) {
    SCRATCH;
    const uint lid = get_local_id(0);
    const float sum = group_sum((float)(lid * lid), scratch), most = group_max((float)(lid * 37 % 64), scratch);
    const float right = group_sum(sum == 85344 && most == 63 ? 1.0f : 0.0f, scratch);
    if (lid == 0) *flag = right == 64;
}
#endif

#if defined(PROBE_AMX) || defined(PROBE_AMX_LIMIT)
#include "amx.clh"
#endif

#ifdef PROBE_AMX_LIMIT
// Sixteen dot products a round of what is in registers: the least time that any number of them can take. Random numbers,
// since zeros draw less power.
__kernel ONE_WORK_ITEM void amx_limit(__global const uchar *numbers, __global float *sums, ulong rounds) {
    float tile[SUMS] __attribute__((aligned(64)));
    begin_tiles();
    multiply(numbers, PANEL_A_ROW, STEP_BYTES, numbers + STEP_BYTES, tile, 1, 0); // leaves its operands in registers
    __asm__ volatile(
        LINE("1:")
        FOUR_DOTS FOUR_DOTS FOUR_DOTS FOUR_DOTS
        LINE("decq %[rounds]")
        LINE("jnz 1b")
        : [rounds] "+&r"(rounds)::"cc");
    end_sums(tile);
    end_tiles();
    sums[get_global_id(0)] = tile[0];
}
#endif

#ifdef PROBE_AMX

// Two steps of a panel of A by one of B, in every way of amx.clh: at once, one after the other, by addresses of B, and
// of A, and upper parts alone. Before each the sums and the registers hold what `sums` held.
__kernel ONE_WORK_ITEM void amx(__global const uchar *a, __global const uchar *b, __global const ulong *offsets,
                                __global float *sums) {
    float tile[SUMS] __attribute__((aligned(64)));
    begin_tiles();
    for (uint way = 0; way < 5; way++, sums += SUMS) {
        for (uint i = 0; i < SUMS; i++) tile[i] = sums[i];
        multiply(a, PANEL_A_ROW, STEP_BYTES, b, tile, 2, 1);
        if (way == 0) {
            multiply(a, PANEL_A_ROW, STEP_BYTES, b, tile, 2, 0);
        } else if (way == 1) {
            multiply(a, PANEL_A_ROW, STEP_BYTES, b, tile, 1, 0);
            multiply(a + STEP_BYTES, PANEL_A_ROW, STEP_BYTES, b + STEP_BYTES, tile, 1, 1);
        } else if (way == 2) {
            multiply_at(a, b, b + PART_BYTES, PANEL_B_ROW, offsets, tile, 2, 0);
        } else if (way == 3) {
            multiply_rows(a, PANEL_A_ROW, offsets, b, tile, 2, 0);
        } else {
#if PARTS == 2
            multiply_high(a, PANEL_A_ROW, STEP_BYTES, b, tile, 2, 0);
#else
            multiply_at(a, b, b, PANEL_B_ROW, offsets, tile, 2, 0);
#endif
        }
        for (uint i = 0; i < SUMS; i++) sums[i] = tile[i];
    }
    end_tiles();
}
#endif
