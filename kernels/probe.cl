// probe.cl: small kernels that show what a device really can do. Each sets *flag to 1 when the device computed
// what it should. Each stands in a program of its own (-DPROBE_...), so that one the compiler refuses does not
// take the others with it. scratch: 64 bytes.

#ifdef PROBE_HALF_STORAGE
// 1 + 2^-11 lies halfway between two halves and must go to the even one, 1; 65520 to infinity; 2^-24 stays.
__kernel void half_storage(__global half *scratch, __global int *flag) {
    vstore_half_rte(1.00048828125f, 0, scratch);
    vstore_half_rte(65520.0f, 1, scratch);
    vstore_half_rte(5.9604645e-8f, 2, scratch);
    *flag = vload_half(0, scratch) == 1.0f && isinf(vload_half(1, scratch)) && vload_half(2, scratch) == 5.9604645e-8f;
}
#endif
