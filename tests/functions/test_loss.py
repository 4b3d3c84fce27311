"""Losses under autograd: gradients follow the incoming one, in each parent's dtype, under every policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
import netcl.nn.loss
import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting
from clamp.casting.policies import Float, Match
from clamp.functions import loss as F
from tests.conformance.reduce import softmax
from tests.functions.operands import half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((6, 5))
CLASSES = np.array([0, 4, 2, 2, 1, 3])
ONE_HOT = np.eye(5)[CLASSES]
EPS = 2.0**-24


def run(function: Callable[..., Any], casting: Casting, *args: Any, seed: float | None = None, **kwargs: Any) -> Node:
    """The loss, after a backward pass whose incoming gradient is ``seed`` (default: netcl's own, 1)."""
    tape = Tape()
    loss = function(casting, *args, tape=tape, **kwargs)
    tape.backward(loss, None if seed is None else to_device(loss.value.queue, np.full(loss.value.shape, seed)))
    return loss


@pytest.mark.parametrize("kind", ["int32 tensor", "float tensor", "float64 tensor", "node", "array", "list"])
def test_labels_equal_one_hot(queue: cl.CommandQueue, kind: str) -> None:
    labels: Any = {
        "int32 tensor": lambda: Tensor.from_host(queue, CLASSES.astype(np.int32), dtype="int32"),
        "float tensor": lambda: Tensor.from_host(queue, CLASSES.astype(np.float32)),
        "float64 tensor": lambda: Tensor.from_host(queue, CLASSES.astype(np.float64), dtype="float64"),
        "node": lambda: Node(value=Tensor.from_host(queue, CLASSES.astype(np.int32), dtype="int32")),
        "array": lambda: CLASSES,
        "list": lambda: CLASSES.tolist(),
    }[kind]()
    reference = leaf(queue, LOGITS, "float16")
    loss = run(F.cross_entropy, Float(), reference, to_device(queue, ONE_HOT), seed=8.0)
    for function in (F.cross_entropy, F.cross_entropy_indices):
        pred = leaf(queue, LOGITS, "float16")
        other = run(function, Float(), pred, labels, seed=8.0)
        assert_close(other.value, to_numpy(loss.value), slack=16 * EPS)
        assert_close(pred.grad, to_numpy(reference.grad), slack=16 * EPS)


def test_labels_are_never_cast(queue: cl.CommandQueue) -> None:
    """In half, the float label 2049 would be 2048."""
    logits = leaf(queue, np.arange(2050)[None] * 0.001)
    labels = to_device(queue, [2049.0])
    loss = run(F.cross_entropy, half(), logits, labels)
    assert to_numpy(logits.grad)[0, 2049] < -0.9
    assert np.isfinite(to_numpy(loss.value)).all()


def test_netcls_own_mse_ignores_the_incoming_gradient_and_clamps_does_not(queue: cl.CommandQueue) -> None:
    target = Node(value=to_device(queue, ONE_HOT))
    own, clamps = leaf(queue, LOGITS), leaf(queue, LOGITS)
    tape = Tape()
    tape.backward(ag.mse_loss(own, target, tape=tape), to_device(queue, [1024.0]))
    run(F.mse_loss, Float(), clamps, target, seed=1024.0)
    expected = 2 * (to_numpy(own.value) - ONE_HOT)
    assert_close(own.grad, expected, slack=EPS)  # scaled by 1024 it should be
    assert_close(clamps.grad, expected * 1024, slack=EPS * 1024)


@pytest.mark.parametrize("name", ["l1_loss", "l2_loss"])
def test_netcls_own_l1_and_l2_backward_raise(queue: cl.CommandQueue, name: str) -> None:
    tape = Tape()
    loss = getattr(ag, name)(leaf(queue, LOGITS), Node(value=to_device(queue, ONE_HOT)), tape=tape)
    with pytest.raises(ValueError, match="shape"):
        tape.backward(loss)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_cross_entropy_of_bare_tensors_and_its_backward(queue: cl.CommandQueue, dtype: str) -> None:
    x = to_device(queue, LOGITS, dtype)
    targets = Tensor.from_host(queue, np.array([0, 4, -100, 2, 1, 3], np.int32), dtype="int32")
    loss, scale = F.tensor_cross_entropy_indices(Float(), x, targets)
    kept = [0, 1, 3, 4, 5]
    share = softmax(to_numpy(x))
    assert_close(loss, [-np.log(share[np.arange(6), CLASSES])[kept].mean()], ulps=4)
    assert_close(scale, [0.2])
    gradient = F.cross_entropy_indices_backward(Match(), x, targets, to_device(queue, [8.0]))
    expected = (share - ONE_HOT) * 8
    expected[2] = 0
    assert gradient.dtype == dtype
    assert_close(gradient, expected, slack=64 * EPS)


@pytest.mark.parametrize("axis", [0, -1])
def test_softmax_backward_of_bare_tensors(queue: cl.CommandQueue, axis: int) -> None:
    y, g = to_device(queue, softmax(LOGITS), "float16"), to_device(queue, LOGITS)
    result = F.softmax_backward(Match(), y, g, axis=axis)
    out = to_numpy(y)
    assert result.dtype == "float16"
    assert_close(result, out * (to_numpy(g) - (out * to_numpy(g)).sum(axis, keepdims=True)), slack=32 * EPS)


# ----------- Weighted losses under autograd: values, gradients that follow the incoming one, who gets one, wrong input.


PRED = np.hstack([RNG.uniform(0.3, 0.7, (6, 2)), RNG.uniform(0.1, 0.5, (6, 2))])
TARGET = PRED + RNG.normal(0, 0.05, PRED.shape)
WEIGHT, OTHER_WEIGHT = RNG.uniform(0.5, 2, (2, *PRED.shape))

#: clamp's function -> netcl's own, and the arguments besides pred and target
LOSSES: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[Any, ...]]] = {
    F.weighted_smooth_l1_loss: (ag.weighted_smooth_l1_loss, (WEIGHT,)),
    F.weighted_smooth_l1_elementwise: (ag.weighted_smooth_l1_elementwise, (WEIGHT,)),
    F.weighted_bce: (ag.weighted_bce, (WEIGHT,)),
    F.weighted_bce_elementwise: (ag.weighted_bce_elementwise, (WEIGHT,)),
    F.fused_weighted_bce_smooth_l1_loss: (
        ag.fused_weighted_bce_smooth_l1_loss,
        (WEIGHT, OTHER_WEIGHT, 0.5, 2.0),
    ),
    F.weighted_box_smooth_l1_loss: (netcl.nn.loss.weighted_box_smooth_l1_loss, ()),
    F.binary_cross_entropy: (ag.binary_cross_entropy, ()),
}
ELEMENTWISE = (F.weighted_smooth_l1_elementwise, F.weighted_bce_elementwise, F.binary_cross_entropy)
losses = pytest.mark.parametrize("function", list(LOSSES), ids=lambda function: function.__name__)


