"""Losses of rows of logits fused with their reduction, and their gradients.

A scalar loss has shape (1,) and is float32: it is a sum over a batch, beyond what 16 bits hold. A gradient is
computed from the loss's own gradient, read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.launch import RowPlan, plan_rows
from clamp.ops.reduce import reduce_sum

LABEL_LOSS = Kernel("loss.cl", "label_loss")
LABEL_MEAN = Kernel("loss.cl", "label_mean")
LABEL_GRADIENT = Kernel("loss.cl", "label_gradient")
PROBABILITY_LOSS = Kernel("loss.cl", "probability_loss")
PROBABILITY_GRADIENT = Kernel("loss.cl", "probability_gradient")
HINGE_LOSS = Kernel("loss.cl", "hinge_loss")
HINGE_GRADIENT = Kernel("loss.cl", "hinge_gradient")

_STATS = 4  # floats that the row kernels keep for each row

#: dtypes labels may have; floating ones hold whole numbers, as netcl's ``Tensor.from_host`` makes by default
LABEL_STORAGE = {**bridge.STORAGE, "int32": "i32", "int": "i32", "int64": "i64"}


@dataclass(frozen=True)
class RowLoss:
    """A loss over rows of logits, with what backward needs besides its inputs.

    Attributes:
        loss: float32, shape (1,).
        stats: a few floats per row: the softmax's maximum and sum, or hinge's true class.
        count: rows that count, at least 1, as float32 of shape (1,) on the device; for labels only.
    """

    loss: Tensor
    stats: Tensor
    count: Tensor | None = None


def _row_buffers(x: Tensor) -> tuple[RowPlan, Tensor, Tensor]:
    rows, n = x.shape
    losses = bridge.empty(x.queue, (rows,), "float32")
    stats = bridge.empty(x.queue, (rows, _STATS), "float32")
    return plan_rows(x.queue, rows, n), losses, stats


def label_loss(x: Tensor, labels: Tensor, ignore_index: int) -> RowLoss:
    """Mean cross entropy of logits against class numbers, over the rows that are not ignored.

    Args:
        x: logits (N, C), float32, float16 or bfloat16.
        labels: N whole numbers, in any dtype of ``LABEL_STORAGE``. A label that is no class makes the loss and the
            row's gradient NaN (nothing is read out of bounds).
        ignore_index: rows with this label have no part in loss and gradient. If all have it, the loss is 0.
    """
    (rows, n), queue = x.shape, x.queue
    plan, losses, stats = _row_buffers(x)
    types = {"X_T": bridge.STORAGE[x.dtype], "LABEL_T": LABEL_STORAGE[labels.dtype]}
    if rows:
        LABEL_LOSS(
            queue, plan.global_size, plan.local_size, x, labels, losses, stats, rows, n, plan.each, ignore_index,
            LABELS=1, WG=plan.group, **types,
        )  # fmt: skip
    loss, count = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    LABEL_MEAN(
        queue, plan.local_size, plan.local_size, losses, stats, loss, count, rows,
        LABELS=1, WG=plan.group, **types,
    )  # fmt: skip
    return RowLoss(loss, stats, count)


def label_gradient(x: Tensor, labels: Tensor, forward: RowLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``label_loss`` for the logits: (softmax - onehot) * grad / count, zero in ignored rows.

    Without a count in ``forward`` it is not divided.
    """
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    count = forward.stats if forward.count is None else forward.count
    LABEL_GRADIENT(
        queue, plan.global_size, plan.local_size, x, labels, forward.stats, count, grad, out, rows, n, plan.each,
        LABELS=1, WG=plan.group, X_T=bridge.STORAGE[x.dtype], LABEL_T=LABEL_STORAGE[labels.dtype],
        G_T=bridge.STORAGE[grad.dtype], DX_T=bridge.STORAGE[out_dtype],
        **({} if forward.count is None else {"COUNTED": 1}),
    )  # fmt: skip
    return out


def probability_loss(x: Tensor, t: Tensor) -> RowLoss:
    """Mean over rows of cross entropy, ``sum(t * (log(sum(exp(x))) - x))``, against probabilities or one-hot rows.

    Args:
        x: logits (N, C).
        t: targets (N, C). Both float32, float16 or bfloat16. Where t is 0, x may be -inf.
    """
    (rows, n), queue = x.shape, x.queue
    plan, losses, stats = _row_buffers(x)
    if rows:
        PROBABILITY_LOSS(
            queue, plan.global_size, plan.local_size, x, t, losses, stats, rows, n, plan.each,
            PROBABILITIES=1, WG=plan.group, X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
        )  # fmt: skip
    return RowLoss(reduce_sum(losses, out_dtype="float32", divisor=float(max(rows, 1))), stats)


def probability_gradient(x: Tensor, t: Tensor, forward: RowLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``probability_loss`` for the logits: (softmax * sum(t) - t) * grad / N."""
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    PROBABILITY_GRADIENT(
        queue, plan.global_size, plan.local_size, x, t, forward.stats, grad, out, rows, n, plan.each,
        PROBABILITIES=1, WG=plan.group, X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
        G_T=bridge.STORAGE[grad.dtype], DX_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    return out


def hinge_loss(x: Tensor, t: Tensor, margin: float) -> RowLoss:
    """Mean over rows of ``sum(max(0, margin + x[c] - x[true]))`` over the classes c that are not the true one.

    Args:
        x: logits (N, C).
        t: one-hot rows (N, C): the true class is the first that is not 0. A row of zeros has none, and score 0.
    """
    (rows, n), queue = x.shape, x.queue
    plan, losses, stats = _row_buffers(x)
    if rows:
        HINGE_LOSS(
            queue, plan.global_size, plan.local_size, x, t, losses, stats, rows, n, plan.each, margin,
            HINGE=1, WG=plan.group, X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
        )  # fmt: skip
    return RowLoss(reduce_sum(losses, out_dtype="float32", divisor=float(max(rows, 1))), stats)


def hinge_gradient(x: Tensor, forward: RowLoss, grad: Tensor, margin: float, out_dtype: str) -> Tensor:
    """Gradient of ``hinge_loss`` for the logits."""
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    HINGE_GRADIENT(
        queue, plan.global_size, plan.local_size, x, forward.stats, grad, out, rows, n, plan.each, margin,
        HINGE=1, WG=plan.group, X_T=bridge.STORAGE[x.dtype], G_T=bridge.STORAGE[grad.dtype],
        DX_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    return out
