"""Distances, triplets and InfoNCE against float64, over storage mixtures, odd shapes, degenerate batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import distances, info_nce, launch
from tests.ops.plans import plans_of
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24
RNG = np.random.default_rng(0)
SHAPES = [(1, 1, 1), (5, 3, 7), (4, 9, 16), (13, 70, 33), (66, 5, 130)]
BATCHES = [(1, 3), (2, 1), (7, 5), (16, 16), (33, 20), (50, 3)]


plan = plans_of(launch, distances)


plans = pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
roots = pytest.mark.parametrize("root", [False, True], ids=["squared", "euclidean"])


def differences(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x[:, None] - y[None]


def distance_matrix(x: np.ndarray, root: bool) -> np.ndarray:
    squares = (differences(x, x) ** 2).sum(2)
    return np.sqrt(squares + 1e-8) if root else squares


def gradient_from_slopes(x: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradient for x of a function with these derivatives by squared distances, and its terms' magnitudes."""
    terms = 2 * (slopes + slopes.T)[:, :, None] * differences(x, x)
    return terms.sum(1), np.abs(terms).sum(1)


def hardest_reference(x: np.ndarray, labels: np.ndarray, margin: float, root: bool) -> tuple[float, np.ndarray]:
    """Sum of the losses, and the slopes."""
    d = distance_matrix(x, root)
    loss, slopes = 0.0, np.zeros_like(d)
    for i in range(len(x)):
        positives = [j for j in range(len(x)) if labels[j] == labels[i] and j != i]
        negatives = [j for j in range(len(x)) if labels[j] != labels[i]]
        if not positives or not negatives:
            continue
        p, n = max(positives, key=lambda j: d[i, j]), min(negatives, key=lambda j: d[i, j])
        over = d[i, p] - d[i, n] + margin
        if over > 0:
            loss += over
            slopes[i, p], slopes[i, n] = 1, -1
    return loss, slopes / (2 * d) if root else slopes


def all_reference(x: np.ndarray, labels: np.ndarray, margin: float, root: bool) -> tuple[float, np.ndarray, int]:
    """Sum of the losses, the slopes, and the number of triplets that exceed 0."""
    d = distance_matrix(x, root)
    same = (labels[:, None] == labels) & ~np.eye(len(x), dtype=bool)
    other = labels[:, None] != labels
    over = d[:, :, None] - d[:, None, :] + margin
    active = (over > 0) & same[:, :, None] & other[:, None, :]
    slopes = active.sum(2) - active.sum(1).astype(float)
    return over[active].sum(), slopes / (2 * d) if root else slopes, int(active.sum())


# --------------------------------------------------------------------------------------------- distances


@pytest.mark.parametrize(
    ("plan", "first", "second"),
    [
        ("own plan", "float32", "float32"),
        ("own plan", "float16", "bfloat16"),
        ("other plan", "bfloat16", "float32"),
    ],
    indirect=["plan"],
)
def test_distances_and_their_gradients(
    queue: cl.CommandQueue, simulated: bool, plan: None, first: str, second: str
) -> None:
    for rows, columns, n in [*SHAPES[:2], (17, 9, 20)] if simulated else SHAPES:
        x = to_device(queue, RNG.standard_normal((rows, n)), first)
        y = to_device(queue, RNG.standard_normal((columns, n)), second)
        apart = differences(to_numpy(x), to_numpy(y))
        squares = (apart**2).sum(2)
        slack = (8 + n) * EPS * squares
        assert_close(distances.all_pairs(x, y, out_dtype="float32"), squares, slack=slack)
        assert_close(distances.all_pairs(x, y, out_dtype=first), squares, slack=slack)
        assert_close(
            distances.all_pairs(x, y, out_dtype="float32", root=True), np.sqrt(squares + 1e-8), ulps=4, slack=slack
        )
        g = to_device(queue, RNG.standard_normal((rows, columns)), second)
        terms = 2 * to_numpy(g)[:, :, None] * apart
        for own, other, axis, sign in ((x, y, 1, 1), (y, x, 0, -1)):
            result = distances.gather(own, other, g, own.dtype, scale=2.0, transpose=axis == 0)
            bound = (8 + terms.shape[axis]) * EPS * np.abs(terms).sum(axis)
            assert_close(result, sign * terms.sum(axis), slack=bound)