def arguments(queue: cl.CommandQueue, function: Callable[..., Any], *dtypes: str, grads: bool = True) -> list[Any]:
    """The loss's arguments, the tensors in these dtypes in turn."""
    values = [PRED, TARGET, *LOSSES[function][1]]
    cycle = iter(dtypes * len(values))
    return [leaf(queue, v, next(cycle), grads) if isinstance(v, np.ndarray) else v for v in values]


def run_weighted(loss: Node, tape: Tape, seed: float) -> Node:
    tape.backward(loss, to_device(loss.value.queue, np.full(loss.value.shape, seed)))
    return loss


@losses
def test_in_fp32_as_netcl(queue: cl.CommandQueue, function: Callable[..., Any]) -> None:
    own, clamps = (arguments(queue, function, "float32") for _ in range(2))
    tapes = Tape(), Tape()
    expected = run_weighted(LOSSES[function][0](*own, tape=tapes[0]), tapes[0], 2.0)
    loss = run_weighted(function(Float(), *clamps, tape=tapes[1]), tapes[1], 2.0)
    assert loss.value.shape == (PRED.shape if function in ELEMENTWISE else (1,)) == expected.value.shape
    assert_close(loss.value, to_numpy(expected.value), ulps=32)
    for mine, netcls in zip(clamps, own, strict=True):
        if not isinstance(mine, Node):
            continue
        assert (mine.grad is None) == (netcls.grad is None)
        if mine.grad is not None:
            assert_close(mine.grad, to_numpy(netcls.grad), slack=64 * EPS)


def test_a_held_probability_gets_no_gradient(queue: cl.CommandQueue) -> None:
    """netcl's own gradient there is 1e7, infinite in float16."""
    pred = leaf(queue, [[0.0, 1.0, 0.5, 1.0]], "float16")
    target, weight = leaf(queue, [[1.0, 0.0, 1.0, 1.0]]), leaf(queue, np.ones((1, 4)))
    tape = Tape()
    loss = run_weighted(F.weighted_bce(Float(), pred, target, weight, tape=tape), tape, 1.0)
    np.testing.assert_array_equal(to_numpy(pred.grad), [[0, 0, -2, 0]])
    assert_close(loss.value, [-2 * np.log(1e-7) + np.log(2) + 1e-7], ulps=4)
