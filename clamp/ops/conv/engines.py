"""The engines of convolutions and their gradients, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeGuard

import pyopencl as cl

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops import engine
from clamp.ops.conv import amx, dot_bf16, matrix_units, packed, tiled, winograd
from clamp.ops.conv.geometry import Pair, Window
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.verified import names_of_verified


class Computes(engine.Engine[Problem], Protocol):
    """A way to compute convolutions."""

    def convolve(self, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
        """Writes the convolution of x, or the input gradient from the output's gradient x, through the epilogue, over
        ``out``."""

    def weight_gradient(
        self, problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None
    ) -> Tensor | None:
        """Writes the gradient by the weights over ``out``. Returns the bias's gradient (F,), stored as ``bias_dtype``,
        if that is given and the engine sums it on the way."""


class Binds(engine.Engine[Problem], Protocol):
    """A way to compute convolutions whose launches are the same for all tensors like these."""

    def bind(
        self, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """What `convolve` does, for all tensors like these, this thread's: called with the source, the weights, the
        result, and the bias, which is the result where there is none."""

    def bind_weight_gradient(
        self, problem: Problem, x: Tensor, grad: Tensor, out: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """What `weight_gradient` does without a bias, likewise."""


ConvEngine: TypeAlias = Computes | Binds

#: the first that fits and pays runs
ENGINES: tuple[ConvEngine, ...] = (amx, winograd, dot_bf16, packed, *matrix_units.MATRIX_UNITS, tiled)

#: those of them that must be verified on a device
MATRIX_UNITS = matrix_units.MATRIX_UNITS


def binds(engine: ConvEngine) -> TypeGuard[Binds]:
    """Returns whether it does; it computes otherwise. (To ask isinstance for a protocol takes as long as a launch.)"""
    return hasattr(engine, "bind")


def choose(problem: Problem, name: str | None = None) -> ConvEngine:
    """The engine of a convolution or a gradient; the named one, if there is a name.

    Raises:
        ValueError: no engine has the name, or the problem does not fit it.
    """
    return engine.choose("conv2d", ENGINES, problem, name)


def problem_on(
    queue: cl.CommandQueue, gradient: str, dtypes: tuple[str, str], out_dtype: str, images: int, image: Pair,
    weights: tuple[int, ...], window: Window,
) -> Problem:  # fmt: skip
    """A convolution on the queue's device, with what this can do, and the engines that are verified there."""
    verified = names_of_verified(MATRIX_UNITS, queue)
    return Problem(gradient, dtypes, out_dtype, images, image, weights, window, capabilities(queue), verified)


def on_device(queue: cl.CommandQueue, dtype: str) -> str:
    """Says in words by which engines convolutions of one storage type run on the queue's device."""

    def engine_for(extent: Pair, window: Window) -> ConvEngine:
        """Returns the engine for many channels and positions."""
        return choose(problem_on(queue, "", (dtype, dtype), dtype, 64, (16, 16), (16, 16, *extent), window))

    chosen = {
        "3x3 of stride 1": engine_for((3, 3), Window(pad=(1, 1))),
        "3x3 of stride 2": engine_for((3, 3), Window((2, 2), (1, 1))),
        "others": engine_for((1, 1), Window()),
    }
    return f"convolutions of {dtype}: {engine.all_in_words(chosen)}"
