"""Losses of rows of logits and their gradients against float64, over storage mixtures, odd shapes, extremes."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import launch
from clamp.ops import loss as ops
from tests.ops.plans import PLANS_AND_DTYPES, plans_of
from tests.reference import assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24
ROWS = [(1, 1), (1, 10), (5, 3), (33, 10), (7, 16), (4, 257), (2, 1500)]
MARGIN = 1.3


plan = plans_of(launch)


def cross_entropy_reference(x: np.ndarray, t: np.ndarray) -> tuple[float, np.ndarray, float]:
    """Loss, gradient, and the sum of the terms' magnitudes."""
    shifted = x - x.max(1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(1, keepdims=True))
    terms = t * (log_total - shifted)
    gradient = np.exp(shifted - log_total) * t.sum(1, keepdims=True) - t
    return terms.sum() / len(x), gradient / len(x), np.abs(terms).sum() / len(x)


def hinge_reference(x: np.ndarray, t: np.ndarray) -> tuple[float, np.ndarray]:
    true = t.argmax(1)
    rows = np.arange(len(x))
    over = np.maximum(0, float(np.float32(MARGIN)) + x - x[rows, true][:, None])
    over[rows, true] = 0
    gradient = (over > 0).astype(float)
    gradient[rows, true] = -gradient.sum(1)
    return over.sum() / len(x), gradient / len(x)


@pytest.mark.parametrize(("plan", "logits", "target"), PLANS_AND_DTYPES, indirect=["plan"])
@pytest.mark.parametrize("shape", ROWS)
def test_cross_entropy_of_probabilities(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, int], logits: str, target: str
) -> None:
    rng = np.random.default_rng(2)
    x = to_device(queue, rng.standard_normal(shape) * 4, logits)
    t = to_device(queue, rng.dirichlet(np.ones(shape[1]), shape[0]) * 1.5, target)  # rows need not sum to 1
    loss, gradient, terms = cross_entropy_reference(to_numpy(x), to_numpy(t))
    forward = ops.probability_loss(x, t)
    assert_close(forward.loss, [loss], slack=(8 + shape[1]) * EPS * (terms + 4))
    for out, incoming in ((logits, 1.0), (logits, 4096.0)):
        result = ops.probability_gradient(x, t, forward, to_device(queue, [incoming]), out)
        assert_close(result, gradient * incoming, slack=(8 + shape[1]) * EPS * incoming / shape[0])


@pytest.mark.parametrize(
    ("plan", "logits", "labels"),
    [
        ("own plan", "float32", "int32"),
        ("own plan", "float16", "int64"),
        ("own plan", "bfloat16", "float32"),
        ("other plan", "float16", "float16"),
    ],
    indirect=["plan"],
)
@pytest.mark.parametrize("shape", ROWS)
def test_cross_entropy_of_labels(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, int], logits: str, labels: str
) -> None:
    rng = np.random.default_rng(3)
    x = to_device(queue, rng.standard_normal(shape) * 4, logits)
    classes = rng.integers(0, shape[1], shape[0])
    ignored = rng.random(shape[0]) < 0.3
    ignored[0] = False
    host = np.where(ignored, -100, classes).astype(labels)
    one_hot = np.eye(shape[1])[classes]
    loss, gradient, terms = cross_entropy_reference(to_numpy(x)[~ignored], one_hot[~ignored])
    full = np.zeros(shape)
    full[~ignored] = gradient
    t = Tensor.from_host(queue, host, dtype=labels)
    forward = ops.label_loss(x, t, -100)
    slack = (8 + shape[1]) * EPS
    assert_close(forward.loss, [loss], slack=slack * (terms + 4))
    for out, incoming in ((logits, 1.0), (logits, 4096.0)):
        result = ops.label_gradient(x, t, forward, to_device(queue, [incoming]), out)
        assert_close(result, full * incoming, slack=slack * incoming / (~ignored).sum())


@pytest.mark.parametrize(("plan", "logits", "target"), PLANS_AND_DTYPES, indirect=["plan"])
@pytest.mark.parametrize("shape", ROWS)
def test_hinge(queue: cl.CommandQueue, plan: None, shape: tuple[int, int], logits: str, target: str) -> None:
    rng = np.random.default_rng(4)
    x = to_device(queue, rng.standard_normal(shape), logits)
    t = to_device(queue, np.eye(shape[1])[rng.integers(0, shape[1], shape[0])], target)
    loss, gradient = hinge_reference(to_numpy(x), to_numpy(t))
    forward = ops.hinge_loss(x, t, MARGIN)
    assert_close(forward.loss, [loss], slack=(8 + shape[1]) * EPS * loss)
    for out, incoming in ((logits, 1.0), (logits, 64.0)):
        result = ops.hinge_gradient(x, forward, to_device(queue, [incoming]), MARGIN, out)
        assert_close(result, gradient * incoming, slack=2 * EPS * np.abs(gradient) * incoming)


