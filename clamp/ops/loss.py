"""Losses of rows of logits fused with their reduction, and their gradients.

A scalar loss has shape (1,) and is float32: it is a sum over a batch, beyond what 16 bits hold. A gradient is
computed from the loss's own gradient, read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import get_kernel
from clamp.ops.reduce import RowPlan, plan_rows, reduce_sum

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
        kernel = get_kernel(queue, "loss.cl", "label_loss", "ppppqqui", LABELS=1, WG=plan.group, **types)
        kernel(
            queue, plan.global_size, plan.local_size,
            x.buffer, labels.buffer, losses.buffer, stats.buffer, rows, n, plan.each, ignore_index,
        )  # fmt: skip
    loss, count = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    kernel = get_kernel(queue, "loss.cl", "label_mean", "ppppq", LABELS=1, WG=plan.group, **types)
    kernel(
        queue, plan.local_size, plan.local_size, losses.buffer, stats.buffer, loss.buffer, count.buffer, rows
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
    kernel = get_kernel(
        queue, "loss.cl", "label_gradient", "ppppppqqu", LABELS=1, WG=plan.group,
        X_T=bridge.STORAGE[x.dtype], LABEL_T=LABEL_STORAGE[labels.dtype], G_T=bridge.STORAGE[grad.dtype],
        DX_T=bridge.STORAGE[out_dtype], **({} if forward.count is None else {"COUNTED": 1}),
    )  # fmt: skip
    count = forward.stats if forward.count is None else forward.count
    kernel(
        queue, plan.global_size, plan.local_size, x.buffer, labels.buffer, forward.stats.buffer, count.buffer,
        grad.buffer, out.buffer, rows, n, plan.each,
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
        kernel = get_kernel(
            queue, "loss.cl", "probability_loss", "ppppqqu", PROBABILITIES=1, WG=plan.group,
            X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
        )  # fmt: skip
        kernel(
            queue, plan.global_size, plan.local_size,
            x.buffer, t.buffer, losses.buffer, stats.buffer, rows, n, plan.each,
        )  # fmt: skip
    return RowLoss(reduce_sum(losses, out_dtype="float32", divisor=float(max(rows, 1))), stats)


def probability_gradient(x: Tensor, t: Tensor, forward: RowLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``probability_loss`` for the logits: (softmax * sum(t) - t) * grad / N."""
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    kernel = get_kernel(
        queue, "loss.cl", "probability_gradient", "pppppqqu", PROBABILITIES=1, WG=plan.group,
        X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype], G_T=bridge.STORAGE[grad.dtype],
        DX_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size,
        x.buffer, t.buffer, forward.stats.buffer, grad.buffer, out.buffer, rows, n, plan.each,
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
        kernel = get_kernel(
            queue, "loss.cl", "hinge_loss", "ppppqquf", HINGE=1, WG=plan.group,
            X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
        )  # fmt: skip
        kernel(
            queue, plan.global_size, plan.local_size,
            x.buffer, t.buffer, losses.buffer, stats.buffer, rows, n, plan.each, margin,
        )  # fmt: skip
    return RowLoss(reduce_sum(losses, out_dtype="float32", divisor=float(max(rows, 1))), stats)


def hinge_gradient(x: Tensor, forward: RowLoss, grad: Tensor, margin: float, out_dtype: str) -> Tensor:
    """Gradient of ``hinge_loss`` for the logits."""
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    kernel = get_kernel(
        queue, "loss.cl", "hinge_gradient", "ppppqquf", HINGE=1, WG=plan.group,
        X_T=bridge.STORAGE[x.dtype], G_T=bridge.STORAGE[grad.dtype], DX_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size,
        x.buffer, forward.stats.buffer, grad.buffer, out.buffer, rows, n, plan.each, margin,
    )  # fmt: skip
    return out