def test_close_rows_keep_their_digits(queue: cl.CommandQueue) -> None:
    """By |x|^2 + |y|^2 - 2xy these distances would be 0, or negative."""
    x = to_device(queue, 1000 + RNG.standard_normal((5, 24)) * 1e-3)
    squares = (differences(to_numpy(x), to_numpy(x)) ** 2).sum(2)
    assert_close(distances.all_pairs(x, x, out_dtype="float32"), squares, slack=32 * EPS * squares)


def test_a_gradient_of_zero_leaves_an_infinite_difference_out(queue: cl.CommandQueue) -> None:
    x, y = to_device(queue, [[1.0, 2.0]]), to_device(queue, [[np.inf, np.nan], [0.0, 0.0]])
    g = to_device(queue, [[0.0, 1.0]])
    assert_close(distances.gather(x, y, g, "float32", scale=2.0), [[2.0, 4.0]])


def test_no_rows(queue: cl.CommandQueue) -> None:
    none, some = to_device(queue, np.empty((0, 3))), to_device(queue, np.ones((2, 3)))
    assert distances.all_pairs(none, some, out_dtype="float32").shape == (0, 2)
    assert_close(
        distances.gather(some, none, to_device(queue, np.empty((2, 0))), "float32", scale=1.0), np.zeros((2, 3))
    )
    labels = Tensor.from_shape(queue, (0,), dtype="int32")
    for mine in (distances.hardest_triplets, distances.all_triplets):
        forward = mine(none, labels, 1.0, False, True)
        assert_close(forward.loss, [0.0])
        assert distances.triplet_gradient(none, forward, to_device(queue, [1.0]), "float32").shape == (0, 3)
    assert_close(distances.triplet_loss(none, none, none, 1.0, True, True).loss, [0.0])
    forward = info_nce.info_nce(none, none, temperature=0.1, normalize=True, mean=True, symmetric=True)
    assert_close(forward.loss, [0.0])
    without_dimensions = to_device(queue, np.empty((2, 0)))
    assert_close(distances.all_pairs(without_dimensions, without_dimensions, out_dtype="float32"), np.zeros((2, 2)))


# -------------------------------------------------------------------------------------- rows of partners


@plans
@roots
@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float16", "bfloat16", "float32"), ("bfloat16",) * 3])
def test_triplets_given_by_rows(
    queue: cl.CommandQueue, simulated: bool, plan: None, root: bool, dtypes: tuple[str, ...]
) -> None:
    for rows, n in [(5, 7), (18, 20)] if simulated else [(1, 1), (5, 7), (33, 20), (6, 130)]:
        a, p, q = (to_device(queue, RNG.standard_normal((rows, n)), dtype) for dtype in dtypes)
        ah, ph, qh = map(to_numpy, (a, p, q))
        near, far = (np.sqrt(s + 1e-8) if root else s for s in (((ah - h) ** 2).sum(1) for h in (ph, qh)))
        over = near - far + 0.5
        for mean in (True, False):
            divisor = rows if mean else 1
            forward = distances.triplet_loss(a, p, q, 0.5, root, mean)
            bound = (16 + n) * EPS * (near + far + 0.5).sum() / divisor
            assert_close(forward.loss, [np.maximum(over, 0).sum() / divisor], slack=bound)
            s = [(over > 0) * (1 / (2 * d) if root else 1.0) * 2 * 64 / divisor for d in (near, far)]
            to_p, to_q = s[0][:, None] * (ah - ph), s[1][:, None] * (ah - qh)
            grad = to_device(queue, [64.0])
            slack = (16 + n) * EPS * (np.abs(to_p) + np.abs(to_q))
            assert_close(distances.partner_gradient(a, (p, q), 0, forward, grad, dtypes[0]), to_p - to_q, slack=slack)
            assert_close(distances.partner_gradient(p, (a,), 0, forward, grad, dtypes[1]), -to_p, slack=slack)
            assert_close(distances.partner_gradient(q, (a,), 1, forward, grad, dtypes[2]), to_q, slack=slack)


