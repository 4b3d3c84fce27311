"""Functions applied element by element, forward and gradient, with numpy's broadcasting.

Operands are float32, float16 or bfloat16 in any mixture, or Python numbers; arithmetic is in float32, and the
result is stored in the dtype that the caller names::

    y = elementwise("relu", "float16", x)
    gx = elementwise("relu_grad", x.dtype, grad, y)          # one kernel, no temporaries
    z = elementwise("mul", "float32", x, 0.5)
    w = elementwise("clamp", x.dtype, x, parameters=(0.0, 6.0))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.launches import Launch
from clamp.opencl.program import READ_STORAGE, Kernel, Prepared
from clamp.ops.arguments import at_least, at_most, bounds, saturated
from clamp.ops.launch import index_type, launch, pieces_for, span_for

ELEMENTWISE = Kernel("elementwise.cl", "elementwise")

#: Every function: how many operands it takes, and how many parameters. Gradients take the result's gradient g
#: first, then what stands in the comment. The formulas are in kernels/elementwise.cl.
OPS: dict[str, tuple[int, int]] = {
    "copy": (1, 0), "neg": (1, 0), "abs": (1, 0), "square": (1, 0), "exp": (1, 0), "log": (1, 0), "log1p": (1, 0),
    "sqrt": (1, 0), "rsqrt": (1, 0), "pow": (1, 1),  # exponent
    "relu": (1, 0), "sigmoid": (1, 0), "tanh": (1, 0), "gelu_tanh": (1, 0), "gelu_erf": (1, 0), "swish": (1, 0),
    "softplus": (1, 0), "hard_sigmoid": (1, 0), "hard_swish": (1, 0),
    "leaky_relu": (1, 1), "elu": (1, 1), "clamp": (1, 2),  # slope; alpha; lowest, highest
    "add": (2, 0), "sub": (2, 0), "mul": (2, 0), "div": (2, 0), "maximum": (2, 0), "minimum": (2, 0),
    "lt": (2, 0), "le": (2, 0), "gt": (2, 0), "ge": (2, 0), "add_relu": (2, 0),
    "where": (3, 0),  # condition, a, b
    "prelu": (2, 0),  # x, slope
    # Gradients: g, x
    "abs_grad": (2, 0), "square_grad": (2, 0), "log1p_grad": (2, 0), "rsqrt_grad": (2, 0), "pow_grad": (2, 1),
    "sigmoid_grad": (2, 0), "tanh_grad": (2, 0), "gelu_tanh_grad": (2, 0), "gelu_erf_grad": (2, 0),
    "swish_grad": (2, 0), "softplus_grad": (2, 0), "hard_sigmoid_grad": (2, 0), "hard_swish_grad": (2, 0),
    "leaky_relu_grad": (2, 1), "elu_grad": (2, 1), "clamp_grad": (2, 2),
    "prelu_grad_slope": (2, 0),
    # Gradients: g, y
    "relu_grad": (2, 0), "sqrt_grad": (2, 0),
    # Gradients: g, a, b (div_grad is that of the divisor)
    "div_grad": (3, 0), "maximum_grad_a": (3, 0), "maximum_grad_b": (3, 0), "minimum_grad_a": (3, 0),
    "minimum_grad_b": (3, 0),
    # Gradients: g, x, slope
    "prelu_grad": (3, 0),
    # Gradients: g, condition
    "where_grad_a": (2, 0), "where_grad_b": (2, 0),
}  # fmt: skip

#: Functions whose result may be one of their numbers as it is: how those are held in the result's type. What the others
#: do with a number is arithmetic, or a comparison, in float32.
_HOLD: dict[str, Callable[[float, str], float]] = {"where": saturated, "maximum": at_least, "minimum": at_most}


class _LaunchPlan(NamedTuple):
    """A launch, prepared."""

    shape: tuple[int, ...]  # of the result
    bound: Launch | None = None  # where all operands are tensors
    kernel: cl.Kernel | None = None  # where numbers are among them; neither where there is nothing to compute
    sizes: tuple[Any, ...] = ()  # global and local
    layout: tuple[Any, ...] = ()  # the kernel's arguments after the parameters


_plans = Prepared(4096)


def elementwise(op: str, out_dtype: str, *operands: Tensor | float, parameters: tuple[float, ...] = ()) -> Tensor:
    """The function ``op`` of the operands, broadcast against each other as in numpy.

    Args:
        op: a name in ``OPS``.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; what is computed in float32 is rounded to it once.
        operands: tensors (float32, float16, bfloat16; int32 is read too) and floats, at least one of them a
            tensor. Floats reach the kernel as arguments: no value is ever compiled in. Finite ones stay finite where
            the function may return them as they are.
        parameters: floats that the function takes after its operands, for example a slope.

    Returns:
        A tensor of the broadcast shape.

    Raises:
        ValueError: the shapes do not broadcast, or ``op`` does not exist or takes other operands.
    """
    key: list[Any] = [op, out_dtype, len(parameters)]
    arguments: list[Any] = []
    tensor = None
    hold = _HOLD.get(op)
    for operand in operands:
        if isinstance(operand, Tensor):
            tensor = operand
            key += (operand.shape, operand.dtype)
            arguments.append(operand.buffer)
        else:
            key.append("arg")
            arguments.append(saturated(operand, "float32") if hold is None else hold(operand, out_dtype))
    if tensor is None:
        raise ValueError(f"{op} needs at least one tensor")
    queue = tensor.queue
    key.append(tensor.context.int_ptr)
    plan_key = tuple(key)
    plan = _plans.known.get(plan_key) or _make_plan(plan_key, queue, op, out_dtype, operands, len(parameters))
    y = bridge.empty(queue, plan.shape, out_dtype)
    if plan.bound is not None:
        plan.bound(queue, *arguments, y.buffer)
    elif plan.kernel is not None:
        numbers: Sequence[float]
        if op in ("clamp", "clamp_grad"):  # a gradient passes where the forward did, which read and stored x's dtype
            numbers = bounds(*parameters, out_dtype if op == "clamp" else tensor.dtype)
        else:
            numbers = [saturated(parameter, "float32") for parameter in parameters]
        plan.kernel(queue, *plan.sizes, *arguments, y.buffer, *numbers, *plan.layout)
    return y


def _make_plan(
    key: tuple[Any, ...], queue: cl.CommandQueue, op: str, out_dtype: str, operands: Sequence[Tensor | float],
    parameter_count: int,
) -> _LaunchPlan:  # fmt: skip
    if OPS.get(op) != (len(operands), parameter_count):
        raise ValueError(f"no function {op!r} of {len(operands)} operands and {parameter_count} parameters")
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in operands]
    shape = broadcast_shape(op, *(shapes[k] for k, x in enumerate(operands) if isinstance(x, Tensor)))
    size = math.prod(shape)
    plan = _LaunchPlan(shape)
    if size:
        dims = _collapse(shapes, shape)
        macros: dict[str, object] = {"OP": f"op_{op}", "ARITY": len(operands), "PARAMETERS": parameter_count}
        for k, x in enumerate(operands):
            macros[f"X{k}_T"] = READ_STORAGE[x.dtype] if isinstance(x, Tensor) else "arg"
            if len(dims) == 1:
                macros[f"X{k}_STEP"] = dims[0][1 + k]
        macros |= {"Y_T": bridge.STORAGE[out_dtype], "STRIDED": int(len(dims) > 1), "PIECES": pieces_for(queue)}
        span, row = span_for(queue, size), dims[0][0]
        items = size // row * -(-row // 16) if macros["PIECES"] else -(-size // span)
        layout: tuple[Any, ...] = (span, size)
        if len(dims) > 1:
            macros["INDEX"] = index_type(size)
            flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
            layout += (len(dims), cl.Buffer(queue.context, flags, hostbuf=np.array(dims, np.uint64)))
        sizes = launch(queue, items)
        if parameter_count or len(operands) > sum(isinstance(x, Tensor) for x in operands):
            plan = _LaunchPlan(shape, None, ELEMENTWISE.on(queue, **macros), sizes, layout)
        else:
            open_places = [...] * (len(operands) + 1)
            plan = _LaunchPlan(shape, ELEMENTWISE.bind(queue, *sizes, *open_places, *layout, **macros))
    return _plans.keep(key, plan)


def broadcast_shape(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the shapes broadcast to, as in numpy.

    Raises:
        ValueError: they do not; the message starts with ``name``.
    """
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise ValueError(f"{name}: the shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def _collapse(shapes: Sequence[tuple[int, ...]], out_shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The fewest dimensions that tell how up to three operands broadcast.

    Returns:
        For each dimension, from the innermost on: its extent and each operand's stride (0: does not move).
    """
    padded = [(1,) * (len(out_shape) - len(shape)) + shape for shape in shapes]
    merged: list[tuple[int, tuple[bool, ...]]] = []
    for axis, extent in enumerate(out_shape):
        moves = tuple(shape[axis] == extent for shape in padded)
        if extent == 1:
            continue
        if merged and merged[-1][1] == moves:
            merged[-1] = (merged[-1][0] * extent, moves)
        else:
            merged.append((extent, moves))
    lengths = [1, 1, 1]
    dims = []
    for extent, moves in reversed(merged):
        moves += (False,) * (3 - len(moves))
        strides = [length if move else 0 for length, move in zip(lengths, moves, strict=True)]
        dims.append((extent, *strides))
        lengths = [length * extent if move else length for length, move in zip(lengths, moves, strict=True)]
    return dims or [(1, 0, 0, 0)]  # type: ignore[return-value]


def masked_fill(x: Tensor, mask: Tensor, fill: float, *, out_dtype: str) -> Tensor:
    """x with ``fill`` wherever the mask is not zero (NaN is not zero).

    Args:
        mask: float32, float16, bfloat16 or int32; repeated over x's leading elements, whatever its own shape.
        fill: rounded to ``out_dtype``, a finite one to a finite one: -1e9 is -65504 in float16.
    """
    rows, row = _repeated(x, mask)
    return bridge.view(elementwise("where", out_dtype, row, fill, rows), x.shape)


def masked_fill_backward(grad: Tensor, mask: Tensor, *, out_dtype: str) -> Tensor:
    """The gradient where the mask is zero, 0 elsewhere, whatever the gradient is there."""
    rows, row = _repeated(grad, mask)
    return bridge.view(elementwise("where_grad_b", out_dtype, rows, row), grad.shape)


def _repeated(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x in rows as long as the mask, and the mask as a row that repeats over them."""
    left = x.size % mask.size if mask.size else x.size
    if left:
        raise ValueError(
            f"masked_fill: a mask of shape {tuple(mask.shape)} does not repeat over a tensor of shape "
            f"{tuple(x.shape)}: {mask.size} elements do not divide {x.size}"
        )
    own = tuple(dropwhile(lambda extent: extent == 1, mask.shape))
    last = tuple(x.shape[len(x.shape) - len(own) :])
    if x.size and own != last and len(own) == len(last) and all(m in (1, n) for m, n in zip(own, last, strict=True)):
        raise ValueError(
            f"masked_fill: a mask of shape {tuple(mask.shape)} for a tensor of shape {tuple(x.shape)}: netcl does not "
            "broadcast it, but repeats its elements in memory order; pass a mask of the full shape, or "
            "ag.where(mask, fill, x), which broadcasts"
        )
    return bridge.view(x, (x.size // max(mask.size, 1), mask.size)), bridge.view(mask, (mask.size,))
