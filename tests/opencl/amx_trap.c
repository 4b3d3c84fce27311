// amx_trap.c: lets a process run the instructions of AMX (kernels/amx.clh) on x86-64 Linux where the processor has none.
//
// It is loaded before all else (LD_PRELOAD). The processor refuses an instruction, Linux sends SIGILL, and the handler
// decodes it and does what the matrix unit would have done to tiles that are the thread's own. What the unit refuses
// ends the process, as does a configuration of tiles that have not been released. The unit seems to be there:
// /proc/cpuinfo lists it, and arch_prctl grants its registers to whoever asks by the C library's `syscall`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define FLAGS "amx_tile amx_bf16 amx_fp16"
#define OF_THREAD static __thread __attribute__((tls_model("initial-exec"))) // a handler must not allocate it

static int is_granted;

// ----------------------------------------------------------------------------------------------- what instructions do

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };
typedef struct {
    uint8_t palette, start_row, reserved[14]; // palette 0: tiles are not configured
    uint16_t row_bytes[16];
    uint8_t rows[16];
} configuration;
OF_THREAD configuration shape;
OF_THREAD uint8_t tiles[TILES][ROWS][ROW_BYTES] __attribute__((aligned(64)));

static int is_tile(unsigned t) { return t < TILES && shape.palette && shape.rows[t]; }

static int configure(const configuration *wanted) {
    if (shape.palette || wanted->palette != 1 || wanted->start_row) return 0;
    for (int t = 0; t < 16; t++) {
        const int rows = wanted->rows[t], bytes = wanted->row_bytes[t];
        if (rows > (t < TILES ? ROWS : 0) || bytes > ROW_BYTES || !rows != !bytes) return 0;
    }
    shape = *wanted;
    memset(tiles, 0, sizeof tiles);
    return 1;
}

static int clear(unsigned t) {
    if (!is_tile(t)) return 0;
    memset(tiles[t], 0, sizeof tiles[t]);
    return 1;
}

static int load(unsigned t, const uint8_t *memory, int64_t stride) {
    if (!clear(t)) return 0;
    for (int row = 0; row < shape.rows[t]; row++) memcpy(tiles[t][row], memory + row * stride, shape.row_bytes[t]);
    return 1;
}

static int store(unsigned t, uint8_t *memory, int64_t stride) {
    if (!is_tile(t)) return 0;
    for (int row = 0; row < shape.rows[t]; row++) memcpy(memory + row * stride, tiles[t][row], shape.row_bytes[t]);
    return 1;
}

static float no_subnormal(float v) { return __builtin_fabsf(v) < 0x1p-126f ? __builtin_copysignf(0, v) : v; }

static float number(const uint8_t *row, int i, int is_half) {
    float v;
    _Float16 half;
    memcpy(&half, row + 2 * i, 2);
    if (is_half) return half;
    memset(&v, 0, 2);
    memcpy((uint8_t *)&v + 2, row + 2 * i, 2);
    return no_subnormal(v);
}

// Sums c += a by b: of even k and of odd ones apart, in their order.
static int dot(unsigned c, unsigned a, unsigned b, int is_half) {
    if (!is_tile(c) || !is_tile(a) || !is_tile(b) || c == a || a == b || b == c) return 0;
    const int pairs = shape.row_bytes[a] / 4, columns = shape.row_bytes[c] / 4;
    if (shape.rows[a] != shape.rows[c] || shape.row_bytes[b] != shape.row_bytes[c] || shape.rows[b] != pairs) return 0;
    float of_b[ROWS][2][ROW_BYTES / 4];
    for (int i = 0; i < pairs * 2 * columns; i++)
        of_b[i / 2 / columns][i % 2][i / 2 % columns] = number(tiles[b][i / 2 / columns], i % (2 * columns), is_half);
    for (int row = 0; row < shape.rows[c]; row++) {
        float sums[2][ROW_BYTES / 4] = {{0}}, *to = (float *)tiles[c][row];
        for (int k = 0; k < 2 * pairs; k++) {
            const float x = number(tiles[a][row], k, is_half), *y = of_b[k / 2][k % 2];
            float *sum = sums[k % 2];
            for (int j = 0; j < columns; j++) sum[j] = no_subnormal(__builtin_fmaf(x, y[j], sum[j]));
        }
        for (int j = 0; j < columns; j++)
            to[j] = no_subnormal(no_subnormal(to[j]) + no_subnormal(sums[0][j] + sums[1][j]));
    }
    return 1;
}

// ------------------------------------------------------------------------------------------------ how they are written

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
enum { TILE_SETUP = 0x49, TILE_MOVE = 0x4b, TILE_DOT = 0x5c };
enum { NONE, P66, PF3, PF2 }; // prefixes

