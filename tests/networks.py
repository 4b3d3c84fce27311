"""Small networks of netcl layers for the tests, and one training step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn.layers import Linear, ReLU, Sequential

from clamp.bridge import Node, Tensor
from tests.reference import to_device


def mlp(queue: cl.CommandQueue, *widths: int, seed: int = 0) -> Sequential:
    """Linear layers with a ReLU between each two; the same seed gives the same weights."""
    np.random.seed(seed)
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [Linear(queue, inputs, outputs), ReLU()]
    return Sequential(*layers[:-1])


def batch(queue: cl.CommandQueue, rows: int, inputs: int, outputs: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A batch of inputs and targets."""
    rng = np.random.default_rng(seed)
    return to_device(queue, rng.standard_normal((rows, inputs))), to_device(queue, rng.standard_normal((rows, outputs)))


LOSS_FACTOR = 2.0**-10  # netcl's mse_loss is a sum: at a scale of 2^16 its gradients would not fit into half


def loss_of(model: Sequential, data: tuple[Tensor, Tensor]) -> Node:
    """Sum of squared errors of a batch, times LOSS_FACTOR."""
    x, y = data
    return ag.mul(ag.mse_loss(model(ag.tensor(x)), ag.tensor(y)), LOSS_FACTOR)


def step(handle: Any, model: Sequential, optimizer: Any, data: tuple[Tensor, Tensor]) -> float:
    """One training step with the two lines; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, data)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return float(loss.value.to_host()[0])


def weights_of(model: Sequential) -> list[np.ndarray]:
    """Host copies of a model's parameters."""
    return [param.to_host().copy() for param in model.parameters()]
