"""Functions of one tensor: activations, exp and log and their kin, dropout; and PReLU, which has a slope besides.

Backward recomputes from the input where that is more accurate: 1 - y*y of a tanh stored in 16 bits is zero from
x = 4.5 on, while the slope is not. It reads the result where nothing is lost by it (relu, exp, sqrt).
"""

from __future__ import annotations

import threading
from math import isnan
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, Operand, as_is, bound, float_operands, require_floats
from clamp.casting.registry import implements
from clamp.functions.arithmetic import apply_unary, is_scalar
from clamp.functions.recompute import drawn
from clamp.ops import dropout as ops
from clamp.ops import elementwise
from clamp.ops import prelu as prelu_ops
from clamp.ops.arguments import number, probability, whole_number, yes_or_no

#: names that netcl has a function of bare tensors for, too, and others
_ON_TENSORS = ("relu", "sigmoid", "tanh", "swish", "softplus", "hard_sigmoid", "hard_swish")
_OF_NODES = ("abs", "exp", "log", "log1p", "sqrt", "rsqrt", "square")
_GRADIENTS = {"exp": "mul", "log": "div"}  # of the others: "relu_grad" of relu
_READ_THE_RESULT = ("relu", "exp", "sqrt")  # in backward, in place of the input


def _plain(name: str) -> None:
    places = ("netcl.autograd", "netcl.ops.elementwise") if name in _ON_TENSORS else ("netcl.autograd",)
    grad_op, from_out = _GRADIENTS.get(name, f"{name}_grad"), name in _READ_THE_RESULT

    @implements(*(f"{place}.{name}" for place in places), uses=(elementwise,))
    def function(casting: Casting, x: TensorLike, tape: Tape | None = None) -> Any:
        return apply_unary(casting, x, tape, name, grad_op, from_out=from_out)


for _name in _ON_TENSORS + _OF_NODES:
    _plain(_name)


@implements("netcl.autograd.leaky_relu", "netcl.ops.elementwise.leaky_relu", uses=(elementwise,))
def leaky_relu(casting: Casting, x: TensorLike, negative_slope: float = 0.01, tape: Tape | None = None) -> Any:
    """x where positive, negative_slope * x elsewhere."""
    slope = number("leaky_relu", "negative_slope", negative_slope)
    return apply_unary(casting, x, tape, "leaky_relu", "leaky_relu_grad", slope)


@implements("netcl.autograd.gelu", "netcl.ops.elementwise.gelu", uses=(elementwise,))
def gelu(casting: Casting, x: TensorLike, approximate: bool = True, tape: Tape | None = None) -> Any:
    """x * Phi(x), Phi being the normal distribution, or with ``approximate`` its usual form in tanh."""
    op = "gelu_tanh" if yes_or_no("gelu", "approximate", approximate) else "gelu_erf"
    return apply_unary(casting, x, tape, op, f"{op}_grad")


@implements("netcl.autograd.elu", "netcl.ops.elementwise.elu", uses=(elementwise,))
def elu(casting: Casting, x: TensorLike, alpha: float = 1.0, tape: Tape | None = None) -> Any:
    """x where positive, alpha * (exp(x) - 1) elsewhere."""
    return apply_unary(casting, x, tape, "elu", "elu_grad", number("elu", "alpha", alpha))


@implements("netcl.autograd.clamp", "netcl.autograd.clip", "netcl.ops.elementwise.clamp", uses=(elementwise,))
def clamp(casting: Casting, x: TensorLike, min_val: float, max_val: float, tape: Tape | None = None) -> Any:
    """x, not below min_val and not above max_val; an infinity is no bound. The gradient passes at the bounds and
    between them.

    Raises:
        TypeError, ValueError: a bound is no number, or NaN, which netcl takes for no bound.
    """
    return apply_unary(casting, x, tape, "clamp", "clamp_grad", *_bounds("clamp", min_val, max_val))


@implements("netcl.autograd.hard_tanh", "netcl.ops.elementwise.hard_tanh", uses=(elementwise,))
def hard_tanh(
    casting: Casting, x: TensorLike, min_val: float = -1.0, max_val: float = 1.0, tape: Tape | None = None
) -> Any:
    """x, not below min_val and not above max_val; see ``clamp``."""
    return apply_unary(casting, x, tape, "clamp", "clamp_grad", *_bounds("hard_tanh", min_val, max_val))


