"""The vocabulary of the conformance table.

A family module (activations.py, conv.py, ...) holds a list ``OPS``, one entry per netcl function::

    Op(
        "netcl.autograd.matmul_op",
        np.matmul,                                        # float64 reference, called as netcl's function is
        [
            Case(Normal(5, 7), Normal(7, 3)),             # positional and keyword arguments
            Case(Normal(2, 3, 7), Normal(7, 5)),
        ],
        terms=lambda a, b: (a.shape[-1], np.abs(a) @ np.abs(b)),
    )

The runner (test_conformance.py) calls the function as a user does, on nodes, inside an AMP region, for every AMP
dtype, every mixture of storage types and every device. Expected dtypes follow from the function's policy on
``lists/``. Gradients are compared with central differences of the float64 reference, so an entry states the forward
only, and a gradient that contradicts the value cannot pass.

Tolerances are those of the design: ``ulps`` of the result's own type plus ``4 * n * 2**-24 * sum|terms|`` for sums in
fp32. For gradients n and the terms come from the differences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Input:
    """A tensor argument, by how its values are drawn.

    Attributes:
        draw: makes the values (float64, or int32 for indices) from a random generator.
        grad: whether backward owes it a gradient.
        secondary: it is read in its own dtype under every policy (a bias, a norm's scale, targets of a match op): it
            takes no part in the casting and stays float32 where inputs are mixed.
    """

    draw: Callable[[np.random.Generator], Array]
    grad: bool = True
    secondary: bool = False

    def fixed(self) -> Input:
        """The same without gradient: targets, masks."""
        return Input(self.draw, grad=False, secondary=self.secondary)

    def aside(self) -> Input:
        """The same as a secondary input."""
        return Input(self.draw, grad=self.grad, secondary=True)


def Normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Input:
    """Normally distributed values."""
    return Input(lambda rng: mean + scale * rng.standard_normal(shape))


def Uniform(low: float, high: float, *shape: int) -> Input:
    """Uniformly distributed values."""
    return Input(lambda rng: rng.uniform(low, high, shape))


def Distinct(*shape: int, step: float = 0.125) -> Input:
    """Multiples of ``step`` in random order, all different in every storage type (at most 256 elements)."""
    size = int(np.prod(shape))
    assert size <= 256, "bfloat16 tells no more integers apart"
    return Input(lambda rng: (rng.permutation(size) - size // 2).reshape(shape) * step)


def Ints(high: int, *shape: int) -> Input:
    """Integers 0 .. high-1 as an int32 tensor."""
    return Input(lambda rng: rng.integers(0, high, shape).astype(np.int32), grad=False, secondary=True)


def Values(values: npt.ArrayLike) -> Input:
    """These values (an integer array becomes an int32 tensor, without gradient)."""
    array = np.asarray(values)
    if array.dtype.kind == "i":
        return Input(lambda rng: array.astype(np.int32), grad=False, secondary=True)
    return Input(lambda rng: array.astype(np.float64))


class Case:
    """One call: positional and keyword arguments. Inputs may stand inside a list, as ``cat`` takes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Case(args={self.args}, kwargs={self.kwargs})"


Reference = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Op:
    """A netcl function in the table.

    Attributes:
        name: its full name on the lists.
        reference: the same function of float64 arrays, keyword arguments included.
        cases: the calls to make; the first is the everyday one, the others belong to the slow sweep.
        ulps: tolerance of the forward result, in ulps of a 16-bit result.
        ulps32: the same for a float32 result (OpenCL's own bound for the builtins inside).
        terms: ``terms(*args, **kwargs) -> (n, sum|terms|)``: the length of the op's sums and the sum of the
            magnitudes of what is summed (broadcastable to the result). Without it the op sums nothing.
        grad_ulps, grad_ulps32: as ulps and ulps32, for gradients.
        slack: factor on the bound for sums: more than 4 for ops that sum several times over.
        cancels: where a gradient is itself a difference of larger terms (gelu's near its minimum, a norm's): so many
            ulps of float32 at the largest gradient are allowed on top.
        differentiable: whether its result has a gradient at all.
        special: whether inf, nan, -0, subnormals and 65504 must come through as the reference has them. By default
            those of match, view and promote ops must.
        special_below: the largest finite magnitude of them that the op can square or sum in fp32.
        exact: the result is bits of the inputs, so also the sign of zero must agree.
        repeatable: calling it twice gives the same result (false for dropout without a seed).
    """

    name: str
    reference: Reference
    cases: Sequence[Case]
    ulps: float = 1.0
    ulps32: float = 4.0
    terms: Callable[..., tuple[float, Any]] | None = None
    grad_ulps: float = 1.0
    grad_ulps32: float = 8.0
    slack: float = 4.0
    cancels: float = 0.0
    differentiable: bool = True
    special: bool | None = None
    special_below: float = np.inf
    exact: bool = False
    repeatable: bool = True

    @property
    def function(self) -> str:
        """Its own name."""
        return self.name.rpartition(".")[2]