@plans
@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [("float32", "float32", "int32"), ("float16", "bfloat16", "int64"), ("bfloat16", "float16", "float32")],
)
def test_contrasts(queue: cl.CommandQueue, plan: None, first: str, second: str, labels: str) -> None:
    for rows, n in [(1, 1), (5, 7), (33, 20), (6, 130)]:
        x, y = (to_device(queue, RNG.standard_normal((rows, n)) * 0.3, dtype) for dtype in (first, second))
        alike = RNG.integers(0, 2, rows)
        t = Tensor.from_host(queue, alike.astype(labels), dtype=labels)
        d = to_numpy(x) - to_numpy(y)
        squares = (d**2).sum(1)
        root = np.sqrt(squares + 1e-8)
        gap = np.maximum(0, 1.5 - root)
        loss = alike * squares + (1 - alike) * gap**2
        forward = distances.contrastive_loss(x, y, t, 1.5, True)
        assert_close(forward.loss, [loss.mean()], slack=(16 + n) * EPS * (loss.mean() + 4))
        gradient = 2 * (alike - (1 - alike) * gap / root)[:, None] * d * 8 / rows
        grad = to_device(queue, [8.0])
        slack = (16 + n) * EPS * (np.abs(gradient) + 16 * np.abs(d / root[:, None]) / rows)
        assert_close(distances.partner_gradient(x, (y,), 0, forward, grad, first), gradient, slack=slack)
        assert_close(distances.partner_gradient(y, (x,), 0, forward, grad, second), -gradient, slack=slack)


@pytest.mark.simulated_elsewhere
def test_equal_rows_have_finite_gradients(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones((3, 4)), "float16")
    one, labels = to_device(queue, [1.0]), Tensor.from_host(queue, np.array([0, 1, 0], np.int32), dtype="int32")
    for forward, expected in (
        (distances.triplet_loss(x, x, x, 0.5, True, True), 0.5),
        (distances.contrastive_loss(x, x, labels, 1.0, False), 2 * (1 - 1e-4) ** 2),
    ):
        assert_close(forward.loss, [expected], ulps=4)
        gradient = distances.partner_gradient(x, (x,), 0, forward, one, "float32")
        np.testing.assert_array_equal(to_numpy(gradient), 0)
    for mine in (distances.hardest_triplets, distances.all_triplets):
        forward = mine(x, labels, 0.5, True, False)
        assert_close(forward.loss, [1.0])  # the two anchors that have a positive
        np.testing.assert_array_equal(to_numpy(distances.triplet_gradient(x, forward, one, "float32")), 0)


# ------------------------------------------------------------------------------------------------- mining


@plans
@roots
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_mining(queue: cl.CommandQueue, simulated: bool, plan: None, root: bool, dtype: str) -> None:
    for rows, n in BATCHES[1:3] if simulated else BATCHES:
        x = to_device(queue, RNG.standard_normal((rows, n)), dtype)
        host, grad = to_numpy(x), to_device(queue, [32.0])
        labels = RNG.integers(0, 4, rows)
        t = Tensor.from_host(queue, labels.astype(np.int32), dtype="int32")
        bound = (32 + n + rows) * EPS
        total, slopes = hardest_reference(host, labels, 0.7, root)
        every, all_slopes, active = all_reference(host, labels, 0.7, root)
        for mine, loss, s, divisor in (
            (distances.hardest_triplets, total, slopes, rows),
            (distances.all_triplets, every, all_slopes, max(active, 1)),
        ):
            terms = np.abs(s).sum() * distance_matrix(host, root).max() + rows
            for mean in (True, False):
                by = divisor if mean else 1
                forward = mine(x, t, 0.7, root, mean)
                assert_close(forward.loss, [loss / by], slack=bound * terms / by)
                gradient, magnitude = gradient_from_slopes(host, s * 32 / by)
                result = distances.triplet_gradient(x, forward, grad, dtype)
                assert_close(result, gradient, slack=bound * magnitude)


@plans
@pytest.mark.simulated_elsewhere
def test_labels_of_any_type_give_the_same_triplets(queue: cl.CommandQueue, plan: None) -> None:
    x = to_device(queue, RNG.standard_normal((21, 5)))
    labels = RNG.integers(0, 5, 21)
    losses = []
    for dtype in ("int32", "int64", "float32", "float16"):
        offset = 2**40 if dtype == "int64" else 0
        t = Tensor.from_host(queue, (labels * 3 + offset).astype(dtype), dtype=dtype)
        losses += [
            to_numpy(mine(x, t, 0.5, True, True).loss) for mine in (distances.hardest_triplets, distances.all_triplets)
        ]
    assert losses[0::2] == [losses[0]] * 4
    assert losses[1::2] == [losses[1]] * 4


