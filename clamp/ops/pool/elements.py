"""Pooling of any windows on any device, element by element (kernels/pool_elements.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.launch import index_type, launch, span_for
from clamp.ops.pool.problem import Problem

POOL = Kernel("pool_elements.cl", "pool_elements")
ARGMAX = Kernel("pool_elements.cl", "max_pool_argmax")
BACKWARD = Kernel("pool_elements.cl", "pool_elements_backward")

NAME = "elements"
TAKES = "every window"
IN_WORDS = "one window after the other"
fits = pays = always


def forward(problem: Problem, x: Tensor, y: Tensor) -> None:
    """Writes the maxima or means over y."""
    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[y.dtype], "MAX": int(problem.is_max)}
    _launch(POOL, problem, (x, y), (problem.scale,), POOL_ELEMENTS=1, **types)


def max_backward(problem: Problem, x: Tensor, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the maxima over dx; the positions of the maxima come first, int32."""
    chosen = bridge.empty(x.queue, grad.shape, "int32")
    _launch(ARGMAX, problem, (x, chosen), MAX_POOL_ARGMAX=1, MAX=1, X_T=bridge.STORAGE[x.dtype])
    _backward(problem, grad, chosen, dx, 1.0)


def avg_backward(problem: Problem, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the means over dx."""
    _backward(problem, grad, grad, dx, problem.scale)


def _backward(problem: Problem, grad: Tensor, chosen: Tensor, dx: Tensor, scale: float) -> None:
    types = {"G_T": bridge.STORAGE[grad.dtype], "DX_T": bridge.STORAGE[dx.dtype], "MAX": int(problem.is_max)}
    _launch(BACKWARD, problem, (grad, chosen, dx), (scale,), POOL_ELEMENTS_BACKWARD=1, **types)


def _launch(
    kernel: Kernel, problem: Problem, tensors: tuple[Tensor, ...], numbers: tuple[float, ...] = (), **macros: object
) -> None:
    """Runs a kernel that writes each element of the last tensor."""
    out = tensors[-1]
    span = span_for(out.queue, out.size) if problem.device.is_cpu else 1
    sizes = launch(out.queue, -(-out.size // span))
    largest = problem.planes * problem.height * problem.width
    kernel(out.queue, *sizes, *tensors, out.size, span, *problem.extents, *numbers, INDEX=index_type(largest), **macros)
