"""Losses of metric learning under autograd: distances between embeddings, triplets, contrasts.

A scalar loss is float32 of shape (1,), under every policy. Labels may be on the host (they are sent to the device) or
a device tensor, which is read there: unlike netcl's, none of these functions brings anything to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from clamp.bridge import Tape, Tensor
from clamp.casting.operands import Casting, Gradients, Operand, bound, require_floats
from clamp.casting.registry import Function, implements
from clamp.functions.indexing import host_integers, int32_on_device
from clamp.functions.loss import labels_given, operands_alike
from clamp.ops import distances, info_nce
from clamp.ops.arguments import number
from clamp.ops.reduce import reduce_sum

_PARTNERS = (distances.PARTNERS, reduce_sum)  # without the kernels of triplets


def _require_choices(function: str, reduction: str, distance: str = "squared") -> None:
    if distance not in ("squared", "euclidean"):
        raise ValueError(f"{function}: distance must be 'squared' or 'euclidean', got {distance!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{function}: reduction must be 'mean' or 'sum', got {reduction!r}")


def _rows(casting: Casting, name: str, **arguments: Any) -> tuple[Operand, ...]:
    """The arguments as operands: floating matrices, all of one shape."""
    operands, first = operands_alike(casting, name, **arguments), next(iter(arguments))
    if len(operands[0].shape) != 2:
        raise ValueError(f"{name}: {first} has shape {operands[0].shape}, and must be (N, D): one embedding a row")
    return operands


def _labels(name: str, labels: Any, x: Tensor, as_classes: bool) -> Tensor:
    """Labels as a device tensor, one for each row of x.

    Args:
        as_classes: only which labels are equal matters, so host labels of any size may be numbered anew.
    """
    value = labels_given(name, labels, x)
    if not isinstance(value, Tensor):
        value = host_integers(name, value)
        value = np.unique(value, return_inverse=True)[1].ravel() if as_classes else value
    if value.size != x.shape[0]:
        raise ValueError(f"{name}: {value.size} labels for embeddings of shape {tuple(x.shape)}; pass one for each row")
    return value if isinstance(value, Tensor) else int32_on_device(value, x.queue)


# --------------------------------------------------------------------------------------------- distances


@implements("netcl.autograd.pairwise_squared_distances", uses=(distances.ALL_PAIRS,))
def pairwise_squared_distances(casting: Casting, X: Any, Y: Any = None, tape: Tape | None = None) -> Any:
    """``sum((X[i] - Y[j])**2)`` of every pair of rows: shape (N, M); without Y, of X's rows among themselves.

    Formed from differences: rows that are close keep their digits.

    Args:
        X: (N, D), Y: (M, D), each float32, float16 or bfloat16. Either may need a gradient.

    Raises:
        ValueError: they are no matrices, or D differs.
    """
    name = "pairwise_squared_distances"
    operands = casting.operands(X, *([] if Y is None else [Y]))
    x, y = operands[0], operands[-1]
    require_floats(name, X=x, Y=y)
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"{name}: X has shape {x.shape}, Y has shape {y.shape}, and they must be (N, D) and (M, D)")
    out = distances.all_pairs(x.value, y.value, out_dtype=casting.result_dtype(*operands))
    gradients: Gradients = {
        x: lambda grad, dtype: distances.gather(x.value, y.value, grad, dtype, scale=2.0, symmetric=Y is None)
    }
    if Y is not None:
        gradients[y] = lambda grad, dtype: distances.gather(y.value, x.value, grad, dtype, scale=2.0, transpose=True)
    return bound(out, gradients, name, tape)


# -------------------------------------------------------------------------------------- pairs and triplets


@implements("netcl.autograd.triplet_loss", "netcl.nn.loss.triplet_loss", uses=_PARTNERS)
def triplet_loss(
    casting: Casting, anchor: Any, positive: Any, negative: Any, margin: float = 1.0, distance: str = "squared",
    reduction: str = "mean", tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Mean or sum over rows of ``max(0, d(anchor, positive) - d(anchor, negative) + margin)``: float32, shape (1,).

    Args:
        anchor, positive, negative: (N, D), in any mixture of float32, float16 and bfloat16. Each may need a gradient.
        distance: d is the squared distance, or "euclidean", ``sqrt(squared distance + 1e-8)``.

    Raises:
        ValueError: the shapes differ or are not (N, D); an unknown distance or reduction.
    """
    _require_choices("triplet_loss", reduction, distance)
    a, p, n = _rows(casting, "triplet_loss", anchor=anchor, positive=positive, negative=negative)
    margin = number("triplet_loss", "margin", margin)
    forward = distances.triplet_loss(a.value, p.value, n.value, margin, distance == "euclidean", reduction == "mean")
    gradients: Gradients = {
        a: partial(_partner_gradient, a, (p, n), 0, forward),
        p: partial(_partner_gradient, p, (a,), 0, forward),
        n: partial(_partner_gradient, n, (a,), 1, forward),
    }
    return bound(forward.loss, gradients, "triplet_loss", tape)


