"""Weighted losses under autograd: values, gradients that follow the incoming one, who gets one, wrong input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
import netcl.nn.loss
import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tape
from clamp.casting.policies import Float
from clamp.functions import loss as F
from tests.functions.operands import leaf
from tests.reference import assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
PRED = np.hstack([RNG.uniform(0.3, 0.7, (6, 2)), RNG.uniform(0.1, 0.5, (6, 2))])
TARGET = PRED + RNG.normal(0, 0.05, PRED.shape)
WEIGHT, OTHER_WEIGHT = RNG.uniform(0.5, 2, (2, *PRED.shape))
EPS = 2.0**-24

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


def run(loss: Node, tape: Tape, seed: float) -> Node:
    tape.backward(loss, to_device(loss.value.queue, np.full(loss.value.shape, seed)))
    return loss


@losses
def test_in_fp32_as_netcl(queue: cl.CommandQueue, function: Callable[..., Any]) -> None:
    own, clamps = (arguments(queue, function, "float32") for _ in range(2))
    tapes = Tape(), Tape()
    expected = run(LOSSES[function][0](*own, tape=tapes[0]), tapes[0], 2.0)
    loss = run(function(Float(), *clamps, tape=tapes[1]), tapes[1], 2.0)
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
    loss = run(F.weighted_bce(Float(), pred, target, weight, tape=tape), tape, 1.0)
    np.testing.assert_array_equal(to_numpy(pred.grad), [[0, 0, -2, 0]])
    assert_close(loss.value, [-2 * np.log(1e-7) + np.log(2) + 1e-7], ulps=4)