@plans
@roots
@pytest.mark.parametrize("labels", [[3] * 6, list(range(6)), [0, 0, 1, 2, 3, 4]], ids=["one", "all", "one pair"])
def test_batches_without_triplets(queue: cl.CommandQueue, plan: None, root: bool, labels: list[int]) -> None:
    x = to_device(queue, RNG.standard_normal((6, 4)))
    t = Tensor.from_host(queue, np.array(labels, np.int32), dtype="int32")
    margin = 64.0  # one that was made all the same would count
    for mine, reference in ((distances.hardest_triplets, hardest_reference), (distances.all_triplets, all_reference)):
        forward = mine(x, t, margin, root, False)
        loss, slopes = reference(to_numpy(x), np.array(labels), margin, root)[:2]
        assert_close(forward.loss, [loss], slack=64 * EPS * max(1.0, loss))
        gradient, magnitude = gradient_from_slopes(to_numpy(x), slopes)
        result = distances.triplet_gradient(x, forward, to_device(queue, [1.0]), "float32")
        assert_close(result, gradient, slack=64 * EPS * magnitude)


@plans
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.simulated_elsewhere
def test_embeddings_that_are_not_finite_make_the_loss_so(queue: cl.CommandQueue, plan: None, bad: float) -> None:
    host = RNG.standard_normal((20, 5))
    host[3, 2] = bad
    x = to_device(queue, host, "float16")
    t = Tensor.from_host(queue, np.arange(20, dtype=np.int32) % 3, dtype="int32")
    for mine in (distances.hardest_triplets, distances.all_triplets):
        forward = mine(x, t, 0.5, False, True)
        assert not np.isfinite(to_numpy(forward.loss)).any()
        gradient = to_numpy(distances.triplet_gradient(x, forward, to_device(queue, [1.0]), "float16"))
        assert not np.isfinite(gradient).all()
    forward = info_nce.info_nce(x, x, temperature=0.1, normalize=True, mean=True, symmetric=True)
    assert np.isnan(to_numpy(forward.loss)).all()


@plans
def test_a_triplet_of_two_infinite_distances_shows_in_gradients(queue: cl.CommandQueue, plan: None) -> None:
    """Whether it counts is not known: a slope of 1, or of 0, would be finite, and wrong."""
    x, grad = to_device(queue, 1e20 * RNG.standard_normal((6, 5))), to_device(queue, [1.0])
    t = Tensor.from_host(queue, np.arange(6, dtype=np.int32) % 3, dtype="int32")
    gradients = [
        distances.triplet_gradient(x, mine(x, t, 0.5, False, False), grad, "float32")
        for mine in (distances.hardest_triplets, distances.all_triplets)
    ]
    anchor, near, far = (to_device(queue, to_numpy(x)[at : at + 2]) for at in (0, 2, 4))
    forward = distances.triplet_loss(anchor, near, far, 0.5, False, False)
    gradients += [distances.partner_gradient(anchor, (near, far), 0, forward, grad, "float32")]
    assert all(np.isnan(to_numpy(gradient)).all() for gradient in gradients)


@pytest.mark.simulated_elsewhere
def test_triplets_repeat_to_the_bit(queue: cl.CommandQueue) -> None:
    x = to_device(queue, RNG.standard_normal((40, 19)), "bfloat16")
    t = Tensor.from_host(queue, np.arange(40, dtype=np.int32) % 4, dtype="int32")
    results = []
    for _ in range(3):
        forward = distances.all_triplets(x, t, 1.0, True, True)
        gradient = distances.triplet_gradient(x, forward, to_device(queue, [1.0]), "float32")
        results.append((to_numpy(forward.loss), to_numpy(gradient)))
    for loss, gradient in results[1:]:
        np.testing.assert_array_equal(loss, results[0][0])
        np.testing.assert_array_equal(gradient, results[0][1])


# ----------------------------------------------------------------------------------------------- InfoNCE


