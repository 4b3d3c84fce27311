"""The loss scale that ranges suggest, beside the largest at which a real step overflows nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp
from clamp.cli.bench.networks import CNN, LM, MLP, Network, Trainer

SCALES = [2.0**exponent for exponent in range(24, 0, -1)]


class Run:
    """A network's trainer, and one batch of noise."""

    def __init__(self, queue: cl.CommandQueue, network: Network) -> None:
        self.trainer = Trainer(queue, network)
        self.data = self.trainer.batch()

    def backward(self, handle: Any) -> None:
        self.trainer.optimizer.zero_grad()
        tape, loss = self.trainer.forward(*self.data)
        with handle.scale_loss(loss, self.trainer.optimizer) as scaled_loss:
            tape.backward(scaled_loss)

    def is_finite_at(self, scale: float) -> bool:
        with amp.init(loss_scale=scale) as handle:
            self.backward(handle)
        grads = [param.grad.to_host() for param in self.trainer.model.parameters() if param.grad is not None]
        return all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(
    "network", [MLP, pytest.param(CNN, marks=pytest.mark.slow), pytest.param(LM, marks=pytest.mark.slow)], ids=str
)
def test_the_suggested_scale_is_within_a_factor_of_four(queue: cl.CommandQueue, network: Network) -> None:
    run = Run(queue, network)
    with amp.init() as handle:

        def step() -> None:
            run.trainer.train(handle, *run.data)

        for _ in range(15):
            step()
        suggested = handle.ranges(step).suggested_scale
    largest = next(scale for scale in SCALES if run.is_finite_at(scale))
    assert suggested is not None
    assert largest / 4 <= suggested <= largest
