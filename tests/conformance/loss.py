"""Losses. Scalars have shape (1,); where netcl's own gradients contradict its values, the values are held."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.table import Array, Case, Input, Ints, Normal, Op, Reference, Uniform, Values

# ------------------------------------------------------------------------------------------ single elements


def smooth_l1(pred: Array, target: Array, beta: float = 1.0) -> Array:
    """d^2 / (2 beta) below beta, else d - beta / 2."""
    d = np.abs(pred - target)
    beta = float(np.float32(beta))
    return np.where(d < beta, d * d / (2 * beta), d - beta / 2)


def bce(p: Array, target: Array, epsilon: float = 1e-7) -> Array:
    """Binary cross entropy of probabilities, held in epsilon .. 1 - epsilon."""
    p = np.clip(p, epsilon, 1 - epsilon)
    return -(target * np.log(p) + (1 - target) * np.log1p(-p))


def logit_bce(x: Array, target: Array) -> Array:
    """Binary cross entropy of logits."""
    return np.maximum(x, 0) - x * target + np.log1p(np.exp(-np.abs(x)))


def detection(p: Array, t: Array, heat: Array, reg: Array, heat_scale: float, reg_scale: float, beta: float) -> Array:
    """A heat map's cross entropy and smooth l1."""
    return heat_scale * heat * bce(p, t) + reg_scale * reg * smooth_l1(p, t, beta)


def box(pred: Array, target: Array, **gains: float) -> Array:
    """Weighted smooth l1 of boxes; without miss_gain, whose weight netcl keeps from the gradient."""
    assert gains["miss_gain"] == 0.0
    area = np.sqrt(np.maximum(target[:, 2] * target[:, 3], 1e-6) / 0.01)
    weight = (1 + 1.5 * np.minimum(area, 6))[:, None] * np.array([3.0, 3.0, 1.0, 1.0])
    return weight * smooth_l1(pred, target, 0.05)


def summed(terms: Reference) -> Reference:
    """The sum of a loss's terms, of shape (1,)."""
    return lambda *args, **kwargs: np.atleast_1d(terms(*args, **kwargs).sum())


def _bound(terms: Reference) -> Any:
    """Every term is computed in a few steps, from values of about 1."""
    return lambda *args, **kwargs: (args[0].size, (np.abs(terms(*args, **kwargs)) + 4).sum())


def scalar(name: str, terms: Reference, *cases: Case) -> Op:
    """A loss that sums its terms."""
    return Op(f"netcl.{name}", summed(terms), cases, terms=_bound(terms))


def elementwise(name: str, terms: Reference, *cases: Case) -> Op:
    """A loss that does not."""
    return Op(f"netcl.autograd.{name}", terms, cases, ulps32=16.0, terms=lambda *args, **kwargs: (4, 4.0))


_PROBABILITIES, _TARGETS, _WEIGHTS = Uniform(0.1, 0.9, 5, 7), Uniform(0, 1, 5, 7).fixed(), Uniform(0.5, 2, 5, 7)
_FIXED = _WEIGHTS.fixed()
_BOXES, _TARGET_BOXES = Uniform(0.2, 0.7, 6, 4), Uniform(0.2, 0.7, 6, 4).fixed()

# ------------------------------------------------------------------------------------------- rows of logits


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def cross_entropy(x: Array, targets: Array) -> Array:
    """Mean over rows, against probabilities or class numbers."""
    probabilities = np.eye(x.shape[1])[targets.astype(int)] if targets.ndim == 1 else targets
    return np.atleast_1d(-(probabilities * _log_softmax(x)).sum() / len(x))


def cross_entropy_indices(x: Array, targets: Array, ignore_index: int = -100) -> Array:
    """Mean over the rows that are not ignored."""
    kept = targets != ignore_index
    return cross_entropy(x[kept], targets[kept])


def hinge(x: Array, targets: Array, margin: float = 1.0) -> Array:
    """Multi-class hinge, mean over rows."""
    score = (x * targets).sum(1, keepdims=True)
    over = np.maximum(0, margin + x - score) * (targets == 0)
    return np.atleast_1d(over.sum() / len(x))


def _row_terms(x: Array, targets: Array, **kwargs: Any) -> tuple[float, Array]:
    return 16, np.atleast_1d(np.abs(x).sum() / len(x) + 8)


