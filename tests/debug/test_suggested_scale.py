"""The loss scale that ranges suggest, beside the largest at which a real step overflows nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp
from clamp.bridge import Tensor
from clamp.cli.bench.networks import CNN, LM, MLP, Network

SCALES = [2.0**exponent for exponent in range(24, 0, -1)]


class Run:
    """A network, one batch of noise and its optimizer."""

    def __init__(self, queue: cl.CommandQueue, network: Network) -> None:
        np.random.seed(0)
        random = np.random.default_rng(0)
        self.network, self.model = network, network.model(queue)
        self.optimizer = network.optimizer(self.model)
        x, y = network.inputs(network.batch, random), network.targets(network.batch, random)
        self.data = Tensor.from_host(queue, x), Tensor.from_host(queue, y)

    def backward(self, handle: Any) -> None:
        self.optimizer.zero_grad()
        loss = self.network.loss(self.network.forward(self.model, self.data[0]), self.data[1])
        with handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def is_finite_at(self, scale: float) -> bool:
        with amp.init(loss_scale=scale) as handle:
            self.backward(handle)
        grads = [param.grad.to_host() for param in self.model.parameters() if param.grad is not None]
        return all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(
    "network", [MLP, pytest.param(CNN, marks=pytest.mark.slow), pytest.param(LM, marks=pytest.mark.slow)], ids=str
)
def test_the_suggested_scale_is_within_a_factor_of_four(queue: cl.CommandQueue, network: Network) -> None:
    run = Run(queue, network)
    with amp.init() as handle:

        def step() -> None:
            run.backward(handle)
            run.optimizer.step()

        for _ in range(15):
            step()
        suggested = handle.ranges(step).suggested_scale
    largest = next(scale for scale in SCALES if run.is_finite_at(scale))
    assert suggested is not None
    assert largest / 4 <= suggested <= largest
