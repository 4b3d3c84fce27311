// conv_dpas.cl: convolutions and their gradients by dpas on the matrix units of Intel's GPUs (Xe HPC, Xe HPG and Xe2).
//
//   weights, image --gather--> tiles --(dpas_step.clh)--> sums --> out           pictures in matrix_conv_kernel.clh
//
//   CONV, WEIGHT_GRAD   the kernel; and SUB_GROUP, and the macros of matrix_conv_kernel.clh

#ifdef CONV
#define A_K_MAJOR 1
#define B_K_MAJOR 0
#else
#define A_K_MAJOR 1
#define B_K_MAJOR 1
#endif

#include "dpas_step.clh"
#include "matrix_conv_kernel.clh"