_ONE_HOT = Values(np.eye(5)[[0, 4, 2, 2, 1, 3]]).fixed()
_PART_IGNORED = Values(np.array([0, -100, 2, 2, 4, -100]))

# ------------------------------------------------------------------------------------------ metric learning


def pairwise(x: Array, y: Array | None = None) -> Array:
    """Squared distances of rows."""
    return ((x[:, None] - (x if y is None else y)[None]) ** 2).sum(2)


def _distance(squares: Array, distance: str) -> Array:
    return np.sqrt(squares + 1e-8) if distance == "euclidean" else squares


def _reduced(losses: Array, reduction: str) -> Array:
    return np.atleast_1d(losses.mean() if reduction == "mean" else losses.sum())


def triplet(
    a: Array, p: Array, n: Array, margin: float = 1.0, distance: str = "squared", reduction: str = "mean"
) -> Array:
    """max(0, d(a, p) - d(a, n) + margin)"""
    near, far = (_distance(((a - other) ** 2).sum(1), distance) for other in (p, n))
    return _reduced(np.maximum(0, near - far + margin), reduction)


def contrastive(x: Array, y: Array, labels: Array, margin: float = 1.0, reduction: str = "mean") -> Array:
    """y d^2 + (1 - y) max(0, margin - d)^2"""
    squares = ((x - y) ** 2).sum(1)
    apart = np.maximum(0, margin - np.sqrt(squares + 1e-8)) ** 2
    return _reduced(labels * squares + (1 - labels) * apart, reduction)


def _masks(labels: Array) -> tuple[Array, Array]:
    same = labels[:, None] == labels
    return same & ~np.eye(len(labels), dtype=bool), ~same


def batch_hard(
    x: Array, labels: Array, margin: float = 1.0, distance: str = "squared", reduction: str = "mean"
) -> Array:
    """The farthest positive and the nearest negative of each row."""
    d, (same, other) = _distance(pairwise(x), distance), _masks(labels)
    over = np.where(same, d, -np.inf).max(1) - np.where(other, d, np.inf).min(1) + margin
    return _reduced(np.where(same.any(1) & other.any(1), np.maximum(0, over), 0), reduction)


def batch_all(
    x: Array, labels: Array, margin: float = 1.0, distance: str = "squared", reduction: str = "mean"
) -> Array:
    """Every triplet; the mean is over those above 0."""
    d, (same, other) = _distance(pairwise(x), distance), _masks(labels)
    over = (d[:, :, None] - d[:, None] + margin) * (same[:, :, None] & other[:, None])
    losses = np.maximum(0, over)
    return np.atleast_1d(losses.sum() / (max((losses > 0).sum(), 1) if reduction == "mean" else 1))


def info_nce(
    q: Array, k: Array, temperature: float = 0.07, normalize: bool = True, reduction: str = "mean",
    symmetric: bool = False,
) -> Array:  # fmt: skip
    """Cross entropy of similarities against the diagonal."""
    if normalize:
        q, k = (x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-8) for x in (q, k))
    s = q @ k.T / temperature
    losses = -np.diag(_log_softmax(s))
    return _reduced((losses - np.diag(_log_softmax(s.T))) / 2 if symmetric else losses, reduction)


def _steps(steepness: float) -> Any:
    """Sums of a few dozen values, the sum of whose magnitudes is about ``steepness`` a row."""
    return lambda *args, **kwargs: (16, steepness * (len(args[0]) if kwargs.get("reduction") == "sum" else 1))


#: The gradient of a scalar is one term to the table, but these sum several, of both signs, and where those cancel a
#: small element keeps the error of its large terms.
_CANCELLING: dict[str, Any] = {"grad_ulps32": 512.0}
_LABELS: Input = Values(np.array([0, 2, 1, 0, 0, 1, 2, 1, 3]))
_ALIKE: Input = Values(np.array([1, 0, 0, 1, 0, 1, 1, 0, 0]))
_E = Normal(9, 6, scale=0.5)
_EUCLIDEAN = {"distance": "euclidean", "reduction": "sum"}

