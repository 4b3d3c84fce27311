"""Pooling of any windows on any device, element by element (kernels/pool_elements.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.launch import index_type, launch, span_for
from clamp.ops.pool.problem import Problem

POOL = Kernel("pool_elements.cl", "pool_elements", "X Y")
ARGMAX = Kernel("pool_elements.cl", "max_pool_argmax", "X")
BACKWARD = Kernel("pool_elements.cl", "pool_elements_backward", "G - DX")

NAME = "elements"
TAKES = "every window"
IN_WORDS = "one window after the other"
fits = pays = always


def forward(problem: Problem, x: Tensor, y: Tensor) -> None:
    """Writes the maxima or means over y."""
    _launch(POOL, problem, (x, y), problem.scale)


def max_backward(problem: Problem, x: Tensor, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the maxima over dx; the positions of the maxima come first, int32."""
    chosen = bridge.empty(x.queue, grad.shape, "int32")
    _launch(ARGMAX, problem, (x, chosen))
    _launch(BACKWARD, problem, (grad, chosen, dx), 1.0)


def avg_backward(problem: Problem, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the means over dx."""
    _launch(BACKWARD, problem, (grad, grad, dx), problem.scale)


def _launch(kernel: Kernel, problem: Problem, tensors: tuple[Tensor, ...], *scale: float) -> None:
    """Runs a kernel that writes each element of the last tensor."""
    out = tensors[-1]
    span = span_for(out.queue, out.size) if problem.device.is_cpu else 1
    sizes = launch(out.queue, -(-out.size // span))
    kernel(
        out.queue, *sizes, *tensors, out.size, span, *problem.extents, *scale, MAX=int(problem.is_max),
        INDEX=index_type(problem.planes * problem.height * problem.width),
    )  # fmt: skip
