"""What is tried of convolutions on matrix units before they are used (clamp/opencl/proofs.py): small ones, compared
with numpy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.conv.geometry import Pair, Window
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import Weights
from clamp.ops.device_matrix import DeviceMatrix
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Epilogue

Array = npt.NDArray[Any]


class Convolver(Protocol):
    """What computes by a given plan."""

    def convolve_by(
        self, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue, plan: Plan
    ) -> None:
        """Writes a convolution or an input gradient over ``out``."""

    def sum_gradient(self, problem: Problem, x: Tensor, grad: Tensor, out: Tensor, plan: Plan) -> None:
        """Writes the gradient by the weights over ``out``."""


def computes_right(engine: Convolver, plan: Plan, queue: cl.CommandQueue, dtypes: Sequence[str]) -> bool:
    """Whether convolutions and their gradients come out right by a plan, in each type, with a stride and without."""
    cases = (((9, 8), Window(pad=(1, 1))), ((8, 8), Window((2, 2), (1, 1), groups=2)))
    return all(
        _computes(engine, plan, queue, dtype, image, window) for dtype, (image, window) in product(dtypes, cases)
    )


def _computes(engine: Convolver, plan: Plan, queue: cl.CommandQueue, dtype: str, image: Pair, window: Window) -> bool:
    numbers = np.random.default_rng(0)
    n, c, f = 3, 24, plan.rows // 2 + 8
    x = numbers.integers(-1, 2, (n, c * window.groups, *image))
    w = numbers.integers(-1, 2, (f * window.groups, c, 3, 3))
    grad = numbers.integers(-1, 2, (n, f * window.groups, *window.output(image, (3, 3))))
    out, dx, dw = _with_gradients(x, w, grad, window)
    for gradient, expected in (("", out), ("input", dx), ("weights", dw)):
        problem = Problem(gradient, (dtype, dtype), "float32", n, image, w.shape, window, capabilities(queue))
        found: Any = DeviceMatrix.like(queue, np.full(expected.shape, 99), "float32")
        xs, ws, grads = (DeviceMatrix.like(queue, host, dtype) for host in (x, w, grad))
        if gradient == "weights":
            engine.sum_gradient(problem, xs, grads, found, plan)
        else:
            weights = Weights(ws, window.groups, gradient == "input")
            engine.convolve_by(problem, grads if gradient else xs, weights, found, Epilogue("float32"), plan)
        if not np.array_equal(found.to_host(), expected):
            return False
    return True


def _with_gradients(x: Array, w: Array, grad: Array, window: Window) -> tuple[Array, Array, Array]:
    """A 3x3 convolution of integers, and its gradients by both operands, a tap at a time."""
    (ph, pw), (sh, sw), groups = window.pad, window.stride, window.groups
    n, rows, columns = x.shape[0], *grad.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    padded = padded.reshape(n, groups, -1, *padded.shape[2:])
    kernels, slopes = w.reshape(groups, -1, *w.shape[1:]), grad.reshape(n, groups, -1, rows, columns)
    out, dpadded, dw = np.zeros_like(slopes), np.zeros_like(padded), np.zeros_like(kernels)
    for i, j in _taps():
        window_of_tap = np.s_[:, :, :, i : i + (rows - 1) * sh + 1 : sh, j : j + (columns - 1) * sw + 1 : sw]
        out += np.einsum("gfc,ngcyx->ngfyx", kernels[..., i, j], padded[window_of_tap])
        dpadded[window_of_tap] += np.einsum("gfc,ngfyx->ngcyx", kernels[..., i, j], slopes)
        dw[..., i, j] = np.einsum("ngfyx,ngcyx->gfc", slopes, padded[window_of_tap])
    inside = dpadded[..., ph : ph + x.shape[2], pw : pw + x.shape[3]]
    return out.reshape(grad.shape), inside.reshape(x.shape), dw.reshape(w.shape)


def _taps() -> Iterator[Pair]:
    return product(range(3), range(3))