//      C4    RXB.map    W.vvvv.L.prefix    opcode    mod.reg.rm    [scale.index.base]    [displacement]
// R, X and B, the highest bits of reg, index and base, are inverted, and so is vvvv. map is 2; W and L are 0.
static int execute(greg_t *registers) {
    const uint8_t *code = (const uint8_t *)registers[REG_RIP], *next = code + 5;
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;
    const unsigned high = ~code[1], third = ~code[2] >> 3 & 15, reg = (code[4] >> 3 & 7) | (high >> 7 & 1) << 3;
    const unsigned rm = code[4] & 7, mod = code[4] >> 6, high_base = (high >> 5 & 1) << 3;
    const int prefix = code[2] & 3, in_memory = mod < 3, has_index = in_memory && rm == 4;
    uint8_t *at = 0;
    int64_t stride = 0;
    if (in_memory) {
        const unsigned sib = has_index ? *next++ : 0, base = has_index ? sib & 7 : rm;
        const unsigned index = (sib >> 3 & 7) | (high >> 6 & 1) << 3;
        const int no_base = mod == 0 && base == 5, size = no_base || mod == 2 ? 4 : mod;
        int32_t displacement = mod == 1 ? (int8_t)*next : 0;
        if (size == 4) memcpy(&displacement, next, 4);
        next += size;
        if (has_index && index != 4) stride = registers[REGISTERS[index]] << (sib >> 6);
        if (!no_base) at = (uint8_t *)registers[REGISTERS[base | high_base]];
        if (no_base && !has_index) at = (uint8_t *)next; // relative to what comes next
        at += displacement;
    }
    int done = 0;
    if (code[3] == TILE_SETUP && in_memory && prefix == NONE && reg == 0)
        done = configure((const configuration *)(at + stride));
    else if (code[3] == TILE_SETUP && code[4] == 0xc0 && prefix == NONE)
        done = 1, shape.palette = 0;
    else if (code[3] == TILE_SETUP && !in_memory && rm == 0 && prefix == PF2)
        done = clear(reg);
    else if (code[3] == TILE_MOVE && has_index && prefix != NONE)
        done = prefix == PF3 ? store(reg, at, stride) : load(reg, at, stride); // 66: loads, and asks not to be cached
    else if (code[3] == TILE_DOT && !in_memory && prefix >= PF3)
        done = dot(reg, rm | high_base, third, prefix == PF2);
    if (done) registers[REG_RIP] = (greg_t)next;
    return done;
}

// ------------------------------------------------------------------------------------------------ the operating system

static int (*next_sigaction)(int, const struct sigaction *, struct sigaction *);

static void on_refusal(int number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const greg_t refused = registers[REG_RIP];
    while (is_granted && execute(registers)) continue; // what comes next is often another
    if (registers[REG_RIP] == refused)
        next_sigaction(number, &(struct sigaction){.sa_handler = SIG_DFL}, 0); // met again, it ends the process
}

__attribute__((constructor)) static void set_trap(void) {
    next_sigaction = (__typeof__(next_sigaction))dlsym(RTLD_NEXT, "sigaction");
    next_sigaction(SIGILL, &(struct sigaction){.sa_sigaction = on_refusal, .sa_flags = SA_SIGINFO}, 0);
}

// Nobody else handles it: neither Python's faulthandler nor a compiler.
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    return number == SIGILL ? 0 : next_sigaction(number, wanted, before);
}

enum { GET_SUPPORTED = 0x1021, GET_PERMITTED, REQUEST, TILE_STATE = 3 << 17, SMALL_STACK = 8192 };

static long refused(int error) {
    errno = error;
    return -1;
}

long syscall(long number, ...) {
    long given[6];
    stack_t stack;
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number != SYS_arch_prctl || given[0] < GET_SUPPORTED || given[0] > REQUEST)
        return ((__typeof__(&syscall))dlsym(RTLD_NEXT, "syscall"))(number, given[0], given[1], given[2], given[3],
                                                                   given[4], given[5]);
    if (given[0] != REQUEST) {
        *(uint64_t *)given[1] = given[0] == GET_SUPPORTED || is_granted ? TILE_STATE : 0;
        return 0;
    }
    if (sigaltstack(0, &stack) == 0 && !(stack.ss_flags & SS_DISABLE) && stack.ss_size <= SMALL_STACK)
        return refused(ENOSPC);
    is_granted = 1;
    return 0;
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int file = ((__typeof__(&open64))dlsym(RTLD_NEXT, "open64"))(path, flags, va_arg(arguments, int));
    va_end(arguments);
    if (file < 0 || strcmp(path, "/proc/cpuinfo") != 0) return file;
    char line[1 << 14];
    FILE *from = fdopen(file, "r");
    const int to = memfd_create("cpuinfo", 0);
    while (fgets(line, sizeof line, from)) {
        line[strcspn(line, "\n")] = 0;
        dprintf(to, "%s%s\n", line, strncmp(line, "flags", 5) ? "" : " " FLAGS);
    }
    fclose(from);
    lseek(to, 0, SEEK_SET);
    return to;
}
