"""Squared distances between rows, losses made of them (of partners, and of the triplets that the labels of a batch
make), and gradients of what was computed from them.

A function of squared distances d[i, j] has the gradient ``sum over j of 2 * slope[i, j] * (x[i] - y[j])``, with slope
its derivative by d: the losses of metric learning hand over their slopes, and one kernel gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import launch, plan_rows
from clamp.ops.loss import LABEL_STORAGE
from clamp.ops.reduce import reduce_sum

ALL_PAIRS = Kernel("distances.cl", "all_pairs", "X Y D")
GATHER = Kernel("distances.cl", "gather", "X Y S")
TRIPLET = Kernel("distances.cl", "triplet", "X Y Z")
CONTRASTIVE = Kernel("distances.cl", "contrastive", "X Y LABEL")
PARTNERS = Kernel("distances.cl", "partners", "X Y Z - G DX")

_TILE_CPU = 4  # rows and columns whose sums stay in registers
_WIDTH_CPU = 64  # columns a work-item goes along
_WIDE_CPU = 4  # vectors of 16 dimensions whose gradients a work-item gathers at once


def all_pairs(x: Tensor, y: Tensor, *, out_dtype: str, root: bool = False) -> Tensor:
    """Squared distance of every row of x from every row of y, shape (N, M); with ``root`` the distance.

    Sums of squared differences in fp32, relative error below ``(n / 16 + 8) * 2**-24``: rows that are close lose no
    digits, as they would by ``|x|^2 + |y|^2 - 2xy``.

    Args:
        x: (N, n), y: (M, n), each float32, float16 or bfloat16.
        root: the square root of the squared distance plus 1e-8, whose slope is finite where rows are equal.
    """
    (rows, n), columns, queue = x.shape, y.shape[0], x.queue
    out = bridge.empty(queue, (rows, columns), out_dtype)
    if out.size == 0:
        return out
    is_cpu = capabilities(queue).is_cpu
    tile, width = (_TILE_CPU, _WIDTH_CPU) if is_cpu else (1, 1)
    items = -(-rows // tile) * -(-columns // width)
    ALL_PAIRS(
        queue, *launch(queue, items), x, y, out, rows, columns, n, width, TILE=tile, **({"ROOT": 1} if root else {})
    )  # fmt: skip
    return out


def gather(
    x: Tensor, y: Tensor, slopes: Tensor, out_dtype: str,
    *, scale: float, grad: Tensor | None = None, count: Tensor | None = None, transpose: bool = False,
    symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """``scale * sum over j of slopes[i, j] * (x[i] - y[j])``, of x's shape. A term whose slope is 0 is left out.

    Args:
        x: (N, n), y: (M, n).
        slopes: (N, M), in any storage type.
        scale: multiplied by ``grad`` and divided by ``count`` (float32), both of one element, where they are given.
        transpose: slopes is (M, N), and is read as its transpose.
        symmetric: ``slopes[i, j] + slopes[j, i]`` in the place of ``slopes[i, j]``; x and y are the same.
    """
    (rows, n), columns, queue = x.shape, y.shape[0], x.queue
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    wide = _WIDE_CPU if capabilities(queue).is_cpu else 1
    macros: dict[str, object] = {"SYMMETRIC": 1} if symmetric else {}
    if grad is not None:
        macros["G_T"] = bridge.STORAGE[grad.dtype]
    if count is not None:
        macros["COUNTED"] = 1
    given = [tensor for tensor in (grad, count) if tensor is not None]
    steps = (1, rows) if transpose else (columns, 1)
    GATHER(
        queue, *launch(queue, rows * -(-n // (16 * wide))), x, y, slopes, *given, out, rows, columns, n, *steps, scale,
        WIDE=wide, DX_T=bridge.STORAGE[out_dtype], **macros,
    )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class MetricLoss:
    """A loss over rows of partners, or over triplets of a batch, with what backward needs besides its inputs."""

    loss: Tensor  # float32, shape (1,)
    # float32: each row's derivatives by the squared distances to its first and second partner, (N, 2); of triplets the
    # sum of the losses' derivatives by all squared distances, (N, N)
    slopes: Tensor
    divisor: float = 1.0  # what the sum was divided by
    count: Tensor | None = None  # and, if there, the number it was divided by as well, on the device


def triplet_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float, root: bool, mean: bool
) -> MetricLoss:
    """Sum or mean over rows of ``max(0, d(anchor, positive) - d(anchor, negative) + margin)``; (N, n) each.

    Args:
        root: d is ``sqrt(squared distance + 1e-8)``, else the squared distance.
    """
    macros = {"ROOT": 1} if root else {}
    return _partner_loss(TRIPLET, (anchor, positive, negative), margin, mean, **macros)


def contrastive_loss(x: Tensor, y: Tensor, labels: Tensor, margin: float, mean: bool) -> MetricLoss:
    """Sum or mean over rows of ``label * d**2 + (1 - label) * max(0, margin - d)**2``, d the distance of x and y.

    Args:
        labels: N numbers in any dtype of ``LABEL_STORAGE``; floating ones are cut to whole numbers, as in netcl.
    """
    return _partner_loss(CONTRASTIVE, (x, y, labels), margin, mean)


def _partner_loss(
    kernel: Kernel, inputs: tuple[Tensor, Tensor, Tensor], margin: float, mean: bool, **macros: object
) -> MetricLoss:
    x = inputs[0]
    (rows, n), queue = x.shape, x.queue
    losses, slopes = bridge.empty(queue, (rows,), "float32"), bridge.empty(queue, (rows, 2), "float32")
    if rows:
        plan = plan_rows(queue, rows, n)
        kernel(queue, *plan.sizes, *inputs, losses, slopes, rows, n, plan.each, margin, **plan.macros, **macros)
    divisor = float(max(rows, 1)) if mean else 1.0
    return MetricLoss(reduce_sum(losses, out_dtype="float32", divisor=divisor), slopes, divisor)


def partner_gradient(
    x: Tensor, partners: tuple[Tensor, ...], first: int, forward: MetricLoss, grad: Tensor, out_dtype: str
) -> Tensor:
    """Gradient of a loss over rows for x, from its one or two partners.

    Args:
        first: which of the slopes belongs to ``partners[0]``; the other one belongs to ``partners[1]``.
    """
    (rows, n), queue = x.shape, x.queue
    out = bridge.empty(queue, x.shape, out_dtype)
    if out.size == 0:
        return out
    y, z = partners[0], partners[-1]
    each = plan_rows(queue, rows, n).each
    PARTNERS(
        queue, *launch(queue, -(-rows // each)), x, y, z, forward.slopes, grad, out, rows, n, each, first,
        2.0 / forward.divisor, PARTNERS=len(partners),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------- triplets
# Of each anchor the hardest, or all of them. Nothing goes through the host, and no array is larger than the distances
# of all pairs.

HARDEST = Kernel("triplets.cl", "hardest")
ALL_TRIPLETS = Kernel("triplets.cl", "all_triplets")
ACTIVE_MEAN = Kernel("triplets.cl", "active_mean")
FIRST_OF_CLASS = Kernel("triplets.cl", "first_of_class")


def hardest_triplets(x: Tensor, labels: Tensor, margin: float, root: bool, mean: bool) -> MetricLoss:
    """Sum over anchors of ``max(0, d(farthest positive) - d(nearest negative) + margin)``, or its mean over N.

    An anchor that has no positive, or no negative, adds 0.

    Args:
        x: embeddings (N, n).
        labels: N class numbers in any dtype of ``LABEL_STORAGE``.
        root: as for ``triplet_loss``.
    """
    losses, slopes, _ = _over_anchors(HARDEST, x, labels, margin, root)
    divisor = float(max(x.shape[0], 1)) if mean else 1.0
    return MetricLoss(reduce_sum(losses, out_dtype="float32", divisor=divisor), slopes, divisor)


def all_triplets(x: Tensor, labels: Tensor, margin: float, root: bool, mean: bool) -> MetricLoss:
    """Sum over all triplets of ``max(0, d(anchor, positive) - d(anchor, negative) + margin)``, or the mean of those
    that exceed 0. Arguments as for ``hardest_triplets``.

    Takes time proportional to the number of positive pairs times N.
    """
    losses, slopes, counts = _over_anchors(ALL_TRIPLETS, x, labels, margin, root)
    if not mean:
        return MetricLoss(reduce_sum(losses, out_dtype="float32"), slopes)
    n, queue = x.shape[0], x.queue
    loss, count = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    plan = plan_rows(queue, 1, n)
    _, group = plan.sizes
    ACTIVE_MEAN(queue, group, group, losses, counts, loss, count, n, ACTIVE=1, **plan.macros)
    return MetricLoss(loss, slopes, count=count)


def triplet_gradient(x: Tensor, forward: MetricLoss, grad: Tensor, out_dtype: str) -> Tensor:
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
        kernel(queue, *plan.sizes, distances, classes, *outputs, n, plan.each, margin, **plan.macros, **macros)
    return losses, slopes, active


def _classes(labels: Tensor) -> Tensor:
    """Labels as int32 of which two are equal if and only if the labels, as whole numbers, are."""
    if LABEL_STORAGE[labels.dtype] == "i32":
        return labels
    n, queue = labels.size, labels.queue
    classes = bridge.empty(queue, (n,), "int32")
    FIRST_OF_CLASS(queue, *launch(queue, n), labels, classes, n, CLASSES=1, WG=1, LABEL_T=LABEL_STORAGE[labels.dtype])
    return classes
