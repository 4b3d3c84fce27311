"""Losses of each element, summed or not, and their gradients.

A sum has shape (1,) and is float32: it is beyond what 16 bits hold. A gradient is computed from the loss's own
gradient, read on the device::

    loss = loss_sum("weighted_bce", (pred, target, weight), bce_constants(1e-7))
    grad_pred = loss_gradient("weighted_bce", (pred, target, weight), grad, pred.dtype, bce_constants(1e-7))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.launch import group_macros, launch, parts_of, pieces_for, span_for
from clamp.ops.reduce import reduce_sum

LOSS_SUM = Kernel("loss_elementwise.cl", "loss_sum", "X T W V")
LOSS_TERMS = Kernel("loss_elementwise.cl", "loss_terms", "X T W V Y")
LOSS_GRADIENT = Kernel("loss_elementwise.cl", "loss_gradient", "X T W V G DX")

Key: TypeAlias = tuple[Any, ...]

_plans = Prepared(1024)

_GPU_GROUP = 256
_CONSTANTS = 6


def bce_constants(epsilon: float) -> tuple[float, ...]:
    """Constants of the cross entropies of a probability that is held in epsilon .. 1 - epsilon."""
    return (0.0, epsilon, math.log(epsilon), math.log1p(-epsilon))


def detection_constants(beta: float, epsilon: float, bce_scale: float, smooth_l1_scale: float) -> tuple[float, ...]:
    """Constants of ``"detection"``: those of its cross entropy and its smooth l1, and how much of each."""
    return (beta, *bce_constants(epsilon)[1:], bce_scale, smooth_l1_scale)


def loss_sum(kind: str, operands: Sequence[Tensor], constants: Sequence[float] = ()) -> Tensor:
    """Sum over all elements of a loss, as float32 of shape (1,).

    Args:
        kind: of kernels/loss_elementwise.cl, which has the formulas: ``"mse"`` (x - t)^2, ``"l1"`` |x - t|,
            ``"smooth_l1"`` d^2 / (2 beta) below beta, else d - beta / 2;
            ``"weighted_smooth_l1"``, ``"weighted_bce"``, ``"detection"``, ``"box"`` (whole boxes of 4 elements).
        operands: prediction, target and the kind's weights, all of the same number of elements, each float32,
            float16 or bfloat16.
        constants: what the kind is set up with: beta first (``"box"``: then reference area, area gain, miss gain,
            center gain, size gain), or what the functions above return.
    """
    x = operands[0]
    key = (x.context.int_ptr, kind, *[(tuple(y.shape), y.dtype) for y in operands])
    kernel, *sizes, parts, rest = _plans.known.get(key) or _plan_sum(key, kind, operands)
    sums = bridge.empty(x.queue, (parts,), "float32")
    kernel(x.queue, *sizes, *[y.buffer for y in _all_four(operands)], sums.buffer, *rest, *_padded(constants))
    return sums if parts == 1 else reduce_sum(sums, out_dtype="float32")


def _plan_sum(key: Key, kind: str, operands: Sequence[Tensor]) -> tuple[Any, ...]:
    """The kernel of a sum, its sizes, how many sums it makes, and the numbers after them."""
    queue, n = operands[0].queue, operands[0].size
    device = capabilities(queue)
    group = 1 if device.is_cpu else min(_GPU_GROUP, 1 << (device.max_work_group.bit_length() - 1))
    parts, span = parts_of(queue, 1, n)
    dtypes = [y.dtype for y in _all_four(operands)]
    kernel = LOSS_SUM.on(queue, *dtypes, KIND=kind, WEIGHTS=len(operands) - 2, **group_macros(queue, group))
    return _plans.keep(key, (kernel, (parts * group,), (group,), parts, (n, span)))


def loss_terms(kind: str, operands: Sequence[Tensor], out_dtype: str, constants: Sequence[float] = ()) -> Tensor:
    """The loss of each element, of the prediction's shape. Arguments as for ``loss_sum``; besides its kinds

    ``"logit_bce"``, binary cross entropy of a logit (an infinite one gives 0 where the target agrees with it), and
    ``"probability_bce"``, of a probability.
    """
    return _over_elements(LOSS_TERMS, kind, operands, (), out_dtype, constants)


def loss_gradient(
    kind: str, operands: Sequence[Tensor], grad: Tensor, out_dtype: str, constants: Sequence[float] = ()
) -> Tensor:
    """Gradient for the prediction of ``loss_sum`` or ``loss_terms``, or for what the kind's last word names.

    Args:
        grad: gradient of the loss: one element, or one for each of the prediction's.
    """
    return _over_elements(LOSS_GRADIENT, kind, operands, (grad,), out_dtype, constants)


def _over_elements(
    kernel: Kernel, kind: str, operands: Sequence[Tensor], others: tuple[Tensor, ...], out_dtype: str,
    constants: Sequence[float],
) -> Tensor:  # fmt: skip
    """Runs a kernel that reads the operands, and others after these, and writes an element for each of them."""
    x = operands[0]
    key = (x.context.int_ptr, kernel.name, kind, out_dtype)
    key += tuple([(tuple(y.shape), y.dtype) for y in (*operands, *others)])
    built, *sizes, rest = _plans.known.get(key) or _plan_elements(key, kernel, kind, operands, others, out_dtype)
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if built is not None:
        tensors = (*_all_four(operands), *others, out)
        built(x.queue, *sizes, *[y.buffer for y in tensors], *rest, *_padded(constants))
    return out


def _plan_elements(
    key: Key, kernel: Kernel, kind: str, operands: Sequence[Tensor], others: tuple[Tensor, ...], out_dtype: str
) -> tuple[Any, ...]:
    """The kernel, None where there are no elements, its sizes, and the numbers after the tensors."""
    x = operands[0]
    span = span_for(x.queue, x.size)
    macros: dict[str, object] = {"KIND": kind, "WEIGHTS": len(operands) - 2, "PIECES": pieces_for(x.queue)}
    if others and others[0].size == x.size:
        macros["G_EACH"] = 1
    dtypes = [y.dtype for y in (*_all_four(operands), *others)]
    built = kernel.on(x.queue, *dtypes, out_dtype, **macros) if x.size else None
    return _plans.keep(key, (built, *launch(x.queue, -(-x.size // span)), (x.size, span)))


def _all_four(operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands; the prediction stands in for weights that the kind has not, and is not read there."""
    return [*operands, operands[0], operands[0]][:4]


def _padded(constants: Sequence[float]) -> list[float]:
    return [*constants, *[0.0] * (_CONSTANTS - len(constants))]
