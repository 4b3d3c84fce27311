"""Losses of single elements and their gradients against float64, over storage mixtures, odd shapes, extreme values."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import launch
from clamp.ops import loss_elementwise as ops
from tests.conformance.activations import sigmoid
from tests.conformance.loss import bce, logit_bce
from tests.ops.plans import PLANS_AND_DTYPES, plans_of
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

pytestmark = pytest.mark.kernel

EPS = 2.0**-24
BETA = 0.7


plan = plans_of(ops, launch)


def smooth_l1(d: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss and slope of differences."""
    beta = float(np.float32(beta))
    near = np.abs(d) < beta
    return np.where(near, d * d / (2 * beta), np.abs(d) - beta / 2), np.where(near, d / beta, np.sign(d))


def pair_reference(kind: str, x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and slope of each element."""
    d = x - t
    if kind == "mse":
        return d * d, 2 * d
    if kind == "l1":
        return np.abs(d), np.sign(d)
    return smooth_l1(d, BETA)


@pytest.mark.parametrize(("plan", "pred", "target"), PLANS_AND_DTYPES, indirect=["plan"])
@pytest.mark.parametrize("kind", ["mse", "l1", "smooth_l1"])
def test_pair_losses_and_gradients(
    queue: cl.CommandQueue, plan: None, simulated: bool, kind: str, pred: str, target: str
) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 15, 16, 131, 3000 if simulated else 70_001):
        x, t = (to_device(queue, rng.standard_normal(size), dtype) for dtype in (pred, target))
        losses, slope = pair_reference(kind, to_numpy(x), to_numpy(t))
        slack = (16 + size / 512) * EPS * losses.sum()
        assert_close(ops.loss_sum(kind, (x, t), (BETA,)), [losses.sum()], slack=slack)
        for out, incoming in ((pred, 1.0), (pred, 1024.0)):
            grad = to_device(queue, [incoming])
            assert_close(
                ops.loss_gradient(kind, (x, t), grad, out, (BETA,)),
                slope * incoming,
                slack=2 * EPS * np.abs(slope) * incoming,
            )


@pytest.mark.parametrize(
    ("pred", "target", "out"), [("float32", "float16", "float32"), ("float16", "float32", "float16"), ("bfloat16",) * 3]
)
def test_binary_cross_entropy(queue: cl.CommandQueue, pred: str, target: str, out: str) -> None:
    rng = np.random.default_rng(1)
    for shape in ((1,), (3, 37), (500,)):
        x = to_device(queue, rng.standard_normal(shape) * 6, pred)
        t = to_device(queue, rng.random(shape).round(1), target)
        g = to_device(queue, rng.standard_normal(shape), out)
        logits, targets, grad = to_numpy(x), to_numpy(t), to_numpy(g)
        losses, slope = logit_bce(logits, targets), sigmoid(logits) - targets
        slack = 4 * EPS * (np.abs(logits) + 1)
        assert_close(ops.loss_terms("logit_bce", (x, t), out), losses, slack=slack)
        assert_close(ops.loss_gradient("logit_bce", (x, t), g, pred), slope * grad, slack=8 * EPS * np.abs(grad))
        assert_close(ops.loss_gradient("logit_bce_target", (x, t), g, target), -logits * grad, slack=EPS)


def test_binary_cross_entropy_of_extreme_logits_is_finite_where_it_should_be(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [np.inf, -np.inf, np.inf, -np.inf, 65504, -65504, 65504, np.nan, 20.0], "float16")
    t = to_device(queue, [1, 0, 0, 1, 1, 0, 0, 1, 1], "float16")
    losses = to_numpy(ops.loss_terms("logit_bce", (x, t), "float32"))
    np.testing.assert_array_equal(losses[:-1], [0, 0, np.inf, np.inf, 0, 0, 65504, np.nan])
    np.testing.assert_allclose(losses[-1], np.log1p(np.exp(-20.0)), rtol=1e-6)
    slopes = to_numpy(ops.loss_gradient("logit_bce", (x, t), to_device(queue, np.ones(9)), "float32"))
    np.testing.assert_array_equal(slopes[:-1], [0, 0, 1, -1, 0, 0, 1, np.nan])
    np.testing.assert_allclose(slopes[-1], -1 / (1 + np.exp(20.0)), rtol=1e-6)


def test_pair_losses_of_extreme_values(queue: cl.CommandQueue) -> None:
    x, t = to_device(queue, [65504.0, 1.0], "float16"), to_device(queue, [-65504.0, 1.0], "float16")
    assert_close(ops.loss_sum("mse", (x, t)), [131008.0**2])
    assert_close(ops.loss_sum("smooth_l1", (x, t), (1.0,)), [131007.5])
    nan = to_device(queue, [np.nan, 2.0])
    one = to_device(queue, [1.0])
    for kind in ("mse", "l1", "smooth_l1"):
        assert np.isnan(to_numpy(ops.loss_sum(kind, (nan, x), (1.0,)))).all()
        assert np.isnan(to_numpy(ops.loss_gradient(kind, (nan, x), one, "float16", (1.0,)))).tolist() == [True, False]
    assert_close(ops.loss_sum("mse", [to_device(queue, np.empty((0, 3)))] * 2), [0.0])


def test_smooth_l1_with_beta_0_is_l1(queue: cl.CommandQueue) -> None:
    x, t = to_device(queue, [1.0, 2.0, -3.0]), to_device(queue, [1.0, 0.5, 0.0])
    assert_close(ops.loss_sum("smooth_l1", (x, t), (0.0,)), [4.5])
    assert_close(ops.loss_gradient("smooth_l1", (x, t), to_device(queue, [1.0]), "float32", (0.0,)), [0, 1, -1])


# ------------------------------------------------------------------------------------------------ with weights

P_EPSILON = 1e-7
GAINS = (0.05, 0.01, 1.5, 2.0, 3.0, 1.0)  # of boxes: beta, reference area, gains of area, miss, center, size


def probability_bce_reference(p: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    held = np.clip(p, P_EPSILON, 1 - P_EPSILON)
    slope = np.where(held == p, (p - t) / (held * (1 - held)), 0)
    return bce(p, t, P_EPSILON), slope


def box_reference(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and slope of each coordinate of boxes (N, 4)."""
    beta, area_ref, area_gain, miss_gain, center_gain, size_gain = (float(np.float32(gain)) for gain in GAINS)
    corners = [np.clip([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 0, 1) for b in (x, t)]
    areas = [np.prod(np.maximum(high - low, 0), 1) for low, high in corners]
    (x_low, x_high), (t_low, t_high) = corners
    common = np.prod(np.maximum(np.minimum(x_high, t_high) - np.maximum(x_low, t_low), 0), 1)
    miss = 1 - common / np.maximum(sum(areas) - common, 1e-6)
    area = np.maximum(t[:, 2] * t[:, 3], 1e-6)
    weight = (1 + area_gain * np.minimum(np.sqrt(area / area_ref), 6)) * (1 + miss_gain * miss * miss)
    weight = weight[:, None] * [center_gain, center_gain, size_gain, size_gain]
    loss, slope = smooth_l1(x - t, beta)
    return weight * loss, weight * slope


@pytest.mark.parametrize(
    ("kind", "plan", "pred", "target", "weight"),
    # every kind with each of both 16-bit types in each place, and on both plans; float32 by one
    [
        ("weighted_smooth_l1", "own plan", "float16", "float32", "bfloat16"),
        ("weighted_smooth_l1", "other plan", "bfloat16", "bfloat16", "float16"),
        ("weighted_bce", "own plan", "bfloat16", "float16", "float32"),
        ("weighted_bce", "other plan", "float16", "bfloat16", "float16"),
        ("detection", "own plan", "float16", "float16", "bfloat16"),
        ("detection", "other plan", "bfloat16", "float32", "float16"),
        ("detection", "own plan", "float32", "float32", "float32"),
    ],
    indirect=["plan"],
)
def test_weighted_losses_and_gradients(
    queue: cl.CommandQueue, plan: None, simulated: bool, kind: str, pred: str, target: str, weight: str
) -> None:
    rng = np.random.default_rng(10)
    for size in (1, 17, 600) if simulated else (1, 17, 131, 40_003):
        p, t = to_device(queue, rng.uniform(0.02, 0.97, size), pred), to_device(queue, rng.random(size), target)
        w, v = (to_device(queue, rng.uniform(0, 2, size), weight) for _ in range(2))
        ph, th, wh, vh = map(to_numpy, (p, t, w, v))
        beta = (0.3, 0, 0, 0)
        l1, l1_slope = smooth_l1(ph - th, 0.3)
        entropy, bce_slope = probability_bce_reference(ph, th)
        both = ops.detection_constants(0.3, P_EPSILON, 0.25, 2.0)
        operands, constants, terms, slope = {
            "weighted_smooth_l1": ((p, t, w), beta, wh * l1, wh * l1_slope),
            "weighted_bce": ((p, t, w), ops.bce_constants(P_EPSILON), wh * entropy, wh * bce_slope),
            "detection": (
                (p, t, w, v), both, 0.25 * wh * entropy + 2 * vh * l1, 0.25 * wh * bce_slope + 2 * vh * l1_slope,
            ),
        }[kind]  # fmt: skip
        total = np.abs(terms).sum()
        assert_close(ops.loss_sum(kind, operands, constants), [terms.sum()], slack=(16 + size / 512) * EPS * total)
        # d - beta / 2 cancels next to beta / 2; a weight multiplies the result.
        assert_close(ops.loss_terms(kind, operands, "float32", constants), terms, slack=16 * EPS * (terms + 2))
        steep = np.abs(slope) + 0.25 * wh * np.abs(bce_slope) + 4
        for incoming in (1.0, 512.0):
            result = ops.loss_gradient(kind, operands, to_device(queue, [incoming]), pred, constants)
            assert_close(result, slope * incoming, slack=8 * EPS * steep * incoming)
        if kind == "weighted_smooth_l1":
            g = to_device(queue, rng.standard_normal(size), pred)
            result = ops.loss_gradient("weighted_smooth_l1_weight", (p, t, w), g, weight, beta)
            assert_close(result, to_numpy(g) * l1, slack=8 * EPS * np.abs(to_numpy(g)))


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_boxes(queue: cl.CommandQueue, plan: None, dtype: str) -> None:
    rng = np.random.default_rng(11)
    for count in (1, 3, 4, 6, 300):
        boxes = np.hstack([rng.uniform(0, 1, (count, 2)), rng.uniform(0.01, 0.6, (count, 2))])
        x = to_device(queue, boxes + rng.normal(0, 0.06, boxes.shape), dtype)
        t = to_device(queue, boxes, "float32")
        terms, slope = box_reference(to_numpy(x), to_numpy(t))
        assert_close(ops.loss_sum("box", (x, t), GAINS), [terms.sum()], slack=64 * EPS * (terms.sum() + count))
        grad = to_device(queue, [8.0])
        slack = 8 * 256 * EPS * (np.abs(slope) + 1)  # the area of a union is a difference
        assert_close(ops.loss_gradient("box", (x, t), grad, dtype, GAINS), 8 * slope, slack=slack)
        assert_close(ops.loss_gradient("box_target", (x, t), grad, "float32", GAINS), -8 * slope, slack=slack)


def test_probabilities_at_and_beyond_the_ends(queue: cl.CommandQueue) -> None:
    """Logarithms are held at log(1e-7); where they are, the loss does not depend on the probability."""
    p = to_device(queue, [0, 1, 0, 1, -0.5, 1.5, np.nan, 1 - 2.0**-24, 0.5])
    t = to_device(queue, [0, 1, 1, 0, 1, 0, 1, 0, 1])
    constants = ops.bce_constants(P_EPSILON)
    far, near = -np.log(P_EPSILON), -np.log1p(-P_EPSILON)
    expected = [near, near, far, far, far, far, np.nan, far, np.log(2)]
    assert_close(ops.loss_terms("probability_bce", (p, t), "float32", constants), expected, ulps=4)
    one = to_device(queue, np.ones(9))
    slopes = ops.loss_gradient("probability_bce", (p, t), one, "float16", constants)
    np.testing.assert_array_equal(to_numpy(slopes), [0, 0, 0, 0, 0, 0, np.nan, 0, -2])
    slopes = ops.loss_gradient("probability_bce_target", (p, t), one, "float32", constants)
    assert_close(slopes, [far - near, near - far, far - near, near - far, far - near, near - far, np.nan,
                          near - far, 0], ulps=4)  # fmt: skip


def test_weighted_losses_of_extreme_values(queue: cl.CommandQueue) -> None:
    x, t = to_device(queue, [65504.0, 1.0], "float16"), to_device(queue, [-65504.0, 1.0], "float16")
    w = to_device(queue, [2.0, 3.0])
    assert_close(ops.loss_sum("weighted_smooth_l1", (x, t, w), (1.0,)), [2 * 131007.5])
    bad = to_device(queue, [np.nan, np.inf])
    for kind, operands, constants in (
        ("weighted_smooth_l1", (bad, t, w), (1.0,)),
        ("weighted_bce", (bad, t, w), ops.bce_constants(P_EPSILON)),
        ("detection", (bad, t, w, w), ops.detection_constants(1.0, P_EPSILON, 1.0, 1.0)),
    ):
        assert np.isnan(to_numpy(ops.loss_sum(kind, operands, constants))).all()
    none = to_device(queue, np.empty((0, 4)))
    assert_close(ops.loss_sum("box", (none, none), GAINS), [0.0])
    assert ops.loss_gradient("box", (none, none), to_device(queue, [1.0]), "float32", GAINS).shape == (0, 4)
