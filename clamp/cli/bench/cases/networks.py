"""The networks whose training steps are timed, written with netcl's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.factory import build_sequential, fast_bn_cnn_config
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.nn.resnet import ResNet18

from clamp.bridge import Node, Tensor


@dataclass(frozen=True)
class Mlp:
    """A stack of ``Linear(width) + ReLU`` with a squared error.

    Attributes:
        work: kind of work, for tables and for peers.
        relu: without them it is the network of Paddle's guide to mixed precision, of 9 x Linear(8192) and batch 2048.
    """

    layers: int
    width: int
    batch: int
    work: str = "step"
    relu: bool = True

    def __str__(self) -> str:
        return f"{self.layers} x Linear({self.width}){'+ReLU' if self.relu else ''}, batch {self.batch}"

    @property
    def peer_args(self) -> tuple[str, ...]:
        """What a peer must know to build the same: layers, width and batch."""
        return str(self.layers), str(self.width), str(self.batch), *(["relu"] if self.relu else [])

    @property
    def learning_rate(self) -> float:
        """With which SGD's loss stays finite. netcl's mse_loss sums: this is 1e-3 on the mean."""
        return 1e-3 / (self.batch * self.width)

    def model(self, queue: cl.CommandQueue) -> Any:
        """The layers, with weights drawn from numpy's global generator."""
        layers: list[Any] = []
        for _ in range(self.layers):
            layers += [Linear(queue, self.width, self.width), *([ReLU()] if self.relu else [])]
        return Sequential(*(layers[:-1] if self.relu else layers))

    def batch_of(self, queue: cl.CommandQueue) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same every time."""
        rng = np.random.default_rng(0)
        rows = (self.batch, self.width)
        x, y = (Tensor.from_host(queue, rng.standard_normal(rows, dtype=np.float32)) for _ in range(2))
        return x, y

    def loss(self, output: Node, target: Node) -> Node:
        """The loss of the model's output."""
        return ag.mse_loss(output, target)


class _Classifier:
    """Of images of (3, 32, 32), with a cross entropy."""

    batch: int
    learning_rate = 1e-2

    def batch_of(self, queue: cl.CommandQueue) -> tuple[Tensor, Tensor]:
        """As `Mlp`'s."""
        rng = np.random.default_rng(0)
        images = rng.standard_normal((self.batch, 3, 32, 32), dtype=np.float32)
        one_hot = np.eye(10, dtype=np.float32)[rng.integers(0, 10, self.batch)]
        return Tensor.from_host(queue, images), Tensor.from_host(queue, one_hot)

    def loss(self, output: Node, target: Node) -> Node:
        """As `Mlp`'s."""
        return F.cross_entropy(output, target)


@dataclass(frozen=True)
class Cnn(_Classifier):
    """netcl's ``fast_bn_cnn_config`` on images of (3, 32, 32) with a cross entropy, without its dropout.

    (Dropout would make the variants' losses differ, and the config's other layers are what is timed.)
    """

    batch: int
    work: str = "cnn"

    def __str__(self) -> str:
        return f"fast_bn_cnn_config, 3x32x32, batch {self.batch}"

    @property
    def peer_args(self) -> tuple[str, ...]:
        """The batch."""
        return (str(self.batch),)

    def model(self, queue: cl.CommandQueue) -> Any:
        """As `Mlp`'s."""
        return build_sequential(queue, [layer for layer in fast_bn_cnn_config() if layer["type"] != "Dropout"])


@dataclass(frozen=True)
class ResNet(_Classifier):
    """netcl's ResNet-18 on images of (3, 32, 32) with a cross entropy."""

    channels: int
    batch: int
    work: str = "resnet"

    def __str__(self) -> str:
        return f"ResNet-18 of {self.channels} channels, 3x32x32, batch {self.batch}"

    @property
    def peer_args(self) -> tuple[str, ...]:
        """Channels of the first stage, and the batch."""
        return str(self.channels), str(self.batch)

    def model(self, queue: cl.CommandQueue) -> Any:
        """As `Mlp`'s."""
        return ResNet18(queue, num_classes=10, base_channels=self.channels)


Network: TypeAlias = Mlp | Cnn | ResNet
