"""Losses fused with their reduction, and their gradients.

A scalar loss has shape (1,) and is float32: it is a sum over a batch, beyond what 16 bits hold. A gradient is
computed from the loss's own gradient, read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import capabilities
from clamp.ops.cast import launch, span_for
from clamp.ops.reduce import RowPlan, parts_of, plan_rows, reduce_sum
from clamp.program import get_kernel

_STATS = 4  # floats that the row kernels keep for each row
_GPU_GROUP = 256

#: dtypes labels may have; floating ones hold whole numbers, as netcl's ``Tensor.from_host`` makes by default
LABEL_STORAGE = {**bridge.STORAGE, "int32": "i32", "int": "i32", "int64": "i64"}

# --------------------------------------------------------------------------------------------------- pairs


def pair_loss(kind: str, x: Tensor, t: Tensor, beta: float = 1.0) -> Tensor:
    """Sum over all elements of a loss between x and t, as float32 of shape (1,).

    Args:
        kind: ``"mse"`` (x - t)^2, ``"l1"`` |x - t|, ``"smooth_l1"`` d^2 / (2 beta) below beta, else d - beta / 2.
        x, t: the same number of elements, each float32, float16 or bfloat16.
    """
    queue, n = x.queue, x.size
    device = capabilities(queue)
    group = 1 if device.is_cpu else min(_GPU_GROUP, 1 << (device.max_work_group.bit_length() - 1))
    parts, span = parts_of(queue, 1, n)
    sums = bridge.empty(queue, (parts,), "float32")
    kernel = get_kernel(
        queue, "loss.cl", "pair_loss", "pppqqf",
        PAIR_LOSS=1, KIND=kind, WG=group, X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype],
    )  # fmt: skip
    kernel(queue, (parts * group,), (group,), x.buffer, t.buffer, sums.buffer, n, span, beta)
    return sums if parts == 1 else reduce_sum(sums, out_dtype="float32")


def pair_terms(kind: str, x: Tensor, t: Tensor, out_dtype: str) -> Tensor:
    """The loss of each element, of x's shape; kind ``"bce"``: binary cross entropy of the logits x.

    Infinite logits give the finite loss 0 where the target agrees with them.
    """
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    span = span_for(x.queue, x.size)
    kernel = get_kernel(
        x.queue, "loss.cl", "pair_terms", "pppqqf", PAIR_TERMS=1, KIND=kind,
        X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype], Y_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    kernel(x.queue, *launch(x.queue, -(-x.size // span)), x.buffer, t.buffer, out.buffer, x.size, span, 0.0)
    return out


def pair_gradient(kind: str, x: Tensor, t: Tensor, grad: Tensor, out_dtype: str, beta: float = 1.0) -> Tensor:
    """Gradient for x of ``pair_loss`` or ``pair_terms``. For t: swap the operands (``"bce"``: as ``"bce_target"``).

    Args:
        grad: gradient of the loss: one element, or one for each of x.
        out_dtype: dtype of the gradient returned.
    """
    out = bridge.empty(x.queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    span = span_for(x.queue, x.size)
    macros: dict[str, object] = {"G_EACH": 1} if grad.size == x.size else {}
    kernel = get_kernel(
        x.queue, "loss.cl", "pair_gradient", "ppppqqf", PAIR_GRADIENT=1, KIND=kind,
        X_T=bridge.STORAGE[x.dtype], T_T=bridge.STORAGE[t.dtype], G_T=bridge.STORAGE[grad.dtype],
        DX_T=bridge.STORAGE[out_dtype], **macros,
    )  # fmt: skip
    kernel(
        x.queue, *launch(x.queue, -(-x.size // span)), x.buffer, t.buffer, grad.buffer, out.buffer, x.size, span, beta
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------- rows


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
    """Gradient of ``label_loss`` for the logits: (softmax - onehot) * grad / count, zero in ignored rows."""
    assert forward.count is not None
    (rows, n), queue = x.shape, x.queue
    plan = plan_rows(queue, rows, n)
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    kernel = get_kernel(
        queue, "loss.cl", "label_gradient", "ppppppqqu", LABELS=1, WG=plan.group,
        X_T=bridge.STORAGE[x.dtype], LABEL_T=LABEL_STORAGE[labels.dtype], G_T=bridge.STORAGE[grad.dtype],
        DX_T=bridge.STORAGE[out_dtype],
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size, x.buffer, labels.buffer, forward.stats.buffer,
        forward.count.buffer, grad.buffer, out.buffer, rows, n, plan.each,
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
