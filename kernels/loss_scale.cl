// loss_scale.cl: the loss scale and what decides about it, all of it on the device.
//
//   word  0 multiplier      1 / scale, correctly rounded           |  unscale (multi_tensor.cl) uses
//         1 found           1: this pass met an inf, 2: a nan      |  these two
//         2 scale
//         3 growth_tracker  clean steps since the last overflow or growth
//         4 overflow        one bit an optimizer: an overflow since its last step
//         5 bad_steps       overflowed steps in a row, for the hysteresis
//         6 event           what was assigned since the scale was last adjusted
//         7 nans            as overflow, of those that met a nan
//
// A backward pass ends with `assign`, which turns found into overflow bits, and `adjust`, which moves the
// scale; `update` is both in one launch. They run as one work-item. Nothing of the state is ever an argument, so
// a recorded launch replays with the live scale.
//
//   X_T, Y_T   with these the program holds `multiply`: storage types of the source and of the product.
//              Without, it holds assign, adjust and update.

typedef struct {
    float multiplier;
    int found;
    float scale;
    int growth_tracker;
    uint overflow;
    int bad_steps;
    uint event;
    uint nans;
} loss_scale_state;

#ifdef X_T

// y[i] = x[i] * scale: a loss on its way into backward, and the gradient of that product.
__kernel void multiply(__global const STORAGE(X_T) *restrict x, __global STORAGE(Y_T) *restrict y,
                       __global const loss_scale_state *restrict state) {
    const size_t i = get_global_id(0);
    STORE(Y_T, LOAD(X_T, x, i) * state->scale, y, i);
}

#else

#define FOUND_NAN 2

#define EVENT_CLEAN 1u         // the first pass of a step, and no overflow in it
#define EVENT_OVERFLOW 2u      // an overflow in a step that had one before
#define EVENT_NEW_OVERFLOW 4u  // the first overflow of a step

// How the scale moves; DynamicLossScale explains it.
#define RULE_PARAMETERS                                                                                   \
    const float growth_factor, const float backoff_factor, const int growth_interval, const int decr_every, \
        const float min_scale, const float max_scale
#define RULE growth_factor, backoff_factor, growth_interval, decr_every, min_scale, max_scale

// 1 / x rounded to nearest: OpenCL allows a division 2.5 ulp. A Newton step brings it within 1 ulp; of the three
// candidates left the nearest has the smallest residual, which one fma computes exactly.
float reciprocal(float x) {
    const float division = 1.0f / x;
    const float newton = fma(fma(-x, division, 1.0f), division, division);
    if (!isfinite(newton) || newton == 0.0f) return division;  // outside of the normal numbers
    float best = newton;
    for (int step = -1; step <= 1; step += 2) {
        const float candidate = as_float(as_int(newton) + step);
        if (fabs(fma(-x, candidate, 1.0f)) < fabs(fma(-x, best, 1.0f))) best = candidate;
    }
    return best;
}

void assign_found(__global loss_scale_state *s, uint mask, uint fresh) {
    const uint overflow = s->overflow & ~fresh;
    s->nans &= ~fresh;
    if (s->found & FOUND_NAN) s->nans |= mask;
    if (s->found) {
        s->event |= (overflow & mask) == 0 ? EVENT_NEW_OVERFLOW : EVENT_OVERFLOW;
        s->overflow = overflow | mask;
    } else {
        s->event |= fresh == mask ? EVENT_CLEAN : 0;
        s->overflow = overflow;
    }
    s->found = 0;
}

// A scale that somebody has set below min_scale stays; a negative min_scale lifts it to that size.
void back_off(__global loss_scale_state *s, float backoff_factor, int decr_every, float min_scale) {
    if (++s->bad_steps < decr_every) return;
    s->bad_steps = 0;
    s->scale = fmax(s->scale * backoff_factor, min_scale < 0 ? -min_scale : fmin(s->scale, min_scale));
}

void grow(__global loss_scale_state *s, float growth_factor, int growth_interval, float max_scale) {
    s->bad_steps = 0;
    if (++s->growth_tracker < growth_interval) return;
    s->growth_tracker = 0;
    const float grown = s->scale * growth_factor;
    if (isfinite(grown)) s->scale = fmax(fmin(grown, max_scale), s->scale);
}

void adjust_scale(__global loss_scale_state *s, RULE_PARAMETERS) {
    if (s->event & (EVENT_OVERFLOW | EVENT_NEW_OVERFLOW)) {
        s->growth_tracker = 0;
        if (s->event & EVENT_NEW_OVERFLOW) back_off(s, backoff_factor, decr_every, min_scale);
    } else if (s->event & EVENT_CLEAN) {
        grow(s, growth_factor, growth_interval, max_scale);
    }
    s->event = 0;
    s->multiplier = reciprocal(s->scale);
}

__kernel void assign(__global loss_scale_state *state, const uint mask, const uint fresh) {
    assign_found(state, mask, fresh);
}

__kernel void adjust(__global loss_scale_state *state, RULE_PARAMETERS) { adjust_scale(state, RULE); }

__kernel void update(__global loss_scale_state *state, const uint mask, const uint fresh, RULE_PARAMETERS) {
    assign_found(state, mask, fresh);
    adjust_scale(state, RULE);
}

#endif