OPS = [
    scalar("autograd.mse_loss", lambda x, t: (x - t) ** 2, Case(Normal(5, 7), Normal(5, 7))),
    scalar("autograd.l2_loss", lambda x, t: (x - t) ** 2, Case(Normal(5, 7), Normal(5, 7))),
    scalar("autograd.l1_loss", lambda x, t: np.abs(x - t), Case(Normal(5, 7), Normal(5, 7))),
    scalar("autograd.smooth_l1_loss", smooth_l1, Case(Normal(5, 7), Normal(5, 7)),
           Case(Normal(5, 7), Normal(5, 7), beta=0.25)),
    elementwise("binary_cross_entropy_with_logits", logit_bce, Case(Normal(5, 7, scale=4), Uniform(0, 1, 5, 7))),
    scalar("autograd.weighted_smooth_l1_loss", lambda x, t, w, beta=1.0: w * smooth_l1(x, t, beta),
           Case(Normal(5, 7), Normal(5, 7), _WEIGHTS), Case(Normal(5, 7), Normal(5, 7), _WEIGHTS, beta=0.25)),
    elementwise("weighted_smooth_l1_elementwise", lambda x, t, w, beta=1.0: w * smooth_l1(x, t, beta),
                Case(Normal(5, 7), Normal(5, 7), _WEIGHTS)),
    scalar("autograd.weighted_bce", lambda p, t, w: w * bce(p, t), Case(_PROBABILITIES, _TARGETS, _FIXED)),
    elementwise("weighted_bce_elementwise", lambda p, t, w: w * bce(p, t), Case(_PROBABILITIES, _TARGETS, _FIXED)),
    scalar("autograd.fused_weighted_bce_smooth_l1_loss", detection,
           Case(_PROBABILITIES, _TARGETS, _FIXED, _FIXED, 0.5, 2.0, beta=0.1)),
    scalar("nn.loss.weighted_box_smooth_l1_loss", box, Case(_BOXES, _TARGET_BOXES, miss_gain=0.0)),
    Op("netcl.autograd.cross_entropy", cross_entropy, [
        Case(Normal(6, 5, scale=3), _ONE_HOT),
        Case(Normal(6, 5, scale=3), Uniform(0, 0.4, 6, 5).fixed()),
        Case(Normal(6, 5, scale=3), Ints(5, 6)),
    ], terms=_row_terms, **_CANCELLING),
    Op("netcl.nn.functional.cross_entropy", cross_entropy, [
        Case(Normal(6, 5, scale=3), Ints(5, 6)),
        Case(Normal(6, 5, scale=3), _ONE_HOT),
    ], terms=_row_terms, **_CANCELLING),
    Op("netcl.autograd.cross_entropy_indices", cross_entropy_indices, [
        Case(Normal(6, 5, scale=3), Ints(5, 6)),
        Case(Normal(6, 5, scale=3), _PART_IGNORED),
    ], terms=_row_terms, **_CANCELLING),
    Op("netcl.autograd.hinge_loss", hinge, [
        Case(Normal(6, 5), _ONE_HOT),
        Case(Normal(6, 5), _ONE_HOT, margin=0.3),
    ], terms=_row_terms),
    Op("netcl.autograd.pairwise_squared_distances", pairwise, [
        Case(Normal(5, 7), Normal(3, 7)),
        Case(Normal(5, 7)),
    ], terms=lambda x, y=None: (x.shape[1], pairwise(x, y))),
    Op("netcl.autograd.triplet_loss", triplet, [
        Case(_E, _E, _E, margin=2.0),
        Case(_E, _E, _E, margin=1.0, **_EUCLIDEAN),
    ], terms=_steps(16), **_CANCELLING),
    Op("netcl.autograd.contrastive_loss", contrastive, [
        Case(_E, _E, _ALIKE, margin=2.0),
        Case(_E, _E, _ALIKE, margin=1.5, reduction="sum"),
    ], terms=_steps(16), **_CANCELLING),
    Op("netcl.autograd.batch_hard_triplet_loss", batch_hard, [
        Case(_E, _LABELS),
        Case(_E, _LABELS, margin=0.5, **_EUCLIDEAN),
    ], terms=_steps(16), slack=64.0, **_CANCELLING),
    Op("netcl.autograd.batch_all_triplet_loss", batch_all, [
        Case(_E, _LABELS),
        Case(_E, _LABELS, margin=0.5, **_EUCLIDEAN),
    ], terms=_steps(64), slack=64.0, **_CANCELLING),
    Op("netcl.autograd.info_nce_loss", info_nce, [
        Case(_E, _E, temperature=0.25),
        Case(_E, _E, temperature=0.5, normalize=False, reduction="sum", symmetric=True),
    ], terms=_steps(16), slack=64.0, **_CANCELLING),
]  # fmt: skip
