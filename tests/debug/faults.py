"""Faults planted in a training step, each on a line of its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.nn.layers import Linear, Module, ReLU
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.debug.explain import Explanation
from clamp.ops.elementwise import elementwise
from tests.reference import to_device


@amp.half_function
def overflowing(x: Node, large: Tensor) -> Node:
    """A function of the user's own, on a kernel that nobody knows: ``x * large`` in the dtype of x."""

    def compute(x: Tensor) -> Tensor:
        return elementwise("mul", x.dtype, x, large)

    def gradient(dy: Tensor) -> list[Tensor]:
        return [dy]

    return apply_op(compute, gradient, x)


class Block(Module):
    """Two layers, and a place for a fault between them."""

    def __init__(self, queue: cl.CommandQueue, fault: str) -> None:
        self.first, self.relu, self.second = Linear(queue, 8, 16), ReLU(), Linear(queue, 16, 4)
        self.fault = fault
        self.large = to_device(queue, np.full((16, 16), 3e4))
        self.rows = to_device(queue, np.full((4, 16), 1e6))

    def forward(self, x: Node) -> Node:
        h = self.relu(self.first(x))
        if self.fault == "forward":
            h = ag.matmul_op(h, ag.tensor(self.large))
        if self.fault == "backward":
            h = ag.sqrt(ag.mul(h, 0.0))
        if self.fault == "custom":
            h = overflowing(h, self.rows)
        return self.second(h)

    __call__ = forward


class Model(Module):
    """A block inside of a model."""

    def __init__(self, queue: cl.CommandQueue, fault: str) -> None:
        self.layers = [Linear(queue, 8, 8), Block(queue, fault)]

    def forward(self, x: Node) -> Node:
        for layer in self.layers:
            x = layer(x)
        return x

    __call__ = forward


def optimize(handle: Any, optimizer: Any, loss: Node) -> None:
    """The second half of a step of a loop."""
    optimizer.zero_grad()
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


class Small:
    """A layer, and what a case makes a loss of: of equal numbers that the layer gives, or of random ones."""

    def __init__(self, queue: cl.CommandQueue, loss: Callable[[Node], Node], x: float | None = None) -> None:
        np.random.seed(0)
        self.layer = Linear(queue, 4, 4)
        if x is not None:
            self.layer.weight.write(np.eye(4, dtype=np.float32))
            self.layer.bias.write(np.zeros(4, np.float32))
        self.optimizer = SGD(self.layer.parameters(), lr=1e-9)
        random = np.random.default_rng(1).standard_normal((16, 4), np.float32)
        self.x, self._loss = to_device(queue, random if x is None else np.full((2, 4), x)), loss

    def loss(self) -> Node:
        """The mean of what the case makes."""
        return ag.mean(self._loss(self.layer(ag.tensor(self.x))))

    def step(self, handle: Any) -> Callable[[], None]:
        """One step of a loop."""
        return lambda: optimize(handle, self.optimizer, self.loss())


def explained(step: Callable[[Any], Callable[[], Any]], way: str, **options: Any) -> tuple[Any, Explanation]:
    """A handle, and its explanation of a step that it has run: as it happened where the way is ``"armed"``, or run
    again."""
    handle = amp.init(debug="attribution" if way == "armed" else None, **options)
    run = step(handle)
    run()
    return handle, handle.explain() if way == "armed" else handle.explain(run)


WAYS = ("armed", "run again")


@dataclass(frozen=True)
class Fault:
    """What an explanation is to say of a fault.

    Attributes:
        kind, function, direction, module: of the explanation.
        code: the line of this file that it names.
        words: of the cause.
        cure: how it begins.
    """

    kind: str
    function: str
    direction: str
    module: str
    code: str
    words: tuple[str, ...]
    cure: str


FAULTS = {
    "weight": Fault(
        "parameter", "matmul_op", "forward", "layers.1.second", "return self.second(h)",
        ("The model's layers.1.second.weight itself holds 1 inf",), "amp.load_checkpoint("),
    "batch": Fault(
        "input", "matmul_op", "forward", "layers.0", "x = layer(x)",
        ("What the model is given holds 1 nan before any op has touched it",), "assert np.isf"),
    "forward": Fault(
        "forward", "matmul_op", "forward", "layers.1", "h = ag.matmul_op(h, ag.tensor(self.large))",
        ("What matmul_op reads is finite, and", "of its results are beyond 65504"), "handle = amp.init("),
    "backward": Fault(
        "backward", "sqrt", "backward", "layers.1", "h = ag.sqrt(ag.mul(h, 0.0))", ("The gradient of sqrt has",),
        "ag.sqrt(ag.add(x, 0.001))"),
    "custom": Fault(
        "forward", "overflowing", "forward", "layers.1", "return apply_op(compute, gradient, x)",
        ("What overflowing reads is finite, and",), "handle = amp.init("),
    "scale": Fault(
        "scale", "mse_loss", "backward", "", "return ag.mse_loss(self.model(ag.tensor(x)), ag.tensor(y))",
        ("The loss scale of {scale:.0f} was too high",), "handle = amp.init("),
}  # fmt: skip


class Training:
    """A model with a fault, its data and its optimizer."""

    def __init__(self, queue: cl.CommandQueue, fault: str) -> None:
        np.random.seed(0)
        self.model = Model(queue, fault)
        self.optimizer = SGD(self.model.parameters(), lr=1e-4)
        x = np.random.default_rng(1).standard_normal((4, 8), np.float32)
        if fault == "weight":
            weight = self.model.layers[1].second.weight
            spoiled = weight.to_host()
            spoiled[3, 1] = np.inf
            cl.enqueue_copy(queue, weight.buffer, spoiled)
        if fault == "batch":
            x[2, 5] = np.nan
        self.data = to_device(queue, x), to_device(queue, np.zeros((4, 4), np.float32))

    def loss(self, *data: Tensor) -> Node:
        """Sum of squared errors, of its own data if none is given."""
        x, y = data or self.data
        return ag.mse_loss(self.model(ag.tensor(x)), ag.tensor(y))

    def step(self, handle: Any) -> Callable[[], None]:
        """One step of a loop."""

        def step() -> None:
            optimize(handle, self.optimizer, self.loss())

        return step


class Train(amp.Graph):
    """A step of a training, as a graph.

    Args:
        loss: of what the graph is called with; the training's if not given.
    """

    def __init__(self, training: Training, scaler: Any, loss: Callable[..., Node] | None = None) -> None:
        super().__init__()
        self.training, self.loss = training, loss
        self.add_optimizer(training.optimizer)
        self.config.enable_amp(True)
        self.set_grad_scaler(scaler)

    def build(self, *inputs: Node) -> Node:
        loss = self.loss(*inputs) if self.loss else self.training.loss(*(x.value for x in inputs))
        loss.backward()
        return loss


def line_of(fault: str) -> int:
    """The line of this file that an explanation is to name."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return next(number for number, text in enumerate(lines, start=1) if text.strip() == FAULTS[fault].code)