def _bounds(function: str, min_val: Any, max_val: Any) -> tuple[float, float]:
    bounds = number(function, "min_val", min_val), number(function, "max_val", max_val)
    if any(map(isnan, bounds)):
        raise ValueError(f"{function}: the bounds are {min_val} and {max_val}; pass an infinity for no bound, not NaN")
    return bounds


@implements("netcl.autograd.pow", uses=(elementwise,))
def pow(casting: Casting, x: TensorLike, exponent: float, tape: Tape | None = None) -> Any:
    """x to a fixed power."""
    return apply_unary(casting, x, tape, "pow", "pow_grad", number("pow", "exponent", exponent))


@implements("netcl.autograd.dropout", "netcl.ops.elementwise.dropout", uses=(ops,))
def dropout(casting: Casting, x: TensorLike, p: float = 0.5, seed: int | None = None, tape: Tape | None = None) -> Any:
    """x with a random part p of its elements zeroed and the others multiplied by 1 / (1 - p).

    The same seed drops the same elements, on every device. Without a seed one is drawn from numpy's global
    generator, so ``np.random.seed`` makes a run repeatable. p = 0 returns x itself, p = 1 zeros. The mask is
    made on the device and made again in backward: it takes no memory, and it is not netcl's mask for that seed.
    Where launches are recorded, every replay draws a new seed; one that was passed stays.

    Raises:
        ValueError: p is not from 0 to 1 (netcl takes what is below for 0 and what is above for 1).
    """
    p = probability("dropout", "p", p)
    if p == 0:
        return x
    (operand,) = float_operands(casting, x)
    key = drawn(_draw_seed) if seed is None else whole_number("dropout", "seed", seed)

    def dropped(values: Tensor, dtype: str) -> Tensor:
        if p == 1:
            return bridge.zeros(values.queue, values.shape, dtype)
        return ops.dropout(values, p, key, dtype)

    out = dropped(operand.value, casting.result_dtype(operand))
    gradients: Gradients = {operand: lambda grad, dtype: dropped(grad, dtype)}
    return bound(out, gradients, "dropout", tape, unread=(operand,))


class LastSeed(threading.local):
    """Last seed that dropout has drawn in this thread: for whoever computes it again."""

    value: int = 0


LAST_SEED = LastSeed()


def _draw_seed() -> int:
    LAST_SEED.value = int.from_bytes(np.random.bytes(8), "little")
    return LAST_SEED.value


# ---------------------------------------------------------------------------------------------- a learned slope

# The slope is read, and gets its gradient, in its own dtype under every policy.


def _prelu_operands(casting: Casting, x: Any, alpha: Any) -> tuple[Operand, Operand]:
    (operand,) = float_operands(casting, x)
    slope = as_is(alpha)
    require_floats("prelu", alpha=slope)
    bridge.require_same_queue("prelu", operand.parent.value, slope.value)
    return operand, slope


@implements("netcl.autograd.prelu", "netcl.ops.elementwise.prelu", uses=(prelu_ops,))
def prelu(casting: Casting, x: Any, alpha: Any, tape: Tape | None = None) -> Any:
    """x where positive, alpha * x elsewhere.

    Args:
        x: (N, C, ...), float32, float16 or bfloat16.
        alpha: the slope of each channel, C elements, or one for all; float32, float16 or bfloat16.

    Raises:
        TypeError: alpha is a number, or holds integers.
    """
    if is_scalar(alpha):
        raise TypeError(f"prelu: alpha is {alpha!r}; pass a node or a tensor of slopes, or call leaky_relu")
    operand, slope = operands = _prelu_operands(casting, x, alpha)
    out = prelu_ops.prelu(operand.value, slope.value, out_dtype=casting.result_dtype(operand))
    gradients: Gradients = {
        operands: lambda grad, dx_dtype, slope_dtype: prelu_ops.prelu_backward(
            grad, operand.value, slope.value, dx_dtype=dx_dtype, slope_dtype=slope_dtype
        )
    }
    return bound(out, gradients, "prelu", tape)


@implements("netcl.ops.elementwise.prelu_backward", uses=(prelu_ops,))
def tensor_prelu_backward(casting: Casting, x: Any, alpha: Any, grad_out: Any) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and alpha from that of ``prelu``'s result."""
    operand, slope = _prelu_operands(casting, x, alpha)
    grad = as_is(grad_out)
    require_floats("prelu_backward", grad_out=grad)
    return prelu_ops.prelu_backward(
        grad.value,
        operand.value,
        slope.value,
        dx_dtype=casting.result_dtype(operand),
        slope_dtype=bridge.canonical_dtype(slope.value.dtype),
    )
