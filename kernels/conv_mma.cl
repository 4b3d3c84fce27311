// conv_mma.cl: convolutions and their gradients by mma.sync on the matrix units of NVIDIA's GPUs (compute capability 8.0 and later).
//
//   weights, image --gather--> tiles --(mma_step.clh)--> sums --> out           pictures in matrix_conv_kernel.clh
//
//   CONV, WEIGHT_GRAD   the kernel; and the macros of matrix_conv_kernel.clh

#ifdef CONV
#define A_K_MAJOR 1
#define B_K_MAJOR 0
#else
#define A_K_MAJOR 1
#define B_K_MAJOR 1
#endif

#include "mma_step.clh"
#include "matrix_conv_kernel.clh"
