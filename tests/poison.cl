// poison.cl: leaves NaN in private memory, where the next kernel finds it if it reads what it has not written.
//
// On a CPU device private arrays lie on the stack of the thread that runs a work-group:
//
//     this kernel    |NaN NaN NaN NaN NaN NaN NaN ... NaN|
//     the next one   |its arrays, unwritten as yet|

#define FLOATS 16384 // more than the private arrays of any kernel of clamp

__kernel void poison(__global float *out, uint index) {
    volatile float stack[FLOATS];
    for (uint k = 0; k < FLOATS; k++) stack[k] = NAN;
    out[get_global_id(0)] = stack[index]; // any element, so that none can be left out
}
