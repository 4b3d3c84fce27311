"""Convolution: `convolution` has the functions, `engines` the ways to compute them, one file each."""

from clamp.ops.conv.convolution import (
    conv2d,
    conv2d_input_grad,
    conv2d_parameter_grads,
    conv2d_weight_grad,
    pack_weights,
)
from clamp.ops.conv.geometry import Pair, Window
from clamp.ops.conv.weights import Weights

__all__ = [
    "Pair",
    "Weights",
    "Window",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_parameter_grads",
    "conv2d_weight_grad",
    "pack_weights",
]
