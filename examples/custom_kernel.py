"""Functions of your own under AMP: an OpenCL kernel that reads 16 bits, and one that must stay in fp32.

    python examples/custom_kernel.py

clamp sees netcl's functions and whatever is made of them. A kernel of your own is beyond its sight, so you say
what it can read. Two ways:

* ``@amp.half_function`` over ``snake``, an activation x + sin(a x)^2 / a with its own OpenCL kernels: under AMP
  it gets float16, because its kernels are written for both storage types.
* ``amp.register_float_function(module, name)`` for ``energy``, which squares and sums: it gets float32.

The script prints which dtypes arrive with AMP and without, and checks the gradients against float64.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache

import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from netcl import autograd as ag
from netcl.autograd.engine import Node, apply_op
from netcl.core.tensor import Tensor

from clamp import amp
from clamp.cli.devices import add_device_option

# The arithmetic is float for both storage types; vload_half and vstore_half need no cl_khr_fp16.
SOURCE = """
#ifdef HALF_STORAGE
  typedef half storage;
  #define LOAD(p, i) vload_half(i, p)
  #define STORE(p, i, v) vstore_half_rte(v, i, p)
#else
  typedef float storage;
  #define LOAD(p, i) (p)[i]
  #define STORE(p, i, v) (p)[i] = (v)
#endif

kernel void snake(global const storage *x, global storage *y, float a) {
    size_t i = get_global_id(0);
    float s = sin(a * LOAD(x, i));
    STORE(y, i, LOAD(x, i) + s * s / a);
}

kernel void snake_backward(global const storage *x, global const storage *dy, global storage *dx, float a) {
    size_t i = get_global_id(0);
    STORE(dx, i, LOAD(dy, i) * (1.0f + sin(2.0f * a * LOAD(x, i))));
}
"""

BUILD_OPTIONS = {"float32": [], "float16": ["-DHALF_STORAGE"]}
arrived: dict[str, str] = {}  # function -> the dtype that its last call got


@cache
def kernels(context: cl.Context, dtype: str) -> tuple[cl.Kernel, cl.Kernel]:
    """Forward and backward for one storage type."""
    program = cl.Program(context, SOURCE).build(BUILD_OPTIONS[dtype])
    return program.snake, program.snake_backward


@amp.half_function
def snake(x: Node, a: float = 1.0) -> Node:
    """x + sin(a x)^2 / a, for float32 and float16."""
    arrived["snake"] = x.value.dtype
    forward, backward = kernels(x.value.context, x.value.dtype)

    def compute(x: Tensor) -> Tensor:
        y = Tensor.from_shape(x.queue, x.shape, dtype=x.dtype)
        forward(x.queue, (x.size,), None, x.buffer, y.buffer, np.float32(a))
        return y

    def gradient(dy: Tensor) -> list[Tensor]:
        dx = Tensor.from_shape(dy.queue, dy.shape, dtype=dy.dtype)
        backward(dy.queue, (dy.size,), None, x.value.buffer, dy.buffer, dx.buffer, np.float32(a))
        return [dx]

    return apply_op(compute, gradient, x, op_name="snake")


def energy(x: Node) -> Node:
    """Mean square of x. In 16 bits a value above 255 would overflow."""
    arrived["energy"] = x.value.dtype
    return ag.mean(ag.square(x))


amp.register_float_function(sys.modules[__name__], "energy")  # before amp.init


def loss_and_gradient(queue: cl.CommandQueue, x: np.ndarray, w: np.ndarray) -> tuple[Node, Node]:
    """energy(snake(x w)) and the node of w."""
    weight = ag.tensor(Tensor.from_host(queue, w), requires_grad=True)
    weight.value.requires_grad = True
    return energy(snake(ag.matmul_op(ag.tensor(Tensor.from_host(queue, x)), weight), a=2.0)), weight


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The gradient of the loss by w, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    z = x @ w
    y = z + np.sin(2 * z) ** 2 / 2
    return x.T @ (2 * y / y.size * (1 + np.sin(4 * z)))


class Weights:
    """An optimizer in its simplest form: what scale_loss needs to know is which tensors get gradients."""

    def __init__(self, *params: Tensor) -> None:
        self.params = list(params)

    def step(self) -> None:
        """Nothing: this example looks at the gradients only."""


def report(name: str, gradient: np.ndarray, reference: np.ndarray) -> None:
    """Prints what arrived where, and how far the gradient is from float64."""
    error = np.abs(gradient - reference).max() / np.abs(reference).max()
    dtypes = ", ".join(f"{function} got {dtype}" for function, dtype in arrived.items())
    print(f"{name}: {dtypes}; gradient {gradient.dtype}, relative error {error:.1e}")


def main() -> None:
    """The same loss without AMP and with it."""
    parser = argparse.ArgumentParser(description="a user's own OpenCL kernel under AMP")
    add_device_option(parser)
    queue = open_queue(parser.parse_args().device)
    print(f"Device: {describe(queue)}")

    random = np.random.default_rng(0)
    x = random.standard_normal((64, 128), dtype=np.float32)
    w = random.standard_normal((128, 32), dtype=np.float32) / 16
    reference = expected(x, w)

    loss, weight = loss_and_gradient(queue, x, w)
    ag.Tape().backward(loss)
    report("without AMP", weight.value.grad.to_host(), reference)

    with amp.init() as handle:
        loss, weight = loss_and_gradient(queue, x, w)
        with handle.scale_loss(loss, Weights(weight.value)) as scaled_loss:
            scaled_loss.backward()
        report("with AMP   ", weight.value.grad.to_host(), reference)


if __name__ == "__main__":
    run_main(main)
