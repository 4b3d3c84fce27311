// conv_wgmma.cl: convolutions and their gradients by wgmma on the matrix units of NVIDIA's Hopper (compute capability 9.0).
//
//   weights, image --gather--> tiles --(wgmma_step.clh)--> sums --> out           pictures in matrix_conv_kernel.clh
//
//   CONV, WEIGHT_GRAD   the kernel; and the macros of matrix_conv_kernel.clh

#ifdef CONV
#define A_K_MAJOR 1
#define B_K_MAJOR 0
#else
#define A_K_MAJOR 1
#define B_K_MAJOR 1
#endif

#include "wgmma_step.clh"
#include "matrix_conv_kernel.clh"