@implements("netcl.autograd.contrastive_loss", uses=_PARTNERS)
def contrastive_loss(
    casting: Casting, x1: Any, x2: Any, labels: Any, margin: float = 1.0, reduction: str = "mean",
    tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Mean or sum over rows of ``y * d**2 + (1 - y) * max(0, margin - d)**2``: float32, shape (1,).

    ``d = |x1 - x2|``, in the second term ``sqrt(d**2 + 1e-8)``.

    Args:
        x1, x2: (N, D), in any mixture of float32, float16 and bfloat16. Either may need a gradient.
        labels: N numbers y, 1 for rows that belong together and 0 for others: a host array, a list or a tensor.

    Raises:
        ValueError: the shapes differ or are not (N, D); another number of labels; an unknown reduction.
    """
    _require_choices("contrastive_loss", reduction)
    x, y = _rows(casting, "contrastive_loss", x1=x1, x2=x2)
    on_device = _labels("contrastive_loss", labels, x.value, as_classes=False)
    margin = number("contrastive_loss", "margin", margin)
    forward = distances.contrastive_loss(x.value, y.value, on_device, margin, reduction == "mean")
    gradients: Gradients = {
        x: partial(_partner_gradient, x, (y,), 0, forward),
        y: partial(_partner_gradient, y, (x,), 0, forward),
    }
    return bound(forward.loss, gradients, "contrastive_loss", tape)


def _partner_gradient(
    own: Operand, partners: tuple[Operand, ...], first: int, forward: distances.MetricLoss, grad: Tensor, dtype: str
) -> Tensor:
    values = tuple(partner.value for partner in partners)
    return distances.partner_gradient(own.value, values, first, forward, grad, dtype)


def _mined(name: str, mine: Callable[..., Any]) -> Function:
    """A triplet loss over what is found among rows (N, D) by their labels, N whole numbers."""

    @implements(f"netcl.autograd.{name}", uses=(distances,))
    def function(
        casting: Casting, embeddings: Any, labels: Any, margin: float = 1.0, distance: str = "squared",
        reduction: str = "mean", tape: Tape | None = None,
    ) -> Any:  # fmt: skip
        _require_choices(name, reduction, distance)
        (x,) = _rows(casting, name, embeddings=embeddings)
        on_device = _labels(name, labels, x.value, as_classes=True)
        margin = number(name, "margin", margin)
        forward = mine(x.value, on_device, margin, distance == "euclidean", reduction == "mean")
        gradients: Gradients = {x: lambda grad, dtype: distances.triplet_gradient(x.value, forward, grad, dtype)}
        return bound(forward.loss, gradients, name, tape)

    return function


# ``max(0, d(farthest of the same label) - d(nearest of another) + margin)`` over rows. One without a partner of either
# kind adds 0; the mean is over all rows. Of equally far rows the first counts.
batch_hard_triplet_loss = _mined("batch_hard_triplet_loss", distances.hardest_triplets)
# ``max(0, d(i, j) - d(i, k) + margin)`` over every i, j of its label, k of another label. The mean is over the triplets
# that exceed 0.
batch_all_triplet_loss = _mined("batch_all_triplet_loss", distances.all_triplets)


# ---------------------------------------------------------------------------------------------- contrasts


@implements("netcl.autograd.info_nce_loss", "netcl.nn.loss.info_nce_loss", uses=(info_nce,))
def info_nce_loss(
    casting: Casting, queries: Any, keys: Any, temperature: float = 0.07, normalize: bool = True,
    reduction: str = "mean", symmetric: bool = False, tape: Tape | None = None,
) -> Any:  # fmt: skip
    """Cross entropy of ``softmax(queries @ keys.T / temperature)`` against the diagonal: float32, shape (1,).

    Args:
        queries, keys: (N, D), in any mixture of float32, float16 and bfloat16; row i of one belongs to row i of the
            other. Either may need a gradient.
        temperature: positive.
        normalize: rows are divided by their norm (plus 1e-8) first, in fp32.
        symmetric: the average with the loss of keys against queries.

    Raises:
        ValueError: the shapes differ or are not (N, D); a temperature that is not positive; an unknown reduction.
    """
    _require_choices("info_nce_loss", reduction)
    temperature = number("info_nce_loss", "temperature", temperature)
    if not temperature > 0.0:
        raise ValueError(f"info_nce_loss: temperature must be positive, got {temperature}")
    q, k = _rows(casting, "info_nce_loss", queries=queries, keys=keys)
    forward = info_nce.info_nce(
        q.value, k.value,
        temperature=temperature, normalize=normalize, mean=reduction == "mean", symmetric=symmetric,
    )  # fmt: skip
    gradients: Gradients = {
        (q, k): lambda grad, *dtypes: info_nce.info_nce_gradients(forward, q.value, k.value, grad, *dtypes)
    }
    return bound(forward.loss, gradients, "info_nce_loss", tape)
