"""The networks of README and of examples/, small as they are there: what a user's first step meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.batchnorm import BatchNorm2dModule as BatchNorm2d
from netcl.nn.containers import Embedding
from netcl.nn.layers import Conv2d, Flatten, Linear, MaxPool2d, Module, ReLU, Sequential
from netcl.nn.modern import DecoderBlock, RMSNorm
from netcl.optim import Adam, AdamW

from clamp.bridge import Node, Tensor

CLASSES = 10


@dataclass(frozen=True)
class SmallNetwork:
    """What the small networks have in common: an optimizer, and images or rows in batches.

    Attributes:
        name: for tables and peers.
        batch: rows of a batch.
    """

    name: str
    batch: int

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"

    def model(self, queue: cl.CommandQueue) -> Any:
        """The layers, with weights drawn from numpy's global generator."""
        raise NotImplementedError

    def inputs(self, queue: cl.CommandQueue, batch: int, random: np.random.Generator) -> Node | Tensor:
        """What the model takes."""
        raise NotImplementedError

    def optimizer(self, model: Any) -> Any:
        """Of the example."""
        return Adam(model.parameters(), lr=1e-3)

    def loss(self, queue: cl.CommandQueue, output: Node, random: np.random.Generator) -> Node:
        """Of the model's output and drawn targets."""
        rows, classes = output.value.shape
        one_hot = np.eye(classes, dtype=np.float32)[random.integers(0, classes, rows)]
        return F.cross_entropy(output, ag.tensor(Tensor.from_host(queue, one_hot)))


class ReadmeMlp(SmallNetwork):
    """README's script."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(Linear(queue, 64, 128), ReLU(), Linear(queue, 128, 1))

    def inputs(self, queue: cl.CommandQueue, batch: int, random: np.random.Generator) -> Node:
        return ag.tensor(Tensor.from_host(queue, random.standard_normal((batch, 64), dtype=np.float32)))

    def loss(self, queue: cl.CommandQueue, output: Node, random: np.random.Generator) -> Node:
        target = random.standard_normal(output.value.shape, dtype=np.float32)
        return F.mse_loss(output, ag.tensor(Tensor.from_host(queue, target)))


class Digits(SmallNetwork):
    """The MLP of examples/digits.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(Linear(queue, 64, 256), ReLU(), Linear(queue, 256, 256), ReLU(), Linear(queue, 256, CLASSES))

    def inputs(self, queue: cl.CommandQueue, batch: int, random: np.random.Generator) -> Node:
        return ag.tensor(Tensor.from_host(queue, random.random((batch, 64), dtype=np.float32)))


class FashionMnist(SmallNetwork):
    """The convolutional network of examples/fashion_mnist.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(
            Conv2d(queue, 1, 32, 3, pad=1), BatchNorm2d(queue=queue, num_features=32), ReLU(), MaxPool2d(2, 2),
            Conv2d(queue, 32, 64, 3, pad=1), BatchNorm2d(queue=queue, num_features=64), ReLU(), MaxPool2d(2, 2),
            Flatten(), Linear(queue, 64 * 7 * 7, CLASSES),
        )  # fmt: skip

    def inputs(self, queue: cl.CommandQueue, batch: int, random: np.random.Generator) -> Node:
        return ag.tensor(Tensor.from_host(queue, random.standard_normal((batch, 1, 28, 28), dtype=np.float32)))


class CharLm(SmallNetwork):
    """The language model of examples/char_lm.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return _Decoder(queue)

    def inputs(self, queue: cl.CommandQueue, batch: int, random: np.random.Generator) -> Tensor:
        codes = random.integers(0, _Decoder.CHARACTERS, (batch, _Decoder.CONTEXT))
        return Tensor.from_host(queue, codes.astype(np.int32))

    def optimizer(self, model: Any) -> Any:
        return AdamW(model.parameters(), lr=3e-3)


class _Decoder(Module):  # type: ignore[misc]
    CHARACTERS, CONTEXT, WIDTH = 96, 128, 128

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.embedding = Embedding(self.CHARACTERS, self.WIDTH, queue=queue, init_std=0.02)
        self.blocks = [DecoderBlock(self.WIDTH, 4, queue=queue) for _ in range(2)]
        self.norm = RMSNorm(self.WIDTH, queue=queue)
        self.head = Linear(queue, self.WIDTH, self.CHARACTERS)

    def forward(self, codes: Tensor) -> Any:
        x = ag.reshape(self.embedding(codes), (*codes.shape, self.WIDTH))
        for block in self.blocks:
            x = block(x)
        return self.head(ag.reshape(self.norm(x), (-1, self.WIDTH)))

    def parameters(self) -> list[Tensor]:
        layers = [self.embedding, *self.blocks, self.norm, self.head]
        return [parameter for layer in layers for parameter in layer.parameters()]


README_MLP = ReadmeMlp("README's MLP", 256)
MLP, CNN, LM = Digits("digits MLP", 64), FashionMnist("Fashion-MNIST CNN", 64), CharLm("char_lm decoder", 16)


class Trainer:
    """Trains a small network: the loop of the examples.

    Args:
        queue: where.
        network: what.
    """

    def __init__(self, queue: cl.CommandQueue, network: SmallNetwork) -> None:
        np.random.seed(0)  # netcl's initializers draw from it
        self._queue, self._network = queue, network
        self._random = np.random.default_rng(0)
        self._model = network.model(queue)
        self._model.train()
        self._optimizer = network.optimizer(self._model)

    def step(self, handle: Any, batch: int | None = None) -> Tensor:
        """One step, whose loss is returned; ``handle`` is what `amp.init` returned, None for netcl alone."""
        self._optimizer.zero_grad()
        with ag.Tape() as tape:
            x = self._network.inputs(self._queue, batch or self._network.batch, self._random)
            loss = self._network.loss(self._queue, self._model(x), self._random)
        if handle is None:
            tape.backward(loss)
        else:
            with handle.scale_loss(loss, self._optimizer) as scaled_loss:
                tape.backward(scaled_loss)
        self._optimizer.step()
        value: Tensor = loss.value
        return value
