"""Small networks of netcl layers for the tests, one training step, and a weight whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
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


def scaled_backward(handle: Any, loss: Node, optimizer: Any) -> None:
    """One scaled pass: the second of the two lines, and what stands in it."""
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def stepping(handle: Any, model: Sequential, optimizer: Any) -> Callable[[Tensor, Tensor], Node]:
    """A training step with the two lines, of inputs and targets; it returns the loss, and can be recorded."""

    def train(x: Tensor, y: Tensor) -> Node:
        optimizer.zero_grad()
        loss = loss_of(model, (x, y))
        scaled_backward(handle, loss, optimizer)
        optimizer.step()
        return loss

    return train


def step(handle: Any, model: Sequential, optimizer: Any, data: tuple[Tensor, Tensor]) -> float:
    """One such step; returns the loss."""
    return float(stepping(handle, model, optimizer)(*data).value.to_host()[0])


class Training:
    """An `mlp` in a loop of the two lines, and the one batch that it is trained with."""

    def __init__(self, queue: cl.CommandQueue, widths: Sequence[int], rows: int = 8, **options: Any) -> None:
        self.model, self.data = mlp(queue, *widths), batch(queue, rows, widths[0], widths[-1])
        self.optimizer = SGD(self.model.parameters(), lr=0.01)
        self.handle = amp.init(**options)

    def step(self) -> float:
        """One step; returns the loss."""
        return step(self.handle, self.model, self.optimizer, self.data)


def learns(queue: cl.CommandQueue, model: Sequential, **amp_options: Any) -> bool:
    """Whether steps under AMP lower the loss of a model that takes 8 numbers and gives 4."""
    data, optimizer = batch(queue, 32, 8, 4), SGD(model.parameters(), lr=2.0)
    with amp.init(**amp_options) as handle:
        losses = [step(handle, model, optimizer, data) for _ in range(20)]
        return handle.history[-1].stepped and losses[-1] < 0.8 * losses[0]


def weights_of(model: Sequential) -> list[np.ndarray]:
    """Host copies of a model's parameters."""
    return [param.to_host().copy() for param in model.parameters()]


class UsersSGD:
    """An optimizer of a user's, which is not netcl's: SGD with a rate of 1."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        for param in self.params:
            if param.grad is not None:
                elementwise_binary(param, param.grad, expression="v0 - v1", out=param)


LR = 0.125  # of a Task's optimizer


class Task:
    """A weight of ones whose loss has a gradient of ``size`` everywhere, exact in float16 at every usual scale."""

    def __init__(self, queue: cl.CommandQueue, shape: tuple[int, int] = (4, 3)) -> None:
        self.queue = queue
        self.weight = Parameter.from_host(queue, np.ones(shape, np.float32))
        self.optimizer = SGD([self.weight], lr=LR)
        self.x = ag.tensor(to_device(queue, np.ones((2, shape[0]))))

    def loss(self, size: float = 1.0) -> Node:
        """What has that gradient."""
        return ag.mul(ag.sum(ag.matmul_op(self.x, ag.tensor(self.weight))), size / 2)

    def backward(self, handle: Any, size: float = 1.0) -> None:
        """One scaled pass."""
        scaled_backward(handle, self.loss(size), self.optimizer)

    def step(self, handle: Any, size: float = 1.0) -> None:
        """One, on the gradients that are there and those of a scaled pass."""
        self.backward(handle, size)
        self.optimizer.step()

    @property
    def gradient(self) -> float:
        """The one value that all elements of the gradient have."""
        grad = self.weight.grad.to_host()
        assert (grad == grad.flat[0]).all()
        return float(grad.flat[0])

    @property
    def moved(self) -> float:
        """How far steps have moved the weight, in gradients of 1."""
        weight = self.weight.to_host()
        assert (weight == weight.flat[0]).all()
        return float(1 - weight.flat[0]) / LR

    def set_gradient(self, value: float) -> None:
        """Gives all elements of the gradient a value."""
        self.weight.grad = to_device(self.queue, np.full(self.weight.shape, value, np.float32))
