// conv_wmma.cl: convolutions and their gradients by v_wmma on the matrix units of AMD's RDNA GPUs (gfx11 and gfx12).
//
//   weights, image --gather--> tiles --(wmma_step.clh)--> sums --> out           pictures in matrix_conv_kernel.clh
//
//   CONV, WEIGHT_GRAD   the kernel; and RDNA, and the macros of matrix_conv_kernel.clh

#ifdef CONV
#define A_K_MAJOR 1
#define B_K_MAJOR 0
#else
#define A_K_MAJOR 1
#define B_K_MAJOR 1
#endif

#include "wmma_step.clh"
#include "matrix_conv_kernel.clh"
