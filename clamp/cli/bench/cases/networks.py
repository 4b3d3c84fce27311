"""The networks whose training steps are timed, written with netcl's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn.factory import build_sequential, fast_bn_cnn_config
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.nn.resnet import ResNet18
from netcl.optim import SGD

from clamp.bridge import Node, Tensor
from clamp.cli.bench.cases.small_networks import Host, Network


@dataclass(frozen=True)
class Mlp(Network):
    """A stack of ``Linear(width) + ReLU`` with a squared error.

    Attributes:
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
        return str(self.layers), str(self.width), str(self.batch), *(["relu"] if self.relu else [])

    def model(self, queue: cl.CommandQueue) -> Any:
        layers: list[Any] = []
        for _ in range(self.layers):
            layers += [Linear(queue, self.width, self.width), *([ReLU()] if self.relu else [])]
        return Sequential(*(layers[:-1] if self.relu else layers))

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.standard_normal((batch, self.width), dtype=np.float32)

    targets = inputs

    def loss(self, output: Node, y: Tensor) -> Node:
        return ag.mse_loss(output, ag.tensor(y))

    def optimizer(self, model: Any) -> Any:
        # With which the loss stays finite. netcl's mse_loss sums: this is 1e-3 on the mean.
        return SGD(model.parameters(), lr=1e-3 / (self.batch * self.width))


class _OfImages(Network):
    """A network that classifies images of (3, 32, 32)."""

    def inputs(self, batch: int, random: np.random.Generator) -> Host:
        return random.standard_normal((batch, 3, 32, 32), dtype=np.float32)


@dataclass(frozen=True)
class Cnn(_OfImages):
    """netcl's ``fast_bn_cnn_config`` with a cross entropy, without its dropout.

    (Dropout would make the variants' losses differ, and the config's other layers are what is timed.)
    """

    batch: int
    work: str = "cnn"

    def __str__(self) -> str:
        return f"fast_bn_cnn_config, 3x32x32, batch {self.batch}"

    def model(self, queue: cl.CommandQueue) -> Any:
        return build_sequential(queue, [layer for layer in fast_bn_cnn_config() if layer["type"] != "Dropout"])


@dataclass(frozen=True)
class ResNet(_OfImages):
    """netcl's ResNet-18 with a cross entropy."""

    channels: int
    batch: int
    work: str = "resnet"

    def __str__(self) -> str:
        return f"ResNet-18 of {self.channels} channels, 3x32x32, batch {self.batch}"

    @property
    def peer_args(self) -> tuple[str, ...]:
        return str(self.channels), str(self.batch)

    def model(self, queue: cl.CommandQueue) -> Any:
        return ResNet18(queue, num_classes=10, base_channels=self.channels)