def test_hinge_without_a_true_class_and_with_nan(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [[1.0, -3.0, 0.0], [np.nan, 0.0, 1.0]])
    t = to_device(queue, [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    forward = ops.hinge_loss(x, t, 1.0)
    assert np.isnan(to_numpy(forward.loss)).all()
    gradient = to_numpy(ops.hinge_gradient(x, forward, to_device(queue, [2.0]), 1.0, "float32"))
    np.testing.assert_array_equal(gradient[0], [1.0, 0.0, 1.0])
    assert np.isnan(gradient[1, 0])


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_labels_that_are_no_class_give_nan_and_read_nothing(queue: cl.CommandQueue, plan: None) -> None:
    x = to_device(queue, np.ones((4, 3)), "float16")
    for wrong in (3, -1, 2**30, -(2**31)):
        labels = Tensor.from_host(queue, np.array([0, wrong, 2, -100], np.int32), dtype="int32")
        forward = ops.label_loss(x, labels, -100)
        assert np.isnan(to_numpy(forward.loss)).all()
        gradient = to_numpy(ops.label_gradient(x, labels, forward, to_device(queue, [1.0]), "float16"))
        assert np.isnan(gradient).all(1).tolist() == [False, True, False, False]
        np.testing.assert_array_equal(gradient[3], 0)
    for wrong in (np.nan, np.inf, 3.0, -1.0, 0.5, -0.5):
        assert np.isnan(to_numpy(ops.label_loss(x, to_device(queue, [0, wrong, 1, 2]), -100).loss)).all()


def test_ignored_rows_have_no_part_however_extreme(queue: cl.CommandQueue) -> None:
    inf, nan = np.inf, np.nan
    x = to_device(queue, [[65504, 0, -65504], [nan, inf, 0], [inf, inf, 0], [-inf, -inf, -inf]], "float16")
    one = to_device(queue, [1.0])
    labels = Tensor.from_host(queue, np.array([1, -100, -100, -100], np.int32), dtype="int32")
    forward = ops.label_loss(x, labels, -100)
    assert_close(forward.loss, [65504.0])
    gradient = to_numpy(ops.label_gradient(x, labels, forward, one, "float16"))
    np.testing.assert_array_equal(gradient, [[1, -1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    labels = Tensor.from_host(queue, np.full(4, 7, np.int32), dtype="int32")
    forward = ops.label_loss(x, labels, 7)
    assert_close(forward.loss, [0.0])
    np.testing.assert_array_equal(to_numpy(ops.label_gradient(x, labels, forward, one, "float16")), 0)


def test_cross_entropy_of_extreme_logits(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [[65504, -65504, 0], [-np.inf, 2, 2]], "float16")
    t = to_device(queue, [[0, 1, 0], [0, 0.5, 0.5]])
    one = to_device(queue, [1.0])
    forward = ops.probability_loss(x, t)
    assert_close(forward.loss, [(131008 + np.log(2)) / 2])
    gradient = ops.probability_gradient(x, t, forward, one, "float32")
    assert_close(gradient, [[0.5, -0.5, 0], [0, 0, 0]], slack=EPS)
    labels = Tensor.from_host(queue, np.array([0, 1], np.int32), dtype="int32")
    assert_close(ops.label_loss(x, labels, -100).loss, [np.log(2) / 2], slack=EPS)
    labels = Tensor.from_host(queue, np.array([0, 0], np.int32), dtype="int32")
    assert_close(ops.label_loss(x, labels, -100).loss, [np.inf])


def test_a_batch_of_none(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.empty((0, 3)))
    labels = Tensor.from_shape(queue, (0,), dtype="int32")
    forward = ops.label_loss(x, labels, -100)
    assert_close(forward.loss, [0.0])
    assert ops.label_gradient(x, labels, forward, to_device(queue, [1.0]), "float32").shape == (0, 3)
    assert_close(ops.probability_loss(x, x).loss, [0.0])


@pytest.mark.slow
def test_a_vocabulary_and_a_large_batch(queue: cl.CommandQueue, simulated: bool) -> None:
    for shape in ((3, 50_257), (20_000, 10)):
        shape = tuple(-(-extent // 50) for extent in shape) if simulated else shape
        rng = np.random.default_rng(5)
        x = to_device(queue, rng.standard_normal(shape), "float16")
        classes = rng.integers(0, shape[1], shape[0])
        loss, gradient, terms = cross_entropy_reference(to_numpy(x), classes[:, None] == np.arange(shape[1]))
        labels = Tensor.from_host(queue, classes.astype(np.int32), dtype="int32")
        forward = ops.label_loss(x, labels, -100)
        assert_close(forward.loss, [loss], slack=64 * EPS * terms)
        result = ops.label_gradient(x, labels, forward, to_device(queue, [65536.0]), "float16")
        assert_close(result, gradient * 65536, slack=64 * EPS * 65536 / shape[0])
