"""compare_accuracy in words where losses overflow, and where exact ops leave little of what they read."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Module

from clamp.bridge import Node
from clamp.debugging import Accuracy, compare_accuracy


class Shifted(Module):
    """A layer whose results are moved, and multiplied."""

    def __init__(self, queue: cl.CommandQueue, shift: float, factor: float, *, back: bool) -> None:
        np.random.seed(0)
        self.layer = Linear(queue, 8, 4)
        self.shift, self.factor, self.back = shift, factor, back

    def forward(self, x: Node) -> Node:
        h = ag.add(ag.mul(self.layer(x), self.factor), self.shift)
        return ag.sub(h, self.shift) if self.back else h

    __call__ = forward


def found(model: Module, dtype: str = "float16") -> Accuracy:
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    return compare_accuracy(model, (x, np.zeros((4, 4), np.float32)), loss=F.mse_loss, dtype=dtype)


def test_a_loss_that_is_not_finite_is_told(queue: cl.CommandQueue) -> None:
    over = str(found(Shifted(queue, 0.0, 1e6, back=False)))
    assert over.startswith("loss inf in float16, ")
    assert "result: inf or nan, and finite in float32" in over
    assert "infx" not in over
    gone = str(found(Shifted(queue, np.inf, 1e6, back=True)))
    assert "loss" not in gone.splitlines()[0]  # nan in float32 too: there is none to compare


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_inputs_cancel_is_told(queue: cl.CommandQueue, dtype: str) -> None:
    cancels = found(Shifted(queue, 300.0, 1.0, back=True), dtype)
    assert cancels.suspects == []
    assert cancels.amplified is not None
    assert (cancels.amplified.function, cancels.amplified.direction) == ("sub", "forward")
    assert cancels.amplified.total > 20 * cancels.amplified.brought
    assert "Each op is right, and yet the result of sub" in str(cancels)
    assert cancels.amplified.line in str(cancels).splitlines()[2]


def test_where_nothing_cancels_nothing_is_told(queue: cl.CommandQueue) -> None:
    sound = found(Shifted(queue, 1.0, 1.0, back=False))
    assert sound.amplified is None
    assert "Each op is right" not in str(sound)
    assert "Each op is right" not in str(found(Shifted(queue, 0.0, 1e6, back=False)))
