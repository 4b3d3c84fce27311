// rotated.cl: a kernel that calls a function of OpenCL C that no kernel of clamp calls.

__kernel void rotated(__global uint *x) { x[0] = rotate(x[0], 1u); }
