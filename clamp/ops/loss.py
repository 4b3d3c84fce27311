"""Losses of rows of logits fused with their reduction, and their gradients.

A scalar loss has shape (1,) and is float32: it is a sum over a batch, beyond what 16 bits hold. A gradient is
computed from the loss's own gradient, read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import READ_STORAGE, Kernel
from clamp.ops.launch import RowPlan, plan_rows
from clamp.ops.reduce import reduce_sum

LABEL_LOSS = Kernel("loss.cl", "label_loss")
LABEL_MEAN = Kernel("loss.cl", "label_mean")
LABEL_GRADIENT = Kernel("loss.cl", "label_gradient", "X LABEL - - G DX")
PROBABILITY_LOSS = Kernel("loss.cl", "probability_loss", "X T")
PROBABILITY_GRADIENT = Kernel("loss.cl", "probability_gradient", "X T - G DX")
HINGE_LOSS = Kernel("loss.cl", "hinge_loss", "X T")
HINGE_GRADIENT = Kernel("loss.cl", "hinge_gradient", "X - G DX")

_STATS = 4  # floats that the row kernels keep for each row

#: dtypes labels may have; floating ones hold whole numbers, as netcl's ``Tensor.from_host`` makes by default
LABEL_STORAGE = READ_STORAGE


@dataclass(frozen=True)
class RowLoss:
    """A loss over rows of logits, with what backward needs besides its inputs."""

    loss: Tensor  # float32, shape (1,)
    stats: Tensor  # a few floats per row: the softmax's maximum and sum, or hinge's true class
    count: Tensor | None = None  # rows that count, at least 1, as float32 of shape (1,) on the device; for labels only


def _launch_losses(
    kernel: Kernel, x: Tensor, targets: Tensor, *numbers: float, **macros: object
) -> tuple[Tensor, Tensor, RowPlan]:
    """The loss of each row, what is kept of it for backward, and how rows were dealt to work-groups."""
    rows, n = x.shape
    plan = plan_rows(x.queue, rows, n)
    losses, stats = bridge.empty(x.queue, (rows,), "float32"), bridge.empty(x.queue, (rows, _STATS), "float32")
    if rows:
        kernel(x.queue, *plan.sizes, x, targets, losses, stats, rows, n, plan.each, *numbers, **plan.macros, **macros)
    return losses, stats, plan


def _launch_gradient(
    kernel: Kernel, x: Tensor, others: tuple[Tensor, ...], grad: Tensor, out_dtype: str, *numbers: float,
    **macros: object,
) -> Tensor:  # fmt: skip
    """The gradient for logits x from the loss's own gradient and what else the kernel reads between the two."""
    rows, n = x.shape
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size:
        plan = plan_rows(x.queue, rows, n)
        kernel(
            x.queue, *plan.sizes, x, *others, grad, out, rows, n, plan.each, *numbers, **plan.macros, **macros
        )  # fmt: skip
    return out


def _mean(losses: Tensor) -> Tensor:
    return reduce_sum(losses, out_dtype="float32", divisor=float(max(losses.size, 1)))


def label_loss(x: Tensor, labels: Tensor, ignore_index: int) -> RowLoss:
    """Mean cross entropy of logits x (N, C) against class numbers, over the rows that are not ignored.

    A label that is no class makes the loss and the row's gradient NaN (nothing is read out of bounds). If all rows are
    ignored, the loss is 0.

    Args:
        labels: N whole numbers, in any dtype of ``LABEL_STORAGE``.
    """
    # Both kernels are in one program.
    macros = {"LABELS": 1, "X_T": bridge.STORAGE[x.dtype], "LABEL_T": LABEL_STORAGE[labels.dtype]}
    losses, stats, plan = _launch_losses(LABEL_LOSS, x, labels, ignore_index, **macros)
    loss, count = bridge.empty(x.queue, (1,), "float32"), bridge.empty(x.queue, (1,), "float32")
    _, group = plan.sizes
    LABEL_MEAN(x.queue, group, group, losses, stats, loss, count, x.shape[0], **plan.macros, **macros)
    return RowLoss(loss, stats, count)


def label_gradient(x: Tensor, labels: Tensor, forward: RowLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``label_loss`` for the logits: (softmax - onehot) * grad / count, zero in ignored rows.

    Without a count in ``forward`` it is not divided.
    """
    count = forward.stats if forward.count is None else forward.count
    counted = {} if forward.count is None else {"COUNTED": 1}
    return _launch_gradient(LABEL_GRADIENT, x, (labels, forward.stats, count), grad, out_dtype, LABELS=1, **counted)


def probability_loss(x: Tensor, t: Tensor) -> RowLoss:
    """Mean over rows of cross entropy, ``sum(t * (log(sum(exp(x))) - x))``, of logits x (N, C) against probabilities or
    one-hot rows t. Where t is 0, x may be -inf."""
    losses, stats, _ = _launch_losses(PROBABILITY_LOSS, x, t, PROBABILITIES=1)
    return RowLoss(_mean(losses), stats)


def probability_gradient(x: Tensor, t: Tensor, forward: RowLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``probability_loss`` for the logits: (softmax * sum(t) - t) * grad / N."""
    return _launch_gradient(PROBABILITY_GRADIENT, x, (t, forward.stats), grad, out_dtype, PROBABILITIES=1)


def hinge_loss(x: Tensor, t: Tensor, margin: float) -> RowLoss:
    """Mean over rows of ``sum(max(0, margin + x[c] - x[true]))`` over the classes c that are not the true one.

    That is the first of a one-hot row of t that is not 0. A row of zeros has none, and score 0.
    """
    losses, stats, _ = _launch_losses(HINGE_LOSS, x, t, margin, HINGE=1)
    return RowLoss(_mean(losses), stats)


def hinge_gradient(x: Tensor, forward: RowLoss, grad: Tensor, margin: float, out_dtype: str) -> Tensor:
    """Gradient of ``hinge_loss`` for the logits."""
    return _launch_gradient(HINGE_GRADIENT, x, (forward.stats,), grad, out_dtype, margin, HINGE=1)
