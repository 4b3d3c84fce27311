"""Losses over the triplets that the labels of a batch make: the hardest of each anchor, or all of them.

Nothing goes through the host, and no array is larger than the distances of all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.distances import all_pairs, gather
from clamp.ops.launch import launch, plan_rows
from clamp.ops.loss import LABEL_STORAGE
from clamp.ops.reduce import reduce_sum

HARDEST = Kernel("triplets.cl", "hardest")
ALL_TRIPLETS = Kernel("triplets.cl", "all_triplets")
ACTIVE_MEAN = Kernel("triplets.cl", "active_mean")
FIRST_OF_CLASS = Kernel("triplets.cl", "first_of_class")


@dataclass(frozen=True)
class TripletLoss:
    """A loss over triplets of a batch, with what backward needs besides the embeddings.

    Attributes:
        loss: float32, shape (1,).
        slopes: (N, N), float32: the sum of losses' derivatives by the squared distances.
        divisor: what the sum was divided by;
        count: and, if there, the number it was divided by as well, on the device.
    """

    loss: Tensor
    slopes: Tensor
    divisor: float = 1.0
    count: Tensor | None = None


def hardest_triplets(x: Tensor, labels: Tensor, margin: float, root: bool, mean: bool) -> TripletLoss:
    """Sum over anchors of ``max(0, d(farthest positive) - d(nearest negative) + margin)``, or its mean over N.

    An anchor that has no positive, or no negative, adds 0.

    Args:
        x: embeddings (N, n), float32, float16 or bfloat16.
        labels: N class numbers in any dtype of ``LABEL_STORAGE``.
        root: d is ``sqrt(squared distance + 1e-8)``, else the squared distance.
    """
    losses, slopes, _ = _over_anchors(HARDEST, x, labels, margin, root)
    divisor = float(max(x.shape[0], 1)) if mean else 1.0
    return TripletLoss(reduce_sum(losses, out_dtype="float32", divisor=divisor), slopes, divisor)


def all_triplets(x: Tensor, labels: Tensor, margin: float, root: bool, mean: bool) -> TripletLoss:
    """Sum over all triplets of ``max(0, d(anchor, positive) - d(anchor, negative) + margin)``, or the mean of those
    that exceed 0. Arguments as for ``hardest_triplets``.

    Takes time proportional to the number of positive pairs times N.
    """
    losses, slopes, counts = _over_anchors(ALL_TRIPLETS, x, labels, margin, root)
    if not mean:
        return TripletLoss(reduce_sum(losses, out_dtype="float32"), slopes)
    n, queue = x.shape[0], x.queue
    loss, count = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    plan = plan_rows(queue, 1, n)
    ACTIVE_MEAN(queue, plan.local_size, plan.local_size, losses, counts, loss, count, n, ACTIVE=1, **plan.macros)
    return TripletLoss(loss, slopes, count=count)


def triplet_gradient(x: Tensor, forward: TripletLoss, grad: Tensor, out_dtype: str) -> Tensor:
    """Gradient of ``hardest_triplets`` or ``all_triplets`` for the embeddings; ``grad`` has one element."""
    scale = 2.0 / forward.divisor
    return gather(x, x, forward.slopes, out_dtype, scale=scale, grad=grad, count=forward.count, symmetric=True)


def _over_anchors(
    kernel: Kernel, x: Tensor, labels: Tensor, margin: float, root: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of anchors, slopes of distances, and (of ``ALL_TRIPLETS``) how many triplets of each anchor exceeded 0."""
    n, queue = x.shape[0], x.queue
    distances = all_pairs(x, x, out_dtype="float32", root=root)
    slopes = bridge.empty(queue, (n, n), "float32")
    losses, active = bridge.empty(queue, (n,), "float32"), bridge.empty(queue, (n,), "float32")
    if n:
        classes = _classes(labels)
        plan = plan_rows(queue, n, n)
        every = kernel is ALL_TRIPLETS
        macros = {"ALL" if every else "HARDEST": 1, **({"ROOT": 1} if root else {})}
        outputs = (slopes, losses, active) if every else (slopes, losses)
        kernel(
            queue, plan.global_size, plan.local_size, distances, classes, *outputs, n, plan.each, margin,
            **plan.macros, **macros,
        )  # fmt: skip
    return losses, slopes, active


def _classes(labels: Tensor) -> Tensor:
    """Labels as int32 of which two are equal if and only if the labels, as whole numbers, are."""
    if LABEL_STORAGE[labels.dtype] == "i32":
        return labels
    n, queue = labels.size, labels.queue
    classes = bridge.empty(queue, (n,), "int32")
    FIRST_OF_CLASS(queue, *launch(queue, n), labels, classes, n, CLASSES=1, WG=1, LABEL_T=LABEL_STORAGE[labels.dtype])
    return classes