def info_nce_reference(
    q: np.ndarray, k: np.ndarray, temperature: float, normalize: bool, symmetric: bool
) -> tuple[float, np.ndarray, np.ndarray]:
    """Sum of the rows' losses, and its gradients for q and k."""
    norms = [np.linalg.norm(x, axis=1, keepdims=True) if normalize else np.ones((len(x), 1)) for x in (q, k)]
    eps = 1e-8 if normalize else 0.0
    unit_q, unit_k = q / (norms[0] + eps), k / (norms[1] + eps)
    s = unit_q @ unit_k.T / temperature
    losses, slopes = 0.0, np.zeros_like(s)
    for side in [s, s.T] if symmetric else [s]:
        shifted = side - side.max(1, keepdims=True)
        share = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
        losses += (np.log(np.exp(shifted).sum(1)) - np.diag(shifted)).sum()
        slopes += (share - np.eye(len(s))) if side is s else (share - np.eye(len(s))).T
    if symmetric:
        losses, slopes = losses / 2, slopes / 2
    gradients = []
    for g, unit, norm in ((slopes @ unit_k, unit_q, norms[0]), (slopes.T @ unit_q, unit_k, norms[1])):
        g = g / temperature
        if normalize:
            along = np.divide(
                (g * unit).sum(1, keepdims=True) * (norm + eps), norm, where=norm > 0, out=np.zeros_like(norm)
            )
            g = (g - along * unit) / (norm + eps)
        gradients.append(g)
    return losses, gradients[0], gradients[1]


@plans
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "bfloat16")])
def test_info_nce(
    queue: cl.CommandQueue, simulated: bool, plan: None, normalize: bool, symmetric: bool, dtypes: tuple[str, str]
) -> None:
    for rows, n in [(5, 7)] if simulated else [(1, 3), (5, 7), (33, 20)]:
        q, k = (to_device(queue, RNG.standard_normal((rows, n)), dtype) for dtype in dtypes)
        temperature = float(np.float32(0.2))
        loss, dq, dk = info_nce_reference(to_numpy(q), to_numpy(k), temperature, normalize, symmetric)
        for mean in (True, False):
            by = rows if mean else 1
            settings: dict[str, Any] = {"normalize": normalize, "mean": mean, "symmetric": symmetric}
            forward = info_nce.info_nce(q, k, temperature=temperature, **settings)
            steep = (1 if normalize else n) / temperature
            assert_close(forward.loss, [loss / by], slack=(64 + 4 * n + rows) * EPS * steep * rows / by)
            slack = (64 + 4 * n + rows) * EPS * steep * steep * 16 / by
            results = info_nce.info_nce_gradients(forward, q, k, to_device(queue, [16.0]), *dtypes)
            for result, expected in zip(results, (dq, dk), strict=True):
                assert result is not None
                assert_close(result, expected * 16 / by, slack=slack)


@pytest.mark.simulated_elsewhere
def test_info_nce_of_extreme_rows_and_temperatures(queue: cl.CommandQueue) -> None:
    one = to_device(queue, [1.0])
    zero = to_device(queue, np.zeros((3, 4)), "float16")
    forward = info_nce.info_nce(zero, zero, temperature=0.07, normalize=True, mean=True, symmetric=True)
    assert_close(forward.loss, [np.log(3)], ulps=2)
    for gradient in info_nce.info_nce_gradients(forward, zero, zero, one, "float32", "float32"):
        assert gradient is not None
        np.testing.assert_array_equal(to_numpy(gradient), 0)
    large = to_device(queue, np.eye(3) * 65504, "float16")
    for temperature in (1e-6, 1e-30, 1e6):
        forward = info_nce.info_nce(large, large, temperature=temperature, normalize=True, mean=True, symmetric=True)
        share = np.exp(1 / temperature) if temperature > 1 else np.inf
        assert_close(forward.loss, [np.log1p(2 / share)], ulps=4)
        assert np.isfinite(to_numpy(forward.loss)).all()
    wrong = to_device(queue, np.roll(np.eye(3), 1, 0) * 65504, "float16")
    forward = info_nce.info_nce(large, wrong, temperature=1.0, normalize=False, mean=True, symmetric=False)
    assert_close(forward.loss, [65504.0**2])
