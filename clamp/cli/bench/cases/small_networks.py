"""What a network that is timed has; and those of README and of examples/, small as they are there: what a user's first
step meets. (first_step_child.py runs this file beside other versions of clamp.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.batchnorm import BatchNorm2dModule as BatchNorm2d
from netcl.nn.containers import Embedding
from netcl.nn.layers import Conv2d, Flatten, Linear, MaxPool2d, Module, ReLU, Sequential
from netcl.nn.modern import DecoderBlock, RMSNorm
from netcl.optim import SGD, Adam, AdamW

from clamp.bridge import Node, Tape, Tensor

CLASSES = 10


Host: TypeAlias = npt.NDArray[Any]


class Network:
    """A network, the data that it takes, and how it learns.

    Attributes:
        work: kind of work, for tables and for peers.
        batch: rows of a batch.
    """

    work: str
    batch: int

    @property
    def peer_args(self) -> tuple[str, ...]:
        """What a peer must know to build the same."""
        return (str(self.batch),)

    def model(self, queue: cl.CommandQueue) -> Any:
        """The layers, with weights drawn from numpy's global generator."""
        raise NotImplementedError

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        """What the model takes."""
        raise NotImplementedError

    def targets(self, batch: int, random: np.random.Generator) -> Host:
        """One-hot rows."""
        return np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, batch)]

    def forward(self, model: Any, x: Tensor) -> Node:
        """The model's output."""
        output: Node = model(ag.tensor(x))
        return output

    def loss(self, output: Node, y: Tensor) -> Node:
        """Of the model's output."""
        return F.cross_entropy(output, ag.tensor(y))

    def optimizer(self, model: Any) -> Any:
        """For the model's parameters."""
        return SGD(model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class SmallNetwork(Network):
    """One of README's or of an example's."""

    name: str  # for tables
    work: str
    batch: int

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"

    def optimizer(self, model: Any) -> Any:
        return Adam(model.parameters(), lr=1e-3)


class ReadmeMlp(SmallNetwork):
    """README's script."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(Linear(queue, 64, 128), ReLU(), Linear(queue, 128, 1))

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.standard_normal((batch, 64), dtype=np.float32)

    def targets(self, batch: int, random: np.random.Generator) -> Host:
        return random.standard_normal((batch, 1), dtype=np.float32)

    def loss(self, output: Node, y: Tensor) -> Node:
        return F.mse_loss(output, ag.tensor(y))


class Digits(SmallNetwork):
    """The MLP of examples/digits.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(Linear(queue, 64, 256), ReLU(), Linear(queue, 256, 256), ReLU(), Linear(queue, 256, CLASSES))

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.random((batch, 64), dtype=np.float32)


class FashionMnist(SmallNetwork):
    """The convolutional network of examples/fashion_mnist.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return Sequential(
            Conv2d(queue, 1, 32, 3, pad=1), BatchNorm2d(queue=queue, num_features=32), ReLU(), MaxPool2d(2, 2),
            Conv2d(queue, 32, 64, 3, pad=1), BatchNorm2d(queue=queue, num_features=64), ReLU(), MaxPool2d(2, 2),
            Flatten(), Linear(queue, 64 * 7 * 7, CLASSES),
        )  # fmt: skip

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.standard_normal((batch, 1, 28, 28), dtype=np.float32)


class CharLm(SmallNetwork):
    """The language model of examples/char_lm.py."""

    def model(self, queue: cl.CommandQueue) -> Any:
        return _Decoder(queue)

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.integers(0, _Decoder.CHARACTERS, (batch, _Decoder.CONTEXT)).astype(np.int32)

    def targets(self, batch: int, random: np.random.Generator) -> Host:
        following = random.integers(0, _Decoder.CHARACTERS, batch * _Decoder.CONTEXT)
        return np.eye(_Decoder.CHARACTERS, dtype=np.float32)[following]

    def forward(self, model: Any, x: Tensor) -> Node:
        output: Node = model(x)
        return output

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


README_MLP = ReadmeMlp("README's MLP", "readme", 256)
MLP = Digits("digits MLP", "digits", 64)
CNN = FashionMnist("Fashion-MNIST CNN", "fashion", 64)
LM = CharLm("char_lm decoder", "char_lm", 16)


class Trainer:
    """Trains a network: the loop of the examples.

    Args:
        queue: where.
        network: what.

    Attributes:
        model, optimizer: the network's.
    """

    def __init__(self, queue: cl.CommandQueue, network: Network) -> None:
        np.random.seed(0)  # netcl's initializers draw from it
        self._queue, self._network = queue, network
        self._random = np.random.default_rng(0)
        self.model = network.model(queue)
        self.model.train()
        self.optimizer = network.optimizer(self.model)

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets, drawn anew."""
        rows = rows or self._network.batch
        drawn = self._network.inputs(rows, self._random), self._network.targets(rows, self._random)
        x, y = (Tensor.from_host(self._queue, host) for host in drawn)
        return x, y

    def step(self, handle: Any, rows: int | None = None) -> Tensor:
        """One step, whose loss is returned; ``handle`` is what `amp.init` returned, None for netcl alone."""
        value: Tensor = self.train(handle, *self.batch(rows)).value
        return value

    def train(self, handle: Any, x: Tensor, y: Tensor) -> Node:
        """One step on a batch."""
        self.optimizer.zero_grad()
        tape, loss = self.forward(x, y)
        if handle is None:
            tape.backward(loss)
        else:
            with handle.scale_loss(loss, self.optimizer) as scaled_loss:
                tape.backward(scaled_loss)
        self.optimizer.step()
        return loss

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tape, Node]:
        """The loss of a batch, with what backward is run by."""
        with ag.Tape() as tape:
            loss = self._network.loss(self._network.forward(self.model, x), y)
        return tape, loss
